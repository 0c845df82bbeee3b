"""Tables of `herd plan network`: collectives by message size and ranks, and what routing leaves of a card's rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rich.table import Table

from llama3.cluster.clos import zone
from llama3.cluster.collectives import ALL, choose, contiguous, crossover, seconds
from llama3.cluster.routing import RING, Job, ring_share, slowdown
from llama3.cluster.topology import Fabric, Layer, Routing
from tasks.projection import plain_table

SIZES = (2**16, 2**20, 2**24, 2**28, 2**32)
ROUTINGS: tuple[tuple[Routing, int], ...] = (
    ("ecmp", 1),
    ("pinning", 1),
    ("e-ecmp", 4),
    ("e-ecmp", 16),
    ("adaptive", 1),
)


def network_tables(fabric: Fabric) -> Iterator[tuple[str, Table]]:
    """Yield title and table of what a cluster's network gives."""
    facts = network_facts(fabric)
    yield (
        "fastest all-reduce (hd: recursive halving and doubling, nearest first)",
        _collectives_table(facts["collectives"]),
    )
    yield "above which size a ring is faster than halving and doubling", _crossover_table(facts["crossover"])
    if facts["routing"]:
        yield f"share of a card's rate in a ring over {RING} racks, slowest pair", _routing_table(facts["routing"])


def network_facts(fabric: Fabric) -> dict[str, Any]:
    """Return the same as data."""
    layers = fabric.layers()
    return {
        "cluster": fabric.name,
        "collectives": [_collective(ranks, layers) for ranks in _ranks(fabric)],
        "crossover": [
            {"ranks": ranks, "bytes": crossover("all-reduce", contiguous(ranks, layers), layers)}
            for ranks in _ranks(fabric)
        ],
        "routing": [*_routing(fabric)],
    }


def _ranks(fabric: Fabric) -> list[int]:
    return [ranks for ranks in (8, 64, 256, 1_024, 4_096, 16_384) if ranks <= fabric.gpus]


def _collective(ranks: int, layers: list[Layer]) -> dict[str, Any]:
    group = contiguous(ranks, layers)
    best = {size: choose("all-reduce", size, group, layers, ALL) for size in SIZES}
    every = {str(size): {name: seconds("all-reduce", size, group, layers, name) for name in ALL} for size in SIZES}
    return {"ranks": ranks, "best": {str(size): found for size, found in best.items()}, "seconds": every}


def _routing(fabric: Fabric) -> Iterator[dict[str, Any]]:
    """Yield the share of a card's rate of each routing: whole racks, a link down, a quarter of the servers taken."""
    if len(fabric.tiers) == 1:
        return
    clos = zone(fabric, RING)
    for routing, flows in ROUTINGS:
        job = Job(clos, routing, flows, replica=clos.cards)
        whole = slowdown(job)
        yield {
            "routing": routing,
            "flows": flows,
            "mean": whole.share,
            "p1": 1 / whole.quantile(0.99),
            "link_down": ring_share(replace(job, failed=1 / (clos.racks * clos.uplinks))),
            "fragmented": ring_share(replace(job, taken=0.25)),
            "here": routing == fabric.routing and flows == fabric.queue_pairs,
        }


def _collectives_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("ranks", *(_size(size) for size in SIZES))
    for row in rows:
        found = (row["best"][str(size)] for size in SIZES)
        table.add_row(f"{row['ranks']:,}", *(f"{_short(name)} {_time(taken)}" for name, taken in found))
    return table


def _crossover_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("ranks", "message")
    for row in rows:
        size = row["bytes"]
        table.add_row(f"{row['ranks']:,}", "never" if np.isinf(size) else _size(size) if size else "always")
    return table


def _routing_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "routing", "flows", "mean", "worst of 100", "a link down", "fragmented", "", left=("routing", "")
    )
    for row in rows:
        shares = (f"{row[name]:.0%}" for name in ("mean", "p1", "link_down", "fragmented"))
        table.add_row(row["routing"], str(row["flows"]), *shares, "<- this cluster" if row["here"] else "")
    return table


def _short(algorithm: str) -> str:
    return {"halving nearest-first": "hd", "halving farthest-first": "far"}.get(algorithm, algorithm)


def _size(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.0f} B"


def _time(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value >= 1e-3 else f"{value * 1e6:,.3g} us"
