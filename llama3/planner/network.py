"""Process groups of a layout on a cluster's network, and the time of their messages.

Ranks fill the cluster in order, [TP, CP, PP, DP] from the innermost (arXiv 2407.21783, section 3.3.2), so strides and
sizes describe a group. Other orders and fragmented clusters are in `placement`, contention of flows in `routing`. A pod
that a replica straddles counts only its whole replicas.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import cast, get_args

from llama3.parallel.layout import Layout
from llama3.planner.collectives import CommGroup, Kind, fastest_algorithm
from llama3.planner.topology import Fabric


class Network:
    """A cluster's layers, and a cache of groups."""

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
