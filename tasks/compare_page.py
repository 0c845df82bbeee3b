"""The comparison of runs as one HTML file: curves over tokens, scores, tables; from artifacts, so no server is needed.

Series are thinned to about 2,000 points when they are read, so a page of five long runs stays below a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS
from llama3.recipe.units import tokens
from llama3.train import metrics
from storage.artifact import Artifact
from tasks.plots import INK, as_svg
from tasks.runs import RunRecord

POINTS = 2000
PALETTE = ("#3b6fb6", "#d1603d", "#3f9b6c", "#8a63b8", "#b8860b", "#c2477f", "#2f9aa8", "#6b7280")
FIGURES = {
    "Loss": ("Training loss, nats per token, against tokens seen.", [metrics.LOSS]),
    "Loss by domain": ("The same for the tokens of each domain.", [metrics.domain_loss(domain) for domain in DOMAINS]),
    "Schedule": ("Learning rate, batch and sequence as trained.", [metrics.LEARNING_RATE, metrics.BATCH_TOKENS, metrics.SEQ_LEN]),  # noqa: E501
    "Throughput": ("Tokens per second, and the share of the time that went into steps that count.", [metrics.TOKENS_PER_S, metrics.GOODPUT]),  # noqa: E501
}  # fmt: skip
KEYS = [key for _, keys in FIGURES.values() for key in keys]
Series = list[tuple[int, float]]
THINNED = """
WITH numbered AS (
    SELECT key, position, value, count(*) OVER (PARTITION BY key) AS total,
        row_number() OVER (PARTITION BY key ORDER BY position) AS number
    FROM read_parquet($tables) WHERE list_contains($keys, key)
)
SELECT key, position, value FROM numbered
WHERE (total - number) % greatest(1, total // $points) = 0 ORDER BY key, position
"""
"""About `points` of each series, its last one always."""


@dataclass(frozen=True)
class Compared:
    """What is known of one run."""

    record: RunRecord
    recipe: Recipe
    stages: list[Artifact]
    series: dict[str, Series]
    scores: dict[str, float]

    @property
    def position(self) -> int:
        """Tokens trained on, stages in progress not counted."""
        return max((int(stage.facts["end"]) for stage in self.stages), default=0)


def series_of(stages: list[Artifact]) -> dict[str, Series]:
    """Return the series that the page draws, each continuous over the stages."""
    if not stages:
        return {}
    tables = [str(stage.part("metrics.parquet")) for stage in stages]
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        values = {"tables": tables, "keys": KEYS, "points": POINTS}
        rows = connection.execute(THINNED, values).fetchall()
    series: dict[str, Series] = {}
    for key, position, value in rows:
        series.setdefault(key, []).append((position, value))
    return series


def comparison_html(
    compared: list[Compared], differences: list[tuple[str, list[str]]], results: list[tuple[str, list[str]]]
) -> str:
    """Return the page; `differences` and `results` are rows of a name and a value for each run."""
    figures = [(title, note, _curves(compared, shown)) for title, (note, keys) in FIGURES.items()
               if (shown := [key for key in keys if any(run.series.get(key) for run in compared)])]  # fmt: skip
    if scores := sorted({key for run in compared for key in run.scores}):
        figures.append(("Evaluations", "The last score of each kind.", _bars(compared, scores)))
    environment = Environment(
        loader=PackageLoader("tasks"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    tables = [("Results", results), ("Recipe fields that differ", differences)]
    names = [run.record.name for run in compared]
    return environment.get_template("comparison.html").render(names=names, tables=tables, figures=figures)


def _curves(compared: list[Compared], keys: list[str]) -> str:
    """Draw one panel for each key, one line for each run."""
    columns = min(2, len(keys))
    rows = -(-len(keys) // columns)
    height = 3.4 if rows == 1 else 2.6 * rows
    figure, axes = plt.subplots(rows, columns, figsize=(9, height), layout="constrained", squeeze=False)
    for axis, key in zip(axes.flat, keys, strict=False):
        for place, run in enumerate(compared):
            points = run.series.get(key, [])
            style = {"color": PALETTE[place % len(PALETTE)], "linewidth": 1.4, "label": run.record.name}
            axis.plot([position for position, _ in points], [value for _, value in points], **style)
        _over_tokens(axis, key)
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    axes.flat[0].legend()
    return as_svg(figure)


def _over_tokens(axis: Any, key: str) -> None:
    axis.set_title(key, fontsize=10, color=INK)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_xlabel("tokens", fontsize=9)


def _bars(compared: list[Compared], keys: list[str]) -> str:
    """Draw one small panel for each score, because their units differ."""
    columns = min(4, len(keys))
    rows = -(-len(keys) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(9, 2.2 * rows), layout="constrained", squeeze=False)
    for axis, key in zip(axes.flat, keys, strict=False):
        values = [run.scores.get(key) for run in compared]
        for place, value in enumerate(values):
            if value is not None:
                axis.bar(place, value, color=PALETTE[place % len(PALETTE)])
                axis.text(place, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
        axis.set_title(key.removeprefix("eval/"), fontsize=9)
        axis.set_xticks(range(len(compared)), [run.record.name for run in compared], fontsize=8)
        axis.grid(axis="x", visible=False)
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    return as_svg(figure)
