"""torch's CUDA build on a device that counts kernels and computes nothing (`make test-cuda`), or on real GPUs.

On the null device everything on the host is real: dispatch, the allocator, streams, FSDP2, NCCL's host side, Triton.
What the host reads back means nothing, so `fix_host_values` replaces it where the trainer decides by it. On GPUs
(`pytest tests/cuda`) nothing is replaced, and what was computed is compared too.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

NULL = "NULLCUDA" in os.environ


def require(processes: int = 1, null: bool = False) -> None:
    """Skip the test or module unless there are as many GPUs, or the null device (`null`: nothing else will do)."""
    if NULL:
        return
    from herd.tasks.launch.local import visible_gpus

    if null or not (count := visible_gpus()):
        pytest.skip("no null CUDA device; run make test-cuda", allow_module_level=True)
    if count < processes:
        pytest.skip(f"{count} GPUs; needs {processes}", allow_module_level=True)


def fix_host_values() -> None:
    """On the null device, let every step be sound, and pipelines use the shapes that they are given."""
    if not NULL:
        return
    import torch.distributed.pipelining.schedules as schedules
    from torch.distributed.pipelining.stage import InferenceMode

    from herd.llama3.train import train_step

    read, warm_up = train_step.PendingTensor.read, schedules._PipelineSchedule._warmup_p2p

    def sound(pending: Any) -> list[float]:
        count = len(read(pending))
        if count < 6:
            return [0.0] * count
        # nats and targets of each domain; stop, save; loss, norm, bad, score
        return [*[0.0, 1.0] * (count // 2 - 3), 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]

    def given_shapes(schedule: Any, stages: Any, *arguments: Any, **keywords: Any) -> None:
        warm_up(schedule, stages, *arguments, **keywords)
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC  # ranks vote by a kernel

    train_step.PendingTensor.read = sound  # type: ignore[method-assign]
    schedules._PipelineSchedule._warmup_p2p = given_shapes  # type: ignore[method-assign]
