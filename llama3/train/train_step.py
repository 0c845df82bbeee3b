"""One optimizer step: gradients of the summed loss (nats) of the batch, then one clipped update by their mean.

The loss is the sum of nats over all targets of the batch divided by their number, for any number of processes and
micro-batches. Nothing in a step waits for the host: the host reads the numbers of a step while the next one runs.
Shapes: B sequences, S sequence length (this process's part of it), D domains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from herd.llama3.model.linear import casts_kept
from herd.llama3.model.loss import NO_TARGET
from herd.llama3.parallel.mesh import ParallelContext, to_local
from herd.llama3.recipe.base import CONVERSATIONS, DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.callbacks import StepResult
from herd.llama3.train.data_loader import LocalBatch, Step
from herd.llama3.train.device import DeviceTime
from herd.llama3.train.job import TrainJob
from herd.llama3.train.loss_spikes import SpikeGuard
from herd.llama3.train.profiler import record_function
from herd.llama3.train.state import TrainState

PIECE = 64
"""Values of a gradient whose norm is one fp32 number."""


class PendingTensor:
    """A copy of `tensor` to pinned memory, `done` when the device has made it."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
        else:
            self._host = tensor.detach().clone()
        self.done = DeviceTime(tensor.device)

    def read(self) -> list[float]:
        """Wait for the copy; return the values of a vector."""
        self.done.wait()
        values: list[float] = self._host.tolist()
        return values


@dataclass(frozen=True)
class Pending:
    """A step that the device works on and the host has not read yet."""

    step: Step
    numbers: PendingTensor
    groups: Sequence[str]
    """What the batch's `domains` count: the domains, and in a stage of kind `sft` conversations."""

    def read(self) -> StepResult:
        """Wait for the step to end and return its numbers. Raises ValueError if its batch had no target."""
        *tally, stop, save, loss, norm, skip, score = self.numbers.read()
        if not sum(tally[1::2]):
            raise ValueError(
                f"stages: no token of the step from {self.step.start:,} to {self.step.end:,} is a target, so there is "
                "nothing to train on; raise the stage's seq_len, or leave out conversations without an answer"
            )
        domains = zip(self.groups, tally[0::2], tally[1::2], strict=True)
        by_domain = {domain: nll / count for domain, nll, count in domains if count}
        return StepResult(loss, norm, by_domain, stop > 0, save > 0, skip > 0, score, sum(tally[1::2]))


class Engine:
    """Trains a state, one step at a time."""

    def __init__(
        self, state: TrainState, recipe: Recipe, job: TrainJob, world: ParallelContext, guard: SpikeGuard
    ) -> None:
        self.state, self.world, self.guard = state, world, guard
        self.clip = recipe.optimizer.clip
        kind = recipe.schedule.span(job.stage).stage.kind
        self.groups: tuple[str, ...] = DOMAINS if kind == "pretrain" else (*DOMAINS, CONVERSATIONS)
        self.micro_batch = 1 if job.deterministic else job.micro_batch
        self.exact = job.deterministic
        self.pipeline: Any = None
        if world.layout.pp > 1:
            from herd.llama3.parallel.pipeline import Pipeline  # torch's pipelining takes a second to import

            self.pipeline = Pipeline(dict(state.model_parts), world)

    def train_step(self, step: Step, batch: LocalBatch, lr: float, stop: bool, save: bool) -> Pending:
        """Train on `batch`, this process's part of `step`, at learning rate `lr`; return before the device is done.

        `stop` and `save` are the requests of this process; the result says whether any process has made them.
        """
        from herd.llama3.parallel.parallelize import last_micro_batch

        state, world = self.state, self.world
        parameters = list(state.parameters.values())
        sequences = len(batch.tokens_BS)

        # Forward and backward: gradients of the summed nats, accumulated over micro-batches.
        # ZeRO-3 gathers a layer at a time, so it may not keep the casts of all.
        several = sequences > self.micro_batch and world.layout.zero == 2
        casts = casts_kept(state.model_parts.values()) if several else nullcontext()
        with record_function("gradients"), casts:
            nll_BS: Tensor | None
            if self.pipeline is not None:
                micro_batch = largest_divisor(sequences, self.micro_batch)
                nll_BS = self.pipeline.run(batch.tokens_BS, batch.documents_BS, batch.targets_BS, micro_batch)
            else:
                model, nll = state.model_parts[0], []
                for first in range(0, sequences, self.micro_batch):
                    chunk = slice(first, first + self.micro_batch)
                    last_micro_batch(model, first + self.micro_batch >= sequences, world.layout)
                    mask = model.mask(None if batch.documents_BS is None else batch.documents_BS[chunk], world.device)
                    chunk_nll_BS = model(batch.tokens_BS[chunk], mask, batch.targets_BS[chunk])
                    chunk_nll_BS.sum().backward()
                    nll.append(chunk_nll_BS.detach())
                nll_BS = torch.cat(nll)

        # One all-reduce for everything that processes must agree on, in fp64.
        groups = len(self.groups)
        tally_D2, squares = tally(nll_BS, batch, world, groups), squared_norm(parameters, self.exact)
        requests_2 = torch.tensor([stop, save], dtype=torch.float64).to(world.device, non_blocking=True)
        shared = world.sum(torch.cat([tally_D2.flatten(), squares.view(1), requests_2]))
        tally_D2, requests_2 = shared[: 2 * groups].view(-1, 2), shared[-2:]
        nll_sum, targets = tally_D2.sum(0).unbind()
        loss, grad_norm = nll_sum / targets, shared[-3].sqrt() / targets  # NaN without a target: a bad step

        # Clip and update. A bad step changes nothing: the fused kernel leaves weights and moments as they are.
        bad = self.guard.flag(loss, grad_norm)
        scale(parameters, (self.clip / grad_norm.clamp(min=self.clip)) / targets)  # of the sum -> of the mean, clipped
        with record_function("update"):
            optimizer: Any = state.optimizer
            for group in optimizer.param_groups:
                group["lr"] = lr
            fused = optimizer.defaults["fused"]
            if fused:
                optimizer.found_inf = bad
            if fused or not bad:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.position = step.end

        # Send the numbers to the host before the device is given the next step.
        single = [loss, grad_norm, bad, self.guard.score]
        numbers = [tally_D2.flatten(), requests_2, torch.stack([number.double() for number in single])]
        return Pending(step, PendingTensor(torch.cat(numbers)), self.groups)

    @torch.no_grad()
    def nll(self, batch: LocalBatch) -> Tensor | None:
        """Return the nats [B, S] of `batch` without training on it; None on processes without the last layer."""
        sequences = len(batch.tokens_BS)
        if self.pipeline is not None:
            micro_batch = largest_divisor(sequences, self.micro_batch)
            nll_BS: Tensor | None = self.pipeline.evaluate(
                batch.tokens_BS, batch.documents_BS, batch.targets_BS, micro_batch
            )
            return nll_BS
        from herd.llama3.parallel.parallelize import release

        model, nll = self.state.model_parts[0], []
        for first in range(0, sequences, self.micro_batch):
            chunk = slice(first, first + self.micro_batch)
            mask = model.mask(None if batch.documents_BS is None else batch.documents_BS[chunk], self.world.device)
            nll.append(model(batch.tokens_BS[chunk], mask, batch.targets_BS[chunk]))
        release(model)
        return torch.cat(nll)


def tally(nll_BS: Tensor | None, batch: LocalBatch, world: ParallelContext, groups: int = len(DOMAINS)) -> Tensor:
    """Return fp64 [D, 2]: nats and targets of each domain in `batch`; zeros if another process counts them."""
    tally_D2 = torch.zeros(groups, 2, dtype=torch.float64, device=world.device)
    if nll_BS is not None and world.is_tp_rank0:
        pairs = torch.stack([nll_BS.double().flatten(), (batch.targets_BS != NO_TARGET).double().flatten()], 1)
        tally_D2.index_add_(0, batch.domains_BS.flatten(), pairs)
    return tally_D2


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` that is at most `limit`: a pipeline needs equal micro-batches."""
    return next(size for size in range(min(count, limit), 0, -1) if count % size == 0)


def squared_norm(parameters: Iterable[nn.Parameter], exact: bool = False) -> Tensor:
    """Return the sum of squares, fp64, of this process's gradients; replicas are counted by their first process.

    Norms of PIECE values are fp32 and their squares are added in fp64, without a copy of a contiguous gradient. The
    relative error of the norm is 1e-9 for random values and 1e-7 for equal ones, which are all rounded alike. Values of
    1e18 give infinity, and values below 1e-22 count as 0. With `exact` everything is fp64, so that shards of any size
    give one sum.
    """
    grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.zeros(1, dtype=torch.float64, device=to_local(grads[0]).device)]
    for grad in grads:
        axes: Any = ()
        if hasattr(grad, "placements"):  # a DTensor; isinstance would need its import, 0.7 s
            axes = zip(grad.device_mesh.get_coordinate(), grad.placements, strict=True)
        if all(rank == 0 for rank, placement in axes if placement.is_replicate()):
            values = to_local(grad).reshape(-1)
            dtype = torch.float64 if exact else torch.promote_types(values.dtype, torch.float32)
            whole = len(values) // PIECE * PIECE * (not exact)
            if whole:
                norms.append(torch.linalg.vector_norm(values[:whole].view(-1, PIECE), dim=1, dtype=dtype).double())
            norms.append(torch.linalg.vector_norm(values[whole:], dtype=dtype).double().view(1))
    return torch.cat(norms).square().sum()


def scale(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
