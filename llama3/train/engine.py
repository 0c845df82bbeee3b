"""Take optimizer steps: what runs on the devices, in which order, without waiting for the host.

Forward and backward over micro-batches (or the pipeline's schedule), one sum over processes, the verdict on the step,
clipping, the update. The host learns of a step through `Pending.read`, which it calls while the next one runs. What
this gives up: a step's log line comes one step late, and a save that a clock asks for happens one step later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama3.parallel.mesh import World
from llama3.recipe.schema import Recipe
from llama3.train.job import TrainJob
from llama3.train.later import Later
from llama3.train.optimizer import scale, squared_norm
from llama3.train.profile import part
from llama3.train.reader import Share, Step
from llama3.train.spikes import SpikeGuard
from llama3.train.state import TrainState
from llama3.train.step import Measured, Outcome, accumulate, agree, on_the_way, tally


@dataclass(frozen=True)
class Pending:
    """A step that was handed to the device and not looked at yet."""

    step: Step
    numbers: Later

    def read(self) -> Outcome:
        """Wait for the step to end and return its numbers."""
        return Outcome.read(self.numbers)


class Engine:
    """Trains a state, one step at a time."""

    def __init__(self, state: TrainState, recipe: Recipe, job: TrainJob, world: World, guard: SpikeGuard) -> None:
        self.state, self.world, self.guard = state, world, guard
        self.clip = recipe.optimizer.clip
        self.micro_batch = 1 if job.deterministic else job.micro_batch
        self.pipeline = _pipeline(state, world)

    def take(self, step: Step, share: Share, lr: float, stop: bool, save: bool) -> Pending:
        """Train on this process's share of `step` at learning rate `lr`.

        `stop` and `save` are this process's wishes; the outcome says whether any process has them.
        """
        state, parameters = self.state, list(self.state.parameters.values())
        with part("gradients"):
            nats_BS = self._gradients(share)
        measured = agree(tally(nats_BS, share, self.world), squared_norm(parameters), stop, save, self.world)
        bad = self.guard.flag(measured.loss, measured.grad_norm)
        scale(parameters, self._factor(measured))
        with part("update"):
            self._update(lr, bad)
        state.position = step.end
        return Pending(step, on_the_way(measured, bad, self.guard.score))

    def _gradients(self, share: Share) -> Tensor | None:
        """Leave the gradients of the summed nats in the weights; return the nats where the last layer is."""
        if self.pipeline is None:
            return accumulate(self.state.parts[0], share, self.micro_batch, self.world.layout.zero)
        micro_batch = largest_divisor(len(share.tokens_BS), self.micro_batch)
        nats: Tensor | None = self.pipeline.run(share.tokens_BS, share.documents_BS, share.targets_BS, micro_batch)
        return nats

    @torch.no_grad()
    def nats(self, share: Share) -> Tensor | None:
        """Return the nats [B, S] of a share without training on it, where the last layer is; None elsewhere."""
        count = len(share.tokens_BS)
        if self.pipeline is not None:
            micro_batch = largest_divisor(count, self.micro_batch)
            found: Tensor | None = self.pipeline.evaluate(
                share.tokens_BS, share.documents_BS, share.targets_BS, micro_batch
            )
            return found
        from llama3.parallel.fsdp import release

        model, parts = self.state.parts[0], []
        for first in range(0, count, self.micro_batch):
            rows = slice(first, first + self.micro_batch)
            documents = None if share.documents_BS is None else share.documents_BS[rows]
            parts.append(model(share.tokens_BS[rows], documents, share.targets_BS[rows]))
        release(model)
        return torch.cat(parts)

    def _factor(self, measured: Measured) -> Tensor:
        """Return what turns gradients of the sum into clipped gradients of the mean."""
        return (self.clip / measured.grad_norm.clamp(min=self.clip)) / measured.targets

    def _update(self, lr: float, bad: Tensor) -> None:
        optimizer: Any = self.state.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.found_inf = bad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` that is at most `limit`: a pipeline wants equal micro-batches."""
    return next(size for size in range(min(count, limit), 0, -1) if count % size == 0)


def _pipeline(state: TrainState, world: World) -> Any:
    if world.layout.pp == 1:
        return None
    from llama3.parallel.pipeline import Pipeline  # torch's pipelining takes a second to import

    return Pipeline(dict(state.parts), world)
