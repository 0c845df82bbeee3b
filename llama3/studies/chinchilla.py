"""The other form of the law: L(N, D) = E + A / N^a + B / D^b through all runs of a ladder at once.

Approach 3 of Hoffmann et al. (arXiv 2203.15556, section 3.3): the Huber loss (delta 1e-3) of the residuals of log L, by
L-BFGS from a grid of starts, keeping the best. Theirs are 4,500 starts in five numbers; for a given (a, b) the form is
linear in E, A and B, so here the grid has those two, least squares fill in the rest, and the best `STARTS` are
polished. Intervals are of 95 %, by the bootstrap of `llama3.studies.isoflop`: residuals widened for the five numbers
that they paid for, drawn with replacement, times sqrt(df / chi2); each draw is polished from the fit. The optimum of a
budget is the lowest loss among models that the budget pays for, found on a grid.

It uses every run, budgets whose minimum lies outside their sizes too, and is not misled by curves that are no
parabolas. What this gives up: if the form is wrong, so is all of it; and few runs, or budgets within a decade, fix its
five numbers badly: then its intervals are wide, and where E or an exponent ends at nothing, there is no fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from llama3.studies.forecast import Interval
from llama3.studies.isoflop import Array, Optimum, Trial
from llama3.studies.results import Cost, cost

RUNS = 7
"""Fewest runs: five numbers, and two to tell the noise by."""
DELTA = 1e-3
"""Of the Huber loss (section 3.3)."""
STARTS = 8
DRAWS = 200
EXPONENTS = np.linspace(0.05, 1.2, 24)
"""Of the grid, for a and b each."""
EXTREMES = (1e-3, 5.0)
"""Exponents beyond which none is looked for; a fit that ends at one is none."""
GRID = np.linspace(-2.0, 2.0, 1601)
"""Decades of parameters about the closed-form optimum at 6 operations per token and parameter; steps of 0.6 %."""


@dataclass(frozen=True)
class Form:
    """Coefficients of L = exp(e) + exp(p - a x) + exp(q - b y), x = ln N - mean, y = ln D - mean."""

    values: Array
    """[5] or [draws, 5]: e, p, q, a, b."""
    means: tuple[float, float]
    """Of ln N and of ln D over the runs."""

    @property
    def alpha(self) -> Array:
        """Exponent of the best number of tokens in operations: a / (a + b)."""
        return np.asarray(self.values[..., 3] / (self.values[..., 3] + self.values[..., 4]))

    def at(self, parameters: Array, tokens: Array) -> Array:
        """Return the loss; arguments are broadcast after the draws."""
        e, p, q, a, b = np.moveaxis(self.values[..., None], -2, 0)
        x, y = np.log(parameters) - self.means[0], np.log(tokens) - self.means[1]
        return np.asarray(np.exp(e) + np.exp(p - a * x) + np.exp(q - b * y))

    def best(self, flops: float, costs: Cost) -> Array:
        """Return [draws] parameters with the lowest loss for `flops`, of those on the grid."""
        _, p, q, a, b = np.moveaxis(self.values[..., None], -2, 0)
        x, y = self.means
        spent = math.log(flops / 6) - x - y
        middle = (p - q + np.log(a / b) + b * spent) / (a + b) + x
        parameters = np.exp(middle + GRID * math.log(10))
        losses = self.at(parameters, flops / costs.per_token(parameters))
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
    """a / (a + b): exponent of the best number of tokens in operations, to compare with the ladder's."""
    least: float
    """Fewest operations among the runs."""
    most: float
    form: Form
    draws: Form
    cost: Cost

    @property
    def scales(self) -> tuple[float, float]:
        """A and B."""
        _, p, q, a, b = self.form.values
        return math.exp(p + a * self.form.means[0]), math.exp(q + b * self.form.means[1])

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of `parameters` after `tokens`."""
        return float(self.form.at(np.array([parameters]), np.array([tokens]))[0])

    def at(self, flops: float) -> Optimum:
        """Return how `flops` operations are best spent. Raises ValueError unless they are above 0."""
        if not 0 < flops < math.inf:
            raise ValueError(f"ladder: {flops:g} operations; give a number above 0")
        value, draws = float(self.form.best(flops, self.cost)), self.draws.best(flops, self.cost)
        tokens = flops / self.cost.per_token(np.array([value, *draws]))
        return Optimum(flops, _spread(tokens[0], tokens[1:]), _spread(value, draws), flops / self.most)


def fit_chinchilla(trials: Sequence[Trial]) -> Chinchilla:
    """Return the form that `trials` show. Raises ValueError where they are too few, too alike, or show another form."""
    rows = np.array([(one.parameters, one.tokens, one.flops, one.loss) for one in trials], np.float64).reshape(-1, 4)
    if len(rows) < RUNS or min(len(np.unique(rows[:, 0])), len(np.unique(rows[:, 1]))) < 3:
        raise ValueError(
            f"ladder: {len(rows)} runs; the form takes {RUNS}, of 3 sizes and 3 numbers of tokens: add runs"
        )
    if not (np.isfinite(rows).all() and (rows > 0).all()):
        raise ValueError("ladder: a run has a count or a loss that is no number above 0; run it again, or leave it out")
    logs = np.log(rows)
    means = (float(logs[:, 0].mean()), float(logs[:, 1].mean()))
    x, y, target = logs[:, 0] - means[0], logs[:, 1] - means[1], logs[:, 3]
    values = min((_polish(start, x, y, target) for start in _starts(x, y, rows[:, 3])), key=lambda one: one[0])[1]
    if not _sound(values):
        raise ValueError(
            "ladder: these runs do not fix E, A, B, a and b; add budgets further apart, and sizes on both sides"
        )
    draws = np.array(_bootstrap(values, x, y, target))
    columns = cost(rows[:, 0].tolist(), rows[:, 1].tolist(), rows[:, 2].tolist())
    return _chinchilla(Form(values, means), Form(draws, means), rows[:, 2], columns)


def _chinchilla(form: Form, draws: Form, flops: Array, costs: Cost) -> Chinchilla:
    e, _, _, a, b = form.values
    return Chinchilla(
        _spread(math.exp(e), np.exp(draws.values[:, 0])),
        _spread(a, draws.values[:, 3]),
        _spread(b, draws.values[:, 4]),
        _spread(float(form.alpha), draws.alpha),
        float(flops.min()),
        float(flops.max()),
        form,
        draws,
        costs,
    )


def _spread(value: float, draws: Array) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def _starts(x: Array, y: Array, loss: Array) -> list[Array]:
    """Return the best starts: for each pair of exponents E, A and B by least squares of relative residuals."""
    a, b = (grid.ravel() for grid in np.meshgrid(EXPONENTS, EXPONENTS))
    columns = np.stack([np.ones((len(a), len(x))), np.exp(-a[:, None] * x), np.exp(-b[:, None] * y)], axis=-1)
    rows = columns / loss[:, None]
    linear = np.maximum(np.linalg.pinv(rows) @ np.ones(len(x)), 1e-3 * loss.min())
    squares = ((np.einsum("gnk,gk->gn", rows, linear) - 1) ** 2).sum(-1)
    return [np.array([*np.log(linear[best]), a[best], b[best]]) for best in squares.argsort()[:STARTS]]


def _polish(start: Array, x: Array, y: Array, target: Array) -> tuple[float, Array]:
    """Return the Huber loss and the values to which L-BFGS comes from `start`."""
    bounds = [(None, None)] * 3 + [EXTREMES] * 2
    found = optimize.minimize(_objective, start, (x, y, target), jac=True, method="L-BFGS-B", bounds=bounds)
    return float(found.fun), np.asarray(found.x)


def _objective(values: Array, x: Array, y: Array, target: Array) -> tuple[float, Array]:
    """Return the summed Huber loss of log residuals, over delta squared, and its gradient."""
    e, p, q, a, b = values
    terms = np.stack([np.full_like(x, e), p - a * x, q - b * y])
    total = special.logsumexp(terms, axis=0)
    part = np.exp(terms - total)
    away = (total - target) / DELTA
    pull = np.clip(away, -1, 1) * part / DELTA
    gradient = np.array([pull[0].sum(), pull[1].sum(), pull[2].sum(), -(pull[1] @ x), -(pull[2] @ y)])
    return float(special.huber(1.0, away).sum()), gradient


def _sound(values: Array) -> bool:
    """Whether both exponents are above 0 and no term has vanished beside the others."""
    e, p, q, a, b = values
    least, most = EXTREMES
    return bool(least < min(a, b) and max(a, b) < most and min(e, p, q) > max(e, p, q) - math.log(1e6))


def _bootstrap(values: Array, x: Array, y: Array, target: Array) -> list[Array]:
    """Return the values that the noise could have led to."""
    e, p, q, a, b = values
    fitted = special.logsumexp(np.stack([np.full_like(x, e), p - a * x, q - b * y]), axis=0)
    spare, dice = len(x) - len(values), np.random.default_rng(0)
    residuals = (target - fitted) * math.sqrt(len(x) / spare)
    scale = np.sqrt(spare / dice.chisquare(spare, (DRAWS, 1)))
    noise = scale * dice.choice(residuals - residuals.mean(), (DRAWS, len(x)))
    return [_polish(values, x, y, fitted + one)[1] for one in noise]
