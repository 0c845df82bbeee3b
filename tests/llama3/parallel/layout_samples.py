"""What processes of a layout compute, against one process that holds everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from llama3.model.init import build
from llama3.model.transformer import Transformer
from llama3.parallel.comms import held_positions
from llama3.parallel.layout import Layout
from llama3.parallel.mesh import ParallelContext, init_distributed, whole
from llama3.parallel.parallelize import build_parts
from llama3.recipe.sections import Model
from llama3.train.optimizer import squared_norm

ROWS, SEQ, SEQUENCES, SEED = 96, 32, 8, 5


def shape(**changes: Any) -> Model:
    """Four layers, grouped queries, nothing tied."""
    numbers = {"layers": 4, "dim": 32, "ffn": 48, "heads": 8, "kv_heads": 4, "max_seq": SEQ}
    return Model.model_validate({**numbers, **changes})


def batch(documents: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return tokens, documents (of uneven lengths, or None) and targets, some of them absent."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, ROWS, (SEQUENCES, SEQ), generator=generator)
    starts = torch.rand(SEQUENCES, SEQ, generator=generator) < 0.15
    starts[:, 0] = False
    targets = torch.randint(0, ROWS, (SEQUENCES, SEQ), generator=generator)
    targets[torch.rand(SEQUENCES, SEQ, generator=generator) < 0.2] = -100
    return tokens, starts.cumsum(1) if documents else None, targets


def alone(
    spec: Model, documents: bool, micro_batch: int = SEQUENCES, z_loss: float = 0.0
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the sum of nats and its gradients in one process, float64."""
    model = build(spec, ROWS, SEED, torch.float64, torch.device("cpu"))
    model.z_loss = z_loss
    nats = _train([model], batch(documents), micro_batch)
    return nats, {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def cut(
    layout: dict[str, Any], spec_changes: dict[str, Any], documents: bool, micro_batch: int = 2, z_loss: float = 0.0
) -> tuple[float, dict[str, np.ndarray]]:
    """Return what `alone` does, computed by the processes of `layout`: the sum over them, whole gradients."""
    with init_distributed("cpu", 60, Layout(**layout), meshed=True) as world:
        spec = shape(**spec_changes)
        parts = build_parts(spec, ROWS, SEED, world, torch.float64, None)
        for part in parts.values():
            part.z_loss = z_loss
        share = my_share(world, batch(documents))
        if world.layout.pp > 1:
            from llama3.parallel.pipeline import Pipeline

            nats_BS = Pipeline(parts, world).run(*share, micro_batch)
            nats = 0.0 if nats_BS is None else float(nats_BS.sum())
        else:
            nats = _train(list(parts.values()), share, micro_batch, world.layout.zero)
        counted = torch.tensor(nats if world.first_of_copy else 0.0, dtype=torch.float64)
        gradients = {
            name: whole(p.grad).numpy()
            for part in parts.values()
            for name, p in part.named_parameters()
            if p.grad is not None
        }
        return float(world.sum(counted)), gradients


def my_share(world: ParallelContext, data: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]) -> Any:
    """Return this process's part of the batch: sequences by dp, tokens and targets of them by cp."""
    tokens, documents, targets = data
    dp, cp = world.axis("dp"), world.axis("cp")
    rows = slice(dp.rank * SEQUENCES // dp.size, (dp.rank + 1) * SEQUENCES // dp.size)
    here = held_positions(SEQ, cp.rank, cp.size)
    return tokens[rows][:, here], None if documents is None else documents[rows], targets[rows][:, here]


def _train(models: list[Transformer], data: Any, micro_batch: int, zero: int = 2) -> float:
    from llama3.parallel.parallelize import last_micro_batch

    (model,), (tokens, documents, targets) = models, data
    total = 0.0
    for first in range(0, len(tokens), micro_batch):
        part = slice(first, first + micro_batch)
        last_micro_batch(model, first + micro_batch >= len(tokens), zero)
        nats = model(tokens[part], None if documents is None else documents[part], targets[part])
        nats.sum().backward()
        total += float(nats.detach().sum())
    return total


def norm_of_replicated_and_sharded() -> float:
    """Return this rank's part of the squared norm of four gradients of 3 that both hold and four of 1 cut in two."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with init_distributed("cpu", 60, Layout(tp=2), meshed=True):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        parameters = []
        for gradient, place in ((torch.full((4,), 3.0), Replicate()), (torch.ones(2), Shard(0))):
            parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(gradient), mesh, [place]))
            parameter.grad = DTensor.from_local(gradient, mesh, [place])
            parameters.append(parameter)
        return float(squared_norm(parameters))
