from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.planner.published import Anchor, within
from herd.llama3.planner.validation import run as module
from herd.llama3.planner.validation.run import ANCHORS, verify
from herd.llama3.planner.validation.step import megascale_anchors, megatron_anchors, table4_anchors

QUICK = (megascale_anchors, table4_anchors, megatron_anchors)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANCHORS", QUICK)


def anchor(ok: bool, ablation: bool = False, published: float | None = 2.0) -> Anchor:
    return Anchor("A1", "figure", 3.0, published, "s", "+-3 %", ok, ablation=ablation)


def test_no_function_of_anchors_is_left_out() -> None:
    files = Path(module.__file__).parent.glob("*.py")
    defined = re.findall(r"^def (\w+_anchors)\(", "".join(path.read_text() for path in files), re.MULTILINE)
    assert sorted(anchors.__name__ for anchors in ANCHORS) == sorted(defined)


def test_rows_stand_in_the_order_of_their_numbers_ablations_last() -> None:
    rows = verify()
    numbers = [int(row.number[1:]) for row in rows]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3, 4, 5}
    for number in set(numbers):
        mine = [row.ablation for row in rows if row.number == f"A{number}"]
        assert mine == sorted(mine)


def test_one_anchor_may_be_asked_for() -> None:
    for name in ["A4", "a4"]:
        assert {row.number for row in verify(name)} == {"A4"}
        assert len(verify(name)) == 8


def test_an_unknown_anchor_is_refused() -> None:
    for name in ["A6", "4", "A44", "anchor"]:
        with pytest.raises(ValueError, match=rf"anchor: '{name}' is unknown; write A1 to A5"):
            verify(name)


def test_verdicts() -> None:
    assert [anchor(ok).verdict for ok in (True, False)] == ["ok", "OUTSIDE"]
    assert [anchor(ok, ablation=True).verdict for ok in (True, False)] == ["misses", "DOES NOT MISS"]
    known = [replace(anchor(ok, ablation), known=True) for ablation in (False, True) for ok in (True, False)]
    assert [row.verdict for row in known] == ["ok", "known miss", "misses", "NOT CAUGHT"]
    assert [row.wrong for row in known] == [True, False, True, False], "what is right is no known miss"
    assert [anchor(ok).wrong for ok in (True, False)] == [False, True]


def test_an_error_needs_a_published_figure() -> None:
    assert anchor(True).error == pytest.approx(0.5)
    assert anchor(True, published=None).error is None
    told = anchor(False).as_dict()
    assert told["verdict"] == "OUTSIDE"
    assert told["error"] == pytest.approx(0.5)
    assert told["what"] == "figure"


@given(st.floats(0.001, 1e12), st.floats(-0.5, 0.5), st.floats(0.0, 0.5))
def test_within_is_relative_to_what_was_published(published: float, error: float, tolerance: float) -> None:
    if abs(abs(error) - tolerance) > 1e-9:
        assert within(published * (1 + error), published, tolerance) is (abs(error) < tolerance)
