"""A9 to A11: right where they must be, and wrong without their parts."""

from __future__ import annotations

from time import process_time

import pytest

from benchmarks.plan_anchors.network import congestion_anchors
from benchmarks.plan_anchors.published import Anchor
from benchmarks.plan_anchors.run import (
    SCHEDULE,
    budget_anchors,
    gpu_hours,
    hall_anchors,
    modeled_tflops,
    steps,
    table_4,
)
from herd.llama3.parallel.layout import TABLE_4


@pytest.fixture(scope="module")
def rows() -> list[Anchor]:
    begin = process_time()
    found = budget_anchors()
    assert process_time() - begin < 5
    return found


def test_every_row_is_right_and_each_anchor_has_an_ablation(rows: list[Anchor]) -> None:
    assert [row.what for row in rows if not row.ok] == []
    for number in ("A9", "A10", "A11"):
        assert {row.ablation for row in rows if row.number == number} == {False, True}


def test_verdicts_are_those_of_the_targets(rows: list[Anchor]) -> None:
    """Counted here once more from the figures, so that a row cannot call itself right."""
    for row in rows:
        tolerance = {"A9": 0.005, "A10": 0.05, "A11": 0.0005}[row.number]
        if row.published is not None:
            assert row.error is not None
            assert (abs(row.error) <= tolerance) != row.ablation, row.what


def test_operations_are_6n_and_causal_attention(rows: list[Anchor]) -> None:
    causal, plain, full = (row.predicted for row in rows if row.number == "A9")
    assert causal - plain == pytest.approx(full - causal) == pytest.approx(6 * 126 * 8_192 * 16_384)


def test_the_schedule_is_the_published_one() -> None:
    assert [part.until for part in SCHEDULE] == [252e6, 2.87e12, 14.8e12, 15.6e12]
    assert [part.batch for part in SCHEDULE] == [4, 8, 16, 16]
    assert [part.seq_len for part in SCHEDULE] == [4_096, 8_192, 8_192, 131_072]
    assert [table_4(part) for part in SCHEDULE] == [430, 430, 400, 380]


def test_steps_follow_from_the_batches() -> None:
    asked = 252e6 / 4e6 + (2.87e12 - 252e6) / 8e6 + (15.6e12 - 2.87e12) / 16e6
    assert steps(10**6) == pytest.approx(asked)
    assert round(asked / 1e6, 3) == 1.154
    assert steps(2**20) == pytest.approx(asked * 10**6 / 2**20)


def test_gpu_hours_go_inversely_with_goodput_and_throughput() -> None:
    assert gpu_hours(0.45) == pytest.approx(2 * gpu_hours(0.9))
    assert gpu_hours(tflops=lambda part: 2 * table_4(part)) == pytest.approx(gpu_hours() / 2)
    assert gpu_hours(causal=False) < gpu_hours()


def test_smaller_batches_are_slower_than_the_published_ones() -> None:
    """Half of the micro-batches leave the bubble twice its share: the model says so, the table cannot."""
    small, half, whole, _ = (modeled_tflops(part) for part in SCHEDULE)
    assert small < half < TABLE_4[0].tflops
    assert whole == pytest.approx(TABLE_4[1].tflops, rel=0.03)


def test_power_readers_and_congestion_hold_and_their_ablations_miss() -> None:
    rows = [*hall_anchors(), *congestion_anchors()]
    assert [row.what for row in rows if row.wrong or row.known] == []
    for number, tolerance in (("A24", 0.05), ("A25", 0.03), ("A26", None)):
        mine = [row for row in rows if row.number == number]
        assert {row.ablation for row in mine} == {False, True}
        assert all(row.note for row in mine if not row.ablation)
        for row in mine if tolerance else ():
            assert row.error is not None
            assert (abs(row.error) <= tolerance) != row.ablation, row.what
