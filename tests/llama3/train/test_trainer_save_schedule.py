"""When a checkpoint is due, and which are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.sections import Keep
from herd.llama3.recipe.units import Cadence, Tokens
from herd.llama3.train.trainer import SaveSchedule


def keep(last: int, every: int | None = None) -> Keep:
    return Keep(last=last, every=None if every is None else Tokens(every))


def test_the_newest_and_the_milestones_are_kept() -> None:
    positions = [30, 60, 90, 120, 150, 180, 210, 240]
    assert keep(2).kept(positions) == {210, 240}
    assert keep(1, 100).kept(positions) == {120, 210, 240}
    assert keep(1).kept(positions, pinned=[30]) == {30, 240}
    assert keep(3, 100).kept([]) == set()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 4), st.integers(20, 200))
def test_milestones_survive_deletion_as_they_come(gaps: list[int], last: int, every: int) -> None:
    """Deleting after each save leaves one checkpoint for each multiple that was reached, not fewer as time goes on."""
    present: list[int] = []
    reached: list[int] = []
    for gap in gaps:
        reached.append((reached[-1] if reached else 0) + gap)
        present = sorted(keep(last, every).kept([*present, reached[-1]]))
    milestones = {position // every for position in reached} - {0}
    assert {position // every for position in present} >= milestones
    assert set(present) >= set(reached[-last:])
    assert len(present) <= len(milestones) + last


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(0, 200),
)
def test_one_checkpoint_is_always_old_enough_for_a_rollback(
    gaps: list[int], last: int, rollback: int, start: int
) -> None:
    """Whatever was deleted after each save, going back as far as a rollback may loses nothing that was saved before."""
    present, reached = [start], [start]
    for gap in gaps:
        reached.append(reached[-1] + gap)
        present = sorted(keep(last).kept([*present, reached[-1]], rollback=rollback))
        oldest = max((position for position in reached if position <= reached[-1] - rollback), default=reached[0])
        kept = max((position for position in present if position <= reached[-1] - rollback), default=present[0])
        assert oldest - rollback < kept <= oldest
        assert set(present) == keep(last).kept(reached, rollback=rollback)
        assert len(present) <= last + 3


def test_due_by_tokens_counts_crossed_multiples() -> None:
    due = SaveSchedule(Cadence.parse("100 tokens"), 250)
    assert [due.passed(position) for position in (260, 299, 300, 399)] == [False, False, True, True]
    due.saved(310)
    assert [due.passed(position) for position in (390, 400)] == [False, True]
    assert not due.late()


def test_due_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    due = SaveSchedule(Cadence.parse("10 s"), 0)
    now = 59.0
    assert not due.late()
    now = 60.0
    assert due.late()
    assert not due.passed(10**12)
    due.saved(1)
    assert not due.late()
