from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.planner.placement import (
    block_sizes,
    candidate_orders,
    improve_by_swaps,
    pack_blocks,
    sort_within_groups,
)

SHAPE = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(SHAPE, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_every_start_is_a_permutation_and_the_first_is_contiguous(
    shape: tuple[int, int, int], counts: list[int], data: st.DataObject
) -> None:
    used = int(np.prod(shape))
    spare = max(0, used - sum(counts))
    group = np.repeat(np.arange(len(counts) + 1), [*counts, spare])
    found = list(candidate_orders(shape, group))
    assert found[0].tolist() == list(range(len(group)))
    assert all(sorted(order) == list(range(len(group))) for order in found)
    order = data.draw(st.sampled_from(found))
    sorted_ = sort_within_groups(order, group, used)
    assert sorted(sorted_) == sorted(order)
    assert (group[sorted_] == group[order]).all()  # no rank leaves its group


def test_blocks_are_stages_and_parts_of_a_replica() -> None:
    assert block_sizes((3, 4, 2)) == [1, 2, 4, 8]
    assert block_sizes((3, 4, 2), stage_major=True) == [1, 2, 6]


def test_whole_replicas_go_first_and_the_rest_fills_the_gaps() -> None:
    group = np.repeat([0, 1, 2], [3, 3, 2])  # replicas of two slots, four of them
    assert pack_blocks((4, 2, 1), group, 2).tolist() == [0, 1, 3, 4, 6, 7, 2, 5]
    assert pack_blocks((1, 2, 1), np.repeat([0, 1], [1, 2]), 1, fullest=True)[:2].tolist() == [1, 2]


def test_dp_inside_pp_puts_a_stage_side_by_side() -> None:
    assert pack_blocks((2, 2, 1), np.zeros(4, np.int64), 1, stage_major=True).tolist() == [0, 2, 1, 3]


@given(st.integers(0, 99))
def test_swaps_never_cost_more_and_leave_fixed_groups(seed: int) -> None:
    outer, inner = np.repeat([0, 1], 6), np.repeat([0, 1, 2, 3], 3)
    wanted = np.random.default_rng(seed).integers(4, size=10)

    def cut(group: np.ndarray) -> float:
        return float((group != wanted).sum())

    order = np.arange(12)
    found = improve_by_swaps(order, 10, [1, 2], cut, [outer, inner], seed)
    assert sorted(found) == list(range(12))
    assert (outer[found[:10]] == outer[order[:10]]).all()
    assert cut(inner[found[:10]]) <= cut(inner[order[:10]])


def test_swaps_reach_idle_slots_and_an_order_that_costs_nothing() -> None:
    group, wanted = np.repeat([0, 1, 2], 4), np.array([2, 2, 1, 1, 0, 0, 2, 2])
    found = improve_by_swaps(np.arange(12), 8, [1, 2], lambda mine: float((mine != wanted).sum()), [group], seed=0)
    assert group[found[:8]].tolist() == wanted.tolist()
