"""One optimizer step: gradients of the mean loss over the batch, summed over micro-batches and processes.

The loss of a batch is the sum of nats over all its targets divided by their number, on whatever number of processes and
micro-batches; so the count of targets is agreed on first. Everything else that processes must agree on (loss, gradient
norm, whether to stop or save) goes into one more sum, so there is one host synchronisation at each end of a step.

Shapes: B sequences, S sequence length, D domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama3.model.loss import NO_TARGET
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import World
from llama3.recipe.section import DOMAINS, Domain
from llama3.tokens.batch import Batch
from llama3.train.optimizer import squared_norm
from llama3.train.precision import Precision


@dataclass(frozen=True)
class Outcome:
    """What a step found before the weights are changed; the same on every process."""

    loss: float
    """Nats per target."""
    grad_norm: float
    domain_loss: dict[Domain, float]
    """Of the domains that the batch has targets of."""
    stop: bool
    save: bool


def take_gradients(
    model: Transformer, batch: Batch, micro_batch: int, precision: Precision, world: World, stop: bool, save: bool
) -> Outcome:
    """Leave the gradients of the batch in `model` and return what the step found.

    `batch` is this process's share; `stop` holds if any process says so, `save` likewise.
    """
    targets = world.sum((batch.targets_BS != NO_TARGET).sum().to(world.device))
    tally_D2 = _backward(model, batch, micro_batch, precision, world.device, max(1, int(targets)))
    flags = torch.tensor([stop, save], dtype=torch.float64, device=world.device)
    shared = torch.cat([tally_D2.flatten(), squared_norm(model).view(1), flags])
    *tally, squares, stops, saves = world.sum(shared).tolist()
    domains = zip(DOMAINS, tally[0::2], tally[1::2], strict=True)
    return Outcome(
        loss=sum(tally[0::2]) / max(1.0, sum(tally[1::2])),
        grad_norm=squares**0.5,
        domain_loss={domain: nats / count for domain, nats, count in domains if count},
        stop=stops > 0,
        save=saves > 0,
    )


def _backward(
    model: Transformer, batch: Batch, micro_batch: int, precision: Precision, device: torch.device, targets: int
) -> Tensor:
    """Accumulate gradients; return fp64 [D, 2]: sum of nats and number of targets of each domain."""
    tally_D2 = torch.zeros(len(DOMAINS), 2, dtype=torch.float64, device=device)
    sequences = len(batch.tokens_BS)
    for first in range(0, sequences, micro_batch):
        part = slice(first, first + micro_batch)
        _mark_last(model, first + micro_batch >= sequences)
        documents = batch.documents_BS[part]  # numbered from 0: without a 1, each sequence is one document
        targets_BS = batch.targets_BS[part].to(device)
        with precision.products(device):
            nats_BS = model(
                batch.tokens_BS[part].to(device), documents.to(device) if documents.any() else None, targets_BS
            )
        (nats_BS.sum() / targets).backward()
        rows = torch.stack([nats_BS.detach().double().flatten(), (targets_BS != NO_TARGET).double().flatten()], 1)
        tally_D2.index_add_(0, batch.domains_BS[part].to(device).flatten(), rows)
    return tally_D2


def _mark_last(model: Transformer, last: bool) -> None:
    """Have a sharded model reduce its gradients once, after the last micro-batch."""
    sharded: Any = model if hasattr(model, "set_requires_gradient_sync") else None
    if sharded is not None:
        sharded.set_requires_gradient_sync(last)
        sharded.set_reshard_after_backward(last)
        sharded.set_is_last_backward(last)
