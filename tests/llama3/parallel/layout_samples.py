"""What processes of a layout compute, against one process that holds everything."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from herd.llama3.model.linear import casts_kept
from herd.llama3.model.transformer import Transformer, build_model, initial_value
from herd.llama3.parallel.comms import cp_positions
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import ParallelContext, full_tensor, init_distributed
from herd.llama3.recipe.sections import Model
from herd.llama3.train.train_step import squared_norm

VOCAB_SIZE, SEQ, SEQUENCES, SEED = 96, 32, 8, 5


def shape(**changes: Any) -> Model:
    """Four layers, grouped queries, nothing tied."""
    numbers = {"layers": 4, "dim": 32, "ffn": 48, "heads": 8, "kv_heads": 4, "max_seq_len": SEQ}
    return Model.model_validate({**numbers, **changes})


def build_parts(
    config: Model,
    vocab_size: int,
    seed: int,
    world: ParallelContext,
    master: torch.dtype,
    compute: torch.dtype | None,
    exact: bool = False,
    float8: bool = False,
) -> dict[int, Transformer]:
    """Return this process's pipeline stages with the initial weights of `seed`."""
    from herd.llama3.parallel.parallelize import empty_model_parts, fill

    parts = empty_model_parts(config, vocab_size, world, master, compute, exact, float8)
    for model in parts.values():
        model.to_empty(device=world.device)
    fill(parts.values(), lambda name, shape: initial_value(config, seed, name, shape), world)
    return parts


def batch(documents: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return tokens, documents (of uneven lengths, or None) and targets, some of them absent."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCAB_SIZE, (SEQUENCES, SEQ), generator=generator)
    starts = torch.rand(SEQUENCES, SEQ, generator=generator) < 0.15
    starts[:, 0] = False
    targets = torch.randint(0, VOCAB_SIZE, (SEQUENCES, SEQ), generator=generator)
    targets[torch.rand(SEQUENCES, SEQ, generator=generator) < 0.2] = -100
    return tokens, starts.cumsum(1) if documents else None, targets


def alone(
    config: Model, documents: bool, micro_batch: int = SEQUENCES, z_loss: float = 0.0
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the sum of nats and its gradients in one process, float64."""
    model = build_model(config, VOCAB_SIZE, SEED, torch.float64, torch.device("cpu"))
    model.z_loss = z_loss
    nll = _train([model], batch(documents), micro_batch)
    return nll, {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def cut(
    layout: dict[str, Any], config_changes: dict[str, Any], documents: bool, micro_batch: int = 2, z_loss: float = 0.0
) -> tuple[float, dict[str, np.ndarray]]:
    """Return what `alone` does, computed by the processes of `layout`: the sum over them, whole gradients."""
    with init_distributed("cpu", 240, Layout(**layout), meshed=True) as world:
        config = shape(**config_changes)
        parts = build_parts(config, VOCAB_SIZE, SEED, world, torch.float64, None)
        for part in parts.values():
            part.z_loss = z_loss
        share = my_share(world, batch(documents))
        if world.layout.pp > 1:
            from herd.llama3.parallel.pipeline import Pipeline

            nll_BS = Pipeline(parts, world).run(*share, micro_batch)
            nll = 0.0 if nll_BS is None else float(nll_BS.sum())
        else:
            nll = _train(list(parts.values()), share, micro_batch, world.layout)
        counted = torch.tensor(nll if world.is_tp_rank0 else 0.0, dtype=torch.float64)
        gradients = {
            name: full_tensor(p.grad).numpy()
            for part in parts.values()
            for name, p in part.named_parameters()
            if p.grad is not None
        }
        return float(world.sum(counted)), gradients


def exact_gradients(changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the `exact` gradients of an fp32 model that FSDP shards over one process."""
    with init_distributed("cpu", 240, Layout(), meshed=True) as world:
        (part,) = build_parts(shape(**changes), VOCAB_SIZE, SEED, world, torch.float32, None, exact=True).values()
        (part(*batch(documents=True)).sum() * 2.0**-20).backward()  # fp32 below 2^-7 is finer than the grid
        return {name: full_tensor(p.grad).numpy() for name, p in part.named_parameters() if p.grad is not None}


def float8_steps(layout: dict[str, Any], micro_batch: int, kept: bool) -> list[float]:
    """Return a sum over the weights after each of two steps in float8 (fp64), with weights cast once a step or not."""
    with init_distributed("cpu", 240, Layout(**layout), meshed=True) as world:
        config = shape(dim=64, ffn=64, heads=4, kv_heads=2, layers=2)
        parts = build_parts(config, VOCAB_SIZE, SEED, world, torch.float32, torch.bfloat16, float8=True)
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        optimizer, sums = torch.optim.SGD(parameters, lr=1e-2), []
        for _ in range(2):
            with casts_kept(parts.values()) if kept else nullcontext():
                share = my_share(world, batch(documents=False))
                if world.layout.pp > 1:
                    from herd.llama3.parallel.pipeline import Pipeline

                    Pipeline(parts, world).run(*share, micro_batch)
                else:
                    _train(list(parts.values()), share, micro_batch, world.layout)
            optimizer.step()
            optimizer.zero_grad()
            sums += [float(full_tensor(parameter).double().square().sum()) for parameter in parameters]
        return sums


def my_share(world: ParallelContext, data: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]) -> Any:
    """Return this process's part of the batch: sequences by dp, tokens and targets of them by cp."""
    tokens, documents, targets = data
    dp, cp = world.axis("dp"), world.axis("cp")
    rows = slice(dp.rank * SEQUENCES // dp.size, (dp.rank + 1) * SEQUENCES // dp.size)
    here = cp_positions(SEQ, cp.size)[cp.rank]
    return tokens[rows][:, here], None if documents is None else documents[rows], targets[rows][:, here]


def _train(models: list[Transformer], data: Any, micro_batch: int, layout: Layout | None = None) -> float:
    from herd.llama3.parallel.parallelize import last_micro_batch

    (model,), (tokens, documents, targets) = models, data
    total = 0.0
    for first in range(0, len(tokens), micro_batch):
        part = slice(first, first + micro_batch)
        last_micro_batch(model, first + micro_batch >= len(tokens), layout or Layout())
        nll = model(tokens[part], None if documents is None else documents[part], targets[part])
        nll.sum().backward()
        total += float(nll.detach().sum())
    return total


def norm_of_replicated_and_sharded() -> float:
    """Return this rank's part of the squared norm of four gradients of 3 that both hold and four of 1 cut in two."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with init_distributed("cpu", 240, Layout(tp=2), meshed=True):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        parameters = []
        for gradient, place in ((torch.full((4,), 3.0), Replicate()), (torch.ones(2), Shard(0))):
            parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(gradient), mesh, [place]))
            parameter.grad = DTensor.from_local(gradient, mesh, [place])
            parameters.append(parameter)
        norm = float(squared_norm(parameters))
        torch.distributed.barrier()  # rank 0 has the store: if it left, rank 1 could not finish its groups
        return norm


def sockets_of_groups() -> tuple[list[int], int, int]:
    """Return how many sockets each of three more groups of all processes takes, and the limits of open files."""

    def count() -> int:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())

    with init_distributed("cpu", 240) as world:
        world.barrier()
        counts = [count()]
        for _ in range(3):
            torch.distributed.new_group(backend="gloo")
            counts.append(count())
        world.barrier()
    return [after - before for before, after in pairwise(counts)], *resource.getrlimit(resource.RLIMIT_NOFILE)
