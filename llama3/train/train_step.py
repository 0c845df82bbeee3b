"""One optimizer step: gradients of the summed nats of the batch, then one update by their mean.

The loss of a batch is the sum of nats over all its targets divided by their number, on whatever number of processes and
micro-batches. Gradients are taken of the sum, and everything that processes must agree on (nats, targets, gradient
norm, whether to stop or save) goes into one small sum; the division, clipping and the decision to pass over a bad step
happen on the device. So nothing in a step waits for the host: its numbers are read while the next step runs.

Shapes: B sequences, S sequence length (this process's part of it), D domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama3.model.loss import NO_TARGET
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import ParallelContext
from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.schema import Recipe
from llama3.train.data_loader import LocalBatch, Step
from llama3.train.job import TrainJob
from llama3.train.loss_spikes import SpikeGuard
from llama3.train.optimizer import scale, squared_norm
from llama3.train.profiler import part
from llama3.train.state import TrainState

# Numbers on their way from the device to the host.
#
# Reading a tensor (`.item()`, `.tolist()`) waits for everything that the device was given before the reading, so
# reading the numbers of a step after the next one was handed over waits for both. Here the copy is handed over when
# the numbers are made, into pinned memory, with an event behind it; reading later waits for that event only.


class PendingTensor:
    """The values that `tensor` has now, in stream order."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if not tensor.is_cuda:
            self._host = tensor.detach().clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> list[float]:
        """Wait for the copy; return the values of a vector."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values


FLAGS = 2


@dataclass(frozen=True)
class StepTensors:
    """What a step found, on the device; the same on every process."""

    tally_D2: Tensor
    """fp64: sum of nats and number of targets of each domain."""
    targets: Tensor
    loss: Tensor
    """Nats per target, fp64."""
    grad_norm: Tensor
    """Of the mean loss, before clipping, fp64."""
    flags: Tensor
    """How many processes want to stop, to save."""

    @classmethod
    def of(cls, shared: Tensor) -> StepTensors:
        """Unpack the sum over processes that `gather` made."""
        tally_D2 = shared[: 2 * len(DOMAINS)].view(-1, 2)
        nats, targets = tally_D2.sum(0).unbind()
        targets = targets.clamp(min=1)
        return cls(tally_D2, targets, nats / targets, shared[-FLAGS - 1].sqrt() / targets, shared[-FLAGS:])


@dataclass(frozen=True)
class StepResult:
    """The same on the host."""

    loss: float
    grad_norm: float
    domain_loss: dict[Domain, float]
    stop: bool
    save: bool
    skipped: bool = False
    """Whether the weights were left as they were, because the step was bad."""
    score: float = 0.0
    """Standard deviations above the mean of the steps before (see `spikes`)."""

    @classmethod
    def read(cls, numbers: PendingTensor) -> StepResult:
        """Wait for the step and read the numbers that `on_the_way` sent."""
        *tally, stop, save, loss, norm, skip, high = numbers.read()
        domains = zip(DOMAINS, tally[0::2], tally[1::2], strict=True)
        by_domain = {domain: nats / count for domain, nats, count in domains if count}
        return cls(loss, norm, by_domain, stop > 0, save > 0, skip > 0, high)


def on_the_way(measured: StepTensors, skipped: Tensor, score: Tensor) -> PendingTensor:
    """Send the numbers of a step to the host, before the device is given the next one."""
    single = [measured.loss, measured.grad_norm, skipped, score]
    return PendingTensor(
        torch.cat([measured.tally_D2.flatten(), measured.flags, torch.stack([n.double() for n in single])])
    )


def accumulate(model: Transformer, share: LocalBatch, micro_batch: int, zero: int) -> Tensor:
    """Add the gradients of this process's share to `model`; return nats per token [B, S]."""
    from llama3.parallel.parallelize import last_micro_batch

    nats = []
    sequences = len(share.tokens_BS)
    for first in range(0, sequences, micro_batch):
        part = slice(first, first + micro_batch)
        last_micro_batch(model, first + micro_batch >= sequences, zero)
        documents = None if share.documents_BS is None else share.documents_BS[part]
        nats_BS = model(share.tokens_BS[part], documents, share.targets_BS[part])
        nats_BS.sum().backward()
        nats.append(nats_BS.detach())
    return torch.cat(nats)


def tally(nats_BS: Tensor | None, share: LocalBatch, world: ParallelContext) -> Tensor:
    """Return fp64 [D, 2]: nats and targets of each domain in this process's share, zero if another counts them."""
    tally_D2 = torch.zeros(len(DOMAINS), 2, dtype=torch.float64, device=world.device)
    if nats_BS is not None and world.first_of_copy:
        rows = torch.stack([nats_BS.double().flatten(), (share.targets_BS != NO_TARGET).double().flatten()], 1)
        tally_D2.index_add_(0, share.domains_BS.flatten(), rows)
    return tally_D2


def agree(tally_D2: Tensor, squares: Tensor, stop: bool, save: bool, world: ParallelContext) -> StepTensors:
    """Sum over all processes what each found; `stop` and `save` hold if any process says so."""
    flags = torch.tensor([stop, save], dtype=torch.float64).to(world.device, non_blocking=True)
    return StepTensors.of(world.sum(torch.cat([tally_D2.flatten(), squares.view(1), flags])))


# Take optimizer steps: what runs on the devices, in which order, without waiting for the host.
#
# Forward and backward over micro-batches (or the pipeline's schedule), one sum over processes, the verdict on the
# step, clipping, the update. The host learns of a step through `Pending.read`, which it calls while the next one
# runs. What this gives up: a step's log line comes one step late, and a save that a clock asks for happens one step
# later.


@dataclass(frozen=True)
class Pending:
    """A step that was handed to the device and not looked at yet."""

    step: Step
    numbers: PendingTensor

    def read(self) -> StepResult:
        """Wait for the step to end and return its numbers."""
        return StepResult.read(self.numbers)


class Engine:
    """Trains a state, one step at a time."""

    def __init__(
        self, state: TrainState, recipe: Recipe, job: TrainJob, world: ParallelContext, guard: SpikeGuard
    ) -> None:
        self.state, self.world, self.guard = state, world, guard
        self.clip = recipe.optimizer.clip
        self.micro_batch = 1 if job.deterministic else job.micro_batch
        self.pipeline = _pipeline(state, world)

    def take(self, step: Step, share: LocalBatch, lr: float, stop: bool, save: bool) -> Pending:
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

    def _gradients(self, share: LocalBatch) -> Tensor | None:
        """Leave the gradients of the summed nats in the weights; return the nats where the last layer is."""
        if self.pipeline is None:
            return accumulate(self.state.parts[0], share, self.micro_batch, self.world.layout.zero)
        micro_batch = largest_divisor(len(share.tokens_BS), self.micro_batch)
        nats: Tensor | None = self.pipeline.run(share.tokens_BS, share.documents_BS, share.targets_BS, micro_batch)
        return nats

    @torch.no_grad()
    def nats(self, share: LocalBatch) -> Tensor | None:
        """Return the nats [B, S] of a share without training on it, where the last layer is; None elsewhere."""
        count = len(share.tokens_BS)
        if self.pipeline is not None:
            micro_batch = largest_divisor(count, self.micro_batch)
            found: Tensor | None = self.pipeline.evaluate(
                share.tokens_BS, share.documents_BS, share.targets_BS, micro_batch
            )
            return found
        from llama3.parallel.parallelize import release

        model, parts = self.state.parts[0], []
        for first in range(0, count, self.micro_batch):
            rows = slice(first, first + self.micro_batch)
            documents = None if share.documents_BS is None else share.documents_BS[rows]
            parts.append(model(share.tokens_BS[rows], documents, share.targets_BS[rows]))
        release(model)
        return torch.cat(parts)

    def _factor(self, measured: StepTensors) -> Tensor:
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


def _pipeline(state: TrainState, world: ParallelContext) -> Any:
    if world.layout.pp == 1:
        return None
    from llama3.parallel.pipeline import Pipeline  # torch's pipelining takes a second to import

    return Pipeline(dict(state.parts), world)
