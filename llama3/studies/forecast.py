"""Forecast the benchmark accuracy of a larger run from smaller ones in two steps (arXiv 2407.21783, section 3.2.1).

Step 1: nats per byte of the gold answer are linear in log10 of training operations, one point per run, its last. Step
2: accuracy is a sigmoid of those nats from chance to 1, fitted by maximum likelihood over all evaluated checkpoints.
The 95 % interval is simulated with a fixed seed; it does not contain the sampling noise of the benchmark itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import numpy as np
from numpy.typing import NDArray

from herd.llama3.statistics.significance import Z
from herd.llama3.studies.results import StudyVerdict

RUNS = 4
"""Minimum number of runs of different compute: two for a line, and two more for the scatter around it."""
POINTS = 6
"""Minimum number of evaluated checkpoints for the sigmoid."""
DRAWS = 4000
ROUNDS = 100
"""Maximum Newton steps; a fit takes about ten."""
SAME = 0.1
"""Runs whose compute differs by a smaller share are one level of a back-test."""
LEVELS = 3
"""Minimum number of levels for a tested forecast: two for a line, and one to check it. Many runs of two budgets do not
replace a third."""
CHANCE = 0.05
"""A back-test is flagged if independent forecasts would have as many misses with a lower probability than this."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class EvaluatedPoint:
    """One evaluated checkpoint."""

    run: str
    flops: float
    """Training operations up to it."""
    nll: float
    """Nats per byte of the gold answers."""
    accuracy: float
    n: int
    """Number of questions."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_draws(cls, value: float, draws: Array) -> Self:
        """Return `value` with the 95 % interval of `draws` [n]."""
        low, high = np.quantile(draws, (0.025, 0.975))
        return cls(float(value), float(low), float(high))


@dataclass(frozen=True)
class Forecast:
    flops: float
    beyond: float
    """`flops` divided by those of the largest run; above 1 it is extrapolated. The line has no floor, so a forecast far
    beyond the data is too optimistic."""
    nll: Interval
    accuracy: Interval


@dataclass(frozen=True)
class ForecastFit:
    """Line and sigmoid through the points of one benchmark."""

    points: tuple[EvaluatedPoint, ...]
    chance: float
    line: LogLinearFit
    curve: AccuracyCurve

    @property
    def largest(self) -> float:
        """Operations of the largest run."""
        return max(point.flops for point in self.points)

    def predict(self, flops: float) -> Forecast:
        """Return the expected score of a run of `flops` operations. Raises ValueError unless they are above 0."""
        if not 0 < flops < math.inf:
            raise ValueError(f"forecast: {flops:g} operations; give a number above 0")
        rng = np.random.default_rng(0)
        nll = np.maximum(self.line.draws(math.log10(flops), rng), 0.0)
        best = max(0.0, self.line.predict(math.log10(flops)))
        accuracy = self.curve.draws(nll, rng)
        return Forecast(
            flops,
            flops / self.largest,
            Interval.of_draws(best, nll),
            Interval.of_draws(float(self.curve.predict(np.array(best))), accuracy),
        )


@dataclass(frozen=True)
class LogLinearFit:
    """Nats per byte over log10 of operations, by least squares."""

    coefficients: Array
    """At `middle`, and per factor of ten."""
    middle: float
    inverse: Array
    """Of the 2 x 2 normal matrix."""
    squares: float
    """Sum of squared residuals."""
    dof: int
    """Runs beyond the two that determine a line."""

    def predict(self, x: float) -> float:
        return float(self.coefficients @ np.array([1.0, x - self.middle]))

    def draws(self, x: float, rng: np.random.Generator) -> Array:
        """Return draws of the nats of a new run at `x`."""
        # The exact t prediction interval. A bootstrap of five runs draws the same run thrice, and is far too narrow.
        scatter = np.sqrt(self.squares / rng.chisquare(self.dof, DRAWS))
        row = np.array([1.0, x - self.middle])
        spread = math.sqrt(1 + float(row @ self.inverse @ row))
        return self.predict(x) + spread * scatter * rng.standard_normal(DRAWS)


@dataclass(frozen=True)
class AccuracyCurve:
    """Accuracy over nats per byte: chance + (1 - chance) / (1 + exp(-(a + b (nats - middle))))."""

    coefficients: Array
    middle: float
    chance: float
    covariance: Array
    """Of the coefficients, for scatter of binomial size."""
    excess: float
    """Variance of the points around the sigmoid, in units of the binomial's; at least 1."""
    dof: int
    n: float
    """Questions of a point (harmonic mean)."""

    def predict(self, nll: Array) -> Array:
        return _sigmoid(self.coefficients[0] + self.coefficients[1] * (nll - self.middle), self.chance)

    def draws(self, nll: Array, rng: np.random.Generator) -> Array:
        """Return draws of the accuracy of models with `nats`: asymptotic errors of the fit, and own scatter."""
        scale = np.sqrt(self.excess * self.dof / rng.chisquare(self.dof, len(nll)))
        normal = rng.standard_normal((len(nll), 2)) @ np.linalg.cholesky(self.covariance).T
        a, b = (self.coefficients + normal * scale[:, None]).T
        p = _sigmoid(a + b * (nll - self.middle), self.chance)
        own = np.sqrt((self.excess - 1) * p * (1 - p) / self.n) * rng.standard_normal(len(nll))
        return np.clip(p + own, 0.0, 1.0)


def fit_forecast(
    points: Sequence[EvaluatedPoint], chance: float, straight: Collection[str] | None = None
) -> ForecastFit:
    """Return the two fits through `points` of a benchmark on which guessing scores `chance`.

    The line goes through the runs named in `straight`, such as the best of each budget of a ladder; None: through all.
    Raises ValueError that names what is missing: valid values, runs, points, or a slope in either step.
    """
    for point in points:
        if not (0 < point.flops < math.inf and math.isfinite(point.nll) and 0 <= point.accuracy <= 1 <= point.n):
            raise ValueError(f"forecast: {point} is not a valid measurement; evaluate this checkpoint again")
    # Only the last point of a run: a checkpoint whose learning rate has not decayed lies above the line.
    ends = [point for point in _last_points(points).values() if straight is None or point.run in straight]
    if (runs := len({point.flops for point in ends})) < RUNS or len(points) < POINTS:
        raise ValueError(
            f"forecast: {runs} run(s) of different compute with {len(points)} evaluated checkpoint(s); "
            f"it takes {RUNS} and {POINTS}: train further sizes, or evaluate after further stages"
        )
    x, y = np.log10([point.flops for point in ends]), np.array([point.nll for point in ends])
    middle = float(x.mean())
    design_matrix = np.stack([np.ones_like(x), x - middle], axis=1)
    inverse: Array = np.linalg.inv(design_matrix.T @ design_matrix).astype(np.float64)
    coefficients = inverse @ design_matrix.T @ y
    if coefficients[1] >= 0:
        raise ValueError("forecast: more compute did not make the gold answers likelier in these runs")
    squares = float(((y - design_matrix @ coefficients) ** 2).sum())
    curve = _fit_curve(points, chance)
    # the slope must be significantly below 0
    if curve is None or not -curve.coefficients[1] / math.sqrt(curve.excess * curve.covariance[1, 1]) > Z:
        raise ValueError(
            "forecast: accuracy does not rise as the gold answers become likelier in these runs; train larger ones"
        )
    return ForecastFit(tuple(points), chance, LogLinearFit(coefficients, middle, inverse, squares, len(x) - 2), curve)


def _last_points(points: Sequence[EvaluatedPoint]) -> dict[str, EvaluatedPoint]:
    """Return the last point of each run."""
    return {point.run: point for point in sorted(points, key=lambda point: point.flops)}


def _fit_curve(points: Sequence[EvaluatedPoint], chance: float) -> AccuracyCurve | None:
    """Return the maximum-likelihood sigmoid by damped Fisher scoring; None if the points do not determine it.

    Checkpoints of one run count as independent.
    """
    nll, share, n = np.array([(point.nll, point.accuracy, point.n) for point in points], np.float64).T
    middle = float(nll.mean())
    design_matrix = np.stack([np.ones_like(nll), nll - middle], axis=1)

    def log_likelihood(beta: Array) -> float:
        p = _sigmoid(design_matrix @ beta, chance)
        return float((n * (share * np.log(p) + (1 - share) * np.log1p(-p))).sum())

    def gradient_and_information(beta: Array) -> tuple[Array, Array]:
        p = _sigmoid(design_matrix @ beta, chance)
        slope = (p - chance) * (1 - p) / (1 - chance)
        weight = n / (p * (1 - p))
        return design_matrix.T @ (weight * slope * (share - p)), (design_matrix.T * (weight * slope**2)) @ design_matrix

    beta, damping = np.zeros(2), 1e-3
    likelihood = log_likelihood(beta)
    for _ in range(ROUNDS):
        gradient, information = gradient_and_information(beta)
        step = np.linalg.solve(information + damping * np.diag(np.diag(information) + 1e-12), gradient)
        candidate = log_likelihood(beta + step)
        if candidate < likelihood:
            damping *= 10
            continue
        beta, likelihood, damping = beta + step, candidate, damping / 10
        if np.abs(step).max() < 1e-9 * (1 + np.abs(beta).max()):
            break
    else:
        return None
    p = _sigmoid(design_matrix @ beta, chance)
    dof = len(points) - 2
    excess = max(1.0, float((n * (share - p) ** 2 / (p * (1 - p))).sum()) / dof)
    _, information = gradient_and_information(beta)
    if np.linalg.cond(information) > 1e12:
        return None
    covariance: Array = np.linalg.inv(information).astype(np.float64)
    return AccuracyCurve(beta, middle, chance, covariance, excess, dof, float(len(n) / (1 / n).sum()))


def _sigmoid(logits: Array, chance: float) -> Array:
    """Return values in (chance, 1), clipped so that their logarithms exist."""
    plain: Array = 0.5 * (1 + np.tanh(0.5 * logits))
    return np.asarray(np.clip(chance + (1 - chance) * plain, chance + 1e-12, 1 - 1e-12))


# Back-test: forecast the largest runs from smaller ones


@dataclass(frozen=True)
class BacktestRow:
    """One run that was left out, and its forecast from smaller runs."""

    left_out: int
    """Levels of compute left out: 1 is the largest alone."""
    run: str
    runs: int
    """Number of runs behind the forecast."""
    forecast: Forecast
    expected: Interval
    """Range of a measured accuracy: the forecast with the sampling noise of the questions."""
    nll: float
    """Measured, per byte of the gold answers."""
    accuracy: float
    """Measured."""

    @property
    def in_interval(self) -> bool:
        """Whether the measured accuracy lies in its expected 95 % interval."""
        return self.expected.low <= self.accuracy <= self.expected.high

    @property
    def nll_in_interval(self) -> bool:
        return self.forecast.nll.low <= self.nll <= self.forecast.nll.high

    @property
    def error(self) -> float:
        """Forecast minus measured accuracy."""
        return self.forecast.accuracy.value - self.accuracy


@dataclass(frozen=True)
class Backtest:
    """Forecasts of left-out runs. Rows are not independent: a run appears once for each fit."""

    rows: tuple[BacktestRow, ...]
    stopped: str
    """Why no more levels were left out."""

    @property
    def in_interval(self) -> float:
        """Share of accuracies inside their 95 % intervals."""
        return fmean(row.in_interval for row in self.rows)

    @property
    def nll_in_interval(self) -> float:
        return fmean(row.nll_in_interval for row in self.rows)

    @property
    def is_calibrated(self) -> bool:
        """Whether the accuracies and the nats outside their intervals are no more than expected by chance."""
        from scipy import stats  # half a second, which only a back-test pays

        misses = (round(len(self.rows) * (1 - share)) for share in (self.in_interval, self.nll_in_interval))
        return all(float(stats.binom.sf(missed - 1, len(self.rows), 0.05)) > CHANCE for missed in misses)

    @property
    def mean_error(self) -> float:
        """Mean absolute error of the accuracy."""
        return fmean(abs(row.error) for row in self.rows)

    @property
    def bias(self) -> float:
        """Mean of forecast minus measured; above 0 forecasts are too high."""
        return fmean(row.error for row in self.rows)


def backtest(points: Sequence[EvaluatedPoint], chance: float, straight: Collection[str] | None = None) -> Backtest:
    """Return the forecasts of runs left out of `points` of a benchmark on which guessing scores `chance`.

    Level after level of compute is left out, largest first, as long as `fit_forecast` accepts the rest. With
    `straight`, as in
    `fit_forecast`, only runs named in it are forecast. Raises ValueError if not even the largest run can be left out.
    """
    ends = _last_points(points)
    levels: list[list[str]] = []
    first = 0.0
    for run, point in sorted(ends.items(), key=lambda item: item[1].flops):
        # leaving out a run does not test extrapolation while others of its size remain
        if levels and point.flops < (1 + SAME) * first:
            levels[-1].append(run)
        else:
            levels.append([run])
            first = point.flops
    rows: list[BacktestRow] = []
    stopped = f"{len(levels)} level(s) of compute, of which {LEVELS} must remain; train further sizes"
    for left_out in range(1, len(levels) - LEVELS + 1):
        below = {run for level in levels[:-left_out] for run in level}
        try:
            smaller = fit_forecast([point for point in points if point.run in below], chance, straight)
        except ValueError as error:
            stopped = str(error).removeprefix("forecast: ")
            break
        for run, point in ends.items():
            if run not in below and (straight is None or run in straight):
                forecast = smaller.predict(point.flops)
                expected = _with_sampling_noise(forecast.accuracy, point.n)
                rows.append(BacktestRow(left_out, run, len(below), forecast, expected, point.nll, point.accuracy))
    if not rows:
        raise ValueError(f"back-test: without the largest run nothing can be forecast: {stopped}")
    return Backtest(tuple(rows), stopped)


def _with_sampling_noise(accuracy: Interval, n: int) -> Interval:
    """Return the interval with the binomial noise of `n` questions, added in quadrature to each side."""
    noise = Z * math.sqrt(max(accuracy.value * (1 - accuracy.value), 0.25 / n) / n)
    low = accuracy.value - math.hypot(accuracy.value - accuracy.low, noise)
    high = accuracy.value + math.hypot(accuracy.high - accuracy.value, noise)
    return Interval(accuracy.value, max(0.0, low), min(1.0, high))


# Verdict


@dataclass(frozen=True)
class TaskPoints:
    """The evaluated checkpoints of a benchmark."""

    points: Sequence[EvaluatedPoint]
    chance: float
    straight: Collection[str] | None = None
    """Runs of the line; None: all."""

    def fit(self) -> ForecastFit:
        """Return line and sigmoid. Raises ValueError."""
        return fit_forecast(self.points, self.chance, self.straight)

    def backtest(self) -> Backtest:
        """Return the forecasts of larger runs from smaller ones. Raises ValueError."""
        return backtest(self.points, self.chance, self.straight)


def forecast_verdict(tasks: Mapping[str, TaskPoints], flops: float) -> StudyVerdict:
    """Return the forecast of each benchmark for a run of `flops` operations, and the result of its back-test.

    A benchmark is flagged if it has no forecast, or if its back-test fails.
    """
    headline, flags = [], []
    for name, task in tasks.items():
        try:
            fitted = task.fit()
        except ValueError as error:
            flags.append(f"{name}: no forecast: {str(error).removeprefix('forecast: ')}")
            continue
        forecast = fitted.predict(flops)
        accuracy = forecast.accuracy
        headline.append(
            f"{name} at {flops:.3g} operations: accuracy {accuracy.value:.3f}, 95 % {accuracy.low:.3f} to "
            f"{accuracy.high:.3f}; fitted on {min(point.flops for point in fitted.points):.3g} to "
            f"{fitted.largest:.3g}, {forecast.beyond:.3g} x beyond"
        )
        try:
            test = task.backtest()
        except ValueError as error:
            flags.append(f"{name}: the forecast could not be tested: {str(error).removeprefix('back-test: ')}")
            continue
        furthest = max(row.forecast.beyond for row in test.rows)
        headline.append(
            f"{name}, largest runs left out: {sum(row.in_interval for row in test.rows)} of {len(test.rows)} "
            f"accuracies inside their 95 % intervals, off by {test.mean_error:.3f} on average, up to {furthest:.3g} x "
            "beyond"
        )
        if not test.is_calibrated:
            direction = "too high" if test.bias > 0 else "too low"
            flags.append(
                f"{name}: smaller runs did not predict larger ones: {test.in_interval:.0%} of accuracies and "
                f"{test.nll_in_interval:.0%} of nats inside 95 % intervals, forecasts {direction} by "
                f"{abs(test.bias):.3f}; add larger runs, and tune their rates and batches"
            )
    return StudyVerdict(headline=headline, flags=flags)
