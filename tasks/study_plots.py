"""A scaling law ladder as a picture: loss over tokens by budget, and the law through the lowest points.

Beside the range that was fitted, the law is dashed, its band goes on and widens, and the number says how far out it is.
What this gives up: the runs' curves; each run is the point at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from llama3.recipe.units import tokens
from llama3.scaling.isoflop import Ladder, Law, Optimum, Parabola
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


def ladder_figures(ladder: Ladder, to: float | None = None) -> list[tuple[str, str, str]]:
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
