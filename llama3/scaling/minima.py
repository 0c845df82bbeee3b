"""Where parabolas have their lowest points, how sure that is, and the line through those points: arrays only.

The noise of a loss is pooled over all parabolas, since four to ten points each tell too little alone; residuals are
divided by sqrt(1 - leverage), as a fit pulls close what has leverage (Davison and Hinkley, Bootstrap Methods and their
Application, section 6.2). Each draw of the bootstrap takes such residuals with replacement and multiplies all of them
by one draw of sqrt(df / chi2): resampling alone acts as if the size of the noise were known, and with eight residual
degrees of freedom its intervals are a sixth too narrow; this makes them Student's. What this gives up: noise that
differs between parabolas, and the error of taking a loss curve for a parabola where all grids err alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

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
class Line:
    """The line through k lowest points."""

    middle: float
    coefficients: Array
    """Height at `middle`, and slope."""
    draws: Array
    """[DRAWS, 2] coefficients that the noise could have led to."""
    excess: float
    """Variance of the lowest points about the line, in units of what the noise explains; 1 unless an F test at 5 % says
    that it is more."""


def line(z: Array, quadratics: Sequence[Quadratic], noise: Noise, minima: Sequence[Array]) -> Line:
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
    return Line(middle, coefficients, coefficients + away, float(excess) if scattered else 1.0)


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
