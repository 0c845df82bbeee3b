"""Figures of the report as SVG text, by matplotlib, their style, and the training curve of a model card as PNG.

Importing this module loads matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from herd.tasks.figures import as_svg, styled, subplots
from herd.tasks.html import COLORS, GROUPS, INK, PAGE

if TYPE_CHECKING:  # `herd compare` draws without a second of imports
    from herd.llama3.evaluate.scores import Scores
    from herd.llama3.studies.forecast import Forecast, ForecastFit, Interval
    from herd.tasks.report.data import DataPage, ReportData

CURVE_POINTS = 60
"""Points at which a fitted curve is drawn."""
LINE, TARGET = COLORS["general"], COLORS["math"]
TITLE = "Needles"
NOTE = (
    "Share of hidden sentences found (multi-key, four choices, so guessing finds a quarter), by the length of the text "
    "in tokens and by how much of the text is before the sentence."
)


# Shares and scores.


@styled
def mix(data: ReportData) -> str:
    stages = list(dict.fromkeys(row.stage for row in data.mix))
    figure, axis = subplots(figsize=(8, 0.55 * len(stages) + 1.1))
    for y, stage in enumerate(stages):
        planned = realized = 0.0
        for row in (row for row in data.mix if row.stage == stage):
            axis.barh(y, row.realized, left=realized, color=GROUPS[row.domain], height=0.6)
            axis.barh(y, row.planned, left=planned, fill=False, edgecolor=INK, linewidth=1, height=0.78)
            middle = realized + row.realized / 2
            # No color of text is easy to read on all bars, in the light and the dark scheme.
            chip = {"boxstyle": "round,pad=0.2", "facecolor": PAGE, "edgecolor": "none"}
            axis.text(middle, y, f"{row.realized:.1%}", ha="center", va="center", fontsize=9, bbox=chip)
            planned, realized = planned + row.planned, realized + row.realized
    axis.set_yticks(range(len(stages)), stages)
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    shown = [name for name in GROUPS if name in COLORS or any(row.domain == name for row in data.mix)]
    patches = [Rectangle((0, 0), 1, 1, color=GROUPS[name]) for name in shown]
    axis.legend(patches, shown, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown))
    return as_svg(figure)


@styled
def bits_per_byte(data: ReportData) -> str:
    figure, axis = subplots(figsize=(8, 3))
    keys = ["eval/bpb", *(f"eval/bpb/{domain}" for domain in COLORS)]
    keys = [key for key in keys if all(key in scores for scores in data.evaluations.values())]
    width = 0.8 / len(data.evaluations)
    for index, (stage, table) in enumerate(data.evaluations.items()):
        scores = [table[key] for key in keys]
        xs = [x - 0.4 + width * (index + 0.5) for x in range(len(keys))]
        errors = [[s.value - s.low for s in scores], [s.high - s.value for s in scores]]
        axis.bar(xs, [s.value for s in scores], width * 0.9, label=stage, yerr=errors, ecolor=INK, capsize=3)
    axis.set_xticks(range(len(keys)), ["all" if key == "eval/bpb" else key.rsplit("/", 1)[1] for key in keys])
    axis.set_ylabel("bits per byte")
    axis.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=5)
    return as_svg(figure)


@styled
def needle_heatmap(scores: Scores) -> str | None:
    """Return the heat map of needle scores by length and depth as SVG text; None if `scores` has no grid."""
    from herd.llama3.evaluate.needle import scores_by_length

    cells = scores_by_length(scores)
    if not cells:
        return None
    depths = sorted({depth for row in cells.values() for depth in row})
    shares = [[row[depth].value if depth in row else float("nan") for depth in depths] for row in cells.values()]
    figure, axis = subplots(figsize=(8, 0.34 * len(cells) + 1.2))
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for y, row in enumerate(cells.values()):
        for x, depth in enumerate(depths):
            if depth in row:
                axis.text(x, y, f"{row[depth].value:.0%}", ha="center", va="center", fontsize=8, color="#24292f")
    axis.set_xticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axis.set_yticks(range(len(cells)), [f"{length:,}" for length in cells])
    axis.set_xlabel("depth")
    axis.set_ylabel("tokens")
    axis.grid(visible=False)
    axis.tick_params(length=0)
    return as_svg(figure)


@styled
def length_histogram(page: DataPage) -> str:
    """Draw, by domain, the number of documents of each size that were kept, and in outline that were read."""

    def size(log2_bytes: float, _: object) -> str:
        value, unit = 2**log2_bytes, "B"
        for larger in ("kB", "MB", "GB"):
            if value >= 1000:
                value, unit = value / 1024, larger
        return f"{value:.0f} {unit}"

    domains = [domain for domain in COLORS if any(row["domain"] == domain for row in page.lengths)]
    figure, axes = subplots(1, len(domains), figsize=(9, 2.6), squeeze=False)
    least, most = (pick(row["log2_bytes"] for row in page.lengths) for pick in (min, max))
    for axis, domain in zip(axes[0], domains, strict=True):
        counts = {kept: dict.fromkeys(range(least, most + 1), 0) for kept in (True, False)}
        for row in page.lengths:
            if row["domain"] == domain:
                counts[row["kept"]][row["log2_bytes"]] += row["documents"]
        xs = list(counts[True])
        axis.bar(xs, list(counts[True].values()), color=COLORS[domain], width=0.9)
        read = [counts[True][x] + counts[False][x] for x in xs]
        axis.bar(xs, read, fill=False, edgecolor=INK, linewidth=0.8, width=0.9)
        axis.set_title(domain, fontsize=10)
        axis.xaxis.set_major_formatter(FuncFormatter(size))
        axis.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("documents")
    return as_svg(figure)


@styled
def forecast_plot(fit: ForecastFit, target: Forecast) -> str:
    """Draw the two steps of a forecast: likelihood over compute, accuracy over likelihood; mark `target`."""
    from herd.llama3.statistics.estimates import proportion

    figure, (left, right) = subplots(1, 2, figsize=(8, 3.4), width_ratios=(1.1, 1))
    ends = {point.run: point for point in sorted(fit.points, key=lambda point: point.flops)}.values()
    inner = [point for point in fit.points if point not in ends]
    least = min(point.flops for point in fit.points)
    curve = [fit.predict(flops) for flops in np.geomspace(least, max(target.flops, fit.largest), CURVE_POINTS)]
    xs = [point.flops for point in curve]
    left.fill_between(xs, [p.nll.low for p in curve], [p.nll.high for p in curve], color=LINE, alpha=0.15, lw=0)
    left.plot(xs, [point.nll.value for point in curve], color=LINE, linewidth=1.6)
    left.scatter([p.flops for p in inner], [p.nll for p in inner], s=14, facecolors="none", edgecolors=INK, lw=0.8)
    left.scatter([p.flops for p in ends], [p.nll for p in ends], s=18, color=INK, zorder=3)
    _mark(left, target.flops, target.nll)
    left.set_xscale("log")
    left.set_xlabel("training operations")
    left.set_ylabel("nats per byte of the gold answer")

    nll, accuracies = [point.nll for point in fit.points], [point.accuracy for point in fit.points]
    grid_nll = np.linspace(min(*nll, target.nll.low), max(nll), CURVE_POINTS)
    right.plot(grid_nll, fit.curve.predict(grid_nll), color=LINE, linewidth=1.6)
    spreads = [proportion(round(point.accuracy * point.n), point.n) for point in fit.points]
    errors = [[max(0.0, a - s.low) for a, s in zip(accuracies, spreads, strict=True)]]
    errors.append([max(0.0, s.high - a) for a, s in zip(accuracies, spreads, strict=True)])
    right.errorbar(nll, accuracies, yerr=errors, fmt="o", markersize=3.5, color=INK, elinewidth=0.7, zorder=3)
    right.axhline(fit.chance, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    right.text(0.99, fit.chance, "chance", transform=right.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
    _mark(right, target.nll.value, target.accuracy)
    right.invert_xaxis()
    right.set_xlabel("nats per byte of the gold answer")
    right.set_ylabel("accuracy")
    return as_svg(figure)


def _mark(axis: Any, x: float, y: Interval) -> None:
    """Draw a forecast with its interval."""
    errors = [[max(0.0, y.value - y.low)], [max(0.0, y.high - y.value)]]
    axis.errorbar([x], [y.value], yerr=errors, fmt="s", markersize=6, color=TARGET, capsize=3, zorder=4)
