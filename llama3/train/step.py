"""One optimizer step: gradients of the summed nats of the batch, then one update by their mean.

The loss of a batch is the sum of nats over all its targets divided by their number, on whatever number of processes and
micro-batches. Gradients are taken of the sum, and everything that processes must agree on (nats, targets, gradient
norm, whether to stop or save) goes into one small sum; the division, clipping and the decision to pass over a bad step
happen on the device. So nothing in a step waits for the host: its numbers are read while the next step runs.

Shapes: B sequences, S sequence length (this process's part of it), D domains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llama3.model.loss import NO_TARGET
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import World
from llama3.recipe.section import DOMAINS, Domain
from llama3.train.later import Later
from llama3.train.reader import Share

FLAGS = 2


@dataclass(frozen=True)
class Measured:
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
    def of(cls, shared: Tensor) -> Measured:
        """Unpack the sum over processes that `gather` made."""
        tally_D2 = shared[: 2 * len(DOMAINS)].view(-1, 2)
        nats, targets = tally_D2.sum(0).unbind()
        targets = targets.clamp(min=1)
        return cls(tally_D2, targets, nats / targets, shared[-FLAGS - 1].sqrt() / targets, shared[-FLAGS:])


@dataclass(frozen=True)
class Outcome:
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
    def read(cls, numbers: Later) -> Outcome:
        """Wait for the step and read the numbers that `on_the_way` sent."""
        *tally, stop, save, loss, norm, skip, high = numbers.read()
        domains = zip(DOMAINS, tally[0::2], tally[1::2], strict=True)
        by_domain = {domain: nats / count for domain, nats, count in domains if count}
        return cls(loss, norm, by_domain, stop > 0, save > 0, skip > 0, high)


def on_the_way(measured: Measured, skipped: Tensor, score: Tensor) -> Later:
    """Send the numbers of a step to the host, before the device is given the next one."""
    single = [measured.loss, measured.grad_norm, skipped, score]
    return Later(torch.cat([measured.tally_D2.flatten(), measured.flags, torch.stack([n.double() for n in single])]))


def accumulate(model: Transformer, share: Share, micro_batch: int, zero: int) -> Tensor:
    """Add the gradients of this process's share to `model`; return nats per token [B, S]."""
    from llama3.parallel.fsdp import last_micro_batch

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


def tally(nats_BS: Tensor | None, share: Share, world: World) -> Tensor:
    """Return fp64 [D, 2]: nats and targets of each domain in this process's share, zero if another counts them."""
    tally_D2 = torch.zeros(len(DOMAINS), 2, dtype=torch.float64, device=world.device)
    if nats_BS is not None and world.first_of_copy:
        rows = torch.stack([nats_BS.double().flatten(), (share.targets_BS != NO_TARGET).double().flatten()], 1)
        tally_D2.index_add_(0, share.domains_BS.flatten(), rows)
    return tally_D2


def agree(tally_D2: Tensor, squares: Tensor, stop: bool, save: bool, world: World) -> Measured:
    """Sum over all processes what each found; `stop` and `save` hold if any process says so."""
    flags = torch.tensor([stop, save], dtype=torch.float64).to(world.device, non_blocking=True)
    return Measured.of(world.sum(torch.cat([tally_D2.flatten(), squares.view(1), flags])))
