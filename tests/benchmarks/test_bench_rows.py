from __future__ import annotations

import json

import pytest

from benchmarks.measure import Cost
from benchmarks.rows import TARGETS, Target, failed, measured, not_measured, number, ratio, report


def cost(cpu_s: float, **facts: object) -> Cost:
    return Cost(cpu_s, cpu_s, 1_000_000, facts)


def test_a_target_is_a_bound_from_one_side() -> None:
    for target, value, met in [
        (Target(50, "x"), 50, True),
        (Target(50, "x"), 49.9, False),
        (Target(15, "s", "at most"), 15, True),
        (Target(15, "s", "at most"), 15.1, False),
        (Target(None, "x"), 0, None),
    ]:
        assert target.met(value) is met


def test_a_ratio_is_cpu_time_per_byte() -> None:
    row = ratio("minhash/datatrove", cost(2, kept=7, rows=[1, 2]), cost(90, kept=8), 40_000_000, 10_000_000)
    assert row.value == pytest.approx((90 / 10) / (2 / 40))
    assert row.ok is True
    assert "per byte" in row.note
    assert row.detail["peer"]["mb_per_cpu_s"] == pytest.approx(0.111)
    assert row.detail["ours"]["facts"] == {"kept": 7}


def test_a_row_that_misses_its_target_says_so() -> None:
    assert measured("near/recall", 0.99).ok is False


def test_a_row_without_its_library_neither_meets_nor_misses() -> None:
    row = not_measured("minhash/datasketch", "No module named 'datasketch'")
    assert (row.value, row.ok) == (None, None)
    assert row.note == "not measured: No module named 'datasketch'"


def test_a_row_that_broke_down_misses() -> None:
    assert failed("mix/documents", "not exact").ok is False


def test_the_report_is_json_with_date_machine_and_versions() -> None:
    made = json.loads(json.dumps(report([measured(name, 1) for name in TARGETS], {"mb": 4}, {"datatrove": "0.10.1"})))
    assert [row["name"] for row in made["rows"]] == list(TARGETS)
    assert made["date"].endswith("+00:00")
    assert made["machine"]["cpu"]
    assert made["machine"]["cores"] >= 1
    assert made["versions"]["numpy"]
    assert made["peers"] == {"datatrove": "0.10.1"}


def test_numbers_are_short() -> None:
    for value, text in [(0, "0"), (123_456.7, "123,457"), (54.32, "54.3"), (0.9976, "0.9976"), (100, "100")]:
        assert number(value) == text
