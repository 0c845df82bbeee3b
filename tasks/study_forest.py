"""The findings of a study as a forest plot: a panel for each score, a row for each arm, a bar for each interval.

What this gives up: p values; what is in colour has passed the correction, whatever its bar alone suggests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from llama3.scaling.verdict import HELPS, HURTS, NOTHING, Finding, Says
from tasks.plots import INK, as_svg

TINTS: dict[Says, str] = {HELPS: "#1a7f37", HURTS: "#cf222e", NOTHING: "#7a828c"}
ACROSS = 4
"""Panels in a row."""
WIDTH, ROW, HEAD = 9.0, 0.24, 0.95
"""Inches."""
FOREST = (
    "Gain over the control (right of the line is better) with its 95 % interval: green helps, red hurts, grey is no "
    "significant difference after correction for all arms and scores."
)


def forest(findings: Sequence[Finding]) -> str:
    """Return the forest plot as SVG text; there is at least one finding."""
    arms = list(dict.fromkeys(one.arm for one in findings))
    scores = list(dict.fromkeys(one.score for one in findings))
    across = min(ACROSS, len(scores))
    down = -(-len(scores) // across)
    height = max(1.7, ROW * len(arms) + HEAD) * down
    figure, grid = plt.subplots(down, across, figsize=(WIDTH, height), layout="constrained", squeeze=False, sharey=True)
    for axis, score in zip(grid.flat, scores, strict=False):
        _panel(axis, [one for one in findings if one.score == score], arms)
    for axis in grid.flat[len(scores) :]:
        axis.set_visible(False)
    grid[0, 0].set_ylim(len(arms) - 0.4, -0.6)
    return as_svg(figure)


def _panel(axis: Any, findings: Sequence[Finding], arms: Sequence[str]) -> None:
    axis.axvline(0, color=INK, linewidth=0.9)
    for one in findings:
        place, tint = arms.index(one.arm), TINTS[one.says]
        if math.isfinite(one.low) and math.isfinite(one.high):
            axis.plot([one.low, one.high], [place, place], color=tint, linewidth=1.8, solid_capstyle="butt")
        axis.plot([one.gain], [place], marker="o", markersize=4.5, color=tint)
    axis.set_yticks(range(len(arms)), arms, fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8.5)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=False))
    axis.margins(x=0.08)
    axis.set_title(findings[0].score.removeprefix("eval/bpb/").removeprefix("eval/"), fontsize=10, color=INK)
    axis.set_xlabel(findings[0].unit, fontsize=9)
