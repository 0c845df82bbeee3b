"""Speed and memory of a stage: tokens and operations per second, utilisation, what is left to do, bytes in use.

Rates are of whole steps on the wall clock, waiting for data included, over all devices of the layout. A device whose
peak is not known gets no utilisation rather than a guessed one (see `peaks`).
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from dataclasses import dataclass

import psutil
import torch

from llama3.model.flops import flops_per_token
from llama3.parallel.mesh import World
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from llama3.train.peaks import described, device_name, peak_of
from llama3.train.reader import Step

GIB = 2**30
RATE_STEPS = 20
"""Steps whose speed foretells the time that remains."""
LAUNCHED = "HERD_LAUNCHED"
"""Environment variable in which a launcher may say when it began an attempt, in seconds since 1970."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one step on the leading process."""

    step: float
    data_wait: float
    checkpoint: float | None = None
    """That training stood still for the checkpoint begun since the step before, if one was."""
    checkpoint_write: float | None = None
    """From the beginning to the commit of a checkpoint that was finished since the step before, if one was."""


class Meter:
    """Measures a stage of `recipe` that ends at `end`, for a model with `rows` embedding rows."""

    def __init__(self, recipe: Recipe, rows: int, world: World, end: int) -> None:
        self.recipe, self.rows, self.world, self.end = recipe, rows, world, end
        self.device = device_name(world.device)
        self.first_step_s: float | None = None
        self._rates: deque[float] = deque(maxlen=RATE_STEPS)

    @property
    def tokens_per_s(self) -> float:
        """Over the last steps."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0

    def described(self) -> str:
        """Return devices, peak and formula in one line."""
        return f"{self.world.size} x {described(self.device, self.recipe.compute)}"

    def speed(self, step: Step, timing: Timing) -> dict[str, float]:
        """Return the metrics of a step that has just ended."""
        if self.first_step_s is None:
            self.first_step_s = time.time() - launched()
        rate = step.batch / timing.step
        self._rates.append(rate)
        values = {
            metrics.TOKENS_PER_S: rate,
            metrics.TOKENS_PER_S_PER_DEVICE: rate / self.world.size,
            metrics.STEP_S: timing.step,
            metrics.DATA_WAIT_S: timing.data_wait,
            metrics.REMAINING_S: (self.end - step.end) / self.tokens_per_s,
            **self._utilisation(step, rate / self.world.size),
        }
        if timing.checkpoint is not None:
            values[metrics.CHECKPOINT_S] = timing.checkpoint
        if timing.checkpoint_write is not None:
            values[metrics.CHECKPOINT_WRITE_S] = timing.checkpoint_write
        return values

    def memory(self) -> dict[str, float]:
        """Return what this process holds and held at most."""
        values = {metrics.HOST_GIB: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        device = self.world.device
        if device.type == "cuda":
            values[metrics.DEVICE_GIB] = torch.cuda.memory_allocated(device) / GIB
            values[metrics.DEVICE_PEAK_GIB] = torch.cuda.max_memory_allocated(device) / GIB
            values[metrics.DEVICE_RESERVED_GIB] = torch.cuda.max_memory_reserved(device) / GIB
        return values

    def _utilisation(self, step: Step, rate: float) -> dict[str, float]:
        flops = flops_per_token(self.recipe.model, self.rows, step.seq)
        values = {metrics.TFLOPS_PER_DEVICE: flops.causal * rate / 1e12}
        if peak := peak_of(self.device, self.recipe.compute):
            values[metrics.MFU] = flops.causal * rate / peak.flops
            values[metrics.MFU_FULL] = flops.full * rate / peak.flops
        return values


def launched() -> float:
    """Return when this attempt was begun, in seconds since 1970: as the launcher says, or this process."""
    told = os.environ.get(LAUNCHED)
    return float(told) if told else float(psutil.Process().create_time())
