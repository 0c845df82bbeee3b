"""Check a layout for any number of processes on one core, in seconds, before a job starts.

Each requested rank is built on torch's fake process group and the meta device with the engine's own mesh and model
parts; the check reports peers, parameters and memory. `python -m llama3.parallel.check_layout` checks the three rows
of Table 4 (405B) in 5 s of CPU and 430 MB. Network traffic: `llama3.parallel.comm_trace`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, RankMemory, memory
from llama3.recipe.sections import Model

ROWS = 128_256
"""Embedding rows of Llama 3: 128,000 and 256 special tokens."""


class Published(NamedTuple):
    """A row of Table 4 (arXiv 2407.21783): how the 405B was trained."""

    world: int
    layout: Layout
    seq: int
    sequences: int
    """Per data-parallel rank and step."""
    tflops: float
    """BF16, per GPU, as published."""


TABLE_4 = (
    Published(8_192, Layout(tp=8, pp=16), 8_192, 32, 430),
    Published(16_384, Layout(tp=8, pp=16), 8_192, 16, 400),
    Published(16_384, Layout(tp=8, cp=16, pp=16), 131_072, 16, 380),
)
"""TP 8, CP 1 or 16, PP 16; data parallelism is what is left: 64, 128, 8."""


@dataclass(frozen=True)
class RankCheck:
    """Coordinates, peers and size of one rank."""

    rank: int
    dp: int
    """Its rank on each axis."""
    pp: int
    cp: int
    tp: int
    peers: dict[str, list[int]]
    """Ranks of its groups, itself included: tp, cp, pp, and shards, among which FSDP cuts its weights."""
    stages: list[int]
    layers: list[int]
    parameters: int
    """Parameters on this rank."""


@dataclass(frozen=True)
class LayoutCheck:
    """Measurements of a layout that fits."""

    world: int
    parameters: int
    """Of the whole model, counted on the meta device."""
    ranks: list[RankCheck]
    memory: list[RankMemory]
    """Of a process of each pipeline rank."""

    @property
    def fullest(self) -> RankMemory:
        """Return the memory of the pipeline rank that needs most."""
        return max(self.memory, key=lambda each: each.total)


def check_layout(
    spec: Model, rows: int, layout: Layout, world: int, load: Load, ranks: Sequence[int] = (0,)
) -> LayoutCheck:
    """Build each of `ranks` of `world` processes in turn and return its coordinates, peers and size.

    Raises ValueError if the layout does not fit. Fails with AssertionError in a process that has a process group.
    """
    needs = memory(spec, rows, layout, world, load)  # first: it rejects bad layouts without torch
    checks = [_check_rank(spec, rows, layout, world, rank) for rank in ranks]
    return LayoutCheck(world, whole_parameters(spec, rows), checks, needs)


@cache
def whole_parameters(spec: Model, rows: int) -> int:
    """Return the number of parameters of the model, made on the meta device."""
    import torch

    from llama3.model.transformer import Transformer

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(spec, rows).parameters())


def _check_rank(spec: Model, rows: int, layout: Layout, world: int, rank: int) -> RankCheck:
    import torch

    from llama3.parallel.comm_trace import imagined
    from llama3.parallel.mesh import local
    from llama3.parallel.parallelize import empty_parts

    with imagined(layout, world, rank) as place:
        meshes = {name: place.mesh[name] for name in ("tp", "cp", "pp")}
        shards = place.shards if layout.replicas == 1 else place.shards["fsdp"]
        groups = {name: mesh.get_group() for name, mesh in {**meshes, "shards": shards}.items()}
        parts = empty_parts(spec, rows, place, torch.float32, torch.bfloat16)
        held = sum(local(each).numel() for part in parts.values() for each in part.parameters())
        return RankCheck(
            rank=rank,
            dp=place.axis("dp").rank,
            pp=place.axis("pp").rank,
            cp=place.axis("cp").rank,
            tp=place.axis("tp").rank,
            peers={name: torch.distributed.get_process_group_ranks(group) for name, group in groups.items()},
            stages=list(parts),
            layers=[int(layer) for part in parts.values() for layer in part.layers],
            parameters=held,
        )


def check_table_4(ranks: Sequence[int] = (5_000,)) -> list[LayoutCheck]:
    """Return the checks of the published layouts, micro-batches of one sequence."""
    spec = Model.model_validate({"preset": "405b"})
    return [check_layout(spec, ROWS, row.layout, row.world, Load(row.seq, 1, row.sequences), ranks) for row in TABLE_4]


def measure_layout() -> tuple[float, int]:
    """Check Table 4 in a fresh process; return its CPU seconds, imports included, and its largest memory in bytes."""
    result = subprocess.run(
        [sys.executable, "-m", "llama3.parallel.check_layout", "--json"], check=True, capture_output=True, text=True
    )
    cost = json.loads(result.stdout)
    return cost["cpu_s"], cost["peak_bytes"]


def _lines(checks: list[LayoutCheck]) -> list[str]:
    """Return a table: a line per row and rank, and the memory of the fullest process."""
    lines = []
    for row, check in zip(TABLE_4, checks, strict=True):
        layout = row.layout
        lines.append(
            f"{row.world:,} ranks: tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, dp {layout.dp(row.world)}; "
            f"seq {row.seq:,}; {check.parameters:,} parameters"
        )
        for rank in check.ranks:
            near = ", ".join(f"{name} {_span(peers)}" for name, peers in rank.peers.items())
            lines.append(f"  rank {rank.rank}: {len(rank.layers)} layers, {rank.parameters:,} parameters; {near}")
        lines.append("  " + memory_line(check.fullest))
    return lines


def memory_line(need: RankMemory) -> str:
    """Return a line with the memory of a process by purpose, in GiB."""
    parts = [
        f"{name.replace('_', ' ')} {size / 2**30:.1f}"
        for name, size in need.as_dict().items()
        if name not in ("pipeline_rank", "in_flight", "total") and size
    ]
    return f"{need.total / 2**30:.0f} GiB on pipeline rank {need.pipeline_rank}: {', '.join(parts)}"


def _span(ranks: list[int]) -> str:
    steps = {after - before for before, after in pairwise(ranks)}
    apart = f" by {steps.pop()}" if len(steps) == 1 else f" ({len(ranks)} ranks)"
    return f"{ranks[0]}..{ranks[-1]}{apart}" if len(ranks) > 1 else str(ranks[0])


def _peak_bytes() -> int:
    """Return the largest resident size of this process: from /proc, since ru_maxrss includes its parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Print the check of Table 4; with --json, the full result and its cost."""
    checks = check_table_4()
    cost = {"cpu_s": time.process_time(), "peak_bytes": _peak_bytes()}
    if "--json" in sys.argv[1:]:
        print(json.dumps({**cost, "checks": [asdict(check) for check in checks]}))
        return
    print(*_lines(checks), f"{cost['cpu_s']:.1f} s of CPU, {cost['peak_bytes'] / 1e6:.0f} MB", sep="\n")


if __name__ == "__main__":
    main()
