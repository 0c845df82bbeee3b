"""Rates of flows that share links: max-min fairness.

What congestion control strives for (Bertsekas, Gallager, Data Networks, section 6.5.2): no flow can have more without
taking from one that has no more. Found by progressive filling, many links at a time: a link whose fair share is the
least on the way of each of its flows cannot give them more, so those flows are settled. Given up: bursts, round-trip
times, losses and pauses; every flow always has something to send.

Shapes: L links, F flows; rates in the unit of the capacities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Floats = NDArray[np.float64]


def max_min(use: sparse.sparray, capacity: Floats) -> Floats:
    """Return the max-min fair rates, (F,).

    `use`: (L, F), the part of a flow's rate that a link carries: 1 on its path, less where a flow is spread over
    several. `capacity`: (L,). Raises ValueError for a negative part or capacity, or for a flow that uses no link.
    """
    by_link = _checked(use, capacity)
    busy = np.diff(by_link.indptr) > 0
    by_link, left = by_link[busy], capacity[busy].astype(np.float64)
    by_flow = by_link.tocsc()
    rates, open_ = np.zeros(by_link.shape[1]), np.ones(by_link.shape[1], dtype=bool)
    while open_.any():
        demand = by_link @ open_.astype(np.float64)
        share = np.divide(left, demand, out=np.full(len(left), np.inf), where=demand > 0)
        least = np.where(open_, np.minimum.reduceat(share[by_flow.indices], by_flow.indptr[:-1]), np.inf)
        tightest = np.minimum.reduceat(least[by_link.indices], by_link.indptr[:-1]) == share
        tightest &= demand > 0
        settled = open_ & np.logical_or.reduceat(tightest[by_flow.indices], by_flow.indptr[:-1])
        rates[settled] = least[settled]
        open_ &= ~settled
        left = np.maximum(left - by_link @ np.where(settled, rates, 0.0), 0.0)
    return rates


def _checked(use: sparse.sparray, capacity: Floats) -> sparse.csr_array:
    by_link = sparse.csr_array(use, dtype=np.float64, copy=True)
    by_link.sum_duplicates()
    by_link.eliminate_zeros()
    if capacity.shape != (by_link.shape[0],):
        raise ValueError(f"capacity: {capacity.shape} for {by_link.shape[0]} links; give one for each")
    if (by_link.data < 0).any() or (capacity < 0).any():
        raise ValueError("use, capacity: some are negative; a flow's part and a link's rate are 0 or more")
    if len(idle := np.flatnonzero(np.diff(by_link.tocsc().indptr) == 0)):
        raise ValueError(f"use: flow {idle[0]} crosses no link, so that nothing bounds it; leave it out")
    return by_link
