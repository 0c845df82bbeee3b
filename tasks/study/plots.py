"""A scaling law ladder as a picture: loss over tokens by budget, and the law through the lowest points.

Beside the range that was fitted, the law is dashed, its band goes on and widens, and the number says how far out it is.
What this gives up: the runs' curves; each run is the point at its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from llama3.recipe.units import tokens
from llama3.studies.forecast import Interval
from llama3.studies.isoflop import IsoflopFit, Law, Optimum, Parabola
from llama3.studies.results import HELPS, HURTS, NOTHING, Finding, Says
from tasks.plots import COLOURS, INK, as_svg

STEPS = 60
"""Places at which a curve is drawn."""
LINE, TARGET = COLOURS["general"], COLOURS["math"]
WIDTH, HEIGHT = 9.0, 4.2
PARABOLAS = (
    "Loss after the last token of each run, and the parabola through the runs of each budget of training operations. "
    "Diamonds are lowest points; hollow ones do not enter the law, since they lie at the edge or drown in noise."
)
LAW = (
    "Best number of tokens by budget, with 95 % intervals. The shaded range was fitted; beyond it the law is dashed, "
    "and its band says how far the runs fix it, not whether it still holds there."
)


def ladder_figures(ladder: IsoflopFit, to: float | None = None) -> list[tuple[str, str, str]]:
    """Return title, explanation and SVG of both pictures; `to` is a budget that is marked on the law."""
    return [
        ("Loss by budget", PARABOLAS, isoflop(ladder.parabolas)),
        ("The law", LAW, law(ladder.law, ladder.parabolas, to)),
    ]


def isoflop(parabolas: Sequence[Parabola]) -> str:
    """Return loss over tokens, a curve for each budget, as SVG text."""
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    for place, one in enumerate(parabolas):
        colour = plt.get_cmap("viridis")(0.9 * place / max(1, len(parabolas) - 1))
        _parabola(axis, one, colour)
    axis.set_xscale("log")
    _count_ticks(axis.xaxis)
    axis.set_xlabel("tokens")
    axis.set_ylabel("loss")
    axis.legend(title="operations", loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=False, fontsize=9)
    return as_svg(figure)


def _parabola(axis: Any, one: Parabola, colour: Any) -> None:
    taken = [trial.tokens for trial in one.trials]
    span = [min(taken), max(taken), *([one.tokens.value] if _near(one, taken) else [])]
    places = np.geomspace(min(span) / 1.1, max(span) * 1.1, STEPS)
    axis.plot(places, [one.at(place) for place in places], color=colour, linewidth=1.4, label=f"{one.budget:.2g}")
    axis.scatter(taken, [trial.loss for trial in one.trials], s=20, color=[colour], zorder=3)
    if _near(one, taken):
        face = colour if one.used else "white"
        axis.plot([one.tokens.value], [one.loss], "D", markersize=8, color=colour, markerfacecolor=face, zorder=4)


def _near(one: Parabola, taken: Sequence[int]) -> bool:
    """Whether the lowest point is not so far outside of the runs that it would squeeze the picture."""
    return math.isfinite(one.tokens.value) and min(taken) / 3 < one.tokens.value < 3 * max(taken)


def law(made: Law, parabolas: Sequence[Parabola], to: float | None = None) -> str:
    """Return the best number of tokens over the budget, both logarithmic, as SVG text."""
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    budgets = [one.budget for one in parabolas]
    least, most = min(budgets) / 1.5, max([*budgets, *([to] if to else [])]) * 1.5
    _band(axis, [made.at(flops) for flops in np.geomspace(least, most, STEPS)])
    for low, high, style in ((made.least, made.most, "-"), (least, made.least, "--"), (made.most, most, "--")):
        ends = [made.at(low), made.at(high)]
        axis.plot([low, high], [end.tokens.value for end in ends], style, color=LINE, linewidth=1.8)
    axis.axvspan(made.least, made.most, color=INK, alpha=0.06, linewidth=0, label="range fitted")
    for one in parabolas:
        _minimum(axis, one)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _fit_to(axis, made, parabolas, to)
    if to:
        _target(axis, made.at(to))
    _count_ticks(axis.yaxis)
    axis.set_xlabel("training operations")
    axis.set_ylabel("best number of tokens")
    alpha, scale = made.alpha, made.coefficient
    words = f"{scale.value:.3g} C^{alpha.value:.3f}, exponent {alpha.low:.3f} to {alpha.high:.3f}"
    axis.plot([], [], color=LINE, linewidth=1.8, label=words)
    axis.legend(loc="upper left")
    return as_svg(figure)


def _band(axis: Any, made: Sequence[Optimum]) -> None:
    low, high = [one.tokens.low for one in made], [one.tokens.high for one in made]
    axis.fill_between([one.flops for one in made], low, high, color=LINE, alpha=0.15, linewidth=0)


def _minimum(axis: Any, one: Parabola) -> None:
    found = one.tokens
    if not math.isfinite(found.value):
        return
    errors = None
    if one.used and math.isfinite(found.low):
        errors = [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]
    face = INK if one.used else "white"
    axis.errorbar(
        [one.budget],
        [found.value],
        yerr=errors,
        fmt="D",
        color=INK,
        markerfacecolor=face,
        markersize=6,
        capsize=3,
        zorder=3,
    )


def _fit_to(axis: Any, law: Law, parabolas: Sequence[Parabola], to: float | None) -> None:
    """Let the axis hold the law and the minima used, not every end of a wide interval."""
    shown = [one.tokens.value for one in parabolas if one.used]
    if to:
        target = law.at(to).tokens
        shown += [target.value, target.high, target.low]
    kept = [value for value in shown if math.isfinite(value) and value > 0]
    axis.set_ylim(min(kept) / 2.5, max(kept) * 2.5)


def _target(axis: Any, best: Optimum) -> None:
    found, size = best.tokens, best.parameters
    errors = [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]
    axis.errorbar([best.flops], [found.value], yerr=errors, fmt="s", color=TARGET, markersize=7, capsize=4, zorder=5)
    words = (
        f"{best.flops:.3g} operations, {best.beyond:.3g} x the largest fitted:\n"
        f"{_short(found.value)} tokens ({_short(found.low)} to {_short(found.high)})\n"
        f"{_short(size.value)} parameters ({_short(size.low)} to {_short(size.high)})"
    )
    axis.text(0.985, 0.04, words, transform=axis.transAxes, ha="right", va="bottom", fontsize=9, color=TARGET)


def _short(count: float) -> str:
    """Return a count in three digits: `16.3T`."""
    return tokens(float(f"{count:.3g}")) if math.isfinite(count) else "unknown"


def _count_ticks(axis: Any) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_minor_formatter(NullFormatter())


# A mix search as pictures: how well the fit foretells an arm that it has not seen, and bits per byte against
# shares.
#
# Plain numbers go in, so the pictures know nothing of the form that was fitted. What this gives up: a share's
# effect at equal other shares; in each panel the other domains move too.

Losses = Mapping[str, Mapping[str, float]]
"""Arm -> domain -> bits per byte, the mean over its repeats."""
Shares = Mapping[str, Mapping[str, float]]
"""Arm -> domain -> share of the tokens."""
MIX_WIDTH = 9.0
BLEND = "#b8860b"
LEFT_OUT = (
    "Each arm's bits per byte against what the fit through all other arms says of it; on the line both are equal. A "
    "fit that cannot order these arms can propose nothing."
)
PANELS = (
    "Bits per byte on the held-out text of each domain against that domain's share of the training tokens, a point for "
    "each arm. The ring is the base mix."
)
SPLIT = "Shares of the base mix and of the best blend of the arms; whiskers are 95 % intervals of the blend's shares."


def left_out(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return measured against predicted bits per byte, a panel for each domain; `pairs` are (predicted, measured)."""
    figure, axes = plt.subplots(1, len(pairs), figsize=(MIX_WIDTH, 2.7), layout="constrained", squeeze=False)
    for axis, (domain, points) in zip(axes.flat, pairs.items(), strict=True):
        values = np.array(points, np.float64)
        ends = [values.min(), values.max()]
        axis.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.scatter(values[:, 0], values[:, 1], s=22, color=_colour(domain), zorder=3)
        _mix_panel(axis, domain, "predicted")
    axes[0, 0].set_ylabel("measured, bits per byte")
    return as_svg(figure)


def against_shares(shares: Shares, losses: Losses, base: str) -> str:
    """Return bits per byte against the domain's own share, a panel for each; `base` names the base mix's arm."""
    domains = list(losses[base])
    figure, axes = plt.subplots(1, len(domains), figsize=(MIX_WIDTH, 2.9), layout="constrained", squeeze=False)
    for axis, domain in zip(axes.flat, domains, strict=True):
        taken = [shares[arm].get(domain, 0.0) for arm in losses]
        axis.scatter(taken, [losses[arm][domain] for arm in losses], s=22, color=_colour(domain), zorder=3)
        own = (shares[base].get(domain, 0.0), losses[base][domain])
        axis.plot(*own, "o", markersize=10, color=INK, markerfacecolor="none", markeredgewidth=1.5, zorder=4)
        _mix_panel(axis, domain, "share of tokens")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes[0, 0].set_ylabel("bits per byte")
    return as_svg(figure)


def split(base: Mapping[str, float], blend: Mapping[str, Interval]) -> str:
    """Return the shares of the base mix and of a blend side by side as SVG text."""
    domains = list(base)
    figure, axis = plt.subplots(figsize=(MIX_WIDTH, 0.5 * len(domains) + 1.1), layout="constrained")
    places = np.arange(len(domains))
    axis.barh(places - 0.19, [base[domain] for domain in domains], 0.34, color="#b4bcc6", label="base")
    found = [blend[domain] for domain in domains]
    errors = [[max(0.0, one.value - one.low) for one in found], [max(0.0, one.high - one.value) for one in found]]
    bars = [one.value for one in found]
    axis.barh(places + 0.19, bars, 0.34, xerr=errors, color=BLEND, capsize=3, ecolor=INK, label="best blend")
    axis.set_yticks(places, domains)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.legend(loc="lower right")
    return as_svg(figure)


def _mix_panel(axis: Any, domain: str, label: str) -> None:
    axis.set_title(domain, fontsize=10, color=INK)
    axis.set_xlabel(label, fontsize=9)
    axis.tick_params(labelsize=8.5)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axis.margins(0.12)


def _colour(domain: str) -> str:
    return COLOURS.get(domain, INK)


# The findings of a study as a forest plot: a panel for each score, a row for each arm, a bar for each interval.
#
# What this gives up: p values; what is in colour has passed the correction, whatever its bar alone suggests.

TINTS: dict[Says, str] = {HELPS: "#1a7f37", HURTS: "#cf222e", NOTHING: "#7a828c"}
ACROSS = 4
"""Panels in a row."""
FOREST_WIDTH, ROW, HEAD = 9.0, 0.24, 0.95
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
    figure, grid = plt.subplots(
        down, across, figsize=(FOREST_WIDTH, height), layout="constrained", squeeze=False, sharey=True
    )
    for axis, score in zip(grid.flat, scores, strict=False):
        _forest_panel(axis, [one for one in findings if one.score == score], arms)
    for axis in grid.flat[len(scores) :]:
        axis.set_visible(False)
    grid[0, 0].set_ylim(len(arms) - 0.4, -0.6)
    return as_svg(figure)


def _forest_panel(axis: Any, findings: Sequence[Finding], arms: Sequence[str]) -> None:
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
