"""The closed form, its range, and what is asked of it: cadence and restart budget."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from herd.llama3.planner.goodput import (
    BYTECHECKPOINT,
    VALID,
    CheckpointCosts,
    Recovery,
    best_checkpoint_interval,
    effective_time,
    failure_cost_share,
    first_order_effective_time,
    longest_restart,
    scaled_costs,
    shared_network_loss,
)

MTTI_S = 54 * 86_400 / 466
FREE = CheckpointCosts(0.6, 0.6, 0.0, "test")


def test_the_formula_as_published() -> None:
    costs = CheckpointCosts(0.6, 0.6, 0.0, "test")
    asked = (1 - (600 + 0.6 + 300) / MTTI_S) / (1 + 0.6 / 600)
    assert effective_time(MTTI_S, 600, 600, costs) == pytest.approx(asked)
    assert asked == pytest.approx(0.91, abs=0.005)


def test_a_long_block_costs_what_it_should() -> None:
    share = effective_time(MTTI_S, 600, 600, CheckpointCosts(60, 60, 0, "test"))
    assert share is not None
    assert share < 0.9


def test_unknown_outside_its_range() -> None:
    assert effective_time(1_000, 600, 600, FREE) is None
    assert failure_cost_share(1_000, 600, 600, FREE) > VALID


@given(
    mtti_s=st.floats(1e3, 1e6),
    restart_s=st.floats(0, 2e3),
    block_s=st.floats(0.01, 30),
    more_s=st.floats(0, 300),
)
def test_no_interval_beats_the_best(mtti_s: float, restart_s: float, block_s: float, more_s: float) -> None:
    costs = CheckpointCosts(block_s, block_s + more_s, 0, "test")
    best = best_checkpoint_interval(mtti_s, restart_s, costs)
    assert best.interval_s >= costs.save_s
    top = first_order_effective_time(mtti_s, restart_s, best.interval_s, costs)
    others = np.geomspace(costs.save_s, 86_400, 200)
    assert top >= max(first_order_effective_time(mtti_s, restart_s, float(each), costs) for each in others) - 1e-6


def test_young_and_daly_agree_where_saves_are_cheap() -> None:
    best = best_checkpoint_interval(1e5, 0.0, CheckpointCosts(0.5, 0.5, 0.0, "test"))
    assert best.young_daly_s == pytest.approx(sqrt(2 * 0.5 * 1e5))
    assert best.interval_s == pytest.approx(best.young_daly_s, rel=0.02)
    assert not best.limited_by_save


def test_a_slow_save_limits_the_cadence() -> None:
    best = best_checkpoint_interval(810.0, 60.0, BYTECHECKPOINT)
    assert (best.interval_s, best.limited_by_save) == (51.0, True)
    assert best.young_daly_s < 51


def test_saves_shorter_than_their_writing_wait_for_each_other() -> None:
    assert BYTECHECKPOINT.blocked_s(600) == 0.59
    assert BYTECHECKPOINT.blocked_s(11) == 40


@given(mtti_s=st.floats(1e3, 1e6), interval_s=st.floats(10, 5e3), target=st.floats(0.86, 0.99))
def test_the_budget_is_where_the_target_is_just_met(mtti_s: float, interval_s: float, target: float) -> None:
    budget = longest_restart(target, mtti_s, interval_s, FREE)
    assume(budget is not None)
    assert budget is not None
    assert effective_time(mtti_s, budget, interval_s, FREE) == pytest.approx(target)
    assert first_order_effective_time(mtti_s, budget + 1, interval_s, FREE) < target


def test_the_budget_of_the_405b() -> None:
    budget = longest_restart(0.9, MTTI_S, 600, BYTECHECKPOINT)
    assert budget == pytest.approx(641, abs=1)
    assert longest_restart(0.9, 810, 600, BYTECHECKPOINT) is None  # 131,072 GPUs: not even an immediate restart


def test_a_hang_costs_its_timeout() -> None:
    recovery = Recovery(notice_s=5, timeout_s=605, relaunch_s=100)
    assert recovery.restart_s(0.0, BYTECHECKPOINT) == 5 + 100 + 129
    assert recovery.restart_s(0.5, BYTECHECKPOINT) == 305 + 100 + 129
    assert Recovery.total(600, BYTECHECKPOINT).restart_s(0.09, BYTECHECKPOINT) == 600


def test_mistakes_are_named() -> None:
    for call, words in [
        (lambda: CheckpointCosts(-1, 0, 0, ""), "block_s: -1 is negative"),
        (lambda: CheckpointCosts(5, 1, 0, ""), "save_s: 1 is below block_s 5"),
        (lambda: effective_time(0, 1, 1, FREE), "mtti_s: 0 s"),
        (lambda: effective_time(10, 1, 0, FREE), "interval_s: 0 s"),
        (lambda: effective_time(10, -1, 1, FREE), "restart_s: -1 is negative"),
        (lambda: best_checkpoint_interval(0, 1, FREE), "mtti_s: 0 s"),
        (lambda: longest_restart(1.0, 10, 1, FREE), "target: 1 is not a share"),
        (lambda: Recovery.total(60, BYTECHECKPOINT), "60 s is less than loading, 129 s"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()  # type: ignore[operator]


def test_the_published_job_has_the_published_times_and_a_small_one_less() -> None:
    published = scaled_costs(12 * 405.9e9, 8_960, 2e12)
    for name in ("block_s", "save_s", "load_s"):
        assert getattr(published, name) == pytest.approx(getattr(BYTECHECKPOINT, name))
    small = scaled_costs(12 * 8e9, 8, 24e9)  # an 8B on one server, whose storage takes 4 s for it
    assert small.block_s == pytest.approx(12 * 8e9 / 8 / 10e9, rel=0.01)
    assert 4 < small.save_s - small.block_s < 4.1
    assert 4 < small.load_s < 4.2
    assert "scaled" in small.source


@given(st.floats(1e9, 1e13), st.integers(1, 100_000), st.floats(1e9, 1e13))
def test_more_bytes_and_slower_storage_never_take_less(state: float, gpus: int, rate: float) -> None:
    costs, larger, slower = (
        scaled_costs(*job) for job in ((state, gpus, rate), (2 * state, gpus, rate), (state, gpus, rate / 2))
    )
    assert costs.save_s < larger.save_s
    assert costs.save_s < slower.save_s
    assert costs.block_s == slower.block_s < larger.block_s


def test_saves_that_share_the_network_cost_what_messages_wait() -> None:
    assert shared_network_loss(0.2, 0.25, 60, 600) == pytest.approx(0.2 / 3 * 0.1)
    assert shared_network_loss(0.2, 5.0, 60, 600) == shared_network_loss(0.2, 0.5, 60, 600) == pytest.approx(0.02)
    assert shared_network_loss(0.0, 0.5, 60, 600) == shared_network_loss(0.2, 0.0, 60, 600) == 0
    assert shared_network_loss(0.2, 0.25, 900, 600) == pytest.approx(0.2 / 3)
