"""Runs side by side: what differs in their recipes, what came of it, and where that is drawn.

Tables and a page of our own are made from records and artifacts and need no server; the page in MLflow is prepared
(`tasks.report.compare`) on the server that runs are tracked by, or that `herd up` starts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.request
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import quote

import duckdb
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from llama3.recipe.base import DOMAINS
from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from llama3.recipe.units import tokens
from llama3.train import metrics
from storage.artifact import Artifact, flatten
from storage.filesystem import write_atomic
from storage.object_artifact import open_store
from storage.root import Root
from tasks.plots import INK, as_svg
from tasks.runs.records import RunRecord, Runs
from tasks.tracking.mlflow import Tracker
from tasks.tracking.mlflow_store import server_uri
from tasks.tracking.steps import scores_of

# The comparison as one HTML file, from artifacts, without a server. Series are thinned to about 2,000 points.

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
        loader=PackageLoader("tasks"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
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


# A prepared view of MLflow's chart page. MLflow keeps what its "Share" button shares in a tag of the experiment,
# `mlflow.sharedViewState.<key>`: JSON with the state of the page as text, deflated if it begins with `deflate;`. The
# page loads it with `viewStateShareKey=<key>`. Field names are those of MLflow 3.17; another version shows its own
# charts. A tag takes 20,000 bytes; five runs need about 3,000.

TAG = "mlflow.sharedViewState."
BASELINE = ["Parameters"]
LINES = {
    "Loss": [metrics.LOSS],
    "Loss by domain": [metrics.domain_loss(domain) for domain in DOMAINS],
    "Schedule": [metrics.LEARNING_RATE, metrics.BATCH_TOKENS, metrics.SEQ_LEN],
    "Throughput": [metrics.TOKENS_PER_S, metrics.MFU, metrics.GOODPUT],
}
"""Section -> its charts over tokens."""
EVALUATIONS, DIFFERENCES = "Evaluations", "What differs"
COLUMNS = {"Loss": 1, "Loss by domain": 2, "Throughput": 2, DIFFERENCES: 1}
"""Charts side by side; elsewhere three."""


def view_key(run_ids: list[str]) -> str:
    """Return the key of the view of these runs; the same runs share one."""
    return "herd-" + hashlib.sha256(" ".join(run_ids).encode()).hexdigest()[:16]


def view_tag(names: list[str], run_ids: list[str], keys: set[str], created_ms: int) -> str:
    """Return the value of the tag; `keys` are the metrics that the runs have."""
    state = json.dumps(_state(run_ids, keys), separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(state.encode(), 9)).decode()
    word = {"name": " and ".join(names), "createdAt": created_ms, "updatedAt": created_ms, "state": packed}
    return json.dumps(word, ensure_ascii=False)


def _state(run_ids: list[str], keys: set[str]) -> dict[str, Any]:
    sections = [_section(name) for name in (*LINES, EVALUATIONS, DIFFERENCES)]
    charts = [_line(name, key) for name, shown in LINES.items() for key in shown if key in keys]
    scores = sorted(key for key in keys if key.startswith("eval/"))
    charts += [_chart("BAR", EVALUATIONS, key) for key in scores]
    charts.append(_difference(run_ids[0]))
    placed = {chart["metricKey"] for chart in charts}
    others = sorted({key.rpartition("/")[0] for key in keys - placed})
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    return {
        "searchFilter": f"attributes.run_id IN ({quoted})",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [*sections, *(_section(name, display=False) for name in others)],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _section(name: str, display: bool = True) -> dict[str, Any]:
    place = {"uuid": _id("section", name), "name": name, "display": display, "columns": COLUMNS.get(name, 3)}
    return {**place, "isReordered": True, "deleted": False, "isGenerated": not display}


def _line(section: str, key: str) -> dict[str, Any]:
    axes = {"xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear", "selectedXAxisMetricKey": ""}
    smooth = {"lineSmoothness": 0, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "ignoreOutliers": False}
    y_axis = {"selectedMetricKeys": [key], "yAxisKey": "metric", "yAxisExpressions": [], "range": {}}
    return {**_chart("LINE", section, key), **axes, **smooth, **y_axis}


def _difference(baseline: str) -> dict[str, Any]:
    what = {"compareGroups": BASELINE, "chartName": "Recipe fields that differ", "baselineColumnUuid": baseline}
    flags = {"showChangeFromBaseline": False, "showDifferencesOnly": True}
    return {**_chart("DIFFERENCE", DIFFERENCES, ""), **what, **flags}


def _chart(kind: str, section: str, key: str) -> dict[str, Any]:
    return {
        "uuid": _id(kind, key),
        "type": kind,
        "runsCountToCompare": 10,
        "metricSectionId": _id("section", section),
        "deleted": False,
        "isGenerated": False,
        "metricKey": key,
        "displayName": key,
    }


def _id(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:20]


LOCAL_SERVER = "http://127.0.0.1:5000"
FOLDER = "comparisons"
SHOWN = ("train/loss", "throughput/tokens_per_s", "time/goodput")
"""Series of whose last tenth the mean is in the table of results: the last batch alone says which domains it drew."""
Rows = list[tuple[str, list[str]]]
"""Names, each with its value in each run."""


class Comparison(NamedTuple):
    """Runs side by side."""

    names: list[str]
    runs: list[Compared]
    differences: Rows
    """Recipe fields that differ."""
    results: Rows
    """Headline results."""


def comparison(root: Root, names: list[str]) -> Comparison:
    """Return the comparison of runs. Raises ValueError for fewer than two runs or an unknown one."""
    compared = _compared(root, names)
    return Comparison(names, compared, differences(compared), results(compared))


def comparison_tables(made: Comparison) -> list[Table]:
    """Return two tables: recipe fields that differ, and headline results, a column per run."""
    return [_table("recipe", made.names, made.differences), _table("result", made.names, made.results)]


def write_comparison(root: Root, made: Comparison) -> Path:
    """Write the comparison as one HTML file that needs nothing else, and return it."""
    page = root.file(FOLDER, "-".join(made.names)[:200] + ".html")
    text = comparison_html(made.runs, made.differences, made.results)
    write_atomic(page, text)
    if not root.is_local:
        root.write(text, FOLDER, page.name)
    return page


def comparison_url(root: Root, made: Comparison) -> str:
    """Return the address of the comparison: in MLflow if a server answers, else of the page of our own.

    The page of our own is written in any case.
    """
    page = write_comparison(root, made)
    return mlflow_url(root, [run.record for run in made.runs]) or page.as_uri()


def mlflow_url(root: Root, records: list[RunRecord]) -> str:
    """Return the address of MLflow's prepared charts of the runs, or "" if no MLflow server answers.

    Runs of one family are shown with charts over tokens, those of several with MLflow's plain comparison.
    """
    server = server_uri() or LOCAL_SERVER
    tracker = Tracker(root, records[0].family)
    if not _answers(server) or not all(record.mlflow_experiment for record in records):
        return ""
    experiments = {record.mlflow_experiment for record in records}
    if len(experiments) > 1:
        return _plain(server, records)
    key = tracker.reach.attempt(lambda: _prepare(tracker, records), "")
    shown = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={key}"
    return f"{server}/#/experiments/{experiments.pop()}/runs?{shown}" if key else _plain(server, records)


def differences(compared: list[Compared]) -> Rows:
    """Return the recipe fields that differ, with their value in each run."""
    recipes = [_fields(run.recipe) for run in compared]
    keys = sorted({key for recipe in recipes for key in recipe})
    rows = [(key, [_text(recipe.get(key)) for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def results(compared: list[Compared]) -> Rows:
    """Return headline results, with their value in each run."""
    last = [
        {**{key: _last_tenth(run.series[key]) for key in SHOWN if run.series.get(key)}, **run.scores}
        for run in compared
    ]
    keys = sorted({key for values in last for key in values})
    rows = [(key, [_number(values.get(key)) for values in last]) for key in keys]
    verdicts = [("verdict", [run.record.verdict or run.record.state for run in compared])]
    return [*verdicts, ("tokens", [f"{run.position:,}" for run in compared]), *rows]


def _last_tenth(series: Series) -> float:
    return fmean(value for _, value in series[-metrics.window(len(series)) :])


def _prepare(tracker: Tracker, records: list[RunRecord]) -> str:
    """Write the view of the runs into their experiment and return its key; raises MlflowException."""
    run_ids = [record.mlflow_run for record in records]
    keys = {key for run_id in run_ids for key in tracker.client.get_run(run_id).data.metrics}
    created = round(max(datetime.fromisoformat(record.started).timestamp() for record in records) * 1000)
    key, names = view_key(run_ids), [record.name for record in records]
    tracker.client.set_experiment_tag(records[0].mlflow_experiment, TAG + key, view_tag(names, run_ids, keys, created))
    return key


def _plain(server: str, records: list[RunRecord]) -> str:
    ids = quote(json.dumps([record.mlflow_run for record in records], separators=(",", ":")))
    experiments = quote(json.dumps(sorted({record.mlflow_experiment for record in records}), separators=(",", ":")))
    return f"{server}/#/compare-runs?runs={ids}&experiments={experiments}&workflowType=machine_learning"


def _answers(server: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server}/health", timeout=2):
            return True
    except (OSError, ValueError):
        return False


def _records(root: Root, names: list[str]) -> list[RunRecord]:
    if len(names) < 2:
        raise ValueError(f"compare: {len(names)} run given; name at least two")
    return [Runs(root).find(name) for name in names]


def _compared(root: Root, names: list[str]) -> list[Compared]:
    runs, store = Runs(root), open_store(root)
    found = []
    for record in _records(root, names):
        made = [store.at(step.artifact) for name, step in record.steps.items() if name != "evaluate-champion"]
        stages = [artifact for artifact in made if artifact.manifest.kind == "checkpoint"]
        scores: dict[str, float] = {}
        for artifact in made:
            if artifact.manifest.kind in ("evaluation", "advance"):
                scores |= scores_of(artifact)
        found.append(Compared(record, runs.recipe(record.name), stages, series_of(stages), scores))
    return found


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return every field of the recipe under one dotted name, stages by theirs (`stages.main.until`)."""
    plain = resolved(recipe)
    return flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}})


def _table(title: str, names: list[str], rows: Rows) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    for name in names:
        table.add_column(name, justify="right")
    for key, values in rows or [("(no difference)", [""] * len(names))]:
        table.add_row(key, *values)
    return table


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
