from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from herd.llama3.hardware.topology import load_fabric
from herd.llama3.parallel.comm_records import Collective
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import RankCoords
from herd.llama3.planner.placement import (
    AxisBytes,
    Placement,
    axis_pairs,
    axis_sizes,
    axis_traffic,
    bytes_above_server,
    joining_layers,
    ring_numbers,
    shuffled_placement,
)
from tests.llama3.planner.placement_samples import Job, contiguous_placement, jobs, small_fabric

AXES = ("tp", "cp", "pp", "dp", "replica")
ONE = AxisBytes(1.0, 1.0, 1.0, 1.0, 1.0)


@given(jobs())
def test_no_byte_is_lost_between_layers(job: Job) -> None:
    placement = contiguous_placement(job.layout, job.world, job.fabric, job.free)
    degrees = axis_sizes(job.layout, job.world)
    for by in ("gpu", "rank"):
        rows = axis_traffic(job.layout, job.fabric, placement, job.sent, by)  # type: ignore[arg-type]
        assert [row.axis for row in rows] == [axis for axis in AXES if degrees[axis] > 1]
        for row in rows:
            each = getattr(job.sent, row.axis)
            total = job.world * each
            if row.axis == "pp":  # V stages send ahead from each rank but the last, which has one fewer
                pp, vpp = job.layout.pp, job.layout.vpp
                total = job.world / pp * each * (pp - 1 + (vpp - 1) / vpp)
            assert sum(row.bytes) == pytest.approx(total)
            assert sum(row.shares) == pytest.approx(1)
            assert row.crosses == row.layers[int(np.flatnonzero(row.shares)[-1])]


@given(jobs())
def test_groups_are_those_of_the_mesh(job: Job) -> None:
    places = [RankCoords.from_rank(rank, job.layout) for rank in range(job.world)]
    within = job.layout.dp(job.world) // job.layout.dp_replicate
    keys = {
        "tp": [(place.dp, place.pp, place.cp) for place in places],
        "cp": [(place.dp, place.pp, place.tp) for place in places],
        "dp": [(place.dp // within, place.pp, place.tp) for place in places],
        "replica": [(place.dp % within, place.pp, place.cp, place.tp) for place in places],
    }
    for axis, numbers in ring_numbers(job.layout, job.world).items():
        assert len(set(zip(keys[axis], numbers.tolist(), strict=True))) == len(set(keys[axis])) == len(set(numbers))


@given(jobs())
def test_every_rank_of_a_ring_sends_once_and_receives_once(job: Job) -> None:
    placement = shuffled_placement(job.layout, job.world, job.fabric, job.free)
    for axis in ("tp", "cp", "dp", "replica"):
        pairs, ring = axis_pairs(axis, job.layout, placement, ONE), ring_numbers(job.layout, job.world)[axis]
        assert sorted(pairs.source) == sorted(pairs.target) == list(range(job.world))
        assert (ring[pairs.source] == ring[pairs.target]).all()


@given(jobs())
def test_rings_by_gpu_cross_no_more_than_rings_by_rank(job: Job) -> None:
    placement = shuffled_placement(job.layout, job.world, job.fabric, job.free)
    sorted_, by_rank = (
        bytes_above_server(axis_traffic(job.layout, job.fabric, placement, job.sent, by))
        for by in ("gpu", "rank")  # type: ignore[arg-type]
    )
    assert all(sorted_[name] <= by_rank[name] * (1 + 1e-9) for name in sorted_)


def test_a_ring_over_three_pods_crosses_three_times() -> None:
    fabric, layout = small_fabric(), Layout()
    rows = axis_traffic(layout, fabric, contiguous_placement(layout, fabric.gpus, fabric), AxisBytes(dp=10.0))
    assert [row.axis for row in rows] == ["dp"]
    # 72 GPUs: 18 servers in 9 racks in 3 pods; every group's last GPU sends out of it
    assert rows[0].bytes == (54 * 10.0, 9 * 10.0, 6 * 10.0, 3 * 10.0)
    assert bytes_above_server(rows) == {"rack": 180.0, "pod": 90.0, "cluster": 30.0}
    assert rows[0].crosses == "cluster"


def test_pipeline_wraps_around_with_virtual_stages_only() -> None:
    for vpp, back in [(1, 0.0), (4, 0.75)]:
        layout, fabric = Layout(pp=3, vpp=vpp), small_fabric()
        pairs = axis_pairs("pp", layout, Placement(np.array([0, 1, 2])), AxisBytes(pp=8.0))
        sent = np.zeros((3, 3))
        np.add.at(sent, (pairs.source, pairs.target), pairs.bytes)
        assert sent.tolist() == [[0, 4, 4 * back], [4, 0, 4], [4 * back, 4, 0]]
        assert sent.sum(axis=1)[1] == 8  # in the middle
        assert joining_layers(fabric, np.array([0, 3, 7, 23]), np.array([1, 4, 8, 24])).tolist() == [0, 1, 2, 3]


def test_llama_3_s_axes_cross_the_layers_that_the_paper_says() -> None:
    """Table 4, second row on the RoCE cluster: TP in servers, a pipeline of 128 GPUs in a pod, FSDP between pods."""
    layout, fabric = Layout(tp=8, pp=16, vpp=8), load_fabric("roce-24k")
    rows = {row.axis: row for row in axis_traffic(layout, fabric, contiguous_placement(layout, 16_384, fabric), ONE)}
    assert {axis: row.crosses for axis, row in rows.items()} == {"tp": "server", "pp": "pod", "dp": "cluster"}
    assert rows["tp"].shares[0] == 1
    assert rows["pp"].shares[1] == 0.5  # two servers of a rack hold two stages; the next one is elsewhere, as is wrap
    assert rows["dp"].size == 128
    assert rows["dp"].bytes[-1] == 6 * 128  # 16,384 GPUs in 6 pods, 8 x 16 rings


def test_tensor_parallel_groups_of_two_servers_cross_the_rack() -> None:
    layout, fabric = Layout(tp=16), load_fabric("roce-24k")
    rows = axis_traffic(layout, fabric, contiguous_placement(layout, 64, fabric), ONE)
    assert {row.axis: row.crosses for row in rows} == {"tp": "rack", "dp": "pod"}


def test_bytes_of_collectives() -> None:
    def one(kind: str, axis: str, when: str, size: int, group: int, count: float) -> Collective:
        return Collective(kind, axis, "forward", when, "layer", size, "bfloat16", group, count)

    sent = [
        one("all-gather", "tp", "each", 80, 8, 2),  # 7/8 of 80, twice in each of 3 micro-batches
        one("all-reduce", "replica", "last", 100, 2, 1),  # twice a half of 100, once
        one("reduce-scatter", "fsdp", "last", 64, 4, 1),
        one("send", "pp", "each", 10, 2, 1),  # 10 forward and 10 back for 2 stages and 3 micro-batches
        one("send", "pp", "each", 10, 2, 1),
    ]
    assert AxisBytes.from_collectives(sent, Layout(tp=8, pp=4, vpp=2), 3) == AxisBytes(420.0, 0.0, 120.0, 48.0, 100.0)


def test_errors_name_what_is_wrong() -> None:
    fabric = small_fabric()
    with pytest.raises(ValueError, match=r"dp: -1 bytes.*write 0 or more"):
        AxisBytes(dp=-1)
    with pytest.raises(ValueError, match="does not divide 6 processes"):
        axis_traffic(Layout(tp=4), fabric, Placement(np.arange(6)), ONE)
    with pytest.raises(ValueError, match=r"group 0 \(tp 4\) is on servers 0, 1; put it on one, which has 4"):
        axis_traffic(Layout(tp=4), fabric, Placement(np.arange(2, 10)), ONE)
