from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.plan_anchors import step
from benchmarks.plan_anchors.published import Anchor, fitted_h100_curves
from benchmarks.plan_anchors.step import table4_anchors
from herd.llama3.parallel.layout import TABLE_4


@pytest.fixture(scope="module")
def rows() -> list[Anchor]:
    return table4_anchors()


def test_anchors_hold_and_ablations_miss(rows: list[Anchor]) -> None:
    assert {row.verdict for row in rows if not row.ablation} == {"ok"}
    assert {row.verdict for row in rows if row.ablation} == {"misses"}
    assert Counter((row.number, row.ablation) for row in rows) == {
        ("A1", False): 1,
        ("A2", False): 3,
        ("A3", True): 6,
    }


def test_targets_are_those_of_the_list(rows: list[Anchor]) -> None:
    one, two, slow, fast = (row for row in rows if not row.ablation)
    assert (one.published, one.target) == (TABLE_4[1].tflops, "+-3 %")
    assert (two.published, two.target) == (TABLE_4[2].tflops, "+-5 %")
    assert abs(one.error or 1) <= 0.03
    assert abs(two.error or 1) <= 0.05
    assert slow.predicted < two.predicted < fast.predicted  # 400, 550 and 600 TFLOP/s of attention
    assert {slow.target, fast.target} == {"printed"}


def test_ablations_miss_by_the_stated_amounts(rows: list[Anchor]) -> None:
    shallow, two, three, dense, *sparse = (row.error or 0.0 for row in rows if row.ablation)
    assert shallow == pytest.approx(-0.036, abs=0.01)
    assert two == pytest.approx(0.07, abs=0.01)
    assert three == pytest.approx(0.13, abs=0.01)
    assert dense == pytest.approx(-0.40, abs=0.04)
    assert all(0.20 <= row.predicted <= 0.22 for row in rows if "sparse" in row.what)
    assert max(sparse) < -0.4


def test_what_was_fitted_and_what_assumed_is_said(rows: list[Anchor]) -> None:
    assert "fitted on row 1 (430)" in rows[0].note
    assert "550 TFLOP/s (prior, not fitted)" in rows[1].note


def test_a_model_without_its_bubble_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows test the model: with bubbles gone, row 2 comes out as fast as row 1."""
    monkeypatch.setattr("herd.llama3.planner.step_time.pipeline_idle", lambda *_: 0.0)
    fitted_h100_curves.cache_clear()
    try:
        first = table4_anchors()[0]
    finally:
        fitted_h100_curves.cache_clear()
    assert first.verdict == "OUTSIDE"
    assert (first.error or 0) > 0.05


def test_a_wrong_stated_shift_is_seen() -> None:
    """An ablation that misses by another amount than is said is wrong, and so is one that does not miss."""
    assert step._ablation("", 110.0, 100.0, 0.10, 0.05).ok
    assert not step._ablation("", 110.0, 100.0, 0.20, 0.05).ok
    assert not step._ablation("", 101.0, 100.0, 0.01, 0.05).ok
    assert step._ablation("", 101.0, 100.0, 0.01, 0.05).verdict == "DOES NOT MISS"
