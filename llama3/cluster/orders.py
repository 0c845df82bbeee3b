"""Orders of slots over groups of GPUs (pods, zones, racks): those one would write down, and a local search from one.

An order is a permutation of all free slots: the first `used` hold the job, slot by slot of its ranks; the rest stay
idle. The search swaps blocks that mean something to the job (a slot, a pipeline stage, half a pipeline, a replica) with
each other and with idle ones, and takes what costs no more. Generic graph partitioning (Kernighan-Lin) moves single
nodes, and a ring gains nothing before its last member leaves a group. Given up: a proof that nothing better exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from llama3.cluster.placement import Ints

SWAPS = 3000
"""Swaps that are tried, of jobs of up to 2,048 slots; fewer for larger ones, so that time stays the same."""


def starts(shape: tuple[int, int, int], group: Ints) -> Iterator[Ints]:
    """Yield orders for a job of `shape` slots [DP, PP, slots of a stage] on free slots that lie in `group`.

    First plain contiguous order. Then every mix of: ranks in the order [TP, CP, PP, DP] or with DP inside PP; cut
    anywhere, or at stages, parts of the pipeline (or of DP), whole replicas; groups as wired, or the fullest first.
    """
    for stage_major in (False, True):
        for block in blocks(shape, stage_major):
            for fullest in (False, True):
                yield packed(shape, group, block, stage_major, fullest)


def blocks(shape: tuple[int, int, int], stage_major: bool = False) -> list[int]:
    """Return sizes of blocks, in slots: one, a stage, and multiples of it that divide a replica (or all of a stage)."""
    dp, pp, stage = shape
    along = dp if stage_major else pp
    return sorted({1, *(stage * part for part in range(1, along + 1) if along % part == 0)})


def packed(
    shape: tuple[int, int, int], group: Ints, block: int, stage_major: bool = False, fullest: bool = False
) -> Ints:
    """Return the order that fills each group with whole blocks, then what is left of the groups."""
    numbers, group_of, counts = np.unique(group, return_inverse=True, return_counts=True)
    place = np.empty(len(numbers), np.int64)
    place[np.argsort(-counts, kind="stable") if fullest else np.arange(len(numbers))] = np.arange(len(numbers))
    first = np.cumsum(counts) - counts  # slots of a group lie side by side
    left_over = np.arange(len(group)) - first[group_of] >= (counts // block * block)[group_of]
    slots = np.lexsort((np.arange(len(group)), place[group_of], left_over))
    used = int(np.prod(shape))
    rank_order = np.arange(used).reshape(shape)
    job = (rank_order.transpose(1, 0, 2) if stage_major else rank_order).reshape(-1)
    order = slots.copy()
    order[job] = slots[:used]
    return order


def improved(
    order: Ints, used: int, sizes: list[int], cut: Callable[[Ints], float], groups: list[Ints], seed: int
) -> Ints:
    """Return `order` after swaps of blocks of `sizes` slots, of which each cuts no more than what was there before.

    `cut`: what crosses, of the groups [used] of a job's slots. `groups`: of each free slot; the last is cut, no rank
    leaves the others.
    """
    random, (*fixed, group) = np.random.default_rng(seed), groups
    order, least = order.copy(), cut(group[order[:used]])
    tries = min(SWAPS, SWAPS * 2048 // used + 1)
    for size, one, two in zip(random.choice(sizes, tries), *random.random((2, tries)), strict=True):
        mine, other = int(one * (used // size)) * size, int(two * (len(order) // size)) * size
        here, there = order[mine : mine + size].copy(), order[other : other + size].copy()
        if mine == other or any((each[here] != each[there]).any() for each in fixed):
            continue
        order[mine : mine + size], order[other : other + size] = there, here
        now = cut(group[order[:used]])
        if now > least:
            order[mine : mine + size], order[other : other + size] = here, there
        least = min(least, now)
    return order


def in_rank_order(order: Ints, group: Ints, used: int) -> Ints:
    """Return `order` with the slots that a job holds in each group handed out by rank, nearest first."""
    order = order.copy()
    by_group = np.argsort(group[order[:used]], kind="stable")
    order[by_group] = np.sort(order[:used])  # slots count up through the groups
    return order
