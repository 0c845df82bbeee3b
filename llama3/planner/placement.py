"""Which GPU each rank runs on: rank orders on a whole cluster, or on what other jobs leave of it.

A scheduler hands out GPUs; the job decides which rank gets which. Plain order puts rank i on the i-th free GPU, which
with ranks in the order [TP, CP, PP, DP] (arXiv 2407.21783, section 3.3.2) keeps the talkative axes close. The unit is a
slot: as many free GPUs of one server as tensor-parallel ranks can share, so that no order tears a tensor-parallel group
over servers where its size divides theirs. Given up: GPUs that make no whole slot stay idle. `cut` looks for a better
order, `axes` says what an order sends where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama3.parallel.comm_records import Collective
from llama3.parallel.layout import Layout
from llama3.planner.topology import Fabric

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placement:
    """An assignment of ranks to GPUs. Raises ValueError if two ranks share a GPU."""

    gpus: Ints
    """[world]: number of the GPU of each rank, in the order of the wiring."""

    def __post_init__(self) -> None:
        """Refuse a GPU that is given twice."""
        numbers, counts = np.unique(self.gpus, return_counts=True)
        if len(numbers) < self.world:
            raise ValueError(
                f"placement: GPU {numbers[counts > 1][0]} is given to {counts.max()} ranks; a rank needs one of its own"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.gpus)

    def check(self, layout: Layout, fabric: Fabric) -> None:
        """Raise ValueError if a GPU is not in the cluster, or a tensor-parallel group leaves its server needlessly."""
        if self.gpus.min() < 0 or self.gpus.max() >= fabric.gpus:
            raise ValueError(
                f"placement: GPUs {self.gpus.min()} .. {self.gpus.max()} do not all lie in the {fabric.gpus} of "
                f"{fabric.name}, which count from 0"
            )
        size = fabric.server.gpus
        servers = self.gpus.reshape(-1, layout.tp) // size
        if size % layout.tp == 0 and (servers != servers[:, :1]).any():
            torn = int((servers != servers[:, :1]).any(axis=1).argmax())
            raise ValueError(
                f"placement: tensor-parallel group {torn} (tp {layout.tp}) lies on servers "
                f"{', '.join(map(str, np.unique(servers[torn])))}; put it on one, which has {size} GPUs"
            )


def slot_size(layout: Layout, fabric: Fabric) -> int:
    """Return the ranks that are placed together: a tensor-parallel group, or as much of it as servers hold evenly."""
    return gcd(layout.tp, fabric.server.gpus)


def free_slots(layout: Layout, world: int, fabric: Fabric, available: Ints | None = None) -> Ints:
    """Return [slots, ranks of a slot]: the free GPUs, in order, as slots that lie in one server each.

    `available`: numbers of the free GPUs (None: all). Raises ValueError if they are no GPUs of the cluster, or too few.
    """
    free = np.arange(fabric.gpus) if available is None else np.unique(available)
    if free.size and (free[0] < 0 or free[-1] >= fabric.gpus):
        raise ValueError(f"available: GPUs {free[0]} .. {free[-1]} are not the 0 .. {fabric.gpus - 1} of {fabric.name}")
    size = slot_size(layout, fabric)
    server = free // fabric.server.gpus
    first = np.searchsorted(server, server)  # where the server of each free GPU starts
    counts = np.searchsorted(server, server, side="right") - first
    whole = np.arange(len(free)) - first < counts // size * size
    slots = free[whole].reshape(-1, size)
    if len(slots) * size < world:
        raise ValueError(
            f"available: {world} ranks need {world // size} slots of {size} free GPUs in one server (tp {layout.tp}); "
            f"{len(slots)} are free; start at most {len(slots) * size // layout.model_parallel} replicas of "
            f"{layout.model_parallel}, or free servers"
        )
    return slots


def contiguous(layout: Layout, world: int, fabric: Fabric, available: Ints | None = None) -> Placement:
    """Return rank i on the i-th free GPU. Raises ValueError, as does all that places."""
    return on_slots(free_slots(layout, world, fabric, available), world)


def shuffled(layout: Layout, world: int, fabric: Fabric, available: Ints | None = None, seed: int = 0) -> Placement:
    """Return slots in random order, as a scheduler that knows no network gives them; groups of ranks inside stay."""
    slots = free_slots(layout, world, fabric, available)
    return on_slots(np.random.default_rng(seed).permutation(slots), world)


def on_slots(slots: Ints, world: int) -> Placement:
    """Return ranks on slots, slot by slot."""
    return Placement(slots.reshape(-1)[:world])


def fragmented(fabric: Fabric, taken: float = 0.25, seed: int = 0) -> Ints:
    """Return the GPUs that are free when other jobs hold a random share of the servers.

    Raises ValueError if `taken` is no share.
    """
    if not 0 <= taken < 1:
        raise ValueError(f"taken: {taken:g} is no share of the servers; write 0 .. 1, 1 excluded")
    left = fabric.servers - round(fabric.servers * taken)
    servers = np.sort(np.random.default_rng(seed).permutation(fabric.servers)[:left])
    return (servers[:, None] * fabric.server.gpus + np.arange(fabric.server.gpus)).reshape(-1)


# Orders of slots over groups of GPUs (pods, zones, racks): those one would write down, and a local search from one.
#
# An order is a permutation of all free slots: the first `used` hold the job, slot by slot of its ranks; the rest
# stay idle. The search swaps blocks that mean something to the job (a slot, a pipeline stage, half a pipeline, a
# replica) with each other and with idle ones, and takes what costs no more. Generic graph partitioning (Kernighan-
# Lin) moves single nodes, and a ring gains nothing before its last member leaves a group. Given up: a proof that
# nothing better exists.

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


# Which layer of the network each axis of parallelism crosses, and how many bytes a step sends there.
#
# Collectives are counted as rings: each GPU sends its bytes to one neighbour. A ring whose members lie in k > 1
# pods crosses pods k times if it runs through them pod by pod (`by="gpu"`, assumed where nothing else is said), and
# at nearly every member if its order knows no pods (`by="rank"` on scattered GPUs). Pipeline stages send both ways;
# with virtual ones, the last rank also to the first. Given up: trees and recursive halving, whose far messages are
# fewer and larger, and when in the step bytes flow.

Order = Literal["gpu", "rank"]
NAMES = {"tp": "tp", "cp": "cp", "pp": "pp", "fsdp": "dp", "replica": "replica"}
"""Axes of `llama3.parallel.comm_records` -> axes here."""


@dataclass(frozen=True)
class AxisBytes:
    """Bytes that leave a GPU in a step, by axis. Raises ValueError if one is negative."""

    tp: float = 0.0
    cp: float = 0.0
    pp: float = 0.0
    """In the middle of the pipeline: forward and backward, for each of its stages."""
    dp: float = 0.0
    """FSDP: over dp and cp together, within one replica of the shards."""
    replica: float = 0.0
    """Between replicas of the shards (HSDP)."""

    def __post_init__(self) -> None:
        """Refuse negative bytes."""
        for name, size in asdict(self).items():
            if not size >= 0:
                raise ValueError(f"{name}: {size:g} bytes cannot be sent in a step; write 0 or more")

    @classmethod
    def of(cls, sent: Iterable[Collective], layout: Layout, micro_batches: int) -> AxisBytes:
        """Return the bytes of what a GPU takes part in, all its stages together.

        A ring moves (n - 1) / n of a tensor per GPU in a gather or a reduce-scatter, and twice that in an all-reduce
        (Thakur, Rabenseifner, Gropp 2005). A send counts for both ways and each stage, even at an end of the pipe.
        """
        total = dict.fromkeys(NAMES.values(), 0.0)
        for one in sent:
            times = one.count * (micro_batches if one.when == "each" else 1)
            if one.kind == "send":
                total["pp"] = max(total["pp"], 2.0 * layout.virtual * times * one.bytes)
            else:
                ways = 2 if one.kind == "all-reduce" else 1
                total[NAMES[one.axis]] += ways * (one.group_size - 1) / one.group_size * one.bytes * times
        return cls(**total)


class AxisMessages(NamedTuple):
    """Messages of an axis: [pairs] each."""

    source: Ints
    """Rank that sends."""
    target: Ints
    """Rank that receives."""
    bytes: NDArray[np.float64]
    """In a step."""


@dataclass(frozen=True)
class AxisTraffic:
    """An axis on the network: a row of the table. `layers`, `shares` and `bytes` go together, innermost layer first."""

    axis: str
    size: int
    """Members of a group."""
    crosses: str
    """Outermost layer that joins a pair of neighbours."""
    layers: tuple[str, ...]
    shares: tuple[float, ...]
    """Of the pairs of neighbours whose way leads up to the layer and no further; they add up to 1."""
    bytes: tuple[float, ...]
    """Bytes of a step that go up to the layer and no further, of the whole job."""

    def as_dict(self) -> dict[str, Any]:
        """Return every field."""
        return asdict(self)


def axis_traffic(
    layout: Layout, fabric: Fabric, placement: Placement, sent: AxisBytes, by: Order = "gpu"
) -> list[AxisTraffic]:
    """Return a row for each axis of more than one member, innermost axis first. Raises ValueError as `Placement.check`.

    `by`: rings run through their members in the order of GPUs, or of ranks.
    """
    talking = [axis for axis, size in sizes(layout, placement.world).items() if size > 1]
    placement.check(layout, fabric)
    pairs = {axis: axis_pairs(axis, layout, placement, sent, by) for axis in talking}
    return [_row(axis, layout, fabric, placement, each) for axis, each in pairs.items()]


def crossing(rows: Iterable[AxisTraffic]) -> dict[str, float]:
    """Return, for each layer above the server, the bytes of a step that go up to it or through it."""
    rows = list(rows)
    names = rows[0].layers if rows else ()
    return {name: sum(sum(row.bytes[number:]) for row in rows) for number, name in enumerate(names) if number}


def sizes(layout: Layout, world: int) -> dict[str, int]:
    """Return the members of a group of each axis. Raises ValueError if the layout does not divide `world`."""
    within = layout.dp(world) // layout.replicas
    return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": within * layout.cp, "replica": layout.replicas}


def ring_numbers(layout: Layout, world: int) -> dict[str, Ints]:
    """Return, for each axis that talks in rings, [world]: the number of each rank's ring; innermost axis first."""
    dp = layout.dp(world)
    within = dp // layout.replicas
    rank = np.arange(world).reshape(layout.replicas, within, layout.pp, layout.cp, layout.tp)
    # A ring is told by its lowest rank: that of its members where every coordinate that varies in it is 0.
    return {
        "tp": _lowest(rank[..., :1], rank),
        "cp": _lowest(rank[..., :1, :], rank),
        "dp": _lowest(rank[:, :1, :, :1], rank),
        "replica": _lowest(rank[:1], rank),
    }


def _lowest(first: Ints, rank: Ints) -> Ints:
    return np.broadcast_to(first, rank.shape).reshape(-1)


def axis_pairs(axis: str, layout: Layout, placement: Placement, sent: AxisBytes, by: Order = "gpu") -> AxisMessages:
    """Return who sends how much to whom on an axis."""
    if axis == "pp":
        return pipeline_pairs(layout, placement.world, sent.pp)
    ring = ring_numbers(layout, placement.world)[axis]
    inside = placement.gpus if by == "gpu" else np.arange(placement.world)
    order = np.lexsort((inside, ring)).reshape(-1, sizes(layout, placement.world)[axis])
    source, target = order.reshape(-1), np.roll(order, -1, axis=1).reshape(-1)
    return AxisMessages(source, target, np.full(len(source), getattr(sent, axis)))


def pipeline_pairs(layout: Layout, world: int, size: float) -> AxisMessages:
    """Return the messages between pipeline ranks: half of `size` forward, half back, to the next and from it.

    The last rank sends on to the first from all of its V stages but the last: (V - 1) / V.
    """
    ranks = np.arange(world).reshape(-1, layout.pp, layout.cp * layout.tp)
    ahead = np.roll(ranks, -1, axis=1)
    half = np.full(ranks.shape, size / 2)
    half[:, -1] *= (layout.virtual - 1) / layout.virtual
    if layout.virtual == 1:
        ranks, ahead, half = ranks[:, :-1], ahead[:, :-1], half[:, :-1]
    here, there, part = (each.reshape(-1) for each in (ranks, ahead, half))
    return AxisMessages(np.append(here, there), np.append(there, here), np.append(part, part))


def layer_numbers(fabric: Fabric, source: Ints, target: Ints) -> Ints:
    """Return, for pairs of GPUs, the number of the innermost layer that joins them; groups nest, so counting does."""
    sizes = (layer.gpus for layer in fabric.layers())
    apart: Ints = np.sum([source // size != target // size for size in sizes], axis=0)
    return apart


def _row(axis: str, layout: Layout, fabric: Fabric, placement: Placement, pairs: AxisMessages) -> AxisTraffic:
    layers = tuple(layer.name for layer in fabric.layers())
    number = layer_numbers(fabric, placement.gpus[pairs.source], placement.gpus[pairs.target])
    counts = np.bincount(number, minlength=len(layers))
    volume = np.bincount(number, pairs.bytes, minlength=len(layers))
    return AxisTraffic(
        axis=axis,
        size=sizes(layout, placement.world)[axis],
        crosses=layers[int(number.max())],
        layers=layers,
        shares=tuple((counts / counts.sum()).tolist()),
        bytes=tuple(volume.tolist()),
    )


# Minimum cut: the order of ranks that sends least over the oversubscribed layers of the network.
#
# What counts is which group of GPUs (pod, zone) each slot of ranks lies in: a ring whose members lie in k > 1
# groups crosses k times, a pair of pipeline stages once if they lie apart. The exact minimum is NP-hard (graph
# partitioning). Meta's scheduler looks for it too and recommends the rank order (Gangidi et al., SIGCOMM 2024,
# unpublished); this search is ours. It starts from orders that one would write down: [TP, CP, PP, DP] in one line
# over the free GPUs, and the same with DP inside PP, each cut at stages, parts of the pipeline or whole replicas,
# groups in the order of the wiring or the fullest first. The best is then improved by seeded swaps of blocks. Plain
# contiguous order is among the starts and every step is accepted only if nothing gets worse, so the outermost
# oversubscribed layer never carries more than under contiguous order. Inner ones come next, by swaps that leave the
# outer ones as they are; they may carry more than before when an outer one gained. Given up: a proof of optimality,
# and contention on single links.

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
