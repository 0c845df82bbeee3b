"""Where parabolas have their lowest points, how sure that is, and the line through those points: arrays only.

The noise of a loss is pooled over all parabolas, since four to ten points each tell too little alone; residuals are
divided by sqrt(1 - leverage), as a fit pulls close what has leverage (Davison and Hinkley, Bootstrap Methods and their
Application, section 6.2). Each draw of the bootstrap takes such residuals with replacement and multiplies all of them
by one draw of sqrt(df / chi2): resampling alone acts as if the size of the noise were known, and with eight residual
degrees of freedom its intervals are a sixth too narrow; this makes them Student's. Minima that scatter about their line
by more than that noise explains widen its interval in proportion, and by their own few degrees of freedom. What this gives up: noise that differs between
parabolas, and the error of taking a loss curve for a parabola where all grids err alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import stats

DRAWS = 2000

Array = NDArray[np.float64]


class Quadratic:
    """The parabola c0 + c1 (x - middle) + c2 (x - middle)^2 through n points, by least squares.

    `x` and `y` are [n]; three different values of x are the fewest, which no residual is left of.
    """

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y, self.middle = x, y, float(x.mean())
        self.inverse: Array = np.linalg.pinv(self._rows(x))
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
        """[n] residuals divided by sqrt(1 - leverage); points that alone fix the parabola have none and are left out."""
        free = 1 - np.einsum("ni,in->n", self._rows(self.x), self.inverse)
        kept = free > 1e-9
        return np.asarray((self.y - self.at(self.x))[kept] / np.sqrt(free[kept]))

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

    def draw(self, quadratics: Sequence[Quadratic], dice: np.random.Generator) -> list[Array]:
        """Return noise [DRAWS, n] for each parabola, of one size in each draw."""
        scale = self.size * np.sqrt(self.spare / dice.chisquare(self.spare, (DRAWS, 1)))
        shapes = [(DRAWS, len(one.x)) for one in quadratics]
        if not len(self.pool):
            return [scale * dice.standard_normal(shape) for shape in shapes]
        return [scale * dice.choice(self.pool, shape) for shape in shapes]


def pooled(quadratics: Sequence[Quadratic]) -> Noise:
    """Return the noise that the parabolas leave."""
    spare = sum(one.spare for one in quadratics)
    if not spare:
        return Noise(float("nan"), 0, np.empty(0))
    found = np.concatenate([one.residuals for one in quadratics])
    found = found - found.mean()
    size = float(np.sqrt(sum(one.squares for one in quadratics) / spare))
    return Noise(size, spare, found / (found.std() or 1.0))


@dataclass(frozen=True)
class Line:
    """The line through k lowest points, each weighted by how sure it is."""

    middle: float
    coefficients: Array
    """Height at `middle`, and slope."""
    draws: Array
    """[DRAWS, 2] coefficients that the noise could have led to."""
    minima: Array
    """[DRAWS, k] of the lowest points."""
    excess: float
    """Scatter of the lowest points about the line, as a variance in units of what the noise explains; 1 unless an F test
    at 5 % says that it is more."""


def line(z: Array, quadratics: Sequence[Quadratic], noise: Noise) -> Line:
    """Return the line of the quadratics' lowest points over `z` [k], k at least 3.

    With no residual to tell the noise by, the points' scatter about the line does, with its k - 2 degrees of freedom.
    """
    lowest = np.array([one.lowest for one in quadratics])
    spread = np.array([one.spread for one in quadratics])
    middle = float(np.average(z, weights=spread**-2))
    rows = np.stack([np.ones_like(z), z - middle], axis=1)
    inverse = np.linalg.pinv(rows / spread[:, None]) / spread
    coefficients = inverse @ lowest
    scatter = float((((lowest - rows @ coefficients) / spread) ** 2).sum()) / (len(z) - 2)
    excess = scatter / noise.size**2 if noise.spare and noise.size else 1.0
    if not noise.spare:
        noise = Noise(scatter**0.5, len(z) - 2, noise.pool)
    dice = np.random.default_rng(0)
    given = noise.draw(quadratics, dice)
    minima = np.stack([one.minima(drawn) for one, drawn in zip(quadratics, given, strict=True)], axis=1)
    scale = max(1.0, excess) ** 0.5 * np.ones((DRAWS, 1))
    if scattered := excess > stats.f.ppf(0.95, len(z) - 2, noise.spare):
        scale *= np.sqrt((len(z) - 2) / dice.chisquare(len(z) - 2, (DRAWS, 1)))
    away = scale * (minima @ inverse.T - coefficients)
    return Line(middle, coefficients, coefficients + away, minima, float(excess) if scattered else 1.0)
