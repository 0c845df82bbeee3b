"""What a larger run would score on a benchmark, from smaller ones: in two steps, with an interval.

Accuracy does not grow with compute in any simple way: small models guess. So Llama 3 (arXiv 2407.21783, section 3.2.1,
figure 4) goes by what a model pays for the right answer. Step 1: nats per byte of the gold answer fall on a straight
line in log10 of the training operations; one point per run, its last, since a checkpoint whose learning rate has not
come down lies above the line. Step 2: accuracy is a sigmoid of those nats, from chance to 1, fitted by maximum
likelihood over all evaluated checkpoints, whose scatter beyond that of so many questions widens it.

The interval (95 %) is by simulation with a fixed seed: the line's coefficients and scatter from their posterior under a
flat prior (the exact t prediction interval), the sigmoid's from their asymptotic one, and a new run's own scatter. Not
a bootstrap: with five runs, resampling draws the same run thrice and its intervals are far too narrow. The sampling
noise of the benchmark itself is not in it. What this gives up: the line has no floor, so a forecast far beyond the data
is too good; `beyond` says how far it lies. Checkpoints of one run count as independent. Without `RUNS` runs and
`POINTS` points, or where the data show no slope, there is no forecast but a ValueError that says what lacks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from llama3.evaluate.statistics import Z
from llama3.studies.results import StudyVerdict

RUNS = 4
"""Fewest runs of different compute: a line, and two to see how they scatter about it."""
POINTS = 6
"""Fewest evaluated checkpoints for the sigmoid."""
DRAWS = 4000
ROUNDS = 100
"""Most Newton steps; a fit takes about ten."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class EvaluatedPoint:
    """One evaluated checkpoint."""

    run: str
    flops: float
    """Training operations up to it."""
    nats: float
    """Nats per byte of the gold answers."""
    accuracy: float
    n: int
    """Questions."""


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    flops: float
    beyond: float
    """`flops` divided by those of the largest run; above 1 it is extrapolated."""
    nats: Interval
    accuracy: Interval


@dataclass(frozen=True)
class Fit:
    """Line and sigmoid through the points of one benchmark."""

    points: tuple[EvaluatedPoint, ...]
    chance: float
    line: LogLinearFit
    curve: Curve

    @property
    def largest(self) -> float:
        """Operations of the largest run."""
        return max(point.flops for point in self.points)

    def at(self, flops: float) -> Forecast:
        """Return what a run of `flops` operations is expected to score. Raises ValueError unless it is above 0."""
        if not 0 < flops < math.inf:
            raise ValueError(f"forecast: {flops:g} operations; give a number above 0")
        dice = np.random.default_rng(0)
        nats = np.maximum(self.line.draws(math.log10(flops), dice), 0.0)
        best = max(0.0, self.line.at(math.log10(flops)))
        accuracy = self.curve.draws(nats, dice)
        return Forecast(
            flops,
            flops / self.largest,
            _interval(best, nats),
            _interval(float(self.curve.at(np.array(best))), accuracy),
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
    spare: int
    """Runs beyond the two that fix a line."""

    def at(self, x: float) -> float:
        return float(self.coefficients @ self._row(x))

    def draws(self, x: float, dice: np.random.Generator) -> Array:
        """Return nats that a new run at `x` may have."""
        scatter = np.sqrt(self.squares / dice.chisquare(self.spare, DRAWS))
        row = self._row(x)
        spread = math.sqrt(1 + float(row @ self.inverse @ row))
        return self.at(x) + spread * scatter * dice.standard_normal(DRAWS)

    def _row(self, x: float) -> Array:
        return np.array([1.0, x - self.middle])


@dataclass(frozen=True)
class Curve:
    """Accuracy over nats per byte: chance + (1 - chance) / (1 + exp(-(a + b (nats - middle))))."""

    coefficients: Array
    middle: float
    chance: float
    covariance: Array
    """Of the coefficients, for scatter of binomial size."""
    excess: float
    """Variance of the points about the sigmoid, in units of the binomial's; at least 1."""
    spare: int
    n: float
    """Questions of a point (harmonic mean)."""

    def at(self, nats: Array) -> Array:
        return _sigmoid(self.coefficients[0] + self.coefficients[1] * (nats - self.middle), self.chance)

    def draws(self, nats: Array, dice: np.random.Generator) -> Array:
        """Return accuracies that a model with each of `nats` may have."""
        scale = np.sqrt(self.excess * self.spare / dice.chisquare(self.spare, len(nats)))
        normal = dice.standard_normal((len(nats), 2)) @ np.linalg.cholesky(self.covariance).T
        a, b = (self.coefficients + normal * scale[:, None]).T
        p = _sigmoid(a + b * (nats - self.middle), self.chance)
        own = np.sqrt((self.excess - 1) * p * (1 - p) / self.n) * dice.standard_normal(len(nats))
        return np.clip(p + own, 0.0, 1.0)

    @cached_property
    def steepness(self) -> float:
        """Standard errors that the slope lies below 0."""
        return float(-self.coefficients[1] / math.sqrt(self.excess * self.covariance[1, 1]))


def fit(points: Sequence[EvaluatedPoint], chance: float, straight: Collection[str] | None = None) -> Fit:
    """Return the two fits through `points` of a benchmark on which guessing scores `chance`.

    The line goes through the runs named in `straight`, such as the best of each budget of a ladder; None: through all.
    Raises ValueError naming what lacks: values that are no numbers, runs, points, or a slope in either step.
    """
    for point in points:
        if not (0 < point.flops < math.inf and math.isfinite(point.nats) and 0 <= point.accuracy <= 1 <= point.n):
            raise ValueError(f"forecast: {point} is no measurement; evaluate this checkpoint again")
    ends = [point for point in _ends(points) if straight is None or point.run in straight]
    if (runs := len({point.flops for point in ends})) < RUNS or len(points) < POINTS:
        raise ValueError(
            f"forecast: {runs} run(s) of different compute with {len(points)} evaluated checkpoint(s); "
            f"it takes {RUNS} and {POINTS}: train further sizes, or evaluate after further stages"
        )
    line = _fit_line(np.log10([point.flops for point in ends]), np.array([point.nats for point in ends]))
    if line.coefficients[1] >= 0:
        raise ValueError("forecast: more compute did not make the gold answers likelier in these runs")
    curve = _fit_curve(points, chance)
    if curve is None or not curve.steepness > Z:
        raise ValueError(
            "forecast: accuracy does not rise as the gold answers become likelier in these runs; train larger ones"
        )
    return Fit(tuple(points), chance, line, curve)


def _ends(points: Sequence[EvaluatedPoint]) -> list[EvaluatedPoint]:
    """Return the last point of each run."""
    last: dict[str, EvaluatedPoint] = {}
    for point in sorted(points, key=lambda point: point.flops):
        last[point.run] = point
    return list(last.values())


def _fit_line(x: Array, y: Array) -> LogLinearFit:
    middle = float(x.mean())
    rows = np.stack([np.ones_like(x), x - middle], axis=1)
    inverse: Array = np.linalg.inv(rows.T @ rows).astype(np.float64)
    coefficients = inverse @ rows.T @ y
    return LogLinearFit(coefficients, middle, inverse, float(((y - rows @ coefficients) ** 2).sum()), len(x) - 2)


def _fit_curve(points: Sequence[EvaluatedPoint], chance: float) -> Curve | None:
    """Return the likeliest sigmoid by damped Fisher scoring; None where the points fix none."""
    nats, share, n = np.array([(point.nats, point.accuracy, point.n) for point in points], np.float64).T
    middle = float(nats.mean())
    rows = np.stack([np.ones_like(nats), nats - middle], axis=1)
    found, damping = np.zeros(2), 1e-3
    likelihood = _likelihood(rows @ found, share, n, chance)
    for _ in range(ROUNDS):
        gradient, information = _derivatives(rows, found, share, n, chance)
        step = np.linalg.solve(information + damping * np.diag(np.diag(information) + 1e-12), gradient)
        tried = _likelihood(rows @ (found + step), share, n, chance)
        if tried < likelihood:
            damping *= 10
            continue
        found, likelihood, damping = found + step, tried, damping / 10
        if np.abs(step).max() < 1e-9 * (1 + np.abs(found).max()):
            break
    else:
        return None
    p = _sigmoid(rows @ found, chance)
    spare = len(points) - 2
    excess = max(1.0, float((n * (share - p) ** 2 / (p * (1 - p))).sum()) / spare)
    _, information = _derivatives(rows, found, share, n, chance)
    if np.linalg.cond(information) > 1e12:
        return None
    covariance: Array = np.linalg.inv(information).astype(np.float64)
    return Curve(found, middle, chance, covariance, excess, spare, float(len(n) / (1 / n).sum()))


def _derivatives(rows: Array, found: Array, share: Array, n: Array, chance: float) -> tuple[Array, Array]:
    """Return gradient and Fisher information of the binomial log-likelihood."""
    p = _sigmoid(rows @ found, chance)
    slope = (p - chance) * (1 - p) / (1 - chance)
    weight = n / (p * (1 - p))
    return rows.T @ (weight * slope * (share - p)), (rows.T * (weight * slope**2)) @ rows


def _likelihood(logits: Array, share: Array, n: Array, chance: float) -> float:
    p = _sigmoid(logits, chance)
    return float((n * (share * np.log(p) + (1 - share) * np.log1p(-p))).sum())


def _sigmoid(logits: Array, chance: float) -> Array:
    """Return values between chance and 1, both excluded by a hair so that their logarithms exist."""
    plain: Array = 0.5 * (1 + np.tanh(0.5 * logits))
    return np.asarray(np.clip(chance + (1 - chance) * plain, chance + 1e-12, 1 - 1e-12))


def _interval(value: float, draws: Array) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(value, float(low), float(high))


# What a forecast is worth: the largest runs are left out, forecast from the smaller ones, and set beside the truth.
#
# Runs whose compute differs by less than `SAME` are one level, since a run is no test of extrapolation where others
# of its size remain. Level after level is left out, largest first, as long as `llama3.studies.forecast.fit` accepts
# what remains, and every run left out is forecast: the further below, the further beyond the data. A measured
# accuracy also has the luck of its questions, which a forecast's interval leaves out; `expected` adds it, and it is
# what a measurement is held against. What this gives up: rows of one study are not independent (a run appears once
# for each fit), so the share inside is a sign and no test; and runs that were never made larger tell nothing of a
# bend beyond them.

SAME = 0.1
"""Relative difference of compute below which two runs are of one level."""
LEVELS = 3
"""Fewest levels that a forecast is tested from: a line, and one to see that it is one. Many runs of two budgets do not
make up for that."""
CHANCE = 0.05
"""So many misses of 95 % intervals, or more, that independent forecasts would have them less often than this, are
flagged."""


@dataclass(frozen=True)
class HeldOutRun:
    """One run that was left out, and what smaller ones said of it."""

    left_out: int
    """Levels of compute left out: 1 is the largest alone."""
    run: str
    runs: int
    """Runs that the forecast is made from."""
    forecast: Forecast
    expected: Interval
    """Accuracy that may be measured: the forecast's, with the sampling noise of the questions."""
    nats: float
    """Measured, per byte of the gold answers."""
    accuracy: float
    """Measured."""

    @property
    def inside(self) -> bool:
        """Whether the measured accuracy lies in the 95 % interval of what may be measured."""
        return self.expected.low <= self.accuracy <= self.expected.high

    @property
    def nats_inside(self) -> bool:
        return self.forecast.nats.low <= self.nats <= self.forecast.nats.high

    @property
    def error(self) -> float:
        """Forecast minus measured accuracy."""
        return self.forecast.accuracy.value - self.accuracy


@dataclass(frozen=True)
class Backtest:
    rows: tuple[HeldOutRun, ...]
    stopped: str
    """Why no more were left out."""

    @property
    def inside(self) -> float:
        """Share of accuracies inside their 95 % intervals."""
        return fmean(row.inside for row in self.rows)

    @property
    def borne_out(self) -> bool:
        """Whether no more accuracies, and no more nats, lie outside of their intervals than chance would put there."""
        shares = self.inside, self.nats_inside
        return all(_tail(round(len(self.rows) * (1 - share)), len(self.rows)) > CHANCE for share in shares)

    @property
    def nats_inside(self) -> float:
        return fmean(row.nats_inside for row in self.rows)

    @property
    def mean_error(self) -> float:
        """Mean absolute error of the accuracy."""
        return fmean(abs(row.error) for row in self.rows)

    @property
    def bias(self) -> float:
        """Mean of forecast minus measured: above 0 forecasts are too good."""
        return fmean(row.error for row in self.rows)


def _tail(misses: int, n: int) -> float:
    """Return the probability of so many misses or more among `n` independent 95 % intervals."""
    from scipy import stats  # half a second, which only a back-test pays

    return float(stats.binom.sf(misses - 1, n, 0.05))


def backtest(points: Sequence[EvaluatedPoint], chance: float, straight: Collection[str] | None = None) -> Backtest:
    """Return the forecasts of runs left out of `points` of a benchmark on which guessing scores `chance`.

    With `straight`, as in `forecast.fit`, only runs named in it are forecast.

    Raises ValueError saying what lacks where not even the largest run can be left out.
    """
    levels = _levels(points)
    rows: list[HeldOutRun] = []
    stopped = f"{len(levels)} level(s) of compute, of which {LEVELS} must remain; train further sizes"
    for left_out in range(1, len(levels) - LEVELS + 1):
        below = {run for level in levels[:-left_out] for run in level}
        try:
            made = fit([point for point in points if point.run in below], chance, straight)
        except ValueError as error:
            stopped = str(error).removeprefix("forecast: ")
            break
        rows += [row for row in _held(made, points, below, left_out) if straight is None or row.run in straight]
    if not rows:
        raise ValueError(f"back-test: without the largest run nothing can be forecast: {stopped}")
    return Backtest(tuple(rows), stopped)


def _levels(points: Sequence[EvaluatedPoint]) -> list[list[str]]:
    """Return the runs by rising compute, those of about the same together."""
    ends: dict[str, float] = {}
    for point in points:
        ends[point.run] = max(point.flops, ends.get(point.run, 0.0))
    levels: list[list[str]] = []
    first = 0.0
    for run, flops in sorted(ends.items(), key=lambda pair: pair[1]):
        if levels and flops < (1 + SAME) * first:
            levels[-1].append(run)
        else:
            levels.append([run])
            first = flops
    return levels


def _held(made: Fit, points: Sequence[EvaluatedPoint], below: set[str], left_out: int) -> Iterator[HeldOutRun]:
    ends = {point.run: point for point in sorted(points, key=lambda point: point.flops)}
    for run, point in ends.items():
        if run not in below:
            forecast = made.at(point.flops)
            expected = _measurable(forecast.accuracy, point.n)
            yield HeldOutRun(left_out, run, len(below), forecast, expected, point.nats, point.accuracy)


def _measurable(accuracy: Interval, n: int) -> Interval:
    """Return the interval with the binomial noise of `n` questions, added in quadrature to each side."""
    noise = Z * math.sqrt(max(accuracy.value * (1 - accuracy.value), 0.25 / n) / n)
    low = accuracy.value - math.hypot(accuracy.value - accuracy.low, noise)
    high = accuracy.value + math.hypot(accuracy.high - accuracy.value, noise)
    return Interval(accuracy.value, max(0.0, low), min(1.0, high))


@dataclass(frozen=True)
class TaskPoints:
    """The evaluated checkpoints of a benchmark."""

    points: Sequence[EvaluatedPoint]
    chance: float
    straight: Collection[str] | None = None
    """Runs that the line goes through; None: all."""

    def fit(self) -> Fit:
        """Return line and sigmoid. Raises ValueError."""
        return fit(self.points, self.chance, self.straight)

    def backtest(self) -> Backtest:
        """Return what smaller runs would have said of larger ones. Raises ValueError."""
        return backtest(self.points, self.chance, self.straight)


def forecast_verdict(tasks: Mapping[str, TaskPoints], flops: float) -> StudyVerdict:
    """Return what a run of `flops` operations would score on each benchmark, and how such forecasts have done.

    A benchmark without a forecast, or whose forecasts were not borne out, is flagged.
    """
    headline, flags = [], []
    for name, task in tasks.items():
        try:
            made = task.fit()
        except ValueError as error:
            flags.append(f"{name}: no forecast: {str(error).removeprefix('forecast: ')}")
            continue
        headline.append(_says(name, made, flops))
        flags += _checked(name, task, headline)
    return StudyVerdict(headline=headline, flags=flags)


def _says(name: str, made: Fit, flops: float) -> str:
    least = min(point.flops for point in made.points)
    forecast = made.at(flops)
    spread = forecast.accuracy
    return (
        f"{name} at {flops:.3g} operations: accuracy {spread.value:.3f}, 95 % {spread.low:.3f} to {spread.high:.3f}; "
        f"fitted on {least:.3g} to {made.largest:.3g}, {forecast.beyond:.3g} x beyond"
    )


def _checked(name: str, task: TaskPoints, headline: list[str]) -> Iterator[str]:
    """Add the back-test's line to `headline`, and yield what weakens it."""
    try:
        test = task.backtest()
    except ValueError as error:
        yield f"{name}: the forecast could not be tested: {str(error).removeprefix('back-test: ')}"
        return
    furthest = max(row.forecast.beyond for row in test.rows)
    headline.append(
        f"{name}, largest runs left out: {sum(row.inside for row in test.rows)} of {len(test.rows)} accuracies inside "
        f"their 95 % intervals, off by {test.mean_error:.3f} on average, up to {furthest:.3g} x beyond"
    )
    if not test.borne_out:
        way = "too good" if test.bias > 0 else "too low"
        yield (
            f"{name}: smaller runs did not foretell larger ones: {test.inside:.0%} of accuracies and "
            f"{test.nats_inside:.0%} of nats inside 95 % intervals, forecasts {way} by {abs(test.bias):.3f}; "
            "add larger runs, and tune their rates and batches"
        )
