"""How many tokens a budget of training operations is best spent on: approach 2 of Hoffmann, as Llama 3 used it.

Each budget is spent on several sizes; the losses of one budget are fitted with a polynomial of second degree in log10
tokens, its lowest point is the budget's best number of tokens, and a power law N*(C) = A C^alpha goes through the
lowest points (arXiv 2407.21783, section 3.2.1; 2203.15556, section 3.2). N* are tokens, as in Llama 3; parameters are
what the budget leaves. Intervals are of 95 %, by a bootstrap of residuals (`llama3.studies.isoflop`).

In 250 simulations each with Hoffmann's and Besiroglu's constants, grids that follow the optimum (3 to 10 budgets, 3 to
7 sizes) and losses off by 0.05 to 0.5 %, they hold the true alpha in 95 to 100 %; where whole budgets are off as well,
in 91 to 98 %. What this gives up: a loss curve is no parabola. Where one grid of sizes serves all budgets, the lowest
points move against the grid: over two decades of budgets alpha is off by 0.002 to 0.015, over three by up to 0.04, more
than the interval says. With five sizes or more such curves are told by a term of third degree, and flagged; and
`llama3.studies.chinchilla`, which has no such error, is given beside it for that reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from llama3.studies.forecast import Interval
from llama3.studies.results import Cost, cost

# Where parabolas have their lowest points, how sure that is, and the line through those points: arrays only.
#
# The noise of a loss is pooled over all parabolas, since four to ten points each tell too little alone; residuals
# are divided by sqrt(1 - leverage), as a fit pulls close what has leverage (Davison and Hinkley, Bootstrap Methods
# and their Application, section 6.2). Each draw of the bootstrap takes such residuals with replacement and
# multiplies all of them by one draw of sqrt(df / chi2): resampling alone acts as if the size of the noise were
# known, and with eight residual degrees of freedom its intervals are a sixth too narrow; this makes them Student's.
# What this gives up: noise that differs between parabolas, and the error of taking a loss curve for a parabola
# where all grids err alike.

DRAWS = 2000

Array = NDArray[np.float64]


class Quadratic:
    """The parabola c0 + c1 (x - middle) + c2 (x - middle)^2 through n points, by least squares.

    `x` and `y` are [n]; three different values of x are the fewest, which no residual is left of.
    """

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y, self.middle = x, y, float(x.mean())
        self.inverse: Array = np.asarray(np.linalg.pinv(self._rows(x)), np.float64)
        """[3, n], from points to coefficients."""
        self.coefficients: Array = self.inverse @ y

    def _rows(self, x: Array) -> Array:
        return np.stack([np.ones_like(x), x - self.middle, (x - self.middle) ** 2], axis=-1)

    def at(self, x: Array) -> Array:
        return np.asarray(self._rows(x) @ self.coefficients)

    @property
    def spare(self) -> int:
        """Points beyond the three that fix a parabola."""
        return len(self.x) - 3

    @property
    def squares(self) -> float:
        """Sum of squared residuals."""
        return float(((self.y - self.at(self.x)) ** 2).sum())

    @property
    def residuals(self) -> Array:
        """[n] residuals divided by sqrt(1 - leverage), without points that alone fix the parabola."""
        free = 1 - np.einsum("ni,in->n", self._rows(self.x), self.inverse)
        kept = free > 1e-9
        return np.asarray((self.y - self.at(self.x))[kept] / np.sqrt(free[kept]))

    @property
    def third(self) -> tuple[float, int]:
        """Sum of squared residuals with a term of third degree, and points beyond the four that fix it."""
        rows = np.column_stack([self._rows(self.x), (self.x - self.middle) ** 3])
        return float(((self.y - rows @ np.linalg.pinv(rows) @ self.y) ** 2).sum()), self.spare - 1

    @cached_property
    def lowest(self) -> float:
        """Where the slope is zero; NaN where the parabola opens downwards."""
        return float(-self.coefficients[1] / (2 * self.coefficients[2]) + self.middle) if self.opens else float("nan")

    @property
    def opens(self) -> bool:
        """Whether it opens upwards."""
        return bool(self.coefficients[2] > 1e-12 * (1 + np.abs(self.y).max()))

    @property
    def bend(self) -> float:
        """Standard error of c2 for noise of size 1."""
        return float(np.linalg.norm(self.inverse[2]))

    @property
    def spread(self) -> float:
        """Standard error of the lowest point for noise of size 1, to first order."""
        away = self.lowest - self.middle
        return float(np.linalg.norm(self.inverse[1] + 2 * away * self.inverse[2]) / (2 * self.coefficients[2]))

    def minima(self, noise: Array) -> Array:
        """Return [draws] lowest points with `noise` [draws, n] added, no further out than the grid is wide.

        A draw that opens downwards has its minimum at that bound on its lower side.
        """
        _, c1, c2 = self.inverse @ (self.at(self.x) + noise).T
        low, high = self.x.min() - self.middle, self.x.max() - self.middle
        least, most = 2 * low - high, 2 * high - low
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(c2 > 0, -c1 / (2 * c2), np.where(c1 + c2 * (low + high) > 0, least, most))
        return np.asarray(np.clip(found, least, most) + self.middle)


@dataclass(frozen=True)
class Noise:
    """Size of the noise in one point, pooled over parabolas."""

    size: float
    """Standard deviation; NaN where no parabola has a point to spare."""
    spare: int
    """Residual degrees of freedom."""
    pool: Array
    """Residuals scaled to mean 0 and variance 1; empty where there are none."""

    def minima(self, quadratics: Sequence[Quadratic]) -> list[Array]:
        """Return [DRAWS] lowest points of each parabola with noise added, of one size in each draw."""
        dice = np.random.default_rng(0)
        scale = self.size * np.sqrt(self.spare / dice.chisquare(self.spare, (DRAWS, 1)))
        return [one.minima(scale * self._unit((DRAWS, len(one.x)), dice)) for one in quadratics]

    def _unit(self, shape: tuple[int, int], dice: np.random.Generator) -> Array:
        return dice.choice(self.pool, shape) if len(self.pool) else dice.standard_normal(shape)


def pooled(quadratics: Sequence[Quadratic]) -> Noise:
    """Return the noise that the parabolas leave."""
    spare = sum(one.spare for one in quadratics)
    if not spare:
        return Noise(float("nan"), 0, np.empty(0))
    found = np.concatenate([one.residuals for one in quadratics])
    found = found - found.mean()
    size = float(np.sqrt(sum(one.squares for one in quadratics) / spare))
    return Noise(size, spare, found / (found.std() or 1.0))


def lopsided(quadratics: Sequence[Quadratic]) -> bool:
    """Whether terms of third degree fit better than noise allows (F test over all parabolas at 1 %)."""
    kept = [one for one in quadratics if one.spare > 1 and len(np.unique(one.x)) > 3]
    squares, spare = (sum(column) for column in zip(*(one.third for one in kept), strict=True)) if kept else (0.0, 0)
    if not squares > 1e-20 * sum(float(one.y @ one.y) for one in kept):
        return False
    ratio = (sum(one.squares for one in kept) - squares) / len(kept) / (squares / spare)
    return bool(ratio > stats.f.ppf(0.99, len(kept), spare))


@dataclass(frozen=True)
class PowerLawFit:
    """The line through k lowest points."""

    middle: float
    coefficients: Array
    """Height at `middle`, and slope."""
    draws: Array
    """[DRAWS, 2] coefficients that the noise could have led to."""
    excess: float
    """Variance of the lowest points about the line, in units of what the noise explains; 1 unless an F test at 5 % says
    that it is more."""


def line(z: Array, quadratics: Sequence[Quadratic], noise: Noise, minima: Sequence[Array]) -> PowerLawFit:
    """Return the line of the quadratics' lowest points over `z` [k], k at least 3; `minima` are k draws of [DRAWS].

    A lowest point weighs by its own variance plus that of all lowest points about the line. Where noise explains the
    scatter, that is its precision; where it does not, all weigh nearly alike, as in the published fits. By precision
    alone, one budget with many runs would decide a law that the others contradict.
    """
    lowest, spread = (
        np.array(column) for column in zip(*((one.lowest, one.spread) for one in quadratics), strict=True)
    )
    own = (spread * noise.size) ** 2
    apart = _scatter(z, lowest, own) if noise.size else 0.0
    middle, rows, inverse = _weighted(z, own + apart if apart else spread**2)
    coefficients = inverse @ lowest
    spare = len(z) - 2
    excess = (from_scatter(z, quadratics).size / noise.size) ** 2 if noise.size else 1.0
    dice = np.random.default_rng(1)
    draws = np.stack(minima, axis=1)
    if apart:
        draws = draws + np.sqrt(apart) * dice.standard_normal(draws.shape)
    away = draws @ inverse.T - coefficients
    if apart:  # its few degrees of freedom, as of Student's t
        squares = float(((lowest - rows @ coefficients) ** 2 / (own + apart)).sum()) / spare
        away *= np.sqrt(max(1.0, squares) * spare / dice.chisquare(spare, (DRAWS, 1)))
    scattered = excess > stats.f.ppf(0.95, spare, noise.spare)
    return PowerLawFit(middle, coefficients, coefficients + away, float(excess) if scattered else 1.0)


def _scatter(z: Array, lowest: Array, own: Array) -> float:
    """Return the variance of lowest points about their line beyond their `own`, by Paule and Mandel's equation."""

    def surplus(apart: float) -> float:
        _, rows, inverse = _weighted(z, own + apart)
        return float(((lowest - rows @ inverse @ lowest) ** 2 / (own + apart)).sum()) - (len(z) - 2)

    most = float(((lowest - lowest.mean()) ** 2).sum())  # of a flat line, which scatters more than the best one
    return float(optimize.brentq(surplus, 0.0, most)) if surplus(0.0) > 0 > surplus(most) else 0.0


def from_scatter(z: Array, quadratics: Sequence[Quadratic]) -> Noise:
    """Return the noise in one point that explains how k minima scatter about their line, with k - 2 degrees of freedom.

    It is all there is to go by where no parabola has a point to spare.
    """
    lowest, spread = (
        np.array(column) for column in zip(*((one.lowest, one.spread) for one in quadratics), strict=True)
    )
    _, rows, inverse = _weighted(z, spread**2)
    away = (lowest - rows @ inverse @ lowest) / spread
    return Noise(float(np.sqrt((away**2).sum() / (len(z) - 2))), len(z) - 2, np.empty(0))


def _weighted(z: Array, variances: Array) -> tuple[float, Array, Array]:
    """Return where the line is centred, its rows [k, 2], and [2, k] from lowest points to coefficients."""
    middle = float(np.average(z, weights=1 / variances))
    rows = np.stack([np.ones_like(z), z - middle], axis=1)
    root = np.sqrt(variances)
    return middle, rows, np.asarray(np.linalg.pinv(rows / root[:, None]) / root)


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
    line: PowerLawFit
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
class IsoflopFit:
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


def fit_ladder(trials: Sequence[Trial], budgets: Sequence[float]) -> IsoflopFit:
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
    return IsoflopFit(
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


def _law(used: Sequence[float], found: PowerLawFit, costs: Cost) -> Law:
    height, alpha = found.coefficients
    low, high = np.quantile(found.draws[:, 1], (0.025, 0.975))
    coefficient = power(float(height - alpha * found.middle), found.draws @ np.array([1.0, -found.middle]))
    return Law(Interval(float(alpha), float(low), float(high)), coefficient, min(used), max(used), found, costs)


def power(value: float, draws: Array) -> Interval:
    """Return ten to the power of `value`, with the 95 % interval of `draws` [n]."""
    with np.errstate(over="ignore", under="ignore"):
        middle, low, high = np.power(10.0, [value, *np.quantile(draws, (0.025, 0.975))])
    return Interval(float(middle), float(low), float(high))


def _law_flags(found: PowerLawFit, used: Sequence[Quadratic]) -> list[str]:
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
