"""A job played through a trace: every second is accounted for, and simple traces cost what one can work out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.planner.goodput import BYTECHECKPOINT, CheckpointCosts, Recovery, effective_time, longest_restart
from herd.llama3.planner.reliability import Failure, Fleet, Trace, llama3_failures
from herd.llama3.planner.uptime import SaveCycle, monte_carlo, simulate

COSTS = CheckpointCosts(block_s=1, save_s=5, load_s=2, source="test")
RECOVERY = Recovery(notice_s=1, timeout_s=50, relaunch_s=7)


def failure(time_s: float, spare: bool = False, hangs: bool = False) -> Failure:
    return Failure(time_s, "test", 0, spare, hangs)


def steps_of(cycle: SaveCycle, elapsed_s: float, tick_s: float = 0.001) -> tuple[float, float]:
    """Return done and committed work the slow way: by walking through it."""
    done = since = blocked = 0.0
    saves: list[tuple[float, float]] = []
    for tick in range(round(elapsed_s / tick_s)):
        if blocked > 0:
            blocked -= tick_s
            continue
        done, since = done + tick_s, since + tick_s
        if since >= cycle.interval_s - tick_s / 2:
            since, blocked = 0.0, cycle.period_s - cycle.interval_s
            saves.append(((tick + 1) * tick_s + cycle.save_s, done))
    return done, max([work for when, work in saves if when <= elapsed_s], default=0.0)


@given(elapsed=st.floats(0, 30), interval=st.floats(0.5, 8), block=st.floats(0, 2), more=st.floats(0, 6))
def test_the_cycle_is_what_walking_through_it_gives(elapsed: float, interval: float, block: float, more: float) -> None:
    cycle = SaveCycle(interval, CheckpointCosts(block, block + more, 0, "test"))
    done, _ = steps_of(cycle, elapsed)
    assert cycle.done_s(elapsed) == pytest.approx(done, abs=0.1)
    assert cycle.committed_s(elapsed) <= cycle.done_s(elapsed) + 1e-9


def test_commits_come_when_the_save_is_written() -> None:
    cycle = SaveCycle(10, COSTS)  # saves begin at 10 and 21, are committed at 15 and 26
    assert [cycle.committed_s(at) for at in (14.9, 15.1, 25.9, 26.1)] == [0, 10, 10, 20]
    assert steps_of(cycle, 25.9)[1] == pytest.approx(10, abs=0.1)
    assert steps_of(cycle, 26.1)[1] == pytest.approx(20, abs=0.1)


def test_without_failures_only_saves_cost() -> None:
    played = simulate((), 110, 10, COSTS, RECOVERY)
    assert (played.useful_s, played.blocked_s, played.lost_s, played.down_s) == (100, 10, 0, 0)


def test_a_crash_goes_back_to_the_newest_commit() -> None:
    """At 20 s the save of 10 s is committed; 9 s of work are lost, then 1 + 7 + 2 s until it runs again."""
    played = simulate((failure(20),), 100, 10, COSTS, RECOVERY)
    assert (played.lost_s, played.down_s, played.failures) == (9, 10, 1)
    assert played.useful_s == 10 + SaveCycle(10, COSTS).done_s(70)


def test_a_save_on_its_way_does_not_count() -> None:
    assert simulate((failure(14),), 100, 10, COSTS, RECOVERY).lost_s == 13
    assert simulate((failure(16),), 100, 10, COSTS, RECOVERY).lost_s == 5


def test_a_hang_costs_the_timeout_more() -> None:
    crash, hang = (simulate((failure(20, hangs=hangs),), 200, 10, COSTS, RECOVERY) for hangs in (False, True))
    assert hang.down_s - crash.down_s == 49


def test_a_failure_during_a_restart_begins_it_again() -> None:
    assert simulate((failure(20), failure(25)), 100, 10, COSTS, RECOVERY).down_s == 15
    assert simulate((failure(20), failure(25)), 100, 10, COSTS, RECOVERY).lost_s == 9


def test_without_spares_the_job_waits_for_repairs() -> None:
    trace = (failure(20, spare=True), failure(40, spare=True))
    times = {"notice_s": 1.0, "timeout_s": 50.0, "relaunch_s": 7.0, "repair_s": 100.0}
    waits = [simulate(trace, 400, 10, COSTS, Recovery(**times, spares=spares)).waiting_s for spares in (2, 1, 0)]
    assert waits[0] == 0
    assert waits[1] == 79  # the second waits for the host that broke at 20 s, from 41 s to 120 s
    assert waits[2] == 99 + 20  # down from 21 s to 120 s; the second breaks meanwhile, until 140 s
    assert simulate(trace, 400, 10, COSTS, Recovery(**times)).waiting_s == 0


@given(
    times=st.lists(st.tuples(st.floats(0, 1500), st.booleans(), st.booleans()), max_size=12),
    interval_s=st.floats(0.5, 300),
    spares=st.one_of(st.none(), st.integers(0, 3)),
)
def test_every_second_is_accounted_for(
    times: list[tuple[float, bool, bool]], interval_s: float, spares: int | None
) -> None:
    trace: Trace = tuple(sorted(failure(*each) for each in times))
    recovery = Recovery(1, 50, 7, repair_s=80, spares=spares)
    played = simulate(trace, 1000, interval_s, COSTS, recovery)
    parts = (played.useful_s, played.lost_s, played.blocked_s, played.down_s)
    assert sum(parts) == pytest.approx(1000)
    assert min(parts) >= -1e-6
    assert 0 <= played.waiting_s <= played.down_s + 1e-6
    assert played.useful_s <= simulate((), 1000, interval_s, COSTS, recovery).useful_s + 1e-6


def test_closed_form_and_simulation_are_close() -> None:
    for restart_s in [200.0, 600.0, 1200.0]:
        for interval_s in [60.0, 600.0]:
            model, fleet = llama3_failures(), Fleet(8_192)
            closed = effective_time(model.mtti_s(fleet), restart_s, interval_s, BYTECHECKPOINT)
            recovery = Recovery.total(restart_s, BYTECHECKPOINT)
            found = monte_carlo(model, fleet, 54, interval_s, BYTECHECKPOINT, recovery, range(12))
            assert closed is not None
            assert abs(closed - found.mean) <= 0.02
            assert found.low <= found.mean <= found.high


def test_the_restart_budget_holds_in_simulation() -> None:
    model, fleet = llama3_failures(), Fleet(16_384)
    budget = longest_restart(0.9, model.mtti_s(fleet), 600, BYTECHECKPOINT)
    assert budget is not None
    recovery = Recovery.total(budget, BYTECHECKPOINT)
    assert monte_carlo(model, fleet, 54, 600, BYTECHECKPOINT, recovery, range(12)).mean == pytest.approx(0.9, abs=0.02)


def test_too_few_spares_cost_effective_time() -> None:
    model, fleet = llama3_failures(), Fleet(16_384)
    few, many = (
        monte_carlo(model, fleet, 54, 600, COSTS, Recovery(1, 600, 300, spares=spares), range(6)).mean
        for spares in (3, 14)
    )
    assert many > few + 0.1


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="interval_s: 0 s"):
        simulate((), 10, 0, COSTS, RECOVERY)
