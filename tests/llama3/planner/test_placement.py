from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.topology import load_fabric
from herd.llama3.parallel.layout import Layout
from herd.llama3.planner.placement import Placement, fragmented_gpus, free_slots, shuffled_placement
from tests.llama3.planner.placement_samples import Job, contiguous_placement, jobs, small_fabric


@given(jobs(), st.integers(0, 9))
def test_orders_put_each_rank_on_a_free_gpu_of_its_own(job: Job, seed: int) -> None:
    plain = contiguous_placement(job.layout, job.world, job.fabric, job.free)
    for placement in (plain, shuffled_placement(job.layout, job.world, job.fabric, job.free, seed)):
        placement.check(job.layout, job.fabric)  # tensor-parallel groups inside servers
        assert len(set(placement.gpus.tolist()) & set(job.free.tolist())) == job.world == placement.world
    assert plain.gpus.tolist() == job.free[: job.world].tolist()  # whole servers are free


def test_gpus_that_make_no_whole_group_stay_idle() -> None:
    fabric, layout = small_fabric(), Layout(tp=2)
    free = np.array([0, 1, 3, 5, 8, 9, 10, 11])  # three of server 0, one of server 1, four of server 2
    assert free_slots(layout, 6, fabric, free).tolist() == [[0, 1], [8, 9], [10, 11]]
    with pytest.raises(ValueError, match=r"8 ranks need 4 slots of 2 free GPUs.*3 are free; start at most 3 replicas"):
        free_slots(layout, 8, fabric, free)


def test_groups_larger_than_a_server_take_whole_servers() -> None:
    assert free_slots(Layout(tp=16), 16, load_fabric("roce-24k")).shape == (3072, 8)
    assert free_slots(Layout(tp=6), 6, load_fabric("roce-24k")).shape == (12288, 2)


def test_a_fragmented_cluster_loses_whole_servers() -> None:
    fabric = load_fabric("roce-24k")
    free = fragmented_gpus(fabric, 0.25, seed=1)
    assert len(free) == 18_432
    assert np.unique(free // 8, return_counts=True)[1].tolist() == [8] * 2304
    assert (free == fragmented_gpus(fabric, 0.25, seed=1)).all()
    assert not np.array_equal(free, fragmented_gpus(fabric, 0.25, seed=2))


def test_errors_name_what_is_wrong() -> None:
    fabric = small_fabric()
    with pytest.raises(ValueError, match="GPU 3 is given to 2 ranks"):
        Placement(np.array([1, 3, 3]))
    with pytest.raises(ValueError, match=r"taken: 1 is not a share"):
        fragmented_gpus(fabric, 1.0)
    with pytest.raises(ValueError, match=r"available: GPUs 0 .. 72 are not the 0 .. 71 of small"):
        contiguous_placement(Layout(), 8, fabric, np.arange(73))
    with pytest.raises(ValueError, match="are not all among the 72 of small"):
        Placement(np.array([71, 72])).check(Layout(), fabric)
    with pytest.raises(
        ValueError, match=r"76 ranks need 19 slots of 4 free GPUs.*; 18 are free; start at most 18 replicas"
    ):
        contiguous_placement(Layout(tp=4), 76, fabric)
