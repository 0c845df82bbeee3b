"""Time of collectives on layers of unequal speed: ring, double binary tree, recursive halving and doubling.

The alpha-beta model (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521): a step takes the latency of the
outermost layer that it crosses, and its bytes over the narrowest rate on the way. So a collective is a straight line
over the size. A ring has n - 1 steps and crosses the border of each server, rack and pod once, with the cards of all
its members there; halving and doubling has log2 n steps, in which many members cross at once. Latency decides for
small messages and many ranks, oversubscription for large messages.

Given up: protocols and chunk sizes of a library, and contention between collectives. A library's ring is only as good
as the order of its ranks, which is taken to follow the wiring.

Shapes: S bytes of the whole tensor, n members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llama3.planner.topology import Layer

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Algorithm = Literal["ring", "tree", "halving nearest-first", "halving farthest-first"]
"""Halving's order is that of a reduce-scatter, whose first step sends half of the data. An all-gather is the same
backwards (doubling), so that nearest-first always means that neighbours exchange the most."""
LIBRARY: tuple[Algorithm, ...] = ("ring", "tree")
"""What NCCL chooses from."""
ALL: tuple[Algorithm, ...] = (*LIBRARY, "halving nearest-first", "halving farthest-first")
ROUNDING = 1e-12
TREE_RATE = 0.92
"""What a tree reaches of a ring's rate: NCCL's tuning, `src/graph/tuning.cc`."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CommGroup:
    """Members of a collective and how they lie on the network."""

    size: int
    per_layer: tuple[int, ...]
    """Members that share each layer, innermost first; the last number is the size."""

    def __post_init__(self) -> None:
        if self.per_layer[-1] != self.size or any(inner > outer for inner, outer in pairwise(self.per_layer)):
            raise ValueError(f"group: {self.size} members on layers of {self.per_layer}; layers grow up to the size")


@dataclass(frozen=True)
class CollectiveCurve:
    """Time of a collective over the size of the tensor."""

    start: float
    """Seconds of the latencies."""
    per_byte: float
    """Seconds of each byte of the whole tensor."""

    def at(self, size: float) -> float:
        """Return the seconds of `size` bytes."""
        return self.start + self.per_byte * size


def contiguous(size: int, layers: Sequence[Layer], stride: int = 1) -> CommGroup:
    """Return a group of neighbours, `stride` GPUs apart. Raises ValueError if the cluster is too small."""
    if size * stride > layers[-1].gpus:
        raise ValueError(f"group: {size} members {stride} apart do not fit {layers[-1].gpus:,} GPUs; take fewer")
    return CommGroup(size, tuple(min(size, max(1, layer.gpus // stride)) for layer in layers))


def line(kind: Kind, group: CommGroup, layers: Sequence[Layer], algorithm: Algorithm = "ring") -> CollectiveCurve:
    """Return the time of a collective as a line over its size.

    Raises ValueError where the algorithm cannot do it: a tree that is not asked to all-reduce, halving in a group whose
    size is no power of two.
    """
    if group.size == 1:
        return CollectiveCurve(0.0, 0.0)
    ways = 2 if kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
    match algorithm:
        case "ring":
            return _ring(ways, group, layers)
        case "tree" if kind == "all-reduce":
            return _tree(group, layers)
        case "halving nearest-first" | "halving farthest-first" if _power_of_two(group.size):
            return _halving(ways, group, layers, algorithm == "halving nearest-first")
        case _:
            raise ValueError(
                f"algorithm: {algorithm!r} cannot {kind} among {group.size}: a tree only all-reduces, halving wants a "
                f"power of two; of {', '.join(ALL)} take a ring"
            )


def seconds(kind: Kind, size: float, group: CommGroup, layers: Sequence[Layer], algorithm: Algorithm = "ring") -> float:
    """Return the time of a collective over `size` bytes of the whole tensor. Raises ValueError as `line`."""
    return line(kind, group, layers, algorithm).at(size)


def able(kind: Kind, group: CommGroup, among: Sequence[Algorithm] = ALL) -> list[Algorithm]:
    """Return the algorithms that can do it (see `line`)."""
    usable = {"ring": True, "tree": kind == "all-reduce"}
    return [one for one in among if usable.get(one, _power_of_two(group.size))]


def choose(
    kind: Kind, size: float, group: CommGroup, layers: Sequence[Layer], among: Sequence[Algorithm] = LIBRARY
) -> tuple[Algorithm, float]:
    """Return the fastest algorithm for a message, and its seconds."""
    times = {one: line(kind, group, layers, one).at(size) for one in able(kind, group, among)}
    best = min(times, key=lambda one: times[one])
    return best, times[best]


def curve(
    kind: Kind, sizes: Floats, group: CommGroup, layers: Sequence[Layer], among: Sequence[Algorithm] = ALL
) -> dict[Algorithm, Floats]:
    """Return the seconds of each algorithm that can do it at each size in bytes, for a plot."""
    lines = {one: line(kind, group, layers, one) for one in able(kind, group, among)}
    return {one: found.start + found.per_byte * sizes for one, found in lines.items()}


def crossover(
    kind: Kind, group: CommGroup, layers: Sequence[Layer], fast: Algorithm = "halving nearest-first"
) -> float:
    """Return the bytes from which a ring is no slower than `fast`: 0 if it always is, infinite if it never is.

    Both are straight lines, so that there is one crossing at most; a ring has never less latency.
    """
    ring, other = (line(kind, group, layers, one) for one in ("ring", fast))
    behind, gains = ring.start - other.start, other.per_byte - ring.per_byte
    if behind <= 0:
        return 0.0
    return behind / gains if gains > ROUNDING * ring.per_byte else float("inf")


def ring_rate(group: CommGroup, layers: Sequence[Layer]) -> float:
    """Return the bytes a second that a ring moves over each of its links.

    Where it leaves a group of the layer below, it has the cards of all its members there: other rings of the same
    job leave with those of theirs.
    """
    rates = [layers[0].bytes_per_s] if group.per_layer[0] > 1 else []
    for below, here, layer in zip(group.per_layer, group.per_layer[1:], layers[1:], strict=False):
        if here > below:
            rates.append(layer.bytes_per_s * below)
    return min(rates)


def _ring(ways: int, group: CommGroup, layers: Sequence[Layer]) -> CollectiveCurve:
    """n - 1 steps of S / n bytes; a chunk meets each border once, and the inner latency elsewhere (NCCL's tuning)."""
    borders = [-(-group.size // members) for members in group.per_layer]  # groups at each layer; 1 outermost
    latency = (group.size - borders[0]) * layers[0].latency_s
    for inner, outer, layer in zip(borders, borders[1:], layers[1:], strict=False):
        latency += (inner - outer) * layer.latency_s
    return CollectiveCurve(ways * latency, ways * (group.size - 1) / group.size / ring_rate(group, layers))


def _tree(group: CommGroup, layers: Sequence[Layer]) -> CollectiveCurve:
    """Up and down a double binary tree over servers, in chains inside them (NCCL 2.4): both halves use all links."""
    servers = -(-group.size // group.per_layer[0])
    outermost = next(layer for members, layer in zip(group.per_layer, layers, strict=True) if members == group.size)
    climb = (group.per_layer[0] - 1) * layers[0].latency_s + (servers - 1).bit_length() * outermost.latency_s
    return CollectiveCurve(2 * climb, 2 / (TREE_RATE * ring_rate(group, layers)))


def _halving(ways: int, group: CommGroup, layers: Sequence[Layer], nearest_first: bool) -> CollectiveCurve:
    """log2 n steps of S / 2, S / 4, ... bytes, every member at once, with partners at doubling or halving distance."""
    steps = _leaving(group.per_layer)
    latency = per_byte = 0.0
    for number, leaving in enumerate(steps if nearest_first else reversed(steps), 1):
        outermost = max((layer for layer, share in enumerate(leaving) if share), default=0)
        latency += layers[outermost].latency_s
        per_byte += 0.5**number / _exchange_rate(leaving, layers)
    return CollectiveCurve(ways * latency, ways * per_byte)


def _exchange_rate(leaving: tuple[float, ...], layers: Sequence[Layer]) -> float:
    """Return what a member sends when such shares of each layer's members leave it: no more than its card can."""
    if not any(leaving):
        return layers[0].bytes_per_s
    crossed = [layer.bytes_per_s / share for layer, share in zip(layers, leaving, strict=True) if share]
    return min(layers[1].bytes_per_s, *crossed)


@lru_cache(maxsize=4096)
def _leaving(per_layer: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Return, by step (nearest first) and layer, the members that cross it, over those of a group of the layer below.

    Partners are i and i xor distance. A group of 3,072 is no power of two, so that some cross and others do not; the
    busiest group counts.
    """
    ranks = np.arange(per_layer[-1])
    partners = [ranks ^ (1 << step) for step in range(per_layer[-1].bit_length() - 1)]
    return tuple((0.0, *(_busiest(ranks, each, below) for below in per_layer[:-1])) for each in partners)


def _busiest(ranks: NDArray[np.int64], partners: NDArray[np.int64], members: int) -> float:
    crossing = ranks // members != partners // members
    return float(np.bincount(ranks // members, weights=crossing).max() / members)


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
