"""Settings and predictions of the fault test; tests/e2e runs one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fault_test import (
    FLEET,
    FaultRunResult,
    FaultTestSettings,
    SteadyState,
    compare_with_prediction,
    fault_test_recipe,
)
from herd.llama3.planner.reliability import llama3_failures
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schedule import Schedule

STEADY = SteadyState(step_s=0.05, block_s=0.01, save_s=0.2, restart_s=1.0)


@pytest.mark.parametrize("name", ["quickstart", "llama3-8b", "llama3-405b"])
def test_a_recipe_becomes_one_long_stage_of_its_first_shape(name: str, checkout: Path) -> None:
    recipe = load_recipe(checkout / "recipes" / f"{name}.yaml")
    first = Schedule(recipe).trained[0].segments[0]
    made = fault_test_recipe(recipe, FaultTestSettings(save_every_s=7))
    (span,) = Schedule(made).trained
    assert (span.segments[0].seq_len, span.segments[0].batch) == (first.seq_len, first.batch)
    assert made.model == recipe.model
    assert (made.checkpoint.every.amount, made.checkpoint.every.unit) == (7, "seconds")
    assert made.evaluate.val_interval == "never"


def test_the_trace_is_seeded_and_as_frequent_as_asked() -> None:
    settings = FaultTestSettings(seed=3, seconds=1000, mtti_s=10)
    assert settings.trace() == settings.trace(3) != settings.trace(4)
    counts = [len(settings.trace(seed)) for seed in range(50)]
    assert sum(counts) / 50 == pytest.approx(100, rel=0.05)
    assert all(failure.time_s < 1000 for failure in settings.trace())


def test_the_prediction_is_of_this_trace_and_the_formula_of_its_rate() -> None:
    settings = FaultTestSettings(seed=3, seconds=600, mtti_s=60, save_every_s=4, timeout_s=5)
    result = compare_with_prediction(
        "tiny-fault-test-1", settings, STEADY, FaultRunResult(useful_s=540, position=1), attempts=9
    )
    assert result.measured == 0.9
    assert result.failures == settings.trace()
    assert result.closed_form == pytest.approx(result.spread.mean, abs=0.02)
    assert result.spread.low - 0.02 < result.predicted < result.spread.high + 0.02
    assert result.as_dict()["error"] == pytest.approx(result.predicted - 0.9)


def test_more_failures_and_longer_restarts_cost_more() -> None:
    calm, rough = (
        compare_with_prediction(
            "x", FaultTestSettings(seconds=600, mtti_s=mtti_s), STEADY, FaultRunResult(0, 0), 0
        ).spread.mean
        for mtti_s in (200, 50)
    )
    slow = SteadyState(0.05, 0.01, 0.2, restart_s=10)
    assert (
        calm
        > rough
        > compare_with_prediction(
            "x", FaultTestSettings(seconds=600, mtti_s=50), slow, FaultRunResult(0, 0), 0
        ).spread.mean
    )


def test_outside_its_range_the_formula_gives_none() -> None:
    result = compare_with_prediction("x", FaultTestSettings(seconds=600, mtti_s=10), STEADY, FaultRunResult(0, 0), 0)
    assert result.closed_form is None
    assert 0 < result.spread.mean < 1


def test_the_planner_gets_what_was_measured() -> None:
    hang = llama3_failures().hang_share(FLEET)
    assert STEADY.recovery(10).restart_s(0, STEADY.costs) == pytest.approx(0.1 + 1.0)
    assert STEADY.recovery(10).restart_s(hang, STEADY.costs) == pytest.approx(1.1 + hang * 11)
    assert SteadyState(step_s=0.1, block_s=0.2, save_s=0.1, restart_s=1).costs.save_s == 0.2


def test_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="mtti_s: 0 s; write a time above 0"):
        FaultTestSettings(mtti_s=0)
