"""The two-step forecast: laws that are known are found again, and intervals hold what they promise."""

from __future__ import annotations

import math
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats

from herd.llama3.studies.forecast import POINTS, RUNS, EvaluatedPoint, ForecastFit, fit_forecast

CHANCE = 0.25
SIZES = [10.0**power for power in np.linspace(18, 20.5, 6)]


def nll_at(flops: float) -> float:
    return 1.4 - 0.16 * (math.log10(flops) - 18)


def accuracy_at(nll: float, chance: float = CHANCE) -> float:
    return chance + (1 - chance) / (1 + math.exp(7 * (nll - 0.9)))


def points(
    dice: np.random.Generator | None = None, scatter: float = 0.0, n: int = 1000, chance: float = CHANCE
) -> list[EvaluatedPoint]:
    """Return six runs of three checkpoints, exact, or with scatter and the luck of `n` questions."""
    made = []
    for number, size in enumerate(SIZES):
        own = scatter * dice.standard_normal() if dice else 0.0
        for part, late in ((0.25, 0.08), (0.5, 0.04), (1.0, 0.0)):  # before its end a run lies above the line
            nll = nll_at(size * part) + late + own
            right = accuracy_at(nll, chance)
            accuracy = dice.binomial(n, right) / n if dice else right
            made.append(EvaluatedPoint(f"size-{number}", size * part, nll, accuracy, n))
    return made


def test_exact_laws_are_found_again() -> None:
    for factor in (0.1, 1, 10, 100):
        found = fit_forecast(points(n=10**6), CHANCE).predict(factor * SIZES[-1])
        nll = nll_at(factor * SIZES[-1])
        assert found.nll.value == pytest.approx(nll, abs=1e-9)
        assert found.accuracy.value == pytest.approx(accuracy_at(nll), abs=1e-6)
        assert found.accuracy.low <= found.accuracy.value <= found.accuracy.high
        assert found.beyond == pytest.approx(factor)


def test_line_and_sigmoid_are_scipys_at_unequal_numbers_of_questions() -> None:
    """The line with its exact interval, and the curve by maximum likelihood with its expected information."""
    dice = np.random.default_rng(4)
    exact = zip(points(dice, 0.02), cycle((50, 400, 2000)))
    some = [EvaluatedPoint(p.run, p.flops, p.nll, dice.binomial(n, p.accuracy) / n, n) for p, n in exact]
    found, x = fit_forecast(some, CHANCE), 21.5
    ends = np.array([(math.log10(p.flops), p.nll) for p in some if p.flops in SIZES])
    line = stats.linregress(*ends.T)
    rest = ends[:, 1] - line.intercept - line.slope * ends[:, 0]
    leverage = 1 / len(ends) + (x - ends[:, 0].mean()) ** 2 / (len(ends) * ends[:, 0].var())
    half = stats.t.isf(0.025, len(ends) - 2) * math.sqrt((rest @ rest) / (len(ends) - 2) * (1 + leverage))
    nats = found.predict(10**x).nll
    assert nats.value == pytest.approx(line.intercept + line.slope * x)
    assert (nats.low, nats.high) == pytest.approx((nats.value - half, nats.value + half), abs=0.1 * half)

    nll, share, n = np.array([(p.nll, p.accuracy, p.n) for p in some]).T
    away = nll - nll.mean()

    def curve(beta: np.ndarray) -> np.ndarray:
        return np.asarray(CHANCE + (1 - CHANCE) * special.expit(beta[0] + beta[1] * away))

    def loss(beta: np.ndarray) -> float:
        return float(-(special.xlogy(n * share, curve(beta)) + special.xlog1py(n * (1 - share), -curve(beta))).sum())

    best = optimize.minimize(loss, [0.0, -1.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-9}).x
    assert found.curve.coefficients == pytest.approx(best, rel=1e-4)
    steps = 1e-6 * np.eye(2)
    slopes = np.array([(curve(best + step) - curve(best - step)) / 2e-6 for step in steps])
    variance = curve(best) * (1 - curve(best)) / n
    assert found.curve.covariance == pytest.approx(np.linalg.inv(slopes / variance @ slopes.T), rel=1e-3)
    excess = ((share - curve(best)) ** 2 / variance).sum() / (len(n) - 2)
    assert excess > 1
    assert (found.curve.excess, found.curve.n) == pytest.approx((excess, stats.hmean(n)), rel=1e-3)


def test_any_chance_is_the_lower_end() -> None:
    for chance in [0.0, 0.5]:
        found = fit_forecast(points(n=10**6, chance=chance), chance)
        assert found.predict(1e10).accuracy.value == pytest.approx(chance, abs=1e-3)
        assert found.predict(1e21).accuracy.value == pytest.approx(accuracy_at(nll_at(1e21), chance), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("scatter", "n"), [(0.04, 100), (0.01, 100), (0.01, 2000), (0.04, 2000)])
def test_intervals_hold_what_a_new_run_will_score(scatter: float, n: int) -> None:
    """Over 300 made-up studies, 95 % intervals at ten times the compute hold nats and accuracy of a new run."""
    dice = np.random.default_rng(7)
    held = {"nats": 0, "accuracy": 0}
    studies = 300
    for _ in range(studies):
        found = fit_forecast(points(dice, scatter, n), CHANCE).predict(10 * SIZES[-1])
        nll = nll_at(10 * SIZES[-1]) + scatter * dice.standard_normal()
        held["nats"] += found.nll.low <= nll <= found.nll.high
        held["accuracy"] += found.accuracy.low <= accuracy_at(nll) <= found.accuracy.high
    assert 0.91 * studies <= held["nats"] <= 0.985 * studies
    assert 0.91 * studies <= held["accuracy"]


def test_intervals_widen_with_distance_and_narrow_with_data() -> None:
    def width(found: ForecastFit, flops: float) -> float:
        return found.predict(flops).nll.high - found.predict(flops).nll.low

    few = fit_forecast(points(np.random.default_rng(3), 0.02), CHANCE)
    widths = [width(few, factor * SIZES[-1]) for factor in (1, 10, 100)]
    assert widths == sorted(widths)
    wide, narrow = (fit_forecast(points(np.random.default_rng(3), size), CHANCE) for size in (0.05, 0.005))
    assert width(wide, 1e21) > 5 * width(narrow, 1e21)


def test_models_that_do_not_follow_one_sigmoid_widen_the_interval() -> None:
    plain = points()
    odd = [
        EvaluatedPoint(p.run, p.flops, p.nll, min(1.0, p.accuracy + (0.05 if number % 2 else -0.05)), p.n)
        for number, p in enumerate(plain)
    ]
    straight, crooked = (fit_forecast(some, CHANCE).predict(1e21).accuracy for some in (plain, odd))
    assert crooked.high - crooked.low > 2 * (straight.high - straight.low)


def test_equal_points_give_equal_forecasts_in_any_order() -> None:
    some = points(np.random.default_rng(1), 0.02)
    one, other = fit_forecast(some, CHANCE).predict(1e22), fit_forecast(some[::-1], CHANCE).predict(1e22)
    assert one == fit_forecast(some, CHANCE).predict(1e22)
    assert other.accuracy.value == pytest.approx(one.accuracy.value, abs=1e-9)


@given(st.floats(15, 27), st.integers(0, 10**6))
def test_forecasts_are_possible_scores(power: float, seed: int) -> None:
    found = fit_forecast(points(np.random.default_rng(seed), 0.02), CHANCE).predict(10**power)
    assert 0 <= found.nll.low <= found.nll.high
    assert 0 <= found.accuracy.low <= found.accuracy.value <= found.accuracy.high <= 1


def test_too_little_is_said_and_not_extrapolated() -> None:
    three = [point for point in points() if point.run in ("size-0", "size-1", "size-2")]
    with pytest.raises(ValueError, match=rf"3 run\(s\) of different compute .* it takes {RUNS} and {POINTS}"):
        fit_forecast(three, CHANCE)
    with pytest.raises(ValueError, match=r"5 evaluated checkpoint\(s\)"):
        fit_forecast([point for point in points() if point.flops in SIZES][:5], CHANCE)
    same = [EvaluatedPoint(f"seed-{seed}", 1e19, 1.0, 0.5, 100) for seed in range(9)]
    with pytest.raises(ValueError, match=r"1 run\(s\) of different compute"):
        fit_forecast(same, CHANCE)


def test_where_nothing_is_learnt_nothing_is_forecast() -> None:
    worse = [EvaluatedPoint(p.run, p.flops, 3 - p.nll, p.accuracy, p.n) for p in points()]
    with pytest.raises(ValueError, match="more compute did not make the gold answers likelier"):
        fit_forecast(worse, CHANCE)
    dice = np.random.default_rng(2)
    guessing = [EvaluatedPoint(p.run, p.flops, p.nll, dice.binomial(100, CHANCE) / 100, 100) for p in points()]
    with pytest.raises(ValueError, match="accuracy does not rise"):
        fit_forecast(guessing, CHANCE)


def test_what_is_no_measurement_is_refused() -> None:
    for wrong in [
        EvaluatedPoint("a", 0, 1, 0.5, 9),
        EvaluatedPoint("a", 1, math.nan, 0.5, 9),
        EvaluatedPoint("a", 1, 1, 1.5, 9),
        EvaluatedPoint("a", 1, 1, 0.5, 0),
    ]:
        with pytest.raises(ValueError, match="is not a valid measurement"):
            fit_forecast([*points(), wrong], CHANCE)
        with pytest.raises(ValueError, match="give a number above 0"):
            fit_forecast(points(), CHANCE).predict(0)
