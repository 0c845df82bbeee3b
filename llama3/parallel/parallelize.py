"""Build this process's pipeline stages of a model, cut by tensor parallelism, sharded by FSDP, with initial weights.

A weight depends only on seed and name: each process draws one whole matrix at a time and keeps its shard, so every
layout starts from the same model and no process holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from herd.llama3.model.attention import use_flash
from herd.llama3.model.linear import Weighted, use_float8
from herd.llama3.model.param_table import param_row
from herd.llama3.model.transformer import Transformer
from herd.llama3.parallel.comms import MeshComms
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import ParallelContext, to_local
from herd.llama3.parallel.pipeline_schedule import split_layers
from herd.llama3.recipe.sections import Model

# Data parallelism: FSDP2, gradients and optimizer state sharded over dp and cp


def shard(model: Transformer, world: ParallelContext, compute: torch.dtype | None, exact: bool) -> None:
    """Shard a model or a pipeline stage in place. Its weights are master weights; blocks work in `compute`."""
    # Gradients are summed, not averaged: the loss is a sum over targets. The ends reduce in fp32 since their gradients
    # are sums over many tokens; fp64 (`exact`) makes sums independent of the number of processes.
    reduce = torch.float64 if exact else None
    if compute is not None and not exact:
        reduce = torch.float32
    blocks = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    ends = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    reshard = world.layout.zero == 3  # ZeRO-2 keeps weights gathered: half of the gathers
    for block in model.layers.values():
        fully_shard(block, mesh=world.shards, reshard_after_forward=reshard, mp_policy=blocks)
    fully_shard(model, mesh=world.shards, reshard_after_forward=False, mp_policy=ends)
    for module in model.modules():  # neither setting reaches the groups inside a group
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def last_micro_batch(model: Transformer, last: bool, layout: Layout) -> None:
    """Set when a sharded model reduces gradients and frees gathered weights; no-op for a plain model.

    ZeRO-2 does both after the last micro-batch. With ZeRO-3 the layers free their weights after every one, and
    gradients are reduced there too (see `Layout.reduces_each`), over replicas after the last.
    """
    if not isinstance(model, FSDPModule):
        return
    reduces = last or layout.reduces_each(model.exact)
    model.set_requires_gradient_sync(reduces)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(reduces)
    for block in model.layers.values() if layout.zero == 3 else ():
        assert isinstance(block, FSDPModule)
        block.set_reshard_after_backward(True)


def release(model: Transformer) -> None:
    """Free the weights gathered by a forward pass without gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Tensor parallelism: columns, then rows, so that a pair of products needs one exchange. Arithmetic is on local tensors:
# DTensor dispatch doubles the time of small models.


def placement(name: str) -> Shard | Replicate:
    axis = param_row(name).tp_axis
    return Replicate() if axis is None else Shard(axis)


def cut(model: nn.Module, mesh: Any) -> None:
    """Replace every weight of `model` (on the meta device) by a DTensor cut over the one-dimensional `mesh`."""
    for name, parameter in list(model.named_parameters()):
        owner_name, _, last = name.rpartition(".")
        weight = distribute_tensor(parameter.detach(), mesh, [placement(name)], src_data_rank=None)
        assert isinstance(weight, DTensor)
        model.get_submodule(owner_name).register_parameter(last, nn.Parameter(weight))


Value = Callable[[str, torch.Size], Tensor]
"""Map a parameter name and global shape to its whole value."""


def empty_model_parts(
    config: Model,
    vocab_size: int,
    world: ParallelContext,
    master: torch.dtype,
    compute: torch.dtype | None,
    exact: bool = False,
    float8: bool = False,
) -> dict[int, Transformer]:
    """Return this process's pipeline stages by number, cut and sharded, on the meta device.

    `master` is the type of weights, `compute` that of products (None: the same); `float8` is for products in blocks.
    """
    layout = world.layout
    use_flash(layout.flash, world.device)
    ranges = split_layers(config.layers, layout.stages)
    models = {}
    for stage in range(world.axis("pp").rank, layout.stages, layout.pp):
        first, last = stage == 0, stage == layout.stages - 1
        with torch.device("meta"):
            model = Transformer(config, vocab_size, ranges[stage], first, last, MeshComms(world)).to(master)
        model.compute, model.recompute = compute, layout.recompute
        for module in model.modules():
            if isinstance(module, Weighted):
                module.exact = exact
        if layout.tp > 1:
            cut(model, world.mesh["tp"])
        if float8:
            use_float8(model.layers)
        if layout.compile and layout.async_tp:
            from torch._inductor import config as inductor
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            if world.device.type != "cuda":
                raise ValueError("cluster.layout.async_tp: needs GPUs; leave it out on processors")
            inductor._micro_pipeline_tp = True
            enable_symm_mem_for_group(world.axis("tp").group.group_name)
        if layout.compile:  # each block by itself: equal blocks share the work, and a sequence ramp compiles again
            for block in model.layers.values():
                block.compile()
        shard(model, world, compute, exact)
        models[stage] = model
    return models


def fill(models: Iterable[Transformer], value: Value, world: ParallelContext) -> None:
    """Set every parameter of `models` to this process's share of its value."""
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                share = local_shard(value(name, parameter.shape), name, world)
                to_local(parameter).copy_(share.to(parameter.dtype))


def local_shard(whole: Tensor, name: str, world: ParallelContext) -> Tensor:
    """Return this process's shard of the parameter `name`: cut by tensor parallelism first, by FSDP then."""
    if world.mesh is None:
        return whole
    tensor, shards = world.axis("tp"), world.shards["fsdp"]
    split = placement(name)
    if tensor.size > 1 and isinstance(split, Shard):
        whole = whole.chunk(tensor.size, split.dim)[tensor.rank]
    pieces = whole.chunk(shards.size())
    rank = shards.get_local_rank()
    return pieces[rank] if rank < len(pieces) else whole[:0]
