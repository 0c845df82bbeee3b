"""How many tokens a budget of training operations is best spent on: approach 2 of Hoffmann, as Llama 3 used it.

Each budget is spent on several sizes; the losses of one budget are fitted with a polynomial of second degree in log10
tokens, its lowest point is the budget's best number of tokens, and a power law N*(C) = A C^alpha goes through the
lowest points (arXiv 2407.21783, section 3.2.1; 2203.15556, section 3.2). N* are tokens, as in Llama 3; parameters are
what the budget leaves. Intervals are of 95 %, by a bootstrap of residuals (`llama3.scaling.minima`).

In 250 simulations each with Hoffmann's and Besiroglu's constants, grids that follow the optimum (3 to 10 budgets, 3 to
7 sizes) and losses off by 0.05 to 0.5 %, they hold the true alpha in 95 to 100 %; where whole budgets are off as well,
in 91 to 98 %. What this gives up: a loss curve is no parabola. Where one grid of sizes serves all budgets, the lowest
points move against the grid: over two decades of budgets alpha is off by 0.002 to 0.015, over three by up to 0.04, more
than the interval says. With five sizes or more such curves are told by a term of third degree, and flagged; and
`llama3.scaling.chinchilla`, which has no such error, is given beside it for that reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from llama3.scaling.cost import Cost, cost
from llama3.scaling.forecast import Interval
from llama3.scaling.minima import Array, Line, Noise, Quadratic, from_scatter, line, lopsided, pooled

BUDGETS = 3
"""Fewest budgets with a usable minimum: a line, and one to see how they scatter about it."""
SIZES = 3
"""Fewest sizes of a budget: they fix a parabola."""
OFF = 0.03
"""A run whose operations differ from its budget by a larger share is flagged."""
FAR = 0.25
"""A run whose operations differ from each budget by a larger share belongs to none."""

Edge = Literal["", "fewest tokens", "most tokens"]


@dataclass(frozen=True)
class Trial:
    """One finished run of a ladder."""

    parameters: int
    tokens: int
    flops: float
    """Training operations, by the formula by which the budgets are meant."""
    loss: float
    """On held-out text: bits per byte, or nats per token; lower is better."""
    name: str


@dataclass(frozen=True)
class Parabola:
    """Loss over log10 of tokens at one budget."""

    budget: float
    trials: tuple[Trial, ...]
    coefficients: tuple[float, float, float]
    """Of 1, (x - middle) and (x - middle)^2."""
    middle: float
    """Mean log10 of tokens."""
    tokens: Interval
    """Where it is lowest; NaN where it opens downwards."""
    loss: float
    """There."""
    edge: Edge
    """Where the lowest loss, or the minimum, lies when it is at the edge of the grid or outside."""
    used: bool
    """Whether its minimum enters the law."""

    def at(self, tokens: float) -> float:
        """Return the loss after `tokens`."""
        away = math.log10(tokens) - self.middle
        return self.coefficients[0] + self.coefficients[1] * away + self.coefficients[2] * away**2


@dataclass(frozen=True)
class Optimum:
    """How a budget is best spent."""

    flops: float
    tokens: Interval
    parameters: Interval
    beyond: float
    """`flops` divided by the largest budget fitted; above 1 it is extrapolated."""


@dataclass(frozen=True)
class Law:
    """N*(C) = A C^alpha, N* in tokens."""

    alpha: Interval
    coefficient: Interval
    """A. It goes with alpha: a pair of ends is no law."""
    least: float
    """Smallest budget fitted."""
    most: float
    """Largest budget fitted."""
    line: Line
    cost: Cost

    @property
    def draws(self) -> Array:
        """[DRAWS, 2] log10 of N* at the line's middle, and alpha."""
        return self.line.draws

    def at(self, flops: float) -> Optimum:
        """Return how `flops` operations are best spent. Raises ValueError unless they are above 0."""
        if not 0 < flops < math.inf:
            raise ValueError(f"ladder: {flops:g} operations; give a number above 0")
        row = np.array([1.0, math.log10(flops) - self.line.middle])
        tokens = power(float(row @ self.line.coefficients), self.draws @ row)
        low, value, high = self.cost.parameters(flops / np.array([tokens.high, tokens.value, tokens.low]))
        return Optimum(flops, tokens, Interval(float(value), float(low), float(high)), flops / self.most)


@dataclass(frozen=True)
class Ladder:
    """Parabolas, the law through their lowest points, and what weakens it."""

    parabolas: tuple[Parabola, ...]
    law: Law
    flags: list[str]


class NoLaw(ValueError):
    """Too few budgets have a usable minimum; what there is can still be shown."""

    def __init__(self, parabolas: Sequence[Parabola], flags: list[str]) -> None:
        self.parabolas, self.flags = tuple(parabolas), flags
        used = sum(one.used for one in parabolas)
        reasons = "; ".join(flags) or "add budgets"
        super().__init__(f"ladder: {used} budget(s) with a usable minimum, where a law takes {BUDGETS}: {reasons}")


def fit_ladder(trials: Sequence[Trial], budgets: Sequence[float]) -> Ladder:
    """Return the law that `trials` of `budgets` (operations) show.

    A budget whose minimum is no minimum does not enter it, and is flagged with what to add. Raises ValueError for a
    run that is no measurement or belongs to no budget, and NoLaw where fewer than `BUDGETS` budgets remain.
    """
    grids, flags = _by_budget(trials, budgets)
    fits = {budget: _quadratic(grid) for budget, grid in grids.items()}
    noise = pooled(list(fits.values()))
    used = [budget for budget, fit in fits.items() if _inside(fit) and _clear(fit, noise)]
    flags += [flag for budget, grid in grids.items() if (flag := _weak(budget, grid, fits[budget], budget in used))]
    z, kept = np.log10(used), [fits[budget] for budget in used]
    if not noise.spare and len(used) >= BUDGETS:
        noise = from_scatter(z, kept)
    minima = dict(zip(fits, noise.minima(list(fits.values())), strict=True)) if noise.spare else {}
    parabolas = [
        _parabola(budget, grid, fits[budget], minima.get(budget), budget in used) for budget, grid in grids.items()
    ]
    if len(used) < BUDGETS:
        raise NoLaw(parabolas, flags)
    found = line(z, kept, noise, [minima[budget] for budget in used])
    columns = [(trial.parameters, trial.tokens, trial.flops) for trial in trials]
    return Ladder(
        tuple(parabolas), _law(used, found, cost(*zip(*columns, strict=True))), flags + _law_flags(found, kept)
    )


def _by_budget(trials: Sequence[Trial], budgets: Sequence[float]) -> tuple[dict[float, list[Trial]], list[str]]:
    """Return the trials of each budget that has enough sizes, and flags."""
    if not budgets or not min(budgets) > 0:
        raise ValueError(f"ladder: budgets {list(budgets)}; give numbers of operations above 0")
    grids: dict[float, list[Trial]] = {budget: [] for budget in sorted(set(budgets))}
    flags = []
    for trial in trials:
        if not (trial.parameters > 0 and trial.tokens > 0 and trial.flops > 0 and math.isfinite(trial.loss)):
            raise ValueError(f"ladder: {trial} is no measurement; run it again, or leave it out")
        budget = min(grids, key=lambda budget: abs(math.log(trial.flops / budget)))
        off = trial.flops / budget - 1
        if abs(off) > FAR:
            raise ValueError(
                f"ladder: run {trial.name} took {trial.flops:.3g} operations, which no budget allows; leave it out"
            )
        if abs(off) > OFF:
            flags.append(
                f"budget {budget:.3g}: run {trial.name} is off by {off:+.0%} operations; change its batch or tokens"
            )
        grids[budget].append(trial)
    for budget, grid in list(grids.items()):
        if (sizes := len({trial.tokens for trial in grid})) < SIZES:
            flags.append(f"budget {budget:.3g}: {sizes} size(s), where a parabola takes {SIZES}; add sizes")
            del grids[budget]
    return grids, flags


def _quadratic(grid: Sequence[Trial]) -> Quadratic:
    return Quadratic(np.log10([trial.tokens for trial in grid]), np.array([trial.loss for trial in grid]))


def _inside(fit: Quadratic) -> bool:
    return fit.opens and bool(fit.x.min() < fit.lowest < fit.x.max())


def _clear(fit: Quadratic, noise: Noise) -> bool:
    """Whether the parabola bends by more than noise does, two-sided at 5 %."""
    if not noise.spare:
        return True
    return bool(fit.coefficients[2] > stats.t.ppf(0.975, noise.spare) * noise.size * fit.bend)


def _edge(fit: Quadratic) -> Edge:
    """Return the edge at which the lowest loss lies, or outside of which the minimum."""
    best = fit.x[fit.y.argmin()]
    if best == fit.x.min() or fit.lowest <= fit.x.min():
        return "fewest tokens"
    return "most tokens" if best == fit.x.max() or fit.lowest >= fit.x.max() else ""


def _weak(budget: float, grid: Sequence[Trial], fit: Quadratic, used: bool) -> str:
    """Return what weakens the minimum of a budget and what to add."""
    words, edge, sizes = f"budget {budget:.3g}", _edge(fit), len({trial.tokens for trial in grid})
    out = "" if used else "; it does not enter the law"
    if not fit.opens:
        return f"{words}: the parabola opens downwards, so no size is best; add sizes on both sides, or seeds{out}"
    if edge:
        size, other = ("largest", "larger") if edge == "fewest tokens" else ("smallest", "smaller")
        return f"{words}: the best size is the {size}; add a {other} one{out}"
    if not used:
        return f"{words}: its sizes differ by no more than noise; add sizes further apart, or seeds{out}"
    return f"{words}: {SIZES} sizes leave no residual to tell noise by; add a fourth" if sizes == SIZES else ""


def _parabola(budget: float, grid: Sequence[Trial], fit: Quadratic, minima: Array | None, used: bool) -> Parabola:
    tokens = Interval(math.nan, math.nan, math.nan)
    if fit.opens:
        tokens = power(fit.lowest, minima if minima is not None else np.array([math.nan]))
    c0, c1, c2 = (float(value) for value in fit.coefficients)
    loss = float(fit.at(np.array(fit.lowest)))
    return Parabola(budget, tuple(grid), (c0, c1, c2), fit.middle, tokens, loss, _edge(fit), used)


def _law(used: Sequence[float], found: Line, costs: Cost) -> Law:
    height, alpha = found.coefficients
    low, high = np.quantile(found.draws[:, 1], (0.025, 0.975))
    coefficient = power(float(height - alpha * found.middle), found.draws @ np.array([1.0, -found.middle]))
    return Law(Interval(float(alpha), float(low), float(high)), coefficient, min(used), max(used), found, costs)


def power(value: float, draws: Array) -> Interval:
    """Return ten to the power of `value`, with the 95 % interval of `draws` [n]."""
    with np.errstate(over="ignore", under="ignore"):
        middle, low, high = np.power(10.0, [value, *np.quantile(draws, (0.025, 0.975))])
    return Interval(float(middle), float(low), float(high))


def _law_flags(found: Line, used: Sequence[Quadratic]) -> list[str]:
    flags = []
    if len(used) == BUDGETS:
        flags.append(f"{BUDGETS} budgets leave the law one degree of freedom; add a fourth")
    if max(one.spare for one in used) < 2:
        flags.append("no budget has five runs, so nothing tells whether the curves are parabolas; add sizes")
    if lopsided(used):
        flags.append(
            "the losses bend more on one side than a parabola does, which can move minima by more than intervals say; "
            "leave out sizes far from the minima, or go by L(N, D)"
        )
    if found.excess > 1:
        flags.append(
            f"the minima scatter {found.excess**0.5:.1f} x as widely about the law as noise explains, which its "
            "interval takes in; tune rate and batch by budget, or add budgets"
        )
    return flags
