"""Time of collectives on layers of unequal speed: ring, double binary tree, recursive halving and doubling.

The alpha-beta model (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521): a step takes the latency of the
outermost layer that it crosses, and its bytes over the narrowest rate on the path, so a collective is a straight line
over the size. Ranks of a ring follow the wiring; collectives do not compete. S bytes of the whole tensor, n members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from herd.llama3.hardware.topology import Fabric, Layer
from herd.llama3.parallel.layout import Layout

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Algorithm = Literal["ring", "tree", "halving nearest-first", "halving farthest-first"]
"""Halving's order is that of a reduce-scatter, whose first step sends half of the data. An all-gather runs it backward
(doubling), so neighbors exchange the most with nearest-first."""
LIBRARY: tuple[Algorithm, ...] = ("ring", "tree")
"""Algorithms of NCCL."""
ALL: tuple[Algorithm, ...] = (*LIBRARY, "halving nearest-first", "halving farthest-first")
ROUNDING = 1e-12
TREE_RATE = 0.92
"""Rate of a tree over that of a ring: NCCL's tuning, `src/graph/tuning.cc`."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CommGroup:
    """Members of a collective and their place on the network."""

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
    """Sum of the latencies, seconds."""
    per_byte: float
    """Seconds per byte of the whole tensor."""

    def seconds_at(self, size: float) -> float:
        """Return the seconds for `size` bytes."""
        return self.start + self.per_byte * size


def contiguous_group(size: int, layers: Sequence[Layer], stride: int = 1) -> CommGroup:
    """Return a group of neighbors, `stride` GPUs apart. Raises ValueError if the cluster is too small."""
    if size * stride > layers[-1].gpus:
        raise ValueError(f"group: {size} members {stride} apart do not fit {layers[-1].gpus:,} GPUs; take fewer")
    return CommGroup(size, tuple(min(size, max(1, layer.gpus // stride)) for layer in layers))


def collective_curve(
    kind: Kind, group: CommGroup, layers: Sequence[Layer], algorithm: Algorithm = "ring"
) -> CollectiveCurve:
    """Return the time of a collective as a line over its size.

    Raises ValueError for a tree that is not an all-reduce, and for halving in a group whose size is not a power of two.
    """
    if group.size == 1:
        return CollectiveCurve(0.0, 0.0)
    ways = 2 if kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
    match algorithm:
        case "ring":
            return _ring(ways, group, layers)
        case "tree" if kind == "all-reduce":
            return _tree(group, layers)
        case "halving nearest-first" | "halving farthest-first" if group.size & (group.size - 1) == 0:
            return _halving(ways, group, layers, algorithm == "halving nearest-first")
        case _:
            raise ValueError(
                f"algorithm: {algorithm!r} cannot {kind} among {group.size}: a tree only all-reduces, halving needs a "
                f"power of two; of {', '.join(ALL)} take a ring"
            )


def collective_seconds(
    kind: Kind, size: float, group: CommGroup, layers: Sequence[Layer], algorithm: Algorithm = "ring"
) -> float:
    """Return the seconds of a collective over `size` bytes (whole tensor). Raises ValueError as `collective_curve`."""
    return collective_curve(kind, group, layers, algorithm).seconds_at(size)


def supported_algorithms(kind: Kind, group: CommGroup, among: Sequence[Algorithm] = ALL) -> list[Algorithm]:
    """Return the algorithms of `among` that support the collective (see `collective_curve`)."""
    power_of_two = group.size & (group.size - 1) == 0
    usable = {"ring": True, "tree": kind == "all-reduce"}
    return [algorithm for algorithm in among if usable.get(algorithm, power_of_two)]


def fastest_algorithm(
    kind: Kind, size: float, group: CommGroup, layers: Sequence[Layer], among: Sequence[Algorithm] = LIBRARY
) -> tuple[Algorithm, float]:
    """Return the fastest algorithm for a message, and its seconds."""
    times = {
        algorithm: collective_curve(kind, group, layers, algorithm).seconds_at(size)
        for algorithm in supported_algorithms(kind, group, among)
    }
    best = min(times, key=lambda algorithm: times[algorithm])
    return best, times[best]


def algorithm_curves(
    kind: Kind, sizes: Floats, group: CommGroup, layers: Sequence[Layer], among: Sequence[Algorithm] = ALL
) -> dict[Algorithm, Floats]:
    """Return the seconds of each supported algorithm at each size in bytes, for a plot."""
    lines = {
        algorithm: collective_curve(kind, group, layers, algorithm)
        for algorithm in supported_algorithms(kind, group, among)
    }
    return {algorithm: timing.start + timing.per_byte * sizes for algorithm, timing in lines.items()}


def crossover(
    kind: Kind, group: CommGroup, layers: Sequence[Layer], fast: Algorithm = "halving nearest-first"
) -> float:
    """Return the bytes from which a ring is at most as slow as `fast`: 0 if it always is, infinite if it never is.

    Two straight lines cross at most once; a ring never has less latency.
    """
    ring, other = (collective_curve(kind, group, layers, algorithm) for algorithm in ("ring", fast))
    behind, gains = ring.start - other.start, other.per_byte - ring.per_byte
    if behind <= 0:
        return 0.0
    return behind / gains if gains > ROUNDING * ring.per_byte else float("inf")


def ring_bandwidth(group: CommGroup, layers: Sequence[Layer]) -> float:
    """Return the bytes per second on each link of a ring.

    Where it leaves a group of the layer below, it has the cards of all its members there, as other rings of the same
    job leave with the cards of theirs.
    """
    rates = [layers[0].bytes_per_s] if group.per_layer[0] > 1 else []
    for below, here, layer in zip(group.per_layer, group.per_layer[1:], layers[1:], strict=False):
        if here > below:
            rates.append(layer.bytes_per_s * below)
    return min(rates)


def _ring(ways: int, group: CommGroup, layers: Sequence[Layer]) -> CollectiveCurve:
    """n - 1 steps of S / n bytes; a chunk crosses each border once, else has the inner latency (NCCL's tuning)."""
    borders = [-(-group.size // members) for members in group.per_layer]  # groups at each layer; 1 outermost
    latency = (group.size - borders[0]) * layers[0].latency_s
    for inner, outer, layer in zip(borders, borders[1:], layers[1:], strict=False):
        latency += (inner - outer) * layer.latency_s
    return CollectiveCurve(ways * latency, ways * (group.size - 1) / group.size / ring_bandwidth(group, layers))


def _tree(group: CommGroup, layers: Sequence[Layer]) -> CollectiveCurve:
    """Up and down a double binary tree over servers, in chains inside them (NCCL 2.4): both halves use all links."""
    servers = -(-group.size // group.per_layer[0])
    outermost = next(layer for members, layer in zip(group.per_layer, layers, strict=True) if members == group.size)
    climb = (group.per_layer[0] - 1) * layers[0].latency_s + (servers - 1).bit_length() * outermost.latency_s
    return CollectiveCurve(2 * climb, 2 / (TREE_RATE * ring_bandwidth(group, layers)))


def _halving(ways: int, group: CommGroup, layers: Sequence[Layer], nearest_first: bool) -> CollectiveCurve:
    """log2 n steps of S / 2, S / 4, ... bytes, every member at once, with partners at doubling or halving distance."""
    steps = _leaving(group.per_layer)
    latency = per_byte = 0.0
    for number, leaving in enumerate(steps if nearest_first else reversed(steps), 1):
        outermost = max((layer for layer, share in enumerate(leaving) if share), default=0)
        latency += layers[outermost].latency_s
        rate = layers[0].bytes_per_s
        if any(leaving):  # no more than the card's rate
            crossed = (layer.bytes_per_s / share for layer, share in zip(layers, leaving, strict=True) if share)
            rate = min(layers[1].bytes_per_s, *crossed)
        per_byte += 0.5**number / rate
    return CollectiveCurve(ways * latency, ways * per_byte)


@lru_cache(maxsize=4096)
def _leaving(per_layer: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Return, by step (nearest first) and layer, the members that cross it, over those of a group of the layer below.

    Partners are i and i xor distance. 3,072 is not a power of two, so some of its members cross and others do
    not; the busiest group counts.
    """
    ranks = np.arange(per_layer[-1])
    steps = []
    for step in range(per_layer[-1].bit_length() - 1):
        partners, shares = ranks ^ (1 << step), [0.0]
        for members in per_layer[:-1]:
            crossing = ranks // members != partners // members
            shares.append(float(np.bincount(ranks // members, weights=crossing).max() / members))
        steps.append(tuple(shares))
    return tuple(steps)


# Process groups of a layout on a cluster's network.


class Network:
    """A cluster's layers, and a cache of the process groups of layouts.

    Ranks fill the cluster in order, [TP, CP, PP, DP] from the innermost (arXiv 2407.21783, section 3.3.2), so strides
    and sizes describe a group. Other orders and fragmented clusters are in `placement`, contention of flows in
    `routing`. A pod that a replica straddles counts only its whole replicas.
    """

    def __init__(self, fabric: Fabric, share: float = 1.0) -> None:
        """`share`: of a card's rate that flows between racks get (see `routing.bandwidth_share`)."""
        self.fabric, self.share = fabric, share
        inside, rack, *tiers = fabric.layers()
        self.layers = [inside, rack, *(replace(tier, bytes_per_s=tier.bytes_per_s * share) for tier in tiers)]
        self._groups: dict[tuple[tuple[int, int], ...], CommGroup] = {}

    def group(self, axis: str, layout: Layout, world: int) -> CommGroup:
        """Return the group of an axis: tp, cp, pp, fsdp (dp and cp together) or replica."""
        within = layout.dp(world) // layout.dp_replicate
        axes: tuple[tuple[int, int], ...]  # stride and size, the inner axis first
        match axis:
            case "tp":
                axes = ((1, layout.tp),)
            case "cp":
                axes = ((layout.tp, layout.cp),)
            case "pp":
                axes = ((layout.tp * layout.cp, layout.pp),)
            case "fsdp":
                axes = ((layout.tp, layout.cp), (layout.model_parallel, within))
            case "replica":
                axes = ((layout.model_parallel * within, layout.dp_replicate),)
            case _:
                raise ValueError(f"axis: {axis!r} is unknown; write tp, cp, pp, fsdp or replica")
        if axes not in self._groups:
            shares = [prod(min(count, max(1, layer.gpus // stride)) for stride, count in axes) for layer in self.layers]
            self._groups[axes] = CommGroup(prod(count for _, count in axes), tuple(shares))
        return self._groups[axes]

    def seconds(self, kind: str, size: float, group: CommGroup) -> float:
        """Return the time of a collective over `size` bytes of the whole tensor, by the algorithm of NCCL."""
        assert kind in get_args(Kind), f"{kind} is not a collective"
        return fastest_algorithm(cast(Kind, kind), size, group, self.layers)[1]

    def send(self, size: float, layout: Layout) -> float:
        """Return the time of a message of `size` bytes to the next pipeline stage."""
        span = layout.model_parallel
        layer = next(layer for layer in self.layers if layer.gpus >= span or layer is self.layers[-1])
        return size / layer.bytes_per_s + layer.latency_s
