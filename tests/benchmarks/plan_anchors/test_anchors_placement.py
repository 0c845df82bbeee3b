from __future__ import annotations

import pytest

from benchmarks.plan_anchors.network import job, placement_anchors, recommendations
from herd.llama3.parallel.layout import TABLE_4


@pytest.mark.slow
def test_a18_holds_and_its_ablations_miss() -> None:
    rows = placement_anchors()
    assert {row.number for row in rows} == {"A18"}
    assert [row.verdict for row in rows] == ["ok", "ok", "misses", "misses", "misses"]
    gain, ratio, rings, inside, greedy = (row.predicted for row in rows)
    assert gain > 15
    assert ratio <= 1
    assert 1 < rings < 10
    assert inside > 2
    assert greedy > 1


def test_every_row_of_table_4_and_some_of_them_strictly_better() -> None:
    found = recommendations()
    assert len(found) == 12
    assert all(each.ratio <= 1 and each.gain >= 10 for each in found)
    assert min(each.ratio for each in found) < 0.7  # 128K on a fragmented cluster: 3,072 is no multiple of 2,048


def test_bytes_of_table_4_follow_from_the_model() -> None:
    layout, world, sent = job(TABLE_4[1])
    assert (layout.dp(world), layout.vpp) == (128, 8)
    assert sent.pp == 2 * 16 * 8 * 8192 * 16384 * 2 / 8  # both ways, 16 micro-batches, 8 stages, BF16 over TP 8
    weights = 405.8e9 / (8 * 16)  # bf16 gathered once, fp32 reduced once
    assert sent.dp == pytest.approx(weights * (2 + 4), rel=0.02)
    assert sent.cp == 0 < job(TABLE_4[2])[2].cp
    assert job(TABLE_4[1], zero=3)[2].dp > 10 * sent.dp
