"""Every row about reliability is right, and those that must miss do."""

from __future__ import annotations

import pytest

from benchmarks.plan_anchors.published import Anchor
from benchmarks.plan_anchors.run import reliability_anchors


@pytest.fixture(scope="module")
def rows() -> list[Anchor]:
    return reliability_anchors()


@pytest.mark.slow
def test_all_four_anchors_pass_with_their_ablations(rows: list[Anchor]) -> None:
    assert [row.what for row in rows if not row.ok] == []
    for number in ("A12", "A13", "A14", "A20"):
        mine = [row for row in rows if row.number == number]
        assert {row.ablation for row in mine} == {False, True}


def test_the_known_miss_is_told(rows: list[Anchor]) -> None:
    (row,) = [row for row in rows if row.what == "1,024 GPUs"]
    assert row.verdict == "misses"
    assert "known miss" in row.note
    assert row.error == pytest.approx(2.65, abs=0.01)


def test_llama_3_s_own_time_to_interruption_is_beside_it(rows: list[Anchor]) -> None:
    assert any("2.78 h" in row.note for row in rows if row.number == "A14")
