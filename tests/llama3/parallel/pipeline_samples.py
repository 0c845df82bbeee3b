"""What the processes of a pipeline compute, and what one process does with the same micro-batches."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from herd.llama3.model.recompute import _Promise
from herd.llama3.model.transformer import Transformer, initial_value
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import ParallelContext, full_tensor, init_distributed
from herd.llama3.parallel.pipeline import Pipeline, _Stage
from herd.llama3.parallel.pipeline_schedule import split_layers
from herd.llama3.recipe.sections import Model
from tests.llama3.parallel.layout_samples import build_parts

VOCAB_SIZE, SEED = 48, 3
backward = _Stage.backward_one_chunk
Result = tuple[np.ndarray | None, dict[str, np.ndarray]]


class Step(NamedTuple):
    """One batch: sequences of `seq_len` tokens, `micro_batch` at a time."""

    sequences: int = 8
    micro_batch: int = 2
    seq_len: int = 12
    documents: bool = False


def shape() -> Model:
    """Six layers, so that eight stages leave the ends with embedding and output alone."""
    return Model.model_validate({"layers": 6, "dim": 16, "ffn": 24, "heads": 4, "kv_heads": 2, "max_seq_len": 64})


def alone(steps: list[Step]) -> list[Result]:
    """Return nats and gradients of each step, in one process."""
    model = part(range(shape().layers), True, True)
    results = []
    for step in steps:
        tokens, documents, targets = batch(step)
        model.zero_grad()
        nll = []
        for first in range(0, step.sequences, step.micro_batch):
            rows = slice(first, first + step.micro_batch)
            nll.append(model(tokens[rows], None if documents is None else documents[rows], targets[rows]))
            nll[-1].sum().backward()
        results.append((torch.cat(nll).detach().numpy(), gradients([model])))
    return results


def piped(layouts: list[dict[str, Any]], steps: list[Step]) -> list[list[Result]]:
    """Return what `alone` does for each of several layouts (of one pp): this rank's part of it."""
    with init_distributed("cpu", 240, Layout(**layouts[0]), meshed=True) as world:
        return [_run(replace(world, layout=Layout(**layout)), steps) for layout in layouts]


def evaluated(layout: dict[str, Any], step: Step) -> list[Result]:
    """Return nats before, in and after a training step, and gradients after the first and the last."""
    with init_distributed("cpu", 240, Layout(**layout), meshed=True) as world:
        parts = my_parts(world)
        pipeline, data = Pipeline(parts, world), batch(step)
        results = []
        for play in (pipeline.evaluate, pipeline.run, pipeline.evaluate):
            nll = play(*data, step.micro_batch)
            results.append((None if nll is None else nll.numpy(), gradients(list(parts.values()))))
        return results


def buffers(layout: dict[str, Any], step: Step) -> list[int]:
    """Return the elements that this rank's stages hold to receive into after a step, and those held in caches."""
    with init_distributed("cpu", 240, Layout(**layout), meshed=True) as world:
        pipeline = Pipeline(my_parts(world), world)
        pipeline.run(*batch(step), step.micro_batch)
        (schedule,) = pipeline.schedules.values()
        return [
            sum(info.buffer.numel() for infos in notes.values() for info in infos if info.buffer is not None)
            + len(stage.fwd_cache)
            for stage in schedule.stages
            for notes in (stage.args_recv_info, stage.grad_recv_info)
        ]


def returned(layout: dict[str, Any], step: Step) -> list[int]:
    """Return the elements in memory, at each backward pass, of all that this rank's stages returned and sent on."""
    sizes = []

    def watched(stage: _Stage, number: int, **more: Any) -> None:
        waiting = [out for stage in stages for outs, _ in stage.fwd_cache.values() for out in outs if not stage.is_last]
        assert all(out.shape == (step.micro_batch, step.seq_len, shape().dim) for out in waiting)
        sizes.append(sum(out.untyped_storage().nbytes() // out.element_size() for out in waiting))
        backward(stage, number, **more)

    with (
        init_distributed("cpu", 240, Layout(**layout), meshed=True) as world,
        patch.object(_Stage, "backward_one_chunk", watched),
    ):
        pipeline = Pipeline(my_parts(world), world)
        stages = pipeline._schedule(step.micro_batch, step.seq_len, step.sequences // step.micro_batch, True).stages
        pipeline.run(*batch(step), step.micro_batch)
    return sizes


def promises(layout: dict[str, Any], step: Step) -> tuple[int, int, int]:
    """Return of the values that this rank made again in a step: how many, the most at once, and those left after it."""
    alive: WeakSet[_Promise] = WeakSet()
    made, most = 0, 0
    read = _Promise.read

    def watched(promise: _Promise) -> Tensor:
        nonlocal made, most
        alive.add(promise)
        made += promise.value is None
        value = read(promise)
        most = max(most, sum(each.value is not None for each in alive))
        return value

    with init_distributed("cpu", 240, Layout(**layout), meshed=True) as world, patch.object(_Promise, "read", watched):
        pipeline = Pipeline(my_parts(world), world)
        gc.disable()  # only counts of references free memory
        pipeline.run(*batch(step), step.micro_batch)
        return made, most, len(alive)


def _run(world: ParallelContext, steps: list[Step]) -> list[Result]:
    parts = my_parts(world)
    pipeline = Pipeline(parts, world)
    results = []
    for step in steps:
        for mine in parts.values():
            mine.zero_grad()
        nll = pipeline.run(*batch(step), step.micro_batch)
        results.append((None if nll is None else nll.numpy(), gradients(list(parts.values()))))
    return results


def my_parts(world: ParallelContext) -> dict[int, Transformer]:
    """Return this rank's stages, not sharded."""
    stages, axis = world.layout.stages, world.axis("pp")
    layers = split_layers(shape().layers, stages)
    return {s: part(layers[s], s == 0, s == stages - 1) for s in range(axis.rank, stages, axis.size)}


def part(layers: range, first: bool, last: bool, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return a part of the model with its initial weights."""
    config = shape()
    model = Transformer(config, VOCAB_SIZE, layers, first, last).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(config, SEED, name, parameter.shape))
    return model


def batch(step: Step) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return tokens, documents and targets, some of them absent."""
    generator = torch.Generator().manual_seed(11)
    size = step.sequences, step.seq_len
    tokens, targets = (torch.randint(0, VOCAB_SIZE, size, generator=generator) for _ in range(2))
    targets[torch.rand(size, generator=generator) < 0.2] = -100
    starts = torch.rand(size, generator=generator) < 0.2
    return tokens, starts.cumsum(1) if step.documents else None, targets


def gradients(models: list[Transformer]) -> dict[str, np.ndarray]:
    """Return gradients by parameter name."""
    named = [pair for model in models for pair in model.named_parameters()]
    return {name: p.grad.detach().clone().numpy() for name, p in named if p.grad is not None}


def sharded(layouts: list[dict[str, Any]], step: Step, compute: str | None = None) -> list[dict[str, Any]]:
    """Return whole gradients of this rank's stages under FSDP for each of several layouts, and its collectives.

    With `compute` weights are fp32 and products of that type, else all is fp64. dp ranks take turns with sequences.
    """
    with init_distributed("cpu", 240, Layout(**layouts[0]), meshed=True) as world:
        return [_sharded(replace(world, layout=Layout(**layout)), step, compute) for layout in layouts]


def _sharded(world: ParallelContext, step: Step, compute: str | None) -> dict[str, Any]:
    master = torch.float32 if compute else torch.float64
    parts = build_parts(shape(), VOCAB_SIZE, SEED, world, master, getattr(torch, compute) if compute else None)
    pipeline, dp = Pipeline(parts, world), world.axis("dp")
    mine_BS = [None if x is None else x[dp.rank :: dp.size] for x in batch(step)]
    before = pipeline.evaluate(*mine_BS, step.micro_batch)
    for _ in range(2):  # the second step finds everything as the first one left it
        for mine in parts.values():
            mine.zero_grad()
        with Collectives() as counted:
            nll = pipeline.run(*mine_BS, step.micro_batch)
    groups = sum(isinstance(m, FSDPModule) and any(True for _ in own(m)) for p in parts.values() for m in p.modules())
    found = {name: full_tensor(p.grad).numpy() for mine in parts.values() for name, p in mine.named_parameters()}
    same = nll is before is None or bool(torch.equal(nll, before))
    return {"gradients": found, "groups": groups, "calls": dict(counted.calls), "evaluates": same}


class Collectives(TorchDispatchMode):
    """Counts collectives by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that an FSDP module gathers itself, not through one inside it."""
    inner = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    taken = {id(p) for m in inner for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in taken]
