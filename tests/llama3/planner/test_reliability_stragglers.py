"""One slow host holds up everybody."""

from __future__ import annotations

import pytest

from herd.llama3.planner.reliability import slowdown_by_rank, slowdown_without_waiting, step_slowdown


def test_the_405b_with_one_host_ten_percent_slow() -> None:
    longer = slowdown_by_rank(16, 8, 16)
    assert len(longer) == 16
    assert all(0.05 <= share <= 0.10 for share in longer)
    assert slowdown_without_waiting(2048) < 0.001  # what a model without waiting says


def test_without_a_pipeline_all_of_it_shows() -> None:
    assert step_slowdown(1, 1, 8, {0: 1.1}) == pytest.approx(0.1)


def test_if_all_are_slow_nothing_hides() -> None:
    assert step_slowdown(4, 2, 8, dict.fromkeys(range(4), 1.1)) == pytest.approx(0.1)


def test_more_slow_hosts_never_help() -> None:
    one, two = step_slowdown(8, 2, 16, {3: 1.1}), step_slowdown(8, 2, 16, {3: 1.1, 6: 1.1})
    assert 0 < one <= two <= 0.1 + 1e-9


def test_bubbles_hide_a_part() -> None:
    """A pipeline with few micro-batches waits a lot, so a slow rank matters less."""
    assert step_slowdown(16, 1, 16, {4: 1.1}) < step_slowdown(16, 1, 64, {4: 1.1}) < step_slowdown(16, 1, 256, {4: 1.1})


def test_what_lies_outside_the_pipeline_is_as_fast_as_before() -> None:
    assert step_slowdown(1, 1, 8, {0: 1.1}, exposed=0.2) == pytest.approx(0.08)


def test_mistakes_are_named() -> None:
    for slow, exposed, words in [({4: 1.1}, 0.0, "rank 4"), ({0: 0.0}, 0.0, "at 0 x"), ({0: 1.1}, 1.0, "exposed: 1 ")]:
        with pytest.raises(ValueError, match=words):
            step_slowdown(4, 1, 8, slow, exposed)
