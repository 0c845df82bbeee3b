"""Union-find over arrays (Tarjan 1975), with path halving; the smaller node of two is the root."""

from __future__ import annotations

import numpy as np
from numba import njit

from llama3.data.kernels.arrow import Offsets


@njit(cache=True, nogil=True)
def _root(parents: Offsets, node: int) -> int:
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


@njit(cache=True, nogil=True)
def smallest_connected(count: int, left: Offsets, right: Offsets) -> Offsets:
    """Return the smallest node that each of `count` nodes is connected to by the edges `left[i]` - `right[i]`."""
    parents = np.arange(count)
    for i in range(len(left)):
        one, two = _root(parents, left[i]), _root(parents, right[i])
        if one < two:
            parents[two] = one
        else:
            parents[one] = two
    for node in range(count):  # a parent is never above its child, so it is final when its child looks at it
        parents[node] = parents[parents[node]]
    return parents
