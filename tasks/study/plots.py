"""Figures of a study as SVG text: ladders, mix searches, and the forest plot of findings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from herd.llama3.recipe.units import tokens
from herd.llama3.studies.forecast import Interval
from herd.llama3.studies.isoflop import IsoflopFit, Parabola, TokenLaw
from herd.llama3.studies.results import HELPS, HURTS, NOTHING, Finding, Says
from herd.tasks.figures import as_svg, styled, subplots
from herd.tasks.html import COLORS, INK, PAGE

Losses = Mapping[str, Mapping[str, float]]
"""Variant -> domain -> bits per byte, the mean over its repeats."""
Shares = Mapping[str, Mapping[str, float]]
"""Variant -> domain -> share of the tokens."""
STEPS = 60
"""Points of a curve."""
LINE, TARGET = COLORS["general"], COLORS["math"]
TINTS: dict[Says, str] = {HELPS: "#1a7f37", HURTS: "#cf222e", NOTHING: "#7a828c"}
WIDTH, HEIGHT = 9.0, 4.2
ROW, HEAD = 0.24, 0.95
"""Inches."""
ACROSS = 4
"""Panels of the forest plot in a row."""
PARABOLAS = (
    "Loss after the last token of each run, and the parabola through the runs of each budget of training operations. "
    "Diamonds are minima; hollow ones do not enter the law, since they lie at the edge or are not significant."
)
LAW = (
    "Best number of tokens by budget, with 95 % intervals. The shaded range was fitted; beyond it the law is dashed, "
    "and its band shows the uncertainty of the fit, not whether the law still holds there."
)
PANELS = (
    "Bits per byte on the held-out text of each domain against that domain's share of the training tokens, a point for "
    "each variant. The ring is the base mix."
)
FOREST = (
    "Gain over the control (right of the line is better) with its 95 % interval: green helps, red hurts, gray is no "
    "significant difference after correction for all variants and scores."
)


# Ladder


def ladder_figures(ladder: IsoflopFit, to: float | None = None) -> list[tuple[str, str, str]]:
    """Return title, explanation and SVG of both figures; `to` is a budget to mark on the law."""
    return [
        ("Loss by budget", PARABOLAS, isoflop(ladder.parabolas)),
        ("The law", LAW, law(ladder.law, ladder.parabolas, to)),
    ]


@styled
def isoflop(parabolas: Sequence[Parabola]) -> str:
    """Return loss over tokens, a curve for each budget, as SVG text."""
    figure, axis = subplots(figsize=(WIDTH, HEIGHT))
    for index, parabola in enumerate(parabolas):
        color = colormaps["viridis"](0.9 * index / max(1, len(parabolas) - 1))
        minimum = parabola.tokens.value
        taken = [trial.tokens for trial in parabola.trials]
        # a minimum far outside of the runs would squeeze the figure
        near = math.isfinite(minimum) and min(taken) / 3 < minimum < 3 * max(taken)
        span = [*taken, minimum] if near else taken
        x = np.geomspace(min(span) / 1.1, max(span) * 1.1, STEPS)
        label = f"{parabola.budget:.2g}"
        axis.plot(x, [parabola.loss_at(tokens) for tokens in x], color=color, linewidth=1.4, label=label)
        axis.scatter(taken, [trial.loss for trial in parabola.trials], s=20, color=[color], zorder=3)
        if near:
            face = color if parabola.used else PAGE
            axis.plot([minimum], [parabola.loss], "D", markersize=8, color=color, markerfacecolor=face, zorder=4)
    axis.set_xscale("log")
    _count_ticks(axis.xaxis)
    axis.set_xlabel("tokens")
    axis.set_ylabel("loss")
    axis.legend(title="operations", loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=False, fontsize=9)
    return as_svg(figure)


@styled
def law(fitted: TokenLaw, parabolas: Sequence[Parabola], to: float | None = None) -> str:
    """Return the best number of tokens over the budget, both logarithmic, as SVG text."""
    figure, axis = subplots(figsize=(WIDTH, HEIGHT))
    budgets = [parabola.budget for parabola in parabolas]
    least, most = min(budgets) / 1.5, max([*budgets, *([to] if to else [])]) * 1.5
    band = [fitted.optimum(flops) for flops in np.geomspace(least, most, STEPS)]
    low, high = [best.tokens.low for best in band], [best.tokens.high for best in band]
    axis.fill_between([best.flops for best in band], low, high, color=LINE, alpha=0.15, linewidth=0)
    for start, end, style in (
        (fitted.min_flops, fitted.max_flops, "-"),
        (least, fitted.min_flops, "--"),
        (fitted.max_flops, most, "--"),
    ):
        ends = [fitted.optimum(start), fitted.optimum(end)]
        axis.plot([start, end], [best.tokens.value for best in ends], style, color=LINE, linewidth=1.8)
    axis.axvspan(fitted.min_flops, fitted.max_flops, color=INK, alpha=0.06, linewidth=0, label="range fitted")
    for parabola in parabolas:
        _plot_minimum(axis, parabola)
    axis.set_xscale("log")
    axis.set_yscale("log")
    # the axis contains the law and the minima used, not every end of a wide interval
    shown = [parabola.tokens.value for parabola in parabolas if parabola.used]
    if to:
        target = fitted.optimum(to).tokens
        shown += [target.value, target.high, target.low]
    shown = [value for value in shown if math.isfinite(value) and value > 0]
    axis.set_ylim(min(shown) / 2.5, max(shown) * 2.5)
    if to:
        _plot_target(axis, fitted, to)
    _count_ticks(axis.yaxis)
    axis.set_xlabel("training operations")
    axis.set_ylabel("best number of tokens")
    alpha, scale = fitted.alpha, fitted.coefficient
    label = f"{scale.value:.3g} C^{alpha.value:.3f}, exponent {alpha.low:.3f} to {alpha.high:.3f}"
    axis.plot([], [], color=LINE, linewidth=1.8, label=label)
    axis.legend(loc="upper left")
    return as_svg(figure)


def _plot_minimum(axis: Any, parabola: Parabola) -> None:
    minimum = parabola.tokens
    if not math.isfinite(minimum.value):
        return
    axis.errorbar(
        [parabola.budget],
        [minimum.value],
        yerr=_errors([minimum]) if parabola.used and math.isfinite(minimum.low) else None,
        fmt="D",
        color=INK,
        markerfacecolor=INK if parabola.used else PAGE,
        markersize=6,
        capsize=3,
        zorder=3,
    )


def _plot_target(axis: Any, fitted: TokenLaw, flops: float) -> None:
    best = fitted.optimum(flops)

    def text(value: float) -> str:  # three digits: `16.3T`
        return tokens(float(f"{value:.3g}")) if math.isfinite(value) else "unknown"

    count, size = best.tokens, best.parameters
    style = {"fmt": "s", "color": TARGET, "markersize": 7, "capsize": 4, "zorder": 5}
    axis.errorbar([best.flops], [count.value], yerr=_errors([count]), **style)
    label = (
        f"{best.flops:.3g} operations, {best.beyond:.3g} x the largest fitted:\n"
        f"{text(count.value)} tokens ({text(count.low)} to {text(count.high)})\n"
        f"{text(size.value)} parameters ({text(size.low)} to {text(size.high)})"
    )
    axis.text(0.985, 0.04, label, transform=axis.transAxes, ha="right", va="bottom", fontsize=9, color=TARGET)


def _errors(values: Sequence[Interval]) -> list[list[float]]:
    """Return the lengths of the error bars, below and above."""
    low = [max(0.0, value.value - value.low) for value in values]
    return [low, [max(0.0, value.high - value.value) for value in values]]


def _count_ticks(axis: Any) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_minor_formatter(NullFormatter())


# Mix search


@styled
def against_shares(shares: Shares, losses: Losses, base: str) -> str:
    """Return bits per byte against the domain's own share, a panel for each; `base` is the variant of the base mix.

    The other domains also differ between the variants, so a panel does not show the effect of a share alone.
    """
    domains = list(losses[base])
    figure, axes = subplots(1, len(domains), figsize=(WIDTH, 2.9), squeeze=False)
    for axis, domain in zip(axes.flat, domains, strict=True):
        x, color = [shares[variant].get(domain, 0.0) for variant in losses], COLORS.get(domain, INK)
        axis.scatter(x, [losses[variant][domain] for variant in losses], s=22, color=color, zorder=3)
        point = (shares[base].get(domain, 0.0), losses[base][domain])
        axis.plot(*point, "o", markersize=10, color=INK, markerfacecolor="none", markeredgewidth=1.5, zorder=4)
        axis.set_title(domain, fontsize=10, color=INK)
        axis.set_xlabel("share of tokens", fontsize=9)
        axis.tick_params(labelsize=8.5)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=3))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axis.margins(0.12)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes[0, 0].set_ylabel("bits per byte")
    return as_svg(figure)


# Findings


@styled
def forest(findings: Sequence[Finding]) -> str:
    """Return the forest plot as SVG text: a panel per score, a row per variant; `findings` is not empty."""
    variants = list(dict.fromkeys(finding.variant for finding in findings))
    scores = list(dict.fromkeys(finding.score for finding in findings))
    across = min(ACROSS, len(scores))
    down = -(-len(scores) // across)
    height = max(1.7, ROW * len(variants) + HEAD) * down
    figure, grid = subplots(down, across, figsize=(WIDTH, height), squeeze=False, sharey=True)
    for axis, score in zip(grid.flat, scores, strict=False):
        _forest_panel(axis, [finding for finding in findings if finding.score == score], variants)
    for axis in grid.flat[len(scores) :]:
        axis.set_visible(False)
    grid[0, 0].set_ylim(len(variants) - 0.4, -0.6)
    return as_svg(figure)


def _forest_panel(axis: Any, findings: Sequence[Finding], variants: Sequence[str]) -> None:
    axis.axvline(0, color=INK, linewidth=0.9)
    for finding in findings:
        y, color = variants.index(finding.variant), TINTS[finding.says]
        if math.isfinite(finding.low) and math.isfinite(finding.high):
            axis.plot([finding.low, finding.high], [y, y], color=color, linewidth=1.8, solid_capstyle="butt")
        axis.plot([finding.gain], [y], marker="o", markersize=4.5, color=color)
    axis.set_yticks(range(len(variants)), variants, fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8.5)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=False))
    axis.margins(x=0.08)
    axis.set_title(findings[0].score.removeprefix("eval/bpb/").removeprefix("eval/"), fontsize=10, color=INK)
    axis.set_xlabel(findings[0].unit, fontsize=9)
