"""The training curve beside a model card: a PNG, because not every page that shows a README shows an SVG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as parquet
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from llama3.export.card import StageLine
from llama3.recipe.units import tokens
from llama3.train import metrics
from storage.artifact import Artifact
from tasks.plots import INK

MEANS = 50
"""Points of the smooth curve, each the mean of its share of the steps."""
FEWEST = 4
"""Steps of a mean."""


def draw_curve(stages: list[Artifact], lines: list[StageLine], path: Path) -> None:
    """Write the training loss of `stages` against tokens as the picture `path`; `lines` mark where each begins."""
    positions, losses = _loss(stages)
    figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    axis.plot(positions, losses, color="#9aa4af", linewidth=0.9, label="each step")
    size = max(FEWEST, len(losses) // MEANS)
    axis.plot(_means(positions, size), _means(losses, size), color=INK, linewidth=1.8, label=f"mean of {size} steps")
    for line in lines:
        if line.start:
            axis.axvline(line.start, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        middle = (line.start + line.end) / 2
        axis.text(middle, 1.02, line.name, transform=axis.get_xaxis_transform(), ha="center", fontsize=9)
    axis.set_xlim(0, lines[-1].end)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_xlabel("tokens")
    axis.set_ylabel("training loss, nats per token")
    axis.legend()
    figure.savefig(path, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)


def _loss(stages: list[Artifact]) -> tuple[list[int], list[float]]:
    points: dict[int, float] = {}
    for stage in stages:
        table = parquet.read_table(stage.part("metrics.parquet"), filters=[("key", "=", metrics.LOSS)])
        points |= {row["position"]: row["value"] for row in table.to_pylist()}
    positions = sorted(points)
    return positions, [points[position] for position in positions]


def _means(values: Sequence[float], size: int) -> list[float]:
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]
