"""The back-test of forecasts: honest intervals hold what was left out, and a law that does not last is caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from herd.llama3.studies.forecast import (
    RUNS,
    Backtest,
    EvaluatedPoint,
    TaskPoints,
    backtest,
    fit_forecast,
    forecast_verdict,
)

CHANCE, QUESTIONS = 0.25, 500
LEVELS = 8
FAMILIES = 100


def lasting(power: float) -> float:
    """Nats per byte at 10^power operations, on one line."""
    return 1.6 - 0.16 * (power - 18)


def levelling(power: float) -> float:
    """A truth that stops getting better halfway up."""
    return max(lasting(power), lasting(19.2))


def family(
    dice: np.random.Generator | None = None,
    law: Callable[[float], float] = lasting,
    levels: int = LEVELS,
    scatter: float = 0.01,
    per_level: int = 1,
    questions: int = QUESTIONS,
) -> list[EvaluatedPoint]:
    """Return runs of so many sizes, four to a factor of ten, three checkpoints each; exact without dice."""
    made = []
    for number in range(levels * per_level):
        power = 18 + number // per_level * 0.3
        own = scatter * dice.standard_normal() if dice else 0.0
        for part, late in ((0.25, 0.06), (0.5, 0.03), (1.0, 0.0)):
            nll = law(power + math.log10(part)) + late + own
            right = CHANCE + (1 - CHANCE) / (1 + math.exp(7 * (nll - 1.2)))
            share = dice.binomial(questions, right) / questions if dice else right
            made.append(EvaluatedPoint(f"size-{number}", part * 10**power, nll, share, questions))
    return made


@cache
def back_tests(law: Callable[[float], float]) -> list[Backtest]:
    dice = np.random.default_rng(11)
    return [backtest(family(dice, law), CHANCE) for _ in range(FAMILIES)]


def test_an_exact_law_is_foretold_exactly() -> None:
    test = backtest(family(), CHANCE)
    assert test.in_interval == test.nll_in_interval == 1
    assert test.mean_error == pytest.approx(0, abs=1e-6)
    assert test.is_calibrated


def test_level_after_level_is_left_out_as_long_as_a_forecast_can_be_made() -> None:
    test = backtest(family(), CHANCE)
    depth = LEVELS - RUNS
    assert [row.left_out for row in test.rows] == [k for k in range(1, depth + 1) for _ in range(k)]
    assert {row.runs for row in test.rows if row.left_out == 2} == {LEVELS - 2}
    assert {row.run for row in test.rows if row.left_out == 2} == {f"size-{LEVELS - 2}", f"size-{LEVELS - 1}"}
    assert max(row.forecast.beyond for row in test.rows) == pytest.approx(10 ** (0.3 * depth))
    assert min(row.forecast.beyond for row in test.rows) > 1
    assert f"it takes {RUNS}" in test.stopped


@pytest.mark.slow
def test_intervals_hold_what_was_left_out() -> None:
    rows = [row for test in back_tests(lasting) for row in test.rows]
    assert len(rows) > 0.95 * FAMILIES * sum(range(1, LEVELS - RUNS + 1))  # some show no slope by chance
    assert np.mean([row.in_interval for row in rows]) >= 0.92
    assert 0.92 <= np.mean([row.nll_in_interval for row in rows]) <= 0.98
    assert abs(np.mean([row.error for row in rows])) < 0.01


@pytest.mark.slow
def test_a_lasting_law_is_seldom_doubted_and_one_that_levels_off_mostly_is() -> None:
    assert np.mean([not test.is_calibrated for test in back_tests(lasting)]) <= 0.12
    found = back_tests(levelling)
    assert np.mean([not test.is_calibrated for test in found]) >= 0.9
    assert np.mean([test.bias for test in found]) > 0.05  # too good


@pytest.mark.slow
def test_without_the_luck_of_the_questions_intervals_would_be_too_narrow() -> None:
    """With hardly any scatter between runs the forecast is sure, and the measurement is not."""
    dice = np.random.default_rng(3)
    made = [backtest(family(dice, levels=14, scatter=0.0005, questions=100), CHANCE) for _ in range(60)]
    rows = [row for one in made for row in one.rows if row.left_out == 1]
    plain = [row.forecast.accuracy.low <= row.accuracy <= row.forecast.accuracy.high for row in rows]
    assert np.mean(plain) < 0.8
    assert np.mean([row.in_interval for row in rows]) >= 0.92


def test_runs_of_one_compute_are_left_out_together() -> None:
    test = backtest(family(np.random.default_rng(1), per_level=3), CHANCE)
    largest = [row for row in test.rows if row.left_out == 1]
    assert {row.run for row in largest} == {f"size-{number}" for number in range(3 * LEVELS - 3, 3 * LEVELS)}
    assert min(row.forecast.beyond for row in largest) > 1.5


@given(st.integers(0, 10**6), st.integers(5, 9))
def test_a_back_test_never_sees_what_it_forecasts(seed: int, levels: int) -> None:
    """Changing the largest run changes no forecast, only what it is held against."""
    points = family(np.random.default_rng(seed), levels=levels)
    other = [
        EvaluatedPoint(one.run, one.flops, one.nll + 0.3, 1 - one.accuracy, one.n)
        if one.run == f"size-{levels - 1}"
        else one
        for one in points
    ]
    try:
        one, changed = backtest(points, CHANCE), backtest(other, CHANCE)
    except ValueError:  # by chance these families show nothing to forecast by
        assume(False)
    assert [row.forecast for row in one.rows] == [row.forecast for row in changed.rows]
    assert all(0 <= row.expected.low <= row.forecast.accuracy.low for row in one.rows)
    assert all(row.forecast.accuracy.high <= row.expected.high <= 1 for row in one.rows)


def test_what_lacks_is_said() -> None:
    with pytest.raises(ValueError, match=rf"without the largest run nothing .* it takes {RUNS}"):
        backtest(family(levels=RUNS), CHANCE)
    same = [
        EvaluatedPoint(one.run, 1e19 * (1 + 0.002 * place), one.nll, one.accuracy, one.n)
        for place, one in enumerate(family())
    ]
    with pytest.raises(ValueError, match=r"1 level\(s\) of compute, of which 3 must remain; train further sizes"):
        backtest(same, CHANCE)


def test_many_runs_of_few_budgets_are_few_levels() -> None:
    """Sixteen runs a few per cent apart fix a line for `fit_forecast`, but only four budgets are behind them."""
    points = [
        EvaluatedPoint(one.run, one.flops * (1 + 0.01 * (place % 4)), one.nll, one.accuracy, one.n)
        for place, one in enumerate(family(np.random.default_rng(1), levels=4, per_level=4))
    ]
    test = backtest(points, CHANCE)
    assert {row.left_out for row in test.rows} == {1}
    assert len(test.rows) == 4
    assert "4 level(s) of compute, of which 3 must remain" in test.stopped


def test_the_verdict_gives_number_interval_range_and_record() -> None:
    points = family(np.random.default_rng(2))
    verdict = forecast_verdict({"arithmetic": TaskPoints(points, CHANCE)}, 1e22)
    made = fit_forecast(points, CHANCE).predict(1e22).accuracy
    number, record = verdict.headline
    assert f"accuracy {made.value:.3f}, 95 % {made.low:.3f} to {made.high:.3f}" in number
    assert "79.4 x beyond" in number  # 10^22 over 10^20.1
    assert "of 10 accuracies inside their 95 % intervals" in record
    assert verdict.change == []
    assert verdict.flags == []


def test_the_verdict_flags_what_lacks_and_what_was_not_borne_out() -> None:
    tasks = {
        "plateau": TaskPoints(family(np.random.default_rng(2), levelling), CHANCE),
        "untested": TaskPoints(family(levels=RUNS), CHANCE),
        "small": TaskPoints(family(levels=2), CHANCE),
    }
    verdict = forecast_verdict(tasks, 1e22)
    assert [line.split()[0] for line in verdict.headline] == ["plateau", "plateau,", "untested"]
    plateau, untested, small = verdict.flags
    assert plateau.startswith("plateau: smaller runs did not predict larger ones")
    assert "too high" in plateau
    assert untested.startswith("untested: the forecast could not be tested")
    assert small.startswith("small: no forecast: 2 run(s) of different compute with 6 evaluated checkpoint(s)")
    alone = forecast_verdict({"small": tasks["small"]}, 1e22)
    assert (alone.headline, alone.flags) == ([], [small])
