from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llama3.data.dedup.minhash import components

NODES = st.integers(-3, 12).map(lambda place: place * 10_000_000_019)


def joined(edges: list[tuple[int, int]]) -> dict[int, int]:
    left, right = np.array(edges, np.int64).reshape(-1, 2).T
    nodes, labels = components(left, right)
    assert nodes.dtype == labels.dtype == np.int64
    return dict(zip(nodes.tolist(), labels.tolist(), strict=True))


@given(st.lists(st.tuples(NODES, NODES)))
def test_components_are_the_reachable_sets(edges: list[tuple[int, int]]) -> None:
    groups: list[set[int]] = []
    for left, right in edges:
        touching = [group for group in groups if left in group or right in group]
        groups = [group for group in groups if group not in touching] + [{left, right}.union(*touching)]
    assert joined(edges) == {node: min(group) for group in groups for node in group}


def test_a_long_chain_in_any_order_is_one_component() -> None:
    chain = np.random.default_rng(0).permutation(100_000)
    edges = np.stack([chain[:-1], chain[1:]], axis=1)
    found = joined([(int(left), int(right)) for left, right in np.random.default_rng(1).permutation(edges)])
    assert len(found) == 100_000
    assert set(found.values()) == {0}
