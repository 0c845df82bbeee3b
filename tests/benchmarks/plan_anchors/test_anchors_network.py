from __future__ import annotations

from collections import Counter
from time import process_time

import pytest

from benchmarks.plan_anchors import network
from benchmarks.plan_anchors.network import network_anchors
from benchmarks.plan_anchors.published import Anchor
from herd.llama3.planner.routing import ring_share


@pytest.fixture(scope="module")
def rows() -> list[Anchor]:
    return network_anchors()


def test_anchors_hold_and_ablations_miss(rows: list[Anchor]) -> None:
    assert {row.verdict for row in rows if not row.ablation and not row.known} == {"ok"}
    assert not any(row.wrong for row in rows)
    assert {row.verdict for row in rows if row.ablation} == {"misses"}
    assert Counter((row.number, row.ablation) for row in rows) == {
        ("A15", False): 4,
        ("A15", True): 4,
        ("A16", False): 2,
        ("A16", True): 4,
        ("A19", False): 4,
        ("A19", True): 3,
    }


def test_they_take_seconds_of_one_core() -> None:
    ring_share.cache_clear()
    begin = process_time()
    network_anchors()
    assert process_time() - begin < 5


def test_ablations_miss_by_far(rows: list[Anchor]) -> None:
    """Below two thirds of the target, but for 1x uplinks, which leave nearly as much of a card as is asked."""
    missed = {row.what: row.predicted for row in rows if row.ablation and row.number != "A19"}
    near = missed.pop("ablation: share of a card with 1x uplinks")
    assert 85 < near < 95
    assert len(missed) == 7
    assert max(missed.values()) < 20


def test_readings_are_stated(rows: list[Anchor]) -> None:
    gain, large, *_ = rows
    assert gain.published == 40
    assert 40 <= gain.predicted < 70
    assert "uplinks twice" in gain.note
    assert large.published == 40
    assert "unknown" in large.note


def test_more_than_an_upper_bound_is_no_success(rows: list[Anchor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Published is "up to 40 %": 53 and 166 are known misses, and a gain inside would have to be called so."""
    gain, large, *_ = rows
    assert (gain.verdict, large.verdict) == ("known miss", "known miss")
    monkeypatch.setattr(network, "_gain", lambda clos: 0.35)
    inside, *_ = network.queue_pairs()
    assert (inside.ok, inside.verdict, inside.wrong) == (True, "ok", True)
    monkeypatch.setattr(network, "_gain", lambda clos: 0.2)
    assert not network.queue_pairs()[0].ok


def test_targets_are_those_of_the_list(rows: list[Anchor]) -> None:
    assert {row.target for row in rows if row.number == "A16" and not row.ablation} == {">= 30 %"}
    assert [row.target for row in rows[:4]] == ["30% to 40%", "30% to 40%", ">= 0 %", ">= 95 %"]
