"""One optimizer step: gradients of the summed loss (nats) of the batch, then one update by their mean.

The loss is the sum of nats over all targets of the batch divided by their number, for any number of processes and
micro-batches. Nothing in a step waits for the host: the host reads the numbers of a step while the next one runs.

Shapes: B sequences, S sequence length (this process's part of it), D domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama3.model.loss import NO_TARGET
from llama3.parallel.mesh import ParallelContext
from llama3.recipe.base import DOMAINS
from llama3.recipe.schema import Recipe
from llama3.train.data_loader import LocalBatch, Step
from llama3.train.job import TrainJob
from llama3.train.loss_spikes import SpikeGuard, StepResult
from llama3.train.optimizer import scale, squared_norm
from llama3.train.profiler import part
from llama3.train.state import TrainState


class PendingTensor:
    """A copy of `tensor` on its way to the host, with the values that it has now in stream order.

    `.item()` and `.tolist()` wait for everything that was enqueued before them, hence also for the next step. This copy
    goes to pinned memory and is followed by an event; `read` waits for that event only.
    """

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


@dataclass(frozen=True)
class Pending:
    """A step that the device works on and the host has not read yet."""

    step: Step
    numbers: PendingTensor

    def read(self) -> StepResult:
        """Wait for the step to end and return its numbers."""
        *tally, stop, save, loss, norm, skip, score = self.numbers.read()
        domains = zip(DOMAINS, tally[0::2], tally[1::2], strict=True)
        by_domain = {domain: nats / count for domain, nats, count in domains if count}
        return StepResult(loss, norm, by_domain, stop > 0, save > 0, skip > 0, score)


class Engine:
    """Trains a state, one step at a time."""

    def __init__(
        self, state: TrainState, recipe: Recipe, job: TrainJob, world: ParallelContext, guard: SpikeGuard
    ) -> None:
        self.state, self.world, self.guard = state, world, guard
        self.clip = recipe.optimizer.clip
        self.micro_batch = 1 if job.deterministic else job.micro_batch
        self.pipeline: Any = None
        if world.layout.pp > 1:
            from llama3.parallel.pipeline import Pipeline  # torch's pipelining takes a second to import

            self.pipeline = Pipeline(dict(state.parts), world)

    def train_step(self, step: Step, batch: LocalBatch, lr: float, stop: bool, save: bool) -> Pending:
        """Train on `batch`, this process's part of `step`, at learning rate `lr`; return before the device is done.

        `stop` and `save` are the requests of this process; the result says whether any process has made them.
        """
        from llama3.parallel.parallelize import last_micro_batch

        state, world = self.state, self.world
        parameters = list(state.parameters.values())
        sequences = len(batch.tokens_BS)

        # Forward and backward: gradients of the summed nats, accumulated over micro-batches.
        with part("gradients"):
            nats_BS: Tensor | None
            if self.pipeline is not None:
                micro_batch = largest_divisor(sequences, self.micro_batch)
                nats_BS = self.pipeline.run(batch.tokens_BS, batch.documents_BS, batch.targets_BS, micro_batch)
            else:
                model, nats = state.parts[0], []
                for first in range(0, sequences, self.micro_batch):
                    chunk = slice(first, first + self.micro_batch)
                    # Gradients are reduced over processes in the last micro-batch only.
                    last_micro_batch(model, first + self.micro_batch >= sequences, world.layout.zero)
                    documents_BS = None if batch.documents_BS is None else batch.documents_BS[chunk]
                    chunk_nats_BS = model(batch.tokens_BS[chunk], documents_BS, batch.targets_BS[chunk])
                    chunk_nats_BS.sum().backward()
                    nats.append(chunk_nats_BS.detach())
                nats_BS = torch.cat(nats)

        # One all-reduce for everything that processes must agree on, in fp64.
        tally_D2, squares = tally(nats_BS, batch, world), squared_norm(parameters)
        requests_2 = torch.tensor([stop, save], dtype=torch.float64).to(world.device, non_blocking=True)
        shared = world.sum(torch.cat([tally_D2.flatten(), squares.view(1), requests_2]))
        tally_D2, requests_2 = shared[: 2 * len(DOMAINS)].view(-1, 2), shared[-2:]
        nats_sum, targets = tally_D2.sum(0).unbind()
        targets = targets.clamp(min=1)
        loss, grad_norm = nats_sum / targets, shared[-3].sqrt() / targets

        # Clip and update. A bad step changes nothing: the fused kernel leaves weights and moments as they are.
        bad = self.guard.flag(loss, grad_norm)
        scale(parameters, (self.clip / grad_norm.clamp(min=self.clip)) / targets)  # of the sum -> of the mean, clipped
        with part("update"):
            optimizer: Any = state.optimizer
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.found_inf = bad
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.position = step.end

        # Send the numbers to the host before the device is given the next step.
        single = [loss, grad_norm, bad, self.guard.score]
        numbers = [tally_D2.flatten(), requests_2, torch.stack([number.double() for number in single])]
        return Pending(step, PendingTensor(torch.cat(numbers)))

    @torch.no_grad()
    def nats(self, batch: LocalBatch) -> Tensor | None:
        """Return the nats [B, S] of `batch` without training on it; None on processes without the last layer."""
        sequences = len(batch.tokens_BS)
        if self.pipeline is not None:
            micro_batch = largest_divisor(sequences, self.micro_batch)
            nats_BS: Tensor | None = self.pipeline.evaluate(
                batch.tokens_BS, batch.documents_BS, batch.targets_BS, micro_batch
            )
            return nats_BS
        from llama3.parallel.parallelize import release

        model, nats = self.state.parts[0], []
        for first in range(0, sequences, self.micro_batch):
            chunk = slice(first, first + self.micro_batch)
            documents_BS = None if batch.documents_BS is None else batch.documents_BS[chunk]
            nats.append(model(batch.tokens_BS[chunk], documents_BS, batch.targets_BS[chunk]))
        release(model)
        return torch.cat(nats)


def tally(nats_BS: Tensor | None, batch: LocalBatch, world: ParallelContext) -> Tensor:
    """Return fp64 [D, 2]: nats and targets of each domain in `batch`; zeros if another process counts them."""
    tally_D2 = torch.zeros(len(DOMAINS), 2, dtype=torch.float64, device=world.device)
    if nats_BS is not None and world.first_of_copy:
        pairs = torch.stack([nats_BS.double().flatten(), (batch.targets_BS != NO_TARGET).double().flatten()], 1)
        tally_D2.index_add_(0, batch.domains_BS.flatten(), pairs)
    return tally_D2


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` that is at most `limit`: a pipeline needs equal micro-batches."""
    return next(size for size in range(min(count, limit), 0, -1) if count % size == 0)
