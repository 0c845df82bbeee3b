"""What one slow host costs: synchronous training waits for it, so the whole job gets slower by nearly as much.

A tensor-parallel group is a host, so a slow one slows every stage of its pipeline rank. The pipeline is simulated with
the trainer's own schedule; where the slow rank has to wait anyhow, a part of its slowness hides. The other pipelines
wait for this one at the reduction of gradients, however many they are. What this gives up: exchange between hosts and
the optimizer, which are taken to be as fast as before: a share `exposed` of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

from llama3.parallel.schedule import Kind, Times, actions, finish

MEGASCALE_SLOW = 1.1
"""Slow hosts took about 10 % longer. Source: MegaScale (arXiv 2402.15627), 6."""
MEGASCALE_GAIN = 0.007
"""MFU that removing them gave (same source): in a fleet with few of them, after other remedies."""


def lengthening(
    pipeline: int, virtual: int, micro_batches: int, slow: Mapping[int, float], exposed: float = 0.0
) -> float:
    """Return by which share a step gets longer when the pipeline ranks in `slow` take so many times as long.

    `exposed` is the share of a step outside the pipeline. Raises ValueError for a rank or factor that cannot be.
    """
    if odd := [rank for rank, factor in slow.items() if not 0 <= rank < pipeline or factor <= 0]:
        raise ValueError(f"slow: rank {odd[0]} at {slow[odd[0]]:g} x; ranks are 0 to {pipeline - 1}, factors above 0")
    if not 0 <= exposed < 1:
        raise ValueError(f"exposed: {exposed:g} is no share of a step; write 0 to 1")
    even = _step(pipeline, virtual, micro_batches, {})
    return (_step(pipeline, virtual, micro_batches, slow) / even - 1) * (1 - exposed)


def one_slow_host(pipeline: int, virtual: int, micro_batches: int, factor: float = MEGASCALE_SLOW) -> list[float]:
    """Return how much longer a step gets (a share), for a slow host at each pipeline rank."""
    return [lengthening(pipeline, virtual, micro_batches, {rank: factor}) for rank in range(pipeline)]


def without_waiting(hosts: int, factor: float = MEGASCALE_SLOW) -> float:
    """Return the lengthening if nobody waited for anybody: the mean over all hosts. What a model must not say."""
    return (factor - 1) / hosts


def _step(pipeline: int, virtual: int, micro_batches: int, slow: Mapping[int, float]) -> float:
    """Return the length of a step whose stages lie round-robin on the ranks, in forward passes of a stage."""
    kind: Kind = "interleaved" if virtual > 1 else "1f1b"
    factors = tuple(slow.get(stage % pipeline, 1.0) for stage in range(pipeline * virtual))
    lists = actions(kind, pipeline, virtual, micro_batches)
    return max(finish(lists, Times(stages=factors)).values())
