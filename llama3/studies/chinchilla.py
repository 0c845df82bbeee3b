"""Fit L(N, D) = E + A / N^a + B / D^b through all runs of a ladder at once (Hoffmann, arXiv 2203.15556, section 3.3).

The Huber loss of the residuals of log L is minimized by L-BFGS from a grid of starts. Intervals are of 95 %, by the
bootstrap of residuals of `isoflop.py`. The fit also uses budgets whose minimum lies outside their sizes, and it does
not assume that losses are parabolas. It needs the form to be right, and enough runs over more than a decade of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from herd.llama3.studies.forecast import Interval
from herd.llama3.studies.isoflop import Array, Optimum, Trial
from herd.llama3.studies.results import FlopsPerToken, fit_flops_per_token

RUNS = 7
"""Minimum number of runs: five coefficients, and two degrees of freedom for the noise."""
DELTA = 1e-3
"""Of the Huber loss (section 3.3)."""
STARTS = 8
DRAWS = 200
EXPONENTS = np.linspace(0.05, 1.2, 24)
"""Grid of starts, for a and b each."""
EXTREMES = (1e-3, 5.0)
"""Bounds of the exponents; a solution at a bound is rejected."""
GRID = np.linspace(-2.0, 2.0, 1601)
"""Decades of parameters around the closed-form optimum at 6 operations per token and parameter; steps of 0.6 %."""


@dataclass(frozen=True)
class LossForm:
    """Coefficients of L = exp(e) + exp(p - a x) + exp(q - b y), x = ln N - mean, y = ln D - mean."""

    values: Array
    """[5] or [draws, 5]: e, p, q, a, b."""
    means: tuple[float, float]
    """Of ln N and of ln D over the runs."""

    @property
    def alpha(self) -> Array:
        """Exponent of the best number of tokens in operations: a / (a + b)."""
        return np.asarray(self.values[..., 3] / (self.values[..., 3] + self.values[..., 4]))

    def loss_at(self, parameters: Array, tokens: Array) -> Array:
        """Return the loss; arguments are broadcast after the draws."""
        e, p, q, a, b = np.moveaxis(self.values[..., None], -2, 0)
        x, y = np.log(parameters) - self.means[0], np.log(tokens) - self.means[1]
        return np.asarray(np.exp(e) + np.exp(p - a * x) + np.exp(q - b * y))

    def best(self, flops: float, costs: FlopsPerToken) -> Array:
        """Return [draws] parameters with the lowest loss for `flops` on the grid."""
        _, p, q, a, b = np.moveaxis(self.values[..., None], -2, 0)
        x, y = self.means
        budget = math.log(flops / 6) - x - y
        middle = (p - q + np.log(a / b) + b * budget) / (a + b) + x
        parameters = np.exp(middle + GRID * math.log(10))
        losses = self.loss_at(parameters, flops / costs.per_token(parameters))
        return np.asarray(np.take_along_axis(parameters, losses.argmin(-1)[..., None], -1)[..., 0])


@dataclass(frozen=True)
class Chinchilla:
    """L(N, D) = E + A / N^a + B / D^b."""

    irreducible: Interval
    """E."""
    size: Interval
    """a, of parameters."""
    data: Interval
    """b, of tokens."""
    alpha: Interval
    """a / (a + b): exponent of the best number of tokens in operations, as alpha of `isoflop.TokenLaw`."""
    min_flops: float
    """Operations of the smallest run."""
    max_flops: float
    form: LossForm
    draws: LossForm
    cost: FlopsPerToken

    @property
    def scales(self) -> tuple[float, float]:
        """A and B."""
        _, p, q, a, b = self.form.values
        return math.exp(p + a * self.form.means[0]), math.exp(q + b * self.form.means[1])

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of `parameters` after `tokens`."""
        return float(self.form.loss_at(np.array([parameters]), np.array([tokens]))[0])

    def optimum(self, flops: float) -> Optimum:
        """Return the best allocation of `flops` operations. Raises ValueError unless they are above 0."""
        if not 0 < flops < math.inf:
            raise ValueError(f"ladder: {flops:g} operations; give a number above 0")
        value, draws = float(self.form.best(flops, self.cost)), self.draws.best(flops, self.cost)
        tokens = flops / self.cost.per_token(np.array([value, *draws]))
        return Optimum(
            flops, Interval.of_draws(tokens[0], tokens[1:]), Interval.of_draws(value, draws), flops / self.max_flops
        )


def fit_chinchilla(trials: Sequence[Trial]) -> Chinchilla:
    """Return the fit through `trials`. Raises ValueError if they are too few or too similar, or if the fit fails."""
    columns = [(trial.parameters, trial.tokens, trial.flops, trial.loss) for trial in trials]
    rows = np.array(columns, np.float64).reshape(-1, 4)
    if len(rows) < RUNS or min(len(np.unique(rows[:, 0])), len(np.unique(rows[:, 1]))) < 3:
        raise ValueError(
            f"ladder: {len(rows)} runs; the form takes {RUNS}, of 3 sizes and 3 numbers of tokens: add runs"
        )
    if not (np.isfinite(rows).all() and (rows > 0).all()):
        raise ValueError("ladder: a run has a count or a loss that is not above 0; run it again, or leave it out")
    logs = np.log(rows)
    means = (float(logs[:, 0].mean()), float(logs[:, 1].mean()))
    x, y, target = logs[:, 0] - means[0], logs[:, 1] - means[1], logs[:, 3]
    values = min((_minimize(start, x, y, target) for start in _starts(x, y, rows[:, 3])), key=lambda fit: fit[0])[1]
    e, p, q, a, b = values
    low, high = EXTREMES
    # rejected: an exponent at a bound, or a term that is a millionth of another, so the runs do not determine it
    if not (low < min(a, b) and max(a, b) < high and min(e, p, q) > max(e, p, q) - math.log(1e6)):
        raise ValueError(
            "ladder: these runs do not fix E, A, B, a and b; add budgets further apart, and sizes on both sides"
        )
    # Bootstrap: residuals, widened for the five coefficients and by sqrt(df / chi2); each draw starts at the solution.
    fitted = special.logsumexp(np.stack([np.full_like(x, e), p - a * x, q - b * y]), axis=0)
    dof, rng = len(x) - len(values), np.random.default_rng(0)
    residuals = (target - fitted) * math.sqrt(len(x) / dof)
    scale = np.sqrt(dof / rng.chisquare(dof, (DRAWS, 1)))
    noise = scale * rng.choice(residuals - residuals.mean(), (DRAWS, len(x)))
    form = LossForm(values, means)
    draws = LossForm(np.array([_minimize(values, x, y, fitted + draw)[1] for draw in noise]), means)
    return Chinchilla(
        irreducible=Interval.of_draws(math.exp(e), np.exp(draws.values[:, 0])),
        size=Interval.of_draws(a, draws.values[:, 3]),
        data=Interval.of_draws(b, draws.values[:, 4]),
        alpha=Interval.of_draws(float(form.alpha), draws.alpha),
        min_flops=float(rows[:, 2].min()),
        max_flops=float(rows[:, 2].max()),
        form=form,
        draws=draws,
        cost=fit_flops_per_token(rows[:, 0].tolist(), rows[:, 1].tolist(), rows[:, 2].tolist()),
    )


def _starts(x: Array, y: Array, loss: Array) -> list[Array]:
    """Return the best starts: for each pair of exponents, E, A and B by least squares of relative residuals.

    Hoffmann uses 4,500 starts in five numbers; for given (a, b) the form is linear in the other three.
    """
    a, b = (grid.ravel() for grid in np.meshgrid(EXPONENTS, EXPONENTS))
    columns = np.stack([np.ones((len(a), len(x))), np.exp(-a[:, None] * x), np.exp(-b[:, None] * y)], axis=-1)
    rows = columns / loss[:, None]
    linear = np.maximum(np.linalg.pinv(rows) @ np.ones(len(x)), 1e-3 * loss.min())
    squares = ((np.einsum("gnk,gk->gn", rows, linear) - 1) ** 2).sum(-1)
    return [np.array([*np.log(linear[best]), a[best], b[best]]) for best in squares.argsort()[:STARTS]]


def _minimize(start: Array, x: Array, y: Array, target: Array) -> tuple[float, Array]:
    """Return the Huber loss and the values that L-BFGS finds from `start`."""
    bounds = [(None, None)] * 3 + [EXTREMES] * 2
    result = optimize.minimize(_objective, start, (x, y, target), jac=True, method="L-BFGS-B", bounds=bounds)
    return float(result.fun), np.asarray(result.x)


def _objective(values: Array, x: Array, y: Array, target: Array) -> tuple[float, Array]:
    """Return the summed Huber loss of log residuals, over delta squared, and its gradient."""
    e, p, q, a, b = values
    terms = np.stack([np.full_like(x, e), p - a * x, q - b * y])
    total = special.logsumexp(terms, axis=0)
    share = np.exp(terms - total)
    residual = (total - target) / DELTA
    pull = np.clip(residual, -1, 1) * share / DELTA
    gradient = np.array([pull[0].sum(), pull[1].sum(), pull[2].sum(), -(pull[1] @ x), -(pull[2] @ y)])
    return float(special.huber(1.0, residual).sum()), gradient
