"""Placement of ranks on GPUs: rank orders, the traffic of an order on each network layer, and a minimum-cut search.

Plain order puts rank i on the i-th free GPU, ranks in the order [TP, CP, PP, DP] (arXiv 2407.21783, section 3.3.2).
The unit is a slot: as many free GPUs of one server as tensor-parallel ranks can share. GPUs that form no whole slot
stay idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from herd.llama3.hardware.topology import Fabric
from herd.llama3.parallel.comm_records import Collective
from herd.llama3.parallel.layout import Layout

Ints = NDArray[np.int64]
Order = Literal["gpu", "rank"]
"""Order of the members of a ring."""
NAMES = {"tp": "tp", "cp": "cp", "pp": "pp", "fsdp": "dp", "replica": "replica"}
"""Axes of `herd.llama3.parallel.comm_records` -> axes here."""
SWAPS = 3000
"""Swaps that the search tries for jobs of up to 2,048 slots; fewer for larger ones, so that time stays the same."""
RINGS = "random, rings by GPU"
"""The name of random order with rings that run through their members in the order of GPUs."""
FLAGS = 16
"""Flags per slot up to which they are faster than sorting."""
LEAST_GAIN = 1e-9
"""An order must save at least this share of the crossing bytes to be better than contiguous order."""


@dataclass(frozen=True, eq=False)
class Placement:
    """An assignment of ranks to GPUs. Raises ValueError if two ranks share a GPU."""

    gpus: Ints
    """[world]: number of the GPU of each rank; GPUs count in the order of the wiring."""

    def __post_init__(self) -> None:
        numbers, counts = np.unique(self.gpus, return_counts=True)
        if len(numbers) < self.world:
            raise ValueError(
                f"placement: GPU {numbers[counts > 1][0]} is given to {counts.max()} ranks; give each rank another GPU"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.gpus)

    def check(self, layout: Layout, fabric: Fabric) -> None:
        """Raise ValueError if a GPU is not in the cluster, or a tensor-parallel group that fits a server leaves it."""
        if self.gpus.min() < 0 or self.gpus.max() >= fabric.gpus:
            raise ValueError(
                f"placement: GPUs {self.gpus.min()} .. {self.gpus.max()} are not all among the {fabric.gpus} of "
                f"{fabric.name}; numbers count from 0"
            )
        size = fabric.server.gpus
        servers = self.gpus.reshape(-1, layout.tp) // size
        if size % layout.tp == 0 and (servers != servers[:, :1]).any():
            split = int((servers != servers[:, :1]).any(axis=1).argmax())
            raise ValueError(
                f"placement: tensor-parallel group {split} (tp {layout.tp}) is on servers "
                f"{', '.join(map(str, np.unique(servers[split])))}; put it on one, which has {size} GPUs"
            )


def slot_size(layout: Layout, fabric: Fabric) -> int:
    """Return the ranks placed together: a tensor-parallel group, or the largest part that divides a server evenly."""
    return gcd(layout.tp, fabric.server.gpus)


def free_slots(layout: Layout, world: int, fabric: Fabric, available: Ints | None = None) -> Ints:
    """Return [slots, ranks of a slot]: the free GPUs, in order, as slots within one server each.

    `available`: numbers of the free GPUs (None: all). Raises ValueError if they are not in the cluster, or too few.
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


def shuffled_placement(
    layout: Layout, world: int, fabric: Fabric, available: Ints | None = None, seed: int = 0
) -> Placement:
    """Return slots in random order, as a scheduler without knowledge of the network assigns them."""
    slots = free_slots(layout, world, fabric, available)
    return fill_slots(np.random.default_rng(seed).permutation(slots), world)


def fill_slots(slots: Ints, world: int) -> Placement:
    """Return ranks on slots, one slot after another."""
    return Placement(slots.reshape(-1)[:world])


def fragmented_gpus(fabric: Fabric, taken: float = 0.25, seed: int = 0) -> Ints:
    """Return the GPUs that are free when other jobs hold a random share of the servers.

    Raises ValueError if `taken` is not from 0 to below 1.
    """
    if not 0 <= taken < 1:
        raise ValueError(f"taken: {taken:g} is not a share of the servers; write 0 .. 1, 1 excluded")
    left = fabric.servers - round(fabric.servers * taken)
    servers = np.sort(np.random.default_rng(seed).permutation(fabric.servers)[:left])
    return (servers[:, None] * fabric.server.gpus + np.arange(fabric.server.gpus)).reshape(-1)


# Orders of slots, as permutations of all free slots: the first `used` hold the job, in the order of ranks


def candidate_orders(shape: tuple[int, int, int], group: Ints) -> Iterator[Ints]:
    """Yield candidate orders for a job of `shape` slots [DP, PP, slots of a stage]; `group`: of each free slot.

    First plain contiguous order. Then every mix of: ranks in the order [TP, CP, PP, DP] or with DP inside PP; cut
    anywhere, or at stages, parts of the pipeline (or of DP), whole replicas; groups as wired, or the fullest first.
    """
    for stage_major in (False, True):
        for block in block_sizes(shape, stage_major):
            for fullest in (False, True):
                yield pack_blocks(shape, group, block, stage_major, fullest)


def block_sizes(shape: tuple[int, int, int], stage_major: bool = False) -> list[int]:
    """Return block sizes in slots: 1, a stage, and multiples of it that divide a replica (or all of a stage)."""
    dp, pp, stage = shape
    along = dp if stage_major else pp
    return sorted({1, *(stage * count for count in range(1, along + 1) if along % count == 0)})


def pack_blocks(
    shape: tuple[int, int, int], group: Ints, block: int, stage_major: bool = False, fullest: bool = False
) -> Ints:
    """Return the order that fills each group with whole blocks first, then the remainders of the groups."""
    numbers, group_of, counts = np.unique(group, return_inverse=True, return_counts=True)
    position = np.empty(len(numbers), np.int64)
    position[np.argsort(-counts, kind="stable") if fullest else np.arange(len(numbers))] = np.arange(len(numbers))
    first = np.cumsum(counts) - counts  # slots of a group are consecutive
    left_over = np.arange(len(group)) - first[group_of] >= (counts // block * block)[group_of]
    slots = np.lexsort((np.arange(len(group)), position[group_of], left_over))
    used = int(np.prod(shape))
    rank_order = np.arange(used).reshape(shape)
    job = (rank_order.transpose(1, 0, 2) if stage_major else rank_order).reshape(-1)
    order = slots.copy()
    order[job] = slots[:used]
    return order


def improve_by_swaps(
    order: Ints, used: int, sizes: list[int], cut: Callable[[Ints], float], groups: list[Ints], seed: int
) -> Ints:
    """Return `order` after random swaps of blocks of `axis_sizes` slots, none of which increases the cut.

    `cut`: bytes that cross, given the groups [used] of a job's slots. `groups`: of each free slot, for each layer; the
    last is cut, and no rank leaves its group of the others. Swapping blocks works where Kernighan-Lin does not: a ring
    gains nothing before its last member leaves a group.
    """
    random, (*fixed, group) = np.random.default_rng(seed), groups
    order, least = order.copy(), cut(group[order[:used]])
    tries = min(SWAPS, SWAPS * 2048 // used + 1)
    for size, first, second in zip(random.choice(sizes, tries), *random.random((2, tries)), strict=True):
        a, b = int(first * (used // size)) * size, int(second * (len(order) // size)) * size
        block_a, block_b = order[a : a + size].copy(), order[b : b + size].copy()
        if a == b or any((outer[block_a] != outer[block_b]).any() for outer in fixed):
            continue
        order[a : a + size], order[b : b + size] = block_b, block_a
        now = cut(group[order[:used]])
        if now > least:
            order[a : a + size], order[b : b + size] = block_a, block_b
        least = min(least, now)
    return order


def sort_within_groups(order: Ints, group: Ints, used: int) -> Ints:
    """Return `order` with the job's slots in each group assigned by rank, nearest first."""
    order = order.copy()
    by_group = np.argsort(group[order[:used]], kind="stable")
    order[by_group] = np.sort(order[:used])  # slots count up through the groups
    return order


# Bytes of a step on each layer of the network, by axis. Collectives are counted as rings


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
        for name, size in asdict(self).items():
            if not size >= 0:
                raise ValueError(f"{name}: {size:g} bytes is negative; write 0 or more")

    @classmethod
    def from_collectives(cls, sent: Iterable[Collective], layout: Layout, micro_batches: int) -> AxisBytes:
        """Return the bytes of the collectives of a GPU, all its stages together.

        A ring moves (n - 1) / n of a tensor per GPU in a gather or a reduce-scatter, and twice that in an all-reduce
        (Thakur, Rabenseifner, Gropp 2005). A send counts for both directions and each stage, even at an end.
        """
        total = dict.fromkeys(NAMES.values(), 0.0)
        for message in sent:
            times = message.count * (micro_batches if message.when == "each" else 1)
            if message.kind == "send":
                total["pp"] = max(total["pp"], 2.0 * layout.vpp * times * message.bytes)
            else:
                ways = 2 if message.kind == "all-reduce" else 1
                share = ways * (message.group_size - 1) / message.group_size
                total[NAMES[message.axis]] += share * message.bytes * times
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
    """Traffic of an axis. `layers`, `shares` and `bytes` have one entry per layer, the innermost first."""

    axis: str
    size: int
    """Members of a group."""
    crosses: str
    """Outermost layer that joins a pair of neighbors."""
    layers: tuple[str, ...]
    shares: tuple[float, ...]
    """Fraction of the neighbor pairs whose path goes up to the layer and no further; they sum to 1."""
    bytes: tuple[float, ...]
    """Bytes of a step of the whole job that go up to the layer and no further."""

    def as_dict(self) -> dict[str, Any]:
        """Return every field."""
        return asdict(self)


def axis_traffic(
    layout: Layout, fabric: Fabric, placement: Placement, sent: AxisBytes, by: Order = "gpu"
) -> list[AxisTraffic]:
    """Return the traffic of each axis of more than one member, the innermost first. Raises as `Placement.check`.

    `by`: rings run through their members in the order of GPUs or of ranks. A ring with members in k > 1 pods crosses
    pods k times in the order of GPUs, and at nearly every member in the order of ranks on scattered GPUs.
    """
    group_sizes = axis_sizes(layout, placement.world)
    placement.check(layout, fabric)
    layers = tuple(layer.name for layer in fabric.layers())
    traffic = []
    for axis, size in group_sizes.items():
        if size == 1:
            continue
        pairs = axis_pairs(axis, layout, placement, sent, by)
        number = joining_layers(fabric, placement.gpus[pairs.source], placement.gpus[pairs.target])
        counts = np.bincount(number, minlength=len(layers))
        volume = np.bincount(number, pairs.bytes, minlength=len(layers))
        shares = tuple((counts / counts.sum()).tolist())
        traffic.append(AxisTraffic(axis, size, layers[int(number.max())], layers, shares, tuple(volume.tolist())))
    return traffic


def bytes_above_server(rows: Iterable[AxisTraffic]) -> dict[str, float]:
    """Return, for each layer above the server, the bytes of a step that go up to it or through it."""
    traffic = list(rows)
    names = traffic[0].layers if traffic else ()
    return {name: sum(sum(axis.bytes[number:]) for axis in traffic) for number, name in enumerate(names) if number}


def axis_sizes(layout: Layout, world: int) -> dict[str, int]:
    """Return the members of a group of each axis. Raises ValueError if the layout does not divide `world`."""
    within = layout.dp(world) // layout.dp_replicate
    return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": within * layout.cp, "replica": layout.dp_replicate}


def ring_numbers(layout: Layout, world: int) -> dict[str, Ints]:
    """Return, for each axis with ring collectives, [world]: the ring number of each rank; innermost axis first."""
    dp = layout.dp(world)
    within = dp // layout.dp_replicate
    rank = np.arange(world).reshape(layout.dp_replicate, within, layout.pp, layout.cp, layout.tp)
    # A ring has the number of its lowest rank: that of its members where every coordinate that varies in it is 0.
    lowest = {"tp": rank[..., :1], "cp": rank[..., :1, :], "dp": rank[:, :1, :, :1], "replica": rank[:1]}
    return {axis: np.broadcast_to(first, rank.shape).reshape(-1) for axis, first in lowest.items()}


def axis_pairs(axis: str, layout: Layout, placement: Placement, sent: AxisBytes, by: Order = "gpu") -> AxisMessages:
    """Return the messages of an axis: source rank, target rank and bytes of each."""
    if axis == "pp":
        return pipeline_pairs(layout, placement.world, sent.pp)
    ring = ring_numbers(layout, placement.world)[axis]
    inside = placement.gpus if by == "gpu" else np.arange(placement.world)
    order = np.lexsort((inside, ring)).reshape(-1, axis_sizes(layout, placement.world)[axis])
    source, target = order.reshape(-1), np.roll(order, -1, axis=1).reshape(-1)
    return AxisMessages(source, target, np.full(len(source), getattr(sent, axis)))


def pipeline_pairs(layout: Layout, world: int, size: float) -> AxisMessages:
    """Return the messages between pipeline ranks: half of `size` forward to the next, half backward from it.

    The last rank sends on to the first from all of its V stages but the last: (V - 1) / V.
    """
    ranks = np.arange(world).reshape(-1, layout.pp, layout.cp * layout.tp)
    following = np.roll(ranks, -1, axis=1)
    half = np.full(ranks.shape, size / 2)
    half[:, -1] *= (layout.vpp - 1) / layout.vpp
    if layout.vpp == 1:
        ranks, following, half = ranks[:, :-1], following[:, :-1], half[:, :-1]
    source, target, size_each = (array.reshape(-1) for array in (ranks, following, half))
    return AxisMessages(np.append(source, target), np.append(target, source), np.append(size_each, size_each))


def joining_layers(fabric: Fabric, source: Ints, target: Ints) -> Ints:
    """Return, for pairs of GPUs, the number of the innermost layer that joins them."""
    sizes = (layer.gpus for layer in fabric.layers())
    apart: Ints = np.sum([source // size != target // size for size in sizes], axis=0)  # groups nest
    return apart


# Minimum cut: the order of ranks that sends least over the oversubscribed layers of the network


@dataclass(frozen=True)
class PlacementChoice:
    """A rank order and its traffic beside that of other orders."""

    placement: Placement
    """Rank i runs on GPU `placement.gpus[i]`."""
    traffic: list[AxisTraffic]
    """By axis, under this order."""
    crossing: dict[str, dict[str, float]]
    """Order (contiguous, recommended, random, and `RINGS`) -> layer -> bytes of a step that cross it."""
    layer: str
    """Outermost oversubscribed layer, whose bytes are minimized first; "" if there is none."""

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
        crossing, reference = (self.crossing[name].get(self.layer, 0.0) for name in (order, base))
        if not reference:
            return float("inf") if crossing else 1.0
        return crossing / reference


class Ring(NamedTuple):
    """An axis with ring collectives, between slots."""

    number: Ints
    """[slots]: ring of each slot."""
    bytes: float
    """Of one crossing of a ring, times the parallel rings through the same slots."""


class SlotTraffic(NamedTuple):
    """Messages between slots of ranks in a step."""

    rings: list[Ring]
    source: Ints
    target: Ints
    """[pairs]: slots of neighboring pipeline stages."""
    bytes: NDArray[np.float64]
    """Of each pair."""

    def cut(self, group: Ints) -> float:
        """Return the bytes that cross if slot i of the job is in group `group[i]`."""
        apart = group[self.source] != group[self.target]
        total = float(self.bytes[apart].sum())
        total += sum(ring.bytes * _crossings(ring.number, group) for ring in self.rings)
        return total


def _crossings(ring: Ints, group: Ints) -> int:
    """Return how often rings cross between groups: a ring with members in k > 1 groups crosses k times."""
    width = int(group.max()) + 1
    key = ring * width + group
    if (cells := (int(ring.max()) + 1) * width) <= FLAGS * len(key):
        flags = np.zeros(cells, bool)
        flags[key] = True
        used = np.flatnonzero(flags)
    else:
        used = np.unique(key)
    groups = np.bincount(used // width)
    return int(groups[groups > 1].sum())


def minimum_cut(
    layout: Layout, world: int, fabric: Fabric, sent: AxisBytes, available: Ints | None = None, seed: int = 0
) -> PlacementChoice:
    """Return the recommended order of ranks on the free GPUs (`available`; None: all).

    The exact minimum is NP-hard (graph partitioning). Meta's scheduler searches for it too (Gangidi et al., SIGCOMM
    2024, unpublished); this search is ours: the best of `candidate_orders`, improved by seeded swaps. The outermost
    oversubscribed layer never carries more than under contiguous order; an inner one may, if an outer one gained.
    Contention on single links is not modeled. Raises ValueError as `free_slots`, or for a layout that does not divide
    `world`.
    """
    slots = free_slots(layout, world, fabric, available)
    best = fill_slots(
        slots[_search(layout, world, fabric, slot_traffic(layout, world, fabric, sent), slots, seed)], world
    )
    random = shuffled_placement(layout, world, fabric, available, seed)
    orders: dict[str, tuple[Placement, Order]] = {
        "contiguous": (fill_slots(slots, world), "gpu"),
        "recommended": (best, "gpu"),
        "random": (random, "rank"),
        RINGS: (random, "gpu"),
    }
    traffic = {name: axis_traffic(layout, fabric, order, sent, by) for name, (order, by) in orders.items()}
    layer = next((tier.name for tier in reversed(fabric.tiers) if tier.oversubscription > 1), "")
    crossings = {name: bytes_above_server(axes) for name, axes in traffic.items()}
    return PlacementChoice(best, traffic["recommended"], crossings, layer)


def server_order(choice: PlacementChoice, layout: Layout, fabric: Fabric, sent: AxisBytes) -> tuple[Ints, float]:
    """Return the servers of a job in the order of ranks, and the bytes of a step that then cross `choice.layer`.

    A launcher numbers ranks server by server, so a recommended order that splits servers becomes one of whole servers:
    by their first rank, or as wired, whichever crosses less.
    """
    gpus, world = fabric.server.gpus, choice.placement.world
    servers, first = np.unique(choice.placement.gpus // gpus, return_index=True)

    def crossing(order: Ints) -> float:
        placed = (order[:, None] * gpus + np.arange(gpus)).reshape(-1)[:world]
        traffic = axis_traffic(layout, fabric, Placement(placed), sent)
        return bytes_above_server(traffic).get(choice.layer, 0.0)

    orders = [servers, servers[np.argsort(first)]]
    crossings = [crossing(order) for order in orders]
    best = int(np.argmin(crossings))
    return orders[best], crossings[best]


def slot_groups(fabric: Fabric, slots: Ints) -> list[Ints]:
    """Return, for each oversubscribed tier, outermost first, [slots]: the group below it of each slot."""
    below = [layer.gpus for layer in fabric.layers()]
    tiers = [size for size, tier in zip(below, fabric.tiers, strict=False) if tier.oversubscription > 1]
    return [slots[:, 0] // size for size in reversed(tiers)]


def slot_traffic(layout: Layout, world: int, fabric: Fabric, sent: AxisBytes) -> SlotTraffic:
    """Return the messages between slots; ranks of one slot share all coordinates but their tensor-parallel one."""
    size = slot_size(layout, fabric)
    rings = []
    for axis, number in ring_numbers(layout, world).items():
        parallel = 1 if axis == "tp" else size
        members = np.unique(number[::size], return_inverse=True)[1]
        rings.append(Ring(members, getattr(sent, axis) * parallel))
    source, target, volume = pipeline_pairs(layout, world, sent.pp)
    first = source % size == 0
    return SlotTraffic(
        [ring for ring in rings if ring.bytes and np.bincount(ring.number).max() > 1],
        source[first] // size,
        target[first] // size,
        volume[first] * size,
    )


def _search(layout: Layout, world: int, fabric: Fabric, needs: SlotTraffic, slots: Ints, seed: int) -> Ints:
    """Return the order of slots that cuts least, or plain order if none cuts less."""
    size = slots.shape[1]
    shape, used = (layout.dp(world), layout.pp, layout.cp * layout.tp // size), world // size
    plain, groups = np.arange(len(slots)), slot_groups(fabric, slots)
    if not groups:
        return plain
    best = min(candidate_orders(shape, groups[0]), key=lambda order: needs.cut(groups[0][order[:used]]))
    for depth, group in enumerate(groups):
        best = improve_by_swaps(best, used, block_sizes(shape), needs.cut, groups[: depth + 1], seed)
        best = sort_within_groups(best, group, used)
    for group in groups:  # the first layer where the two differ decides
        cut, plain_cut = needs.cut(group[best[:used]]), needs.cut(group[plain[:used]])
        if abs(cut - plain_cut) > LEAST_GAIN * plain_cut:
            return best if cut < plain_cut else plain
    return plain
