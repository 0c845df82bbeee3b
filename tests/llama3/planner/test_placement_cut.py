from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.topology import load_fabric
from herd.llama3.parallel.layout import Layout
from herd.llama3.planner.placement import (
    RINGS,
    AxisBytes,
    Placement,
    axis_traffic,
    bytes_above_server,
    free_slots,
    minimum_cut,
    shuffled_placement,
    slot_groups,
    slot_traffic,
)
from tests.llama3.planner.placement_samples import Job, contiguous_placement, jobs, small_fabric


@pytest.mark.slow
@given(jobs(), st.integers(0, 3))
def test_never_worse_than_contiguous_order(job: Job, seed: int) -> None:
    found = minimum_cut(job.layout, job.world, job.fabric, job.sent, job.free, seed)
    found.placement.check(job.layout, job.fabric)  # tensor-parallel groups stay in servers
    assert len(set(found.placement.gpus.tolist()) & set(job.free.tolist())) == job.world
    assert found.ratio <= 1
    over = [tier.name for tier in reversed(job.fabric.tiers) if tier.oversubscription > 1]
    before, after = ([found.crossing[order].get(name, 0.0) for name in over] for order in ("contiguous", "recommended"))
    first = next((at for at in range(len(over)) if after[at] != pytest.approx(before[at])), None)
    assert first is None or after[first] < before[first]  # outermost first, inner ones only where outer ones are equal


@given(jobs(), st.integers(0, 9))
def test_the_cut_is_what_axis_traffic_counts(job: Job, seed: int) -> None:
    """The search's own arithmetic, from groups of slots, against messages between pairs of GPUs."""
    placement = shuffled_placement(job.layout, job.world, job.fabric, job.free, seed)
    needs, size = (
        slot_traffic(job.layout, job.world, job.fabric, job.sent),
        np.gcd(job.layout.tp, job.fabric.server.gpus),
    )
    told = bytes_above_server(axis_traffic(job.layout, job.fabric, placement, job.sent))
    for below, layer in zip(job.fabric.layers(), job.fabric.layers()[1:], strict=False):
        cut = needs.cut(placement.gpus[::size] // below.gpus)
        assert cut == pytest.approx(told.get(layer.name, 0.0), abs=1e-3)


def test_as_good_as_trying_everything() -> None:
    """Eight ranks on pods of 3, 4 and 3 free GPUs: every assignment to pods is tried."""
    for sent, layout in [
        (AxisBytes(dp=1.0, pp=9.0), Layout(pp=2)),
        (AxisBytes(dp=9.0, pp=1.0), Layout(pp=2)),
        (AxisBytes(dp=1.0, pp=3.0), Layout(pp=4, vpp=2)),
        (AxisBytes(dp=2.0, pp=2.0, cp=9.0), Layout(pp=2, cp=2)),
    ]:
        fabric = small_fabric(server=4, rack=1, pod=1)
        free = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9, 10])
        needs, counts = slot_traffic(layout, 8, fabric, sent), np.array([3, 4, 3])
        fits = (np.array(pods) for pods in product(range(3), repeat=8))
        least = min(needs.cut(pods) for pods in fits if (np.bincount(pods, minlength=3) <= counts).all())
        found = minimum_cut(layout, 8, fabric, sent, free)
        assert found.crossing["recommended"]["cluster"] == pytest.approx(least)


def test_helps_where_replicas_do_not_divide_pods() -> None:
    """A replica of 8 GPUs on pods of 12: contiguous order cuts every third pipeline, whole ones need no cut."""
    fabric, layout, sent = small_fabric(pod=3, rack=1), Layout(tp=4, pp=2, vpp=2), AxisBytes(dp=1.0, pp=100.0)
    found = minimum_cut(layout, 24, fabric, sent)
    # 4 GPUs a stage: the second replica of three is cut twice (wrap: V - 1 of V), and each of 2 x 4 rings in two pods
    assert found.crossing["contiguous"]["cluster"] == 4 * 100 * 1.5 + 8 * 2
    assert found.crossing["recommended"]["cluster"] == 8 * 3
    groups = found.placement.gpus.reshape(3, 8) // 12
    assert (groups == groups[:, :1]).all()


def test_much_fsdp_traffic_puts_dp_inside_pods() -> None:
    """ZeRO-3's weights for each micro-batch outweigh the pipeline's activations: rings stay in pods instead."""
    fabric, layout = small_fabric(pod=2, rack=1, cluster=2), Layout(tp=4, pp=2)
    found = minimum_cut(layout, 16, fabric, AxisBytes(dp=100.0, pp=1.0))
    stages = found.placement.gpus.reshape(2, 2, 4)[:, :, 0] // 8  # [DP, PP] -> pod
    assert stages[0].tolist() == stages[1].tolist()
    assert found.crossing["recommended"]["cluster"] == 2 * 4 * 1.0
    assert found.ratio == pytest.approx(8 / 1600)


def test_inner_tiers_are_cut_without_leaving_the_outer_group() -> None:
    fabric, layout = small_fabric(server=4, rack=2, pod=3, cluster=2, over=(1, 4, 7)), Layout(tp=4, pp=3)
    found = minimum_cut(layout, 48, fabric, AxisBytes(dp=1.0, pp=50.0))
    plain, best = found.crossing["contiguous"], found.crossing["recommended"]
    assert best["cluster"] == plain["cluster"]  # two replicas a pod already
    assert best["pod"] <= plain["pod"]


def test_full_bisection_keeps_contiguous_order() -> None:
    fabric, layout = load_fabric("ib-24k"), Layout(tp=8, pp=16)
    found = minimum_cut(layout, 2048, fabric, AxisBytes(dp=1.0, pp=1.0))
    assert (found.placement.gpus == contiguous_placement(layout, 2048, fabric).gpus).all()
    assert (found.layer, found.gain, found.ratio) == ("", 1.0, 1.0)


def test_a_job_inside_a_pod_crosses_none() -> None:
    found = minimum_cut(Layout(tp=8, pp=16), 2048, load_fabric("roce-24k"), AxisBytes(dp=1.0, pp=1.0))
    assert found.crossing["recommended"]["cluster"] == 0
    assert (found.gain, found.ratio) == (float("inf"), 1.0)


def test_seeds_decide_and_nothing_else_does() -> None:
    job = (Layout(tp=4, pp=2, vpp=2), 48, small_fabric(), AxisBytes(dp=1.0, pp=3.0))
    one, same = (minimum_cut(*job, seed=3) for _ in range(2))
    assert (one.placement.gpus == same.placement.gpus).all()
    assert one.crossing == same.crossing
    assert one.crossing[RINGS]["cluster"] <= one.crossing["random"]["cluster"]


def test_groups_are_those_below_oversubscribed_tiers() -> None:
    fabric = small_fabric(over=(1, 2, 7))
    slots = free_slots(Layout(tp=4), 72, fabric)
    outer, inner = slot_groups(fabric, slots)
    assert (outer == slots[:, 0] // 24).all()  # pods, which the cluster joins
    assert (inner == slots[:, 0] // 8).all()  # racks, which pods join
    assert slot_groups(load_fabric("ib-24k"), slots) == []


def test_a_placement_of_ranks_reaches_the_table() -> None:
    fabric, layout = small_fabric(), Layout(tp=4, pp=2)
    found = minimum_cut(layout, 16, fabric, AxisBytes(tp=5.0, dp=1.0, pp=3.0))
    again = axis_traffic(layout, fabric, Placement(found.placement.gpus), AxisBytes(tp=5.0, dp=1.0, pp=3.0))
    assert [row.as_dict() for row in found.traffic] == [row.as_dict() for row in again]
