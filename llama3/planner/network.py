"""How the groups of a layout lie on a cluster's network, and what their messages take.

Ranks fill the cluster in order, [TP, CP, PP, DP] from the innermost (arXiv 2407.21783, section 3.3.2), so that a group
is told by strides and sizes, and only by how many of its members share each layer of the network. Given up here:
fragmented clusters and other orders, which are `placement`'s; contention of flows, which `routing` answers as one share
of a card's rate; replicas that straddle pods, of which a pod is counted to hold only the whole ones.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import cast, get_args

from llama3.parallel.layout import Layout
from llama3.planner.collectives import CommGroup, Kind, choose
from llama3.planner.topology import Fabric


class Network:
    """A cluster's layers, with the groups that were asked for."""

    def __init__(self, fabric: Fabric, share: float = 1.0) -> None:
        """`share`: of a card's rate that flows between racks get (see `routing.bandwidth_share`)."""
        self.fabric, self.share = fabric, share
        inside, rack, *tiers = fabric.layers()
        self.layers = [inside, rack, *(replace(tier, bytes_per_s=tier.bytes_per_s * share) for tier in tiers)]
        self._groups: dict[tuple[tuple[int, int], ...], CommGroup] = {}

    def group(self, axis: str, layout: Layout, world: int) -> CommGroup:
        """Return the group of an axis: tp, cp, pp, fsdp (dp and cp together) or replica."""
        return self._group(tuple(_strides(axis, layout, world)))

    def seconds(self, kind: str, size: float, group: CommGroup) -> float:
        """Return the time of a collective over `size` bytes of the whole tensor, by what NCCL would choose."""
        assert kind in get_args(Kind), f"{kind} is no collective"
        return choose(cast(Kind, kind), size, group, self.layers)[1]

    def send(self, size: float, layout: Layout) -> float:
        """Return the time of a message of `size` bytes to the next pipeline stage."""
        span = layout.model_parallel
        layer = next(layer for layer in self.layers if layer.gpus >= span or layer is self.layers[-1])
        return size / layer.bytes_per_s + layer.latency_s

    def _group(self, axes: tuple[tuple[int, int], ...]) -> CommGroup:
        """`axes`: strides and sizes, the inner axis first."""
        if axes not in self._groups:
            shares = [prod(min(count, max(1, layer.gpus // stride)) for stride, count in axes) for layer in self.layers]
            self._groups[axes] = CommGroup(prod(count for _, count in axes), tuple(shares))
        return self._groups[axes]


def _strides(axis: str, layout: Layout, world: int) -> list[tuple[int, int]]:
    within = layout.dp(world) // layout.replicas
    match axis:
        case "tp":
            return [(1, layout.tp)]
        case "cp":
            return [(layout.tp, layout.cp)]
        case "pp":
            return [(layout.tp * layout.cp, layout.pp)]
        case "fsdp":
            return [(layout.tp, layout.cp), (layout.model_parallel, within)]
        case "replica":
            return [(layout.model_parallel * within, layout.replicas)]
        case _:
            raise ValueError(f"axis: {axis!r} is none of tp, cp, pp, fsdp, replica")
