"""The reliability part of a plan: its figures are those of the models below, and move the right way."""

from __future__ import annotations

from functools import cache

import pytest

from herd.llama3.planner.goodput import (
    BYTECHECKPOINT,
    CheckpointCosts,
    Recovery,
    effective_time,
    first_order_effective_time,
)
from herd.llama3.planner.reliability import Fleet, llama3_failures
from herd.llama3.planner.uptime import TARGET, Uptime, uptime

LLAMA3 = 16_384


@cache
def on(gpus: int, interval_s: float = 600.0) -> Uptime:
    return uptime(gpus, interval_s)


def test_the_405b_trains_nine_tenths_of_the_time() -> None:
    found = on(LLAMA3)
    assert found.mtti_s == pytest.approx(54 * 86_400 / 466)  # 419 unexpected and 47 planned
    assert 0.90 < found.share < 0.93
    assert found.spread.low < found.share < found.spread.high
    assert found.share == pytest.approx(effective_time(found.mtti_s, found.restart_s, 600, found.costs), abs=0.02)


def test_a_restart_is_notice_relaunch_and_load_and_longer_for_hangs() -> None:
    found, hang = on(LLAMA3), llama3_failures().hang_share(Fleet(LLAMA3))
    assert 0 < hang < 0.2
    asked = 30 * (1 - hang) + 600 * hang + 300 + BYTECHECKPOINT.load_s
    assert found.restart_s == pytest.approx(asked)


def test_the_budget_of_a_restart_just_meets_the_target() -> None:
    found = on(LLAMA3)
    assert found.restart_budget_s is not None
    assert found.restart_budget_s > found.restart_s  # what is assumed of restarts is enough for 90 %
    assert first_order_effective_time(found.mtti_s, found.restart_budget_s, 600, found.costs) == pytest.approx(TARGET)


def test_more_gpus_fail_more_often_train_less_and_need_more_spares() -> None:
    found = [on(gpus) for gpus in (8, 1_024, LLAMA3, 65_536)]
    for value in ("mtti_s", "share"):
        values = [getattr(one, value) for one in found]
        assert values == sorted(values, reverse=True)
        assert values[0] > values[-1]
    spares = [one.spares for one in found]
    assert spares == sorted(spares)
    assert spares[0] == 0 < spares[-1]


def test_where_the_formula_ends_there_is_no_budget_but_a_simulation() -> None:
    found = on(131_072)
    assert found.restart_budget_s is None
    assert found.cadence.share is None
    assert 0.3 < found.share < 0.7
    assert found.spread.error < 0.01


def test_the_best_cadence_is_better_than_an_hour_or_half_a_minute() -> None:
    best = on(LLAMA3).cadence.interval_s
    assert 30 < best < 600
    assert on(LLAMA3, best).share > max(on(LLAMA3, 3600.0).share, on(LLAMA3, 30.0).share) + 0.02


def test_a_save_that_blocks_a_minute_fails_the_target() -> None:
    found = uptime(LLAMA3, 600.0, CheckpointCosts(60, 60, 129, "test"))
    assert found.share < TARGET < on(LLAMA3).share


def test_waiting_for_spares_and_slow_relaunches_cost_time() -> None:
    base = on(LLAMA3).share
    without = uptime(LLAMA3, 600.0, recovery=Recovery(30, 600, 300, spares=0))
    slow = uptime(LLAMA3, 600.0, recovery=Recovery(30, 600, 1_800))
    assert without.share < slow.share < base
    assert slow.restart_s == pytest.approx(on(LLAMA3).restart_s + 1_500)


def test_smaller_hosts_are_more_and_fail_more_often() -> None:
    small = uptime(LLAMA3, 600.0, gpus_per_host=4)
    assert small.mtti_s < on(LLAMA3).mtti_s


def test_it_is_seeded() -> None:
    assert uptime(LLAMA3, 600.0) == on(LLAMA3)
    assert on(LLAMA3).costs == BYTECHECKPOINT


def test_times_and_sizes_that_cannot_be_are_told() -> None:
    for gpus, interval_s, told in [
        (0, 600.0, "gpus: 0 is not a number of GPUs; write 1 or more"),
        (8, 0.0, "interval_s: 0 s; write a time above 0"),
    ]:
        with pytest.raises(ValueError, match=told):
            uptime(gpus, interval_s)


def test_small_jobs_have_the_times_of_a_shared_fleet_too() -> None:
    """Kokolis et al. observed 47.7 days for 8 GPUs and 7.9 h for 1,024, and no larger job."""
    one, largest, more = (uptime(gpus, 600.0) for gpus in (8, 1_024, 1_025))
    assert one.rsc1_mtti_s == pytest.approx(47.7 * 86_400)
    assert largest.rsc1_mtti_s is not None
    assert largest.rsc1_share is not None
    assert 7.9 < largest.rsc1_mtti_s / 3600 < 9
    assert largest.rsc1_share < largest.share - 0.02
    assert (more.rsc1_mtti_s, more.rsc1_share) == (None, None)
