"""Which layer of the network each axis of parallelism crosses, and how many bytes a step sends there.

Collectives are counted as rings: each GPU sends its bytes to one neighbour. A ring whose members lie in k > 1 pods
crosses pods k times if it runs through them pod by pod (`by="gpu"`, assumed where nothing else is said), and at nearly
every member if its order knows no pods (`by="rank"` on scattered GPUs). Pipeline stages send both ways; with virtual
ones, the last rank also to the first. Given up: trees and recursive halving, whose far messages are fewer and larger,
and when in the step bytes flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama3.cluster.placement import Ints, Placement
from llama3.cluster.topology import Fabric
from llama3.parallel.layout import Layout
from llama3.parallel.traffic import Collective

Order = Literal["gpu", "rank"]
NAMES = {"tp": "tp", "cp": "cp", "pp": "pp", "fsdp": "dp", "replica": "replica"}
"""Axes of `llama3.parallel.traffic` -> axes here."""


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


class Pairs(NamedTuple):
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


def axis_pairs(axis: str, layout: Layout, placement: Placement, sent: AxisBytes, by: Order = "gpu") -> Pairs:
    """Return who sends how much to whom on an axis."""
    if axis == "pp":
        return pipeline_pairs(layout, placement.world, sent.pp)
    ring = ring_numbers(layout, placement.world)[axis]
    inside = placement.gpus if by == "gpu" else np.arange(placement.world)
    order = np.lexsort((inside, ring)).reshape(-1, sizes(layout, placement.world)[axis])
    source, target = order.reshape(-1), np.roll(order, -1, axis=1).reshape(-1)
    return Pairs(source, target, np.full(len(source), getattr(sent, axis)))


def pipeline_pairs(layout: Layout, world: int, size: float) -> Pairs:
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
    return Pairs(np.append(here, there), np.append(there, here), np.append(part, part))


def layer_numbers(fabric: Fabric, source: Ints, target: Ints) -> Ints:
    """Return, for pairs of GPUs, the number of the innermost layer that joins them; groups nest, so counting does."""
    sizes = (layer.gpus for layer in fabric.layers())
    apart: Ints = np.sum([source // size != target // size for size in sizes], axis=0)
    return apart


def _row(axis: str, layout: Layout, fabric: Fabric, placement: Placement, pairs: Pairs) -> AxisTraffic:
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
