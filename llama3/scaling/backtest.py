"""What a forecast is worth: the largest runs are left out, forecast from the smaller ones, and set beside the truth.

Runs whose compute differs by less than `SAME` are one level, since a run is no test of extrapolation where others of
its size remain. Level after level is left out, largest first, as long as `llama3.scaling.forecast.fit` accepts what
remains, and every run left out is forecast: the further below, the further beyond the data. A measured accuracy also
has the luck of its questions, which a forecast's interval leaves out; `expected` adds it, and it is what a measurement
is held against. What this gives up: rows of one study are not independent (a run appears once for each fit), so the
share inside is a sign and no test; and runs that were never made larger tell nothing of a bend beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats

from llama3.evaluate.statistics import Z
from llama3.scaling.forecast import Fit, Forecast, Interval, Point, fit
from llama3.scaling.verdict import Verdict

SAME = 0.1
"""Relative difference of compute below which two runs are of one level."""
LEVELS = 3
"""Fewest levels that a forecast is tested from: a line, and one to see that it is one. Many runs of two budgets do not
make up for that."""
CHANCE = 0.05
"""So many misses of 95 % intervals, or more, that independent forecasts would have them less often than this, are
flagged."""


@dataclass(frozen=True)
class Held:
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
    rows: tuple[Held, ...]
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
    return float(stats.binom.sf(misses - 1, n, 0.05))


def backtest(points: Sequence[Point], chance: float, straight: Collection[str] | None = None) -> Backtest:
    """Return the forecasts of runs left out of `points` of a benchmark on which guessing scores `chance`.

    With `straight`, as in `forecast.fit`, only runs named in it are forecast.

    Raises ValueError saying what lacks where not even the largest run can be left out.
    """
    levels = _levels(points)
    rows: list[Held] = []
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


def _levels(points: Sequence[Point]) -> list[list[str]]:
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


def _held(made: Fit, points: Sequence[Point], below: set[str], left_out: int) -> Iterator[Held]:
    ends = {point.run: point for point in sorted(points, key=lambda point: point.flops)}
    for run, point in ends.items():
        if run not in below:
            forecast = made.at(point.flops)
            expected = _measurable(forecast.accuracy, point.n)
            yield Held(left_out, run, len(below), forecast, expected, point.nats, point.accuracy)


def _measurable(accuracy: Interval, n: int) -> Interval:
    """Return the interval with the binomial noise of `n` questions, added in quadrature to each side."""
    noise = Z * math.sqrt(max(accuracy.value * (1 - accuracy.value), 0.25 / n) / n)
    low = accuracy.value - math.hypot(accuracy.value - accuracy.low, noise)
    high = accuracy.value + math.hypot(accuracy.high - accuracy.value, noise)
    return Interval(accuracy.value, max(0.0, low), min(1.0, high))


@dataclass(frozen=True)
class TaskPoints:
    """The evaluated checkpoints of a benchmark."""

    points: Sequence[Point]
    chance: float
    straight: Collection[str] | None = None
    """Runs that the line goes through; None: all."""

    def fit(self) -> Fit:
        """Return line and sigmoid. Raises ValueError."""
        return fit(self.points, self.chance, self.straight)

    def backtest(self) -> Backtest:
        """Return what smaller runs would have said of larger ones. Raises ValueError."""
        return backtest(self.points, self.chance, self.straight)


def forecast_verdict(tasks: Mapping[str, TaskPoints], flops: float) -> Verdict:
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
    return Verdict(headline=headline, flags=flags)


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
