from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.dedup.minhash import large_star, small_star

NODES = st.integers(0, 12).map(lambda place: place * 10_000_000_019)


def joined(edges: list[tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Return the label of each node once no star changes, and the rounds that this took."""
    ends = np.array(edges, np.int64).reshape(-1, 2)
    node, other = np.concatenate((ends, ends[:, ::-1])).T
    rounds, larger_moved, smaller_moved = 0, True, True
    while larger_moved or smaller_moved:
        rounds += 1
        node, other, larger_moved = large_star(node, other)
        left, right, smaller_moved = small_star(node, other)
        node, other = np.concatenate((left, right)), np.concatenate((right, left))
    labels = {int(end): int(end) for end in ends.ravel()}
    for end, label in zip(node.tolist(), other.tolist(), strict=True):
        labels[end] = min(labels[end], label)
    return labels, rounds


@given(st.lists(st.tuples(NODES, NODES).filter(lambda ends: ends[0] != ends[1])))
def test_components_are_the_reachable_sets(edges: list[tuple[int, int]]) -> None:
    groups: list[set[int]] = []
    for left, right in edges:
        touching = [group for group in groups if left in group or right in group]
        groups = [group for group in groups if group not in touching] + [{left, right}.union(*touching)]
    assert joined(edges)[0] == {node: min(group) for group in groups for node in group}


def test_a_long_chain_in_any_order_is_one_component() -> None:
    chain = np.random.default_rng(0).permutation(100_000)
    edges = np.stack([chain[:-1], chain[1:]], axis=1)
    found, rounds = joined([(int(left), int(right)) for left, right in np.random.default_rng(1).permutation(edges)])
    assert len(found) == 100_000
    assert set(found.values()) == {0}
    assert rounds < 20
