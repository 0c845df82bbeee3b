"""Figures of the report as SVG text, by matplotlib; the x axis is always tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from llama3.evaluate.needle import grid
from llama3.evaluate.scores import Scores
from llama3.evaluate.statistics import proportion
from llama3.export.card import StageLine
from llama3.recipe.units import tokens
from llama3.studies.forecast import Fit, Forecast, Interval
from llama3.train import metrics
from storage.artifact import Artifact
from tasks.plots import COLOURS, INK, as_svg
from tasks.report.data import DataPage, ReportData, Series

SMOOTH = 9
"""Steps of the smoothed curve."""


def loss(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "loss, nats per token")
    points = data.series[metrics.LOSS]
    axis.plot(*_xy(points), color="#9aa4af", linewidth=0.8, label="each step")
    axis.plot(*_xy(_smooth(points)), color=INK, linewidth=1.8, label=f"mean of {SMOOTH} steps")
    _legend(figure)
    return as_svg(figure)


def domain_loss(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "loss, nats per token")
    for domain, colour in COLOURS.items():
        points = data.series.get(metrics.domain_loss(domain), [])
        axis.plot(*_xy(_smooth(points)), color=colour, linewidth=1.6, label=domain)
    _legend(figure)
    return as_svg(figure)


def held_out(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "bits per byte")
    for domain, colour in COLOURS.items():
        points = data.series.get(metrics.held_out(domain), [])
        axis.plot(*_xy(points), color=colour, linewidth=1.4, marker="o", markersize=3, label=domain)
    axis.plot(*_xy(data.series[metrics.HELD_OUT]), color=INK, linewidth=1.8, marker="o", markersize=4, label="all")
    _legend(figure)
    return as_svg(figure)


def schedule(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "learning rate")
    axis.plot(*_xy(data.series[metrics.LEARNING_RATE]), color="#3b6fb6", linewidth=1.8, label="learning rate")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    batch = axis.twinx()
    batch.grid(visible=False)
    batch.spines["right"].set_visible(True)
    for key, colour, label in (
        (metrics.BATCH_TOKENS, "#d1603d", "batch, tokens"),
        (metrics.SEQ_LEN, "#3f9b6c", "sequence"),
    ):
        batch.step(*_xy(data.series[key]), where="pre", color=colour, linewidth=1.4, label=label)
    batch.set_yscale("log", base=2)
    batch.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(figure)
    return as_svg(figure)


def throughput(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "tokens per second")
    axis.plot(*_xy(data.series[metrics.TOKENS_PER_S]), color="#3f9b6c", linewidth=1.2)
    axis.set_ylim(bottom=0)
    return as_svg(figure)


def mix(data: ReportData) -> str:
    stages = list(dict.fromkeys(row.stage for row in data.mix))
    figure, axis = plt.subplots(figsize=(8, 0.55 * len(stages) + 1.1), layout="constrained")
    for place, stage in enumerate(stages):
        planned = realised = 0.0
        for row in (row for row in data.mix if row.stage == stage):
            axis.barh(place, row.realised, left=realised, color=COLOURS[row.domain], height=0.6)
            axis.barh(place, row.planned, left=planned, fill=False, edgecolor=INK, linewidth=1, height=0.78)
            axis.text(
                realised + row.realised / 2, place, f"{row.realised:.1%}", ha="center", va="center", color="white"
            )
            planned, realised = planned + row.planned, realised + row.realised
    axis.set_yticks(range(len(stages)), stages)
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axis.legend(patches, list(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return as_svg(figure)


def bits_per_byte(data: ReportData) -> str:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    keys = [key for key in ("eval/bpb", *(f"eval/bpb/{domain}" for domain in COLOURS)) if _has(data, key)]
    width = 0.8 / len(data.evaluations)
    for index, (stage, scores) in enumerate(data.evaluations.items()):
        values = [scores[key] for key in keys]
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(keys))]
        errors = [[s.value - s.low for s in values], [s.high - s.value for s in values]]
        axis.bar(places, [s.value for s in values], width * 0.9, label=stage, yerr=errors, capsize=3, alpha=0.85)
    axis.set_xticks(range(len(keys)), ["all" if key == "eval/bpb" else key.rsplit("/", 1)[1] for key in keys])
    axis.set_ylabel("bits per byte")
    axis.grid(axis="x", visible=False)
    _legend(figure)
    return as_svg(figure)


def _legend(figure: Any) -> None:
    """Name the lines below the figure, where they cross nothing."""
    figure.legend(loc="outside lower center", ncols=5)


def _has(data: ReportData, key: str) -> bool:
    return all(key in scores for scores in data.evaluations.values())


def _over_tokens(data: ReportData, label: str) -> tuple[Any, Any]:
    """Return a figure whose x axis is tokens, with the stages marked."""
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for index, stage in enumerate(data.stages):
        if index:
            axis.axvline(stage.start, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        middle = (stage.start + stage.end) / 2
        axis.text(middle, 1.02, stage.name, transform=axis.get_xaxis_transform(), ha="center", fontsize=9)
    axis.set_xlim(0, data.stages[-1].end)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_xlabel("tokens")
    axis.set_ylabel(label)
    return figure, axis


def _xy(points: Series) -> tuple[list[int], list[float]]:
    return [position for position, _ in points], [value for _, value in points]


def _smooth(points: Series, window: int = SMOOTH) -> Series:
    smooth = []
    for index in range(len(points)):
        near = points[max(0, index - window // 2) : index + window // 2 + 1]
        smooth.append((points[index][0], sum(value for _, value in near) / len(near)))
    return smooth


# The grid of needles as a figure: the longer and the deeper, the harder to find.

TITLE = "Needles"
NOTE = (
    "Share of hidden sentences found (multi-key, four choices, so guessing finds a quarter), by the length of the text "
    "in tokens and by how much of it stands before the sentence."
)


def needles(scores: Scores) -> str | None:
    """Return the heat map of `scores` as SVG text; None where they have no grid."""
    rows = grid(scores)
    if not rows:
        return None
    depths = sorted({depth for row in rows.values() for depth in row})
    shares = [[row[depth].value if depth in row else float("nan") for depth in depths] for row in rows.values()]
    figure, axis = plt.subplots(figsize=(8, 0.34 * len(rows) + 1.2), layout="constrained")
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for place, row in enumerate(rows.values()):
        for column, depth in enumerate(depths):
            if depth in row:
                axis.text(column, place, f"{row[depth].value:.0%}", ha="center", va="center", fontsize=8, color=INK)
    axis.set_xticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axis.set_yticks(range(len(rows)), [f"{length:,}" for length in rows])
    axis.set_xlabel("depth")
    axis.set_ylabel("tokens")
    axis.grid(visible=False)
    axis.tick_params(length=0)
    return as_svg(figure)


# Figures of the data page as SVG text.


def lengths(page: DataPage) -> str:
    """Draw, by domain, how many documents of each size were kept, and in outline how many were read."""
    domains = [domain for domain in COLOURS if any(row["domain"] == domain for row in page.lengths)]
    figure, axes = plt.subplots(1, len(domains), figsize=(9, 2.6), layout="constrained", squeeze=False)
    least, most = (pick(row["log2_bytes"] for row in page.lengths) for pick in (min, max))
    for axis, domain in zip(axes[0], domains, strict=True):
        counts = {kept: dict.fromkeys(range(least, most + 1), 0) for kept in (True, False)}
        for row in page.lengths:
            if row["domain"] == domain:
                counts[row["kept"]][row["log2_bytes"]] += row["documents"]
        places = list(counts[True])
        read = [counts[True][place] + counts[False][place] for place in places]
        axis.bar(places, list(counts[True].values()), color=COLOURS[domain], width=0.9)
        axis.bar(places, read, fill=False, edgecolor="#30363d", linewidth=0.8, width=0.9)
        axis.set_title(domain, fontsize=10)
        axis.xaxis.set_major_formatter(FuncFormatter(_power))
        axis.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("documents")
    return as_svg(figure)


def _power(value: float, _: object) -> str:
    """Return 2^value bytes as people say it."""
    size, unit = 2**value, "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1024, larger
    return f"{size:.0f} {unit}"


# The two steps of a forecast as one figure: likelihood over compute, accuracy over likelihood.

STEPS = 60
"""Places at which a curve is drawn."""
LINE, TARGET = COLOURS["general"], COLOURS["math"]


def forecast(fit: Fit, target: Forecast) -> str:
    """Return the figure as SVG text; `target` is the forecast that is marked."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", width_ratios=(1.1, 1))
    _compute(left, fit, target)
    _accuracy(right, fit, target)
    return as_svg(figure)


def _compute(axis: Any, fit: Fit, target: Forecast) -> None:
    ends = {point.run: point for point in sorted(fit.points, key=lambda point: point.flops)}.values()
    inner = [point for point in fit.points if point not in ends]
    least = min(point.flops for point in fit.points)
    made = [fit.at(flops) for flops in np.geomspace(least, max(target.flops, fit.largest), STEPS)]
    places = [one.flops for one in made]
    axis.fill_between(places, [o.nats.low for o in made], [o.nats.high for o in made], color=LINE, alpha=0.15, lw=0)
    axis.plot(places, [one.nats.value for one in made], color=LINE, linewidth=1.6)
    axis.scatter([p.flops for p in inner], [p.nats for p in inner], s=14, facecolors="none", edgecolors=INK, lw=0.8)
    axis.scatter([p.flops for p in ends], [p.nats for p in ends], s=18, color=INK, zorder=3)
    _mark(axis, target.flops, target.nats)
    axis.set_xscale("log")
    axis.set_xlabel("training operations")
    axis.set_ylabel("nats per byte of the gold answer")


def _accuracy(axis: Any, fit: Fit, target: Forecast) -> None:
    nats = [point.nats for point in fit.points]
    places = np.linspace(min(*nats, target.nats.low), max(nats), STEPS)
    axis.plot(places, fit.curve.at(places), color=LINE, linewidth=1.6)
    spreads = [proportion(round(point.accuracy * point.n), point.n) for point in fit.points]
    shares = [point.accuracy for point in fit.points]
    errors = [[max(0.0, a - s.low) for a, s in zip(shares, spreads, strict=True)]]
    errors.append([max(0.0, s.high - a) for a, s in zip(shares, spreads, strict=True)])
    axis.errorbar(nats, shares, yerr=errors, fmt="o", markersize=3.5, color=INK, elinewidth=0.7, zorder=3)
    axis.axhline(fit.chance, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    axis.text(0.99, fit.chance, "chance", transform=axis.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
    _mark(axis, target.nats.value, target.accuracy)
    axis.invert_xaxis()
    axis.set_xlabel("nats per byte of the gold answer")
    axis.set_ylabel("accuracy")


def _mark(axis: Any, x: float, y: Interval) -> None:
    """Draw a forecast with its interval."""
    errors = [[max(0.0, y.value - y.low)], [max(0.0, y.high - y.value)]]
    axis.errorbar([x], [y.value], yerr=errors, fmt="s", markersize=6, color=TARGET, capsize=3, zorder=4)


# The training curve beside a model card: a PNG, because not every page that shows a README shows an SVG beside it.

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
