"""Which GPU each rank runs on: rank orders on a whole cluster, or on what other jobs leave of it.

A scheduler hands out GPUs; the job decides which rank gets which. Plain order puts rank i on the i-th free GPU, which
with ranks in the order [TP, CP, PP, DP] (arXiv 2407.21783, section 3.3.2) keeps the talkative axes close. The unit is a
slot: as many free GPUs of one server as tensor-parallel ranks can share, so that no order tears a tensor-parallel group
over servers where its size divides theirs. Given up: GPUs that make no whole slot stay idle. `cut` looks for a better
order, `axes` says what an order sends where.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from llama3.cluster.topology import Fabric
from llama3.parallel.layout import Layout

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
