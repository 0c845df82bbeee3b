"""Minimum cut: the order of ranks that sends least over the oversubscribed layers of the network.

What counts is which group of GPUs (pod, zone) each slot of ranks lies in: a ring whose members lie in k > 1 groups
crosses k times, a pair of pipeline stages once if they lie apart. The exact minimum is NP-hard (graph partitioning).
Meta's scheduler looks for it too and recommends the rank order (Gangidi et al., SIGCOMM 2024, unpublished); this search
is ours. It starts from orders that one would write down: [TP, CP, PP, DP] in one line over the free GPUs, and the same
with DP inside PP, each cut at stages, parts of the pipeline or whole replicas, groups in the order of the wiring or the
fullest first. The best is then improved by seeded swaps of blocks. Plain contiguous order is among the starts and every
step is accepted only if nothing gets worse, so the outermost oversubscribed layer never carries more than under
contiguous order. Inner ones come next, by swaps that leave the outer ones as they are; they may carry more than before
when an outer one gained. Given up: a proof of optimality, and contention on single links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama3.cluster.axes import AxisBytes, AxisTraffic, Order, axis_traffic, crossing, pipeline_pairs, ring_numbers
from llama3.cluster.orders import blocks, improved, in_rank_order, starts
from llama3.cluster.placement import Ints, Placement, free_slots, on_slots, shuffled, slot_size
from llama3.cluster.topology import Fabric
from llama3.parallel.layout import Layout

RINGS = "random, rings by GPU"
"""The name of random order with rings that run through their members in the order of GPUs."""
FLAGS = 16
"""Flags per slot up to which they are faster than sorting."""
LEAST_GAIN = 1e-9
"""Share of the crossing bytes below which an order is no better than contiguous order."""


@dataclass(frozen=True)
class Recommendation:
    """A rank order with what it saves."""

    placement: Placement
    """Rank i runs on GPU `placement.gpus[i]`."""
    traffic: list[AxisTraffic]
    """By axis, under this order."""
    crossing: dict[str, dict[str, float]]
    """Order (contiguous, recommended, random, and `RINGS`) -> layer -> bytes of a step that cross it."""
    layer: str
    """Outermost oversubscribed layer, which comes first; "" if there is none, and so nothing to gain."""

    @property
    def gain(self) -> float:
        """Return the bytes over `layer` in random order as a multiple of the recommended one's; 1 if there are none."""
        return self.over("recommended", "random")

    @property
    def ratio(self) -> float:
        """Return the bytes over `layer` in the recommended order as a share of contiguous order's: at most 1."""
        return self.over("contiguous", "recommended")

    def over(self, base: str, order: str) -> float:
        """Return the bytes over `layer` in one order over those in another; 1 if neither sends any."""
        mine, other = (self.crossing[name].get(self.layer, 0.0) for name in (order, base))
        if not other:
            return float("inf") if mine else 1.0
        return mine / other


class Ring(NamedTuple):
    """An axis that talks in rings, seen from slots."""

    number: Ints
    """[slots]: ring of each slot."""
    bytes: float
    """That a crossing of one ring sends, times the rings that run side by side through the same slots."""


class Demand(NamedTuple):
    """What slots of ranks send each other in a step."""

    rings: list[Ring]
    source: Ints
    target: Ints
    """[pairs]: slots of neighbouring pipeline stages."""
    bytes: NDArray[np.float64]
    """Of each pair."""

    def cut(self, group: Ints) -> float:
        """Return the bytes that cross if slot i of the job lies in group `group[i]`."""
        apart = group[self.source] != group[self.target]
        total = float(self.bytes[apart].sum())
        total += sum(ring.bytes * _crossings(ring.number, group) for ring in self.rings)
        return total


def _crossings(ring: Ints, group: Ints) -> int:
    """Return how often rings cross between groups: as often as they have groups, if more than one."""
    width = int(group.max()) + 1
    key = ring * width + group
    if (cells := (int(ring.max()) + 1) * width) <= FLAGS * len(key):
        flags = np.zeros(cells, bool)
        flags[key] = True
        seen = np.flatnonzero(flags)
    else:
        seen = np.unique(key)
    groups = np.bincount(seen // width)
    return int(groups[groups > 1].sum())


def minimum_cut(
    layout: Layout, world: int, fabric: Fabric, sent: AxisBytes, available: Ints | None = None, seed: int = 0
) -> Recommendation:
    """Return the recommended order of ranks on the free GPUs (`available`; None: all).

    Raises ValueError if they are too few, or the layout does not divide `world`.
    """
    slots = free_slots(layout, world, fabric, available)
    best = on_slots(slots[_search(layout, world, fabric, demand(layout, world, fabric, sent), slots, seed)], world)
    chance = shuffled(layout, world, fabric, available, seed)
    orders: dict[str, tuple[Placement, Order]] = {
        "contiguous": (on_slots(slots, world), "gpu"),
        "recommended": (best, "gpu"),
        "random": (chance, "rank"),
        RINGS: (chance, "gpu"),
    }
    rows = {name: axis_traffic(layout, fabric, order, sent, by) for name, (order, by) in orders.items()}
    layer = next((tier.name for tier in reversed(fabric.tiers) if tier.oversubscription > 1), "")
    return Recommendation(best, rows["recommended"], {name: crossing(row) for name, row in rows.items()}, layer)


def slot_groups(fabric: Fabric, slots: Ints) -> list[Ints]:
    """Return, for each oversubscribed tier, outermost first, [slots]: the group below it that each slot lies in."""
    below = [layer.gpus for layer in fabric.layers()]
    tiers = [size for size, tier in zip(below, fabric.tiers, strict=False) if tier.oversubscription > 1]
    return [slots[:, 0] // size for size in reversed(tiers)]


def demand(layout: Layout, world: int, fabric: Fabric, sent: AxisBytes) -> Demand:
    """Return what slots send each other; ranks of one slot share all coordinates but their tensor-parallel one."""
    size = slot_size(layout, fabric)
    rings = []
    for axis, number in ring_numbers(layout, world).items():
        beside = 1 if axis == "tp" else size
        members = np.unique(number[::size], return_inverse=True)[1]
        rings.append(Ring(members, getattr(sent, axis) * beside))
    source, target, part = pipeline_pairs(layout, world, sent.pp)
    first = source % size == 0
    return Demand(
        [ring for ring in rings if ring.bytes and np.bincount(ring.number).max() > 1],
        source[first] // size,
        target[first] // size,
        part[first] * size,
    )


def _search(layout: Layout, world: int, fabric: Fabric, needs: Demand, slots: Ints, seed: int) -> Ints:
    """Return the order of slots (see `orders`) that cuts least, or plain order if none cuts less."""
    size = slots.shape[1]
    shape, used = (layout.dp(world), layout.pp, layout.cp * layout.tp // size), world // size
    plain, groups = np.arange(len(slots)), slot_groups(fabric, slots)
    if not groups:
        return plain

    def cuts(order: Ints) -> list[float]:
        return [needs.cut(group[order[:used]]) for group in groups]

    found = min(starts(shape, groups[0]), key=lambda order: needs.cut(groups[0][order[:used]]))
    for depth, group in enumerate(groups):
        found = improved(found, used, blocks(shape), needs.cut, groups[: depth + 1], seed)
        found = in_rank_order(found, group, used)
    return found if _less(cuts(found), cuts(plain)) else plain


def _less(mine: list[float], other: list[float]) -> bool:
    """Return whether `mine` is less at the first layer where the two differ."""
    pairs = zip(mine, other, strict=True)
    return next((one < two for one, two in pairs if abs(one - two) > LEAST_GAIN * two), False)
