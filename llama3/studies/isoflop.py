"""Fit the best number of tokens for a budget of training operations (IsoFLOP, Hoffmann's approach 2).

Each budget trains several sizes; a parabola in log10 tokens through their losses gives the budget's best number of
tokens N*, and a power law N*(C) = A C^alpha goes through the minima (arXiv 2407.21783, section 3.2.1; 2203.15556,
section 3.2). As in Llama 3, N* are tokens. Intervals are of 95 %, by a bootstrap of residuals.
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

from herd.llama3.studies.forecast import Interval
from herd.llama3.studies.results import FlopsPerToken, fit_flops_per_token

BUDGETS = 3
"""Minimum number of budgets with a usable minimum: two for a line, and one more for the scatter around it."""
SIZES = 3
"""Minimum number of sizes of a budget: they determine a parabola."""
OFF = 0.03
"""Runs whose operations differ from their budget by a larger share are flagged."""
FAR = 0.25
"""Runs whose operations differ from every budget by a larger share are refused."""
DRAWS = 2000
"""Of the bootstrap."""

Array = NDArray[np.float64]
Edge = Literal["", "fewest tokens", "most tokens"]


@dataclass(frozen=True)
class Trial:
    """One finished run of a ladder."""

    parameters: int
    tokens: int
    flops: float
    """Training operations, counted by the formula of the budgets."""
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
    """Position of the minimum; NaN if the parabola opens downwards."""
    loss: float
    """Loss at the minimum."""
    edge: Edge
    """The edge of the grid at which the lowest loss is, or beyond which the minimum is; empty for neither."""
    used: bool
    """Whether its minimum enters the law."""

    def loss_at(self, tokens: float) -> float:
        """Return the loss after `tokens`."""
        x = math.log10(tokens) - self.middle
        return self.coefficients[0] + self.coefficients[1] * x + self.coefficients[2] * x**2


@dataclass(frozen=True)
class Optimum:
    """The best allocation of a budget."""

    flops: float
    tokens: Interval
    parameters: Interval
    beyond: float
    """`flops` divided by the largest budget fitted; above 1 it is extrapolated."""


@dataclass(frozen=True)
class TokenLaw:
    """N*(C) = A C^alpha, N* in tokens."""

    alpha: Interval
    coefficient: Interval
    """A. It is correlated with alpha: do not combine the ends of both intervals."""
    min_flops: float
    """Smallest budget fitted."""
    max_flops: float
    """Largest budget fitted."""
    line: PowerLawFit
    cost: FlopsPerToken

    @property
    def draws(self) -> Array:
        """[DRAWS, 2] log10 of N* at the line's middle, and alpha."""
        return self.line.draws

    def optimum(self, flops: float) -> Optimum:
        """Return the best allocation of `flops` operations. Raises ValueError unless they are above 0."""
        if not 0 < flops < math.inf:
            raise ValueError(f"ladder: {flops:g} operations; give a number above 0")
        row = np.array([1.0, math.log10(flops) - self.line.middle])
        tokens = power_of_ten(float(row @ self.line.coefficients), self.draws @ row)
        low, value, high = self.cost.parameters(flops / np.array([tokens.high, tokens.value, tokens.low]))
        return Optimum(flops, tokens, Interval(float(value), float(low), float(high)), flops / self.max_flops)


@dataclass(frozen=True)
class IsoflopFit:
    """Parabolas, the law through their minima, and flags."""

    parabolas: tuple[Parabola, ...]
    law: TokenLaw
    flags: list[str]


class NoLawError(ValueError):
    """Too few budgets have a usable minimum; the parabolas are kept for display."""

    def __init__(self, parabolas: Sequence[Parabola], flags: list[str]) -> None:
        self.parabolas, self.flags = tuple(parabolas), flags
        used = sum(parabola.used for parabola in parabolas)
        reasons = "; ".join(flags) or "add budgets"
        super().__init__(f"ladder: {used} budget(s) with a usable minimum, where a law takes {BUDGETS}: {reasons}")


def fit_ladder(trials: Sequence[Trial], budgets: Sequence[float]) -> IsoflopFit:
    """Return the law that `trials` of `budgets` (operations) show.

    A budget without a usable minimum does not enter it, and is flagged with what to add. Raises ValueError for an
    invalid run or one that belongs to no budget, and NoLawError if fewer than `BUDGETS` budgets remain.
    """
    # Coverage of alpha's interval in 250 simulations each with Hoffmann's and Besiroglu's constants, grids around the
    # optimum (3 to 10 budgets, 3 to 7 sizes) and losses off by 0.05 to 0.5 %: 95 to 100 %; if whole budgets are off as
    # well, 91 to 98 %. A loss curve is not exactly a parabola: with one grid of sizes for all budgets, alpha is off by
    # 0.002 to 0.015 over two decades of budgets and by up to 0.04 over three, more than the interval says.
    # `has_cubic_term` detects this with five sizes or more; `chinchilla.py` does not have this error.
    grids, flags = _by_budget(trials, budgets)
    fits = {
        budget: Quadratic(np.log10([trial.tokens for trial in grid]), np.array([trial.loss for trial in grid]))
        for budget, grid in grids.items()
    }
    noise = pooled_noise(list(fits.values()))
    used = [budget for budget, fit in fits.items() if _usable(fit, noise)]
    for budget, fit in fits.items():
        if flag := _flag_of(budget, fit, budget in used):
            flags.append(flag)
    z, kept = np.log10(used), [fits[budget] for budget in used]
    if not noise.dof and len(used) >= BUDGETS:
        noise = noise_from_scatter(z, kept)
    minima = dict(zip(fits, noise.minima(list(fits.values())), strict=True)) if noise.dof else {}
    parabolas = []
    for budget, grid in grids.items():
        fit, tokens = fits[budget], Interval(math.nan, math.nan, math.nan)
        if fit.is_convex:
            tokens = power_of_ten(fit.minimum, minima.get(budget, np.array([math.nan])))
        c0, c1, c2 = (float(value) for value in fit.coefficients)
        loss = float(fit.value_at(np.array(fit.minimum)))
        parabolas.append(
            Parabola(budget, tuple(grid), (c0, c1, c2), fit.middle, tokens, loss, fit.edge, budget in used)
        )
    if len(used) < BUDGETS:
        raise NoLawError(parabolas, flags)
    fitted = fit_power_law(z, kept, noise, [minima[budget] for budget in used])
    height, alpha = (float(value) for value in fitted.coefficients)
    law = TokenLaw(
        alpha=Interval.of_draws(alpha, fitted.draws[:, 1]),
        coefficient=power_of_ten(height - alpha * fitted.middle, fitted.draws @ np.array([1.0, -fitted.middle])),
        min_flops=min(used),
        max_flops=max(used),
        line=fitted,
        cost=fit_flops_per_token(
            *zip(*((trial.parameters, trial.tokens, trial.flops) for trial in trials), strict=True)
        ),
    )
    return IsoflopFit(tuple(parabolas), law, flags + _law_flags(fitted, kept))


def _by_budget(trials: Sequence[Trial], budgets: Sequence[float]) -> tuple[dict[float, list[Trial]], list[str]]:
    """Return the trials of each budget that has enough sizes, and flags."""
    if not budgets or not min(budgets) > 0:
        raise ValueError(f"ladder: budgets {list(budgets)}; give numbers of operations above 0")
    grids: dict[float, list[Trial]] = {budget: [] for budget in sorted(set(budgets))}
    flags = []
    for trial in trials:
        if not (trial.parameters > 0 and trial.tokens > 0 and trial.flops > 0 and math.isfinite(trial.loss)):
            raise ValueError(f"ladder: {trial} is not a valid measurement; run it again, or leave it out")
        budget = min(grids, key=lambda budget: abs(math.log(trial.flops / budget)))
        off = trial.flops / budget - 1
        if abs(off) > FAR:
            raise ValueError(
                f"ladder: run {trial.name} took {trial.flops:.3g} operations, which match no budget; leave it out"
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


def _usable(fit: Quadratic, noise: Noise) -> bool:
    """Whether the minimum lies inside the grid and the curvature exceeds the noise, two-sided at 5 %."""
    if not fit.is_convex or not fit.x.min() < fit.minimum < fit.x.max():
        return False
    if not noise.dof:
        return True
    bend = float(np.linalg.norm(fit.inverse[2]))  # standard error of c2 for noise of size 1
    return bool(fit.coefficients[2] > stats.t.ppf(0.975, noise.dof) * noise.size * bend)


def _flag_of(budget: float, fit: Quadratic, used: bool) -> str:
    """Return the weak point of a budget's minimum and what to add; empty if there is none."""
    name, sizes = f"budget {budget:.3g}", len(np.unique(fit.x))
    out = "" if used else "; it does not enter the law"
    if not fit.is_convex:
        return f"{name}: the parabola opens downwards, so no size is best; add sizes on both sides, or seeds{out}"
    if fit.edge:
        size, other = ("largest", "larger") if fit.edge == "fewest tokens" else ("smallest", "smaller")
        return f"{name}: the best size is the {size}; add a {other} one{out}"
    if not used:
        return f"{name}: its sizes differ by no more than noise; add sizes further apart, or seeds{out}"
    return f"{name}: {SIZES} sizes leave no residual to estimate the noise; add a fourth" if sizes == SIZES else ""


def _law_flags(fitted: PowerLawFit, used: Sequence[Quadratic]) -> list[str]:
    flags = []
    if len(used) == BUDGETS:
        flags.append(f"{BUDGETS} budgets leave the law one degree of freedom; add a fourth")
    if max(fit.dof for fit in used) < 2:
        flags.append("no budget has five runs, so it cannot be tested whether the curves are parabolas; add sizes")
    if has_cubic_term(used):
        flags.append(
            "the losses bend more on one side than a parabola does, which can move minima by more than intervals say; "
            "leave out sizes far from the minima, or go by L(N, D)"
        )
    if fitted.excess > 1:
        flags.append(
            f"the minima scatter {fitted.excess**0.5:.1f} x as widely around the law as noise explains, which its "
            "interval includes; tune rate and batch by budget, or add budgets"
        )
    return flags


def power_of_ten(value: float, draws: Array) -> Interval:
    """Return ten to the power of `value`, with the 95 % interval of `draws` [n]."""
    with np.errstate(over="ignore", under="ignore"):
        middle, low, high = np.power(10.0, [value, *np.quantile(draws, (0.025, 0.975))])
    return Interval(float(middle), float(low), float(high))


# Parabolas, their pooled noise, and the line through their minima


class Quadratic:
    """The parabola c0 + c1 (x - middle) + c2 (x - middle)^2 through n points, by least squares.

    `x` and `y` are [n], with at least three different values of x; three leave no residual.
    """

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y, self.middle = x, y, float(x.mean())
        self.inverse: Array = np.asarray(np.linalg.pinv(self._rows(x)), np.float64)
        """[3, n], from points to coefficients."""
        self.coefficients: Array = self.inverse @ y

    def _rows(self, x: Array) -> Array:
        return np.stack([np.ones_like(x), x - self.middle, (x - self.middle) ** 2], axis=-1)

    def value_at(self, x: Array) -> Array:
        return np.asarray(self._rows(x) @ self.coefficients)

    @property
    def dof(self) -> int:
        """Points beyond the three that determine a parabola."""
        return len(self.x) - 3

    @property
    def squares(self) -> float:
        """Sum of squared residuals."""
        return float(((self.y - self.value_at(self.x)) ** 2).sum())

    @property
    def residuals(self) -> Array:
        """[n] residuals divided by sqrt(1 - leverage), without points that determine the parabola alone."""
        free = 1 - np.einsum("ni,in->n", self._rows(self.x), self.inverse)
        kept = free > 1e-9
        return np.asarray((self.y - self.value_at(self.x))[kept] / np.sqrt(free[kept]))

    @property
    def cubic(self) -> tuple[float, int]:
        """Sum of squared residuals with a term of third degree, and points beyond the four that determine it."""
        design_matrix = np.column_stack([self._rows(self.x), (self.x - self.middle) ** 3])
        return float(((self.y - design_matrix @ np.linalg.pinv(design_matrix) @ self.y) ** 2).sum()), self.dof - 1

    @property
    def is_convex(self) -> bool:
        """Whether it opens upwards."""
        return bool(self.coefficients[2] > 1e-12 * (1 + np.abs(self.y).max()))

    @cached_property
    def minimum(self) -> float:
        """Position of the minimum; NaN if the parabola opens downwards."""
        return (
            float(-self.coefficients[1] / (2 * self.coefficients[2]) + self.middle) if self.is_convex else float("nan")
        )

    @property
    def edge(self) -> Edge:
        """The edge at which the lowest loss is, or beyond which the minimum is."""
        best = self.x[self.y.argmin()]
        if best == self.x.min() or self.minimum <= self.x.min():
            return "fewest tokens"
        return "most tokens" if best == self.x.max() or self.minimum >= self.x.max() else ""

    @property
    def spread(self) -> float:
        """Standard error of the minimum's position for noise of size 1, to first order."""
        away = self.minimum - self.middle
        return float(np.linalg.norm(self.inverse[1] + 2 * away * self.inverse[2]) / (2 * self.coefficients[2]))

    def minima(self, noise: Array) -> Array:
        """Return [draws] positions of the minimum with `noise` [draws, n] added, at most a grid width outside.

        A draw that opens downwards has its minimum at the bound on its lower side.
        """
        _, c1, c2 = self.inverse @ (self.value_at(self.x) + noise).T
        low, high = self.x.min() - self.middle, self.x.max() - self.middle
        least, most = 2 * low - high, 2 * high - low
        with np.errstate(divide="ignore", invalid="ignore"):
            minimum = np.where(c2 > 0, -c1 / (2 * c2), np.where(c1 + c2 * (low + high) > 0, least, most))
        return np.asarray(np.clip(minimum, least, most) + self.middle)


@dataclass(frozen=True)
class Noise:
    """Noise of one point, pooled over parabolas, as four to ten points each estimate it badly."""

    size: float
    """Standard deviation; NaN if no parabola has residual degrees of freedom."""
    dof: int
    """Residual degrees of freedom."""
    pool: Array
    """Residuals scaled to mean 0 and variance 1; empty if there are none."""

    def minima(self, quadratics: Sequence[Quadratic]) -> list[Array]:
        """Return [DRAWS] positions of each parabola's minimum with noise added, one size of noise per draw."""
        rng = np.random.default_rng(0)
        # sqrt(df / chi2): resampling alone treats the size of the noise as known; with eight degrees of freedom its
        # intervals are a sixth too narrow
        scale = self.size * np.sqrt(self.dof / rng.chisquare(self.dof, (DRAWS, 1)))
        minima = []
        for fit in quadratics:
            shape = (DRAWS, len(fit.x))
            unit = rng.choice(self.pool, shape) if len(self.pool) else rng.standard_normal(shape)
            minima.append(fit.minima(scale * unit))
        return minima


def pooled_noise(quadratics: Sequence[Quadratic]) -> Noise:
    """Return the noise from the residuals of the parabolas (Davison and Hinkley, Bootstrap Methods, section 6.2)."""
    dof = sum(fit.dof for fit in quadratics)
    if not dof:
        return Noise(float("nan"), 0, np.empty(0))
    residuals = np.concatenate([fit.residuals for fit in quadratics])
    residuals = residuals - residuals.mean()
    size = float(np.sqrt(sum(fit.squares for fit in quadratics) / dof))
    return Noise(size, dof, residuals / (residuals.std() or 1.0))


def has_cubic_term(quadratics: Sequence[Quadratic]) -> bool:
    """Whether terms of third degree fit better than noise allows (F test over all parabolas at 1 %)."""
    kept = [fit for fit in quadratics if fit.dof > 1 and len(np.unique(fit.x)) > 3]
    squares, dof = (sum(column) for column in zip(*(fit.cubic for fit in kept), strict=True)) if kept else (0.0, 0)
    if not squares > 1e-20 * sum(float(fit.y @ fit.y) for fit in kept):
        return False
    ratio = (sum(fit.squares for fit in kept) - squares) / len(kept) / (squares / dof)
    return bool(ratio > stats.f.ppf(0.99, len(kept), dof))


@dataclass(frozen=True)
class PowerLawFit:
    """The line through k minima."""

    middle: float
    coefficients: Array
    """Height at `middle`, and slope."""
    draws: Array
    """[DRAWS, 2] coefficients of the bootstrap."""
    excess: float
    """Variance of the minima around the line, in units of the noise; 1 unless an F test at 5 % finds more."""


def fit_power_law(z: Array, quadratics: Sequence[Quadratic], noise: Noise, minima: Sequence[Array]) -> PowerLawFit:
    """Return the line of the quadratics' minima over `z` [k], k at least 3; `minima` are k draws of [DRAWS].

    The weight of a minimum is the inverse of its own variance plus the scatter of all minima around the line. If noise
    explains the scatter, that is its precision; if not, all weights are nearly equal, as in the published fits.
    Weights by precision alone would let a budget with many runs decide against all others.
    """
    lowest, spread = _lowest_and_spread(quadratics)
    own = (spread * noise.size) ** 2
    scatter = _scatter(z, lowest, own) if noise.size else 0.0
    middle, design_matrix, inverse = _weighted(z, own + scatter if scatter else spread**2)
    coefficients = inverse @ lowest
    dof = len(z) - 2
    excess = (noise_from_scatter(z, quadratics).size / noise.size) ** 2 if noise.size else 1.0
    rng = np.random.default_rng(1)
    draws = np.stack(minima, axis=1)
    if scatter:
        draws = draws + np.sqrt(scatter) * rng.standard_normal(draws.shape)
    away = draws @ inverse.T - coefficients
    if scatter:  # few degrees of freedom, as in Student's t
        squares = float(((lowest - design_matrix @ coefficients) ** 2 / (own + scatter)).sum()) / dof
        away *= np.sqrt(max(1.0, squares) * dof / rng.chisquare(dof, (DRAWS, 1)))
    significant = excess > stats.f.ppf(0.95, dof, noise.dof)
    return PowerLawFit(middle, coefficients, coefficients + away, float(excess) if significant else 1.0)


def noise_from_scatter(z: Array, quadratics: Sequence[Quadratic]) -> Noise:
    """Return the noise of one point that explains the scatter of k minima around their line, with k - 2 degrees.

    The only estimate if no parabola has residual degrees of freedom.
    """
    lowest, spread = _lowest_and_spread(quadratics)
    _, design_matrix, inverse = _weighted(z, spread**2)
    away = (lowest - design_matrix @ inverse @ lowest) / spread
    return Noise(float(np.sqrt((away**2).sum() / (len(z) - 2))), len(z) - 2, np.empty(0))


def _lowest_and_spread(quadratics: Sequence[Quadratic]) -> tuple[Array, Array]:
    return np.array([fit.minimum for fit in quadratics]), np.array([fit.spread for fit in quadratics])


def _scatter(z: Array, lowest: Array, own: Array) -> float:
    """Return the variance of minima around their line beyond their `own`, by the equation of Paule and Mandel."""

    def surplus(scatter: float) -> float:
        _, design_matrix, inverse = _weighted(z, own + scatter)
        return float(((lowest - design_matrix @ inverse @ lowest) ** 2 / (own + scatter)).sum()) - (len(z) - 2)

    most = float(((lowest - lowest.mean()) ** 2).sum())  # of a flat line, which scatters more than the best one
    return float(optimize.brentq(surplus, 0.0, most)) if surplus(0.0) > 0 > surplus(most) else 0.0


def _weighted(z: Array, variances: Array) -> tuple[float, Array, Array]:
    """Return the center of the line, its design matrix [k, 2], and [2, k] from minima to coefficients."""
    middle = float(np.average(z, weights=1 / variances))
    design_matrix = np.stack([np.ones_like(z), z - middle], axis=1)
    root = np.sqrt(variances)
    return middle, design_matrix, np.asarray(np.linalg.pinv(design_matrix / root[:, None]) / root)
