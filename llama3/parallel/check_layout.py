"""Check a layout for any number of processes on one core, in seconds, before a job starts.

Each requested rank is built on torch's fake process group and the meta device with the engine's own mesh and model;
the check reports peers, parameters and memory. `python -m herd.llama3.parallel.check_layout` checks the three
rows of Table 4 (405B) in 5 s of CPU and 430 MB. Messages: `herd.llama3.parallel.comm_trace`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from herd.llama3.model.flops import parameter_count
from herd.llama3.parallel.layout import LLAMA3_VOCAB_SIZE, TABLE_4, Layout
from herd.llama3.parallel.memory import Load, RankMemory, memory, memory_line
from herd.llama3.recipe.sections import Model

RANK = 5_000
"""The rank of each layout that `main` checks."""


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
    """Of the whole model."""
    ranks: list[RankCheck]
    memory: list[RankMemory]
    """Of a process of each pipeline rank."""

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda rank: rank.total)


def check_layout(
    config: Model, vocab_size: int, layout: Layout, world: int, load: Load, ranks: Sequence[int] = (0,)
) -> LayoutCheck:
    """Build each of `ranks` of `world` processes in turn and return its coordinates, peers and size.

    Raises ValueError if the layout does not fit. Fails with AssertionError in a process that has a process group.
    """
    needs = memory(config, vocab_size, layout, world, load)  # first: it rejects bad layouts without torch

    import torch

    from herd.llama3.parallel.comm_trace import fake_process_group
    from herd.llama3.parallel.mesh import to_local
    from herd.llama3.parallel.parallelize import empty_model_parts

    checks = []
    for rank in ranks:
        with fake_process_group(layout, world, rank) as context:
            meshes = {name: context.mesh[name] for name in ("tp", "cp", "pp")}
            meshes["shards"] = context.shards if layout.dp_replicate == 1 else context.shards["fsdp"]
            groups = {name: mesh.get_group() for name, mesh in meshes.items()}
            models = empty_model_parts(config, vocab_size, context, torch.float32, torch.bfloat16)
            parameters = [to_local(parameter) for model in models.values() for parameter in model.parameters()]
            check = RankCheck(
                rank=rank,
                dp=context.axis("dp").rank,
                pp=context.axis("pp").rank,
                cp=context.axis("cp").rank,
                tp=context.axis("tp").rank,
                peers={name: torch.distributed.get_process_group_ranks(group) for name, group in groups.items()},
                stages=list(models),
                layers=[int(layer) for model in models.values() for layer in model.layers],
                parameters=sum(parameter.numel() for parameter in parameters),
            )
            checks.append(check)
    return LayoutCheck(world, parameter_count(config, vocab_size), checks, needs)


def measure_layout() -> tuple[float, int]:
    """Check Table 4 in a fresh process; return its CPU seconds, imports included, and its largest memory in bytes."""
    result = subprocess.run(
        [sys.executable, "-m", "herd.llama3.parallel.check_layout", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    cost = json.loads(result.stdout)
    return cost["cpu_s"], cost["peak_bytes"]


def _span(ranks: list[int]) -> str:
    """Return `first..last by step`, or the number of ranks if their steps differ."""
    steps = {after - before for before, after in pairwise(ranks)}
    step = f" by {steps.pop()}" if len(steps) == 1 else f" ({len(ranks)} ranks)"
    return f"{ranks[0]}..{ranks[-1]}{step}" if len(ranks) > 1 else str(ranks[0])


def main() -> None:
    """Print the check of Table 4, micro-batches of one sequence; with --json, the full result and its cost."""
    config = Model.model_validate({"preset": "405b"})
    checks = [
        check_layout(config, LLAMA3_VOCAB_SIZE, row.layout, row.world, Load(row.seq_len, 1, row.sequences), [RANK])
        for row in TABLE_4
    ]
    try:  # not ru_maxrss, which includes the parent's
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    cost = {"cpu_s": time.process_time(), "peak_bytes": peak_bytes}
    if "--json" in sys.argv[1:]:
        print(json.dumps({**cost, "checks": [asdict(check) for check in checks]}))
        return
    for row, check in zip(TABLE_4, checks, strict=True):
        layout = row.layout
        print(
            f"{row.world:,} ranks: tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, dp {layout.dp(row.world)}; "
            f"seq_len {row.seq_len:,}; {check.parameters:,} parameters"
        )
        for rank in check.ranks:
            peers = ", ".join(f"{name} {_span(peers)}" for name, peers in rank.peers.items())
            print(f"  rank {rank.rank}: {len(rank.layers)} layers, {rank.parameters:,} parameters; {peers}")
        print("  " + memory_line(check.fullest))
    print(f"{cost['cpu_s']:.1f} s of CPU, {peak_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
