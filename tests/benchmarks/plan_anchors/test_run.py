from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from benchmarks.__main__ import bench
from benchmarks.plan_anchors import run as module
from benchmarks.plan_anchors import step
from benchmarks.plan_anchors.published import Anchor, within
from benchmarks.plan_anchors.run import ANCHORS, compare_with_published
from benchmarks.plan_anchors.step import megascale_anchors, megatron_anchors, table4_anchors

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


def test_anchors_are_in_the_order_of_their_numbers_and_ablations_last() -> None:
    anchors = compare_with_published()
    numbers = [int(anchor.number[1:]) for anchor in anchors]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3, 4, 5}
    for number in set(numbers):
        ablations = [anchor.ablation for anchor in anchors if anchor.number == f"A{number}"]
        assert ablations == sorted(ablations)


def test_a_number_selects_its_anchors() -> None:
    for name in ["A4", "a4"]:
        assert {anchor.number for anchor in compare_with_published(name)} == {"A4"}
        assert len(compare_with_published(name)) == 8


def test_an_unknown_anchor_is_refused() -> None:
    for name in ["A6", "4", "A44", "anchor"]:
        with pytest.raises(ValueError, match=rf"anchor: '{name}' is unknown; write A1 to A5"):
            compare_with_published(name)


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


# The command


def plan_anchors(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["plan-anchors", *arguments], env={"COLUMNS": "100"})


def test_the_command_exits_0_if_all_anchors_are_as_they_must_be() -> None:
    result = plan_anchors()
    assert result.exit_code == 0
    assert "A4" in result.output
    assert "all as they must be" in result.output
    anchors = json.loads(plan_anchors("--json").stdout)
    assert {anchor["number"] for anchor in anchors} == {"A1", "A2", "A3", "A4", "A5"}
    assert all(anchor["ok"] for anchor in anchors)


def test_the_command_exits_1_if_an_anchor_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = step.SYSTEMS
    changed = second._replace(seconds={**second.seconds, 8192: 11.0})
    monkeypatch.setattr(step, "SYSTEMS", (first, changed))
    result = plan_anchors()
    assert result.exit_code == 1
    assert "OUTSIDE" in result.output
    assert "1 are not as they must be: A5" in " ".join(result.output.split())
    result = plan_anchors("a5", "--json")
    assert result.exit_code == 1
    assert [anchor["what"] for anchor in json.loads(result.stdout) if not anchor["ok"]] == ["MegaScale, 8,192 GPUs"]
    assert plan_anchors("A4").exit_code == 0


def test_the_command_refuses_an_unknown_anchor() -> None:
    result = plan_anchors("A99")
    assert result.exit_code == 2
    assert "anchor: 'A99' is unknown; write A1 to A5" in result.stderr


def test_the_table_fits_100_columns() -> None:
    text = plan_anchors().output
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "…" not in text  # nothing was cut off for it
