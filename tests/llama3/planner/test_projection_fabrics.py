"""The same job on several clusters, and anchor A17."""

from __future__ import annotations

from functools import cache
from time import process_time

import pytest

from benchmarks.plan_anchors.network import MOST, fabric_anchors
from benchmarks.plan_anchors.published import meta_layout, table4_query
from herd.llama3.hardware.topology import Fabric, load_fabric
from herd.llama3.parallel.layout import LLAMA3_VOCAB_SIZE, Layout
from herd.llama3.planner.device_curves import prior_curves
from herd.llama3.planner.layout_search import LayoutQuery
from herd.llama3.planner.projection import fabric_step_model, project_on_fabric
from herd.llama3.planner.routing import bandwidth_share
from herd.llama3.recipe.sections import Model

CURVES = prior_curves(load_fabric("roce-24k").accelerator)
SMALL = LayoutQuery(Model.model_validate({"preset": "8b"}), LLAMA3_VOCAB_SIZE, 8_192, 2**22, 256, 80e9)


@cache
def fabric(name: str) -> Fabric:
    return load_fabric(name)


@cache
def hashed() -> Fabric:
    return fabric("roce-24k").model_copy(update={"name": "hashed", "routing": "ecmp", "queue_pairs": 1})


def test_a17_holds_and_plain_ecmp_misses() -> None:
    begin = process_time()
    rows = fabric_anchors()
    assert process_time() - begin < 10
    assert {row.number for row in rows} == {"A17"}
    assert [row.verdict for row in rows] == ["ok", "ok", "ok", "misses"]
    ratios = [row.predicted for row in rows]
    assert all(1 <= ratio <= 1 + MOST for ratio in ratios[:3])  # InfiniBand has full bisection, so it is never slower
    assert ratios[3] > 1 + 2 * MOST
    assert all("no figure is published" in row.note for row in rows[:3])


def test_the_model_of_a_cluster_has_what_its_routing_leaves() -> None:
    for name in ["roce-24k", "ib-24k", "ai-zone"]:
        network = fabric_step_model(SMALL, fabric(name), CURVES).network
        assert network.share == bandwidth_share(fabric(name))
        rates = [layer.bytes_per_s for layer in fabric(name).layers()[2:]]
        assert [layer.bytes_per_s for layer in network.layers[2:]] == [rate * network.share for rate in rates]


def test_only_what_crosses_racks_is_slower_where_flows_are_hashed() -> None:
    tuned, plain = (
        project_on_fabric(table4_query(2), each, CURVES, meta_layout(2)) for each in (fabric("roce-24k"), hashed())
    )
    assert plain.share < tuned.share < 1
    slower = {
        name: value / tuned.best.time.as_dict()[name]
        for name, value in plain.best.time.as_dict().items()
        if value > tuned.best.time.as_dict()[name] * (1 + 1e-9)
    }
    assert set(slower) >= {"cp", "pp"}
    assert slower.keys() <= {"cp", "pp", "dp", "bubble", "imbalance"}
    assert plain.best.time.tp == tuned.best.time.tp  # inside servers
    assert slower["pp"] == pytest.approx(tuned.share / plain.share, rel=0.02)  # but for latency
    assert plain.best.memory == tuned.best.memory


def test_a_layout_that_cannot_be_cut_so_is_told() -> None:
    with pytest.raises(ValueError, match="tp 8 x cp 1 x pp 3 = 24 does not divide 256"):
        project_on_fabric(SMALL, fabric("ib-24k"), CURVES, Layout(tp=8, pp=3))
