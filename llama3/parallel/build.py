"""Build this process's part of a model: its layers, cut by tensor parallelism, sharded by FSDP, with initial weights.

Weights are a function of seed and name, so each process draws the whole of one matrix at a time and keeps its part;
no process ever holds the model, and every layout starts from the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from llama3.model.float8 import use_float8
from llama3.model.initial import initial_value
from llama3.model.linear import Linear, RMSNorm
from llama3.model.transformer import Transformer
from llama3.parallel.exchange import Exchange
from llama3.parallel.fsdp import shard
from llama3.parallel.mesh import World, local
from llama3.parallel.schedule import split_layers
from llama3.parallel.tensor import cut, placement
from llama3.recipe.schema import Model

Value = Callable[[str, torch.Size], Tensor]
"""Returns the whole value of the parameter of a name and global shape."""


def empty_parts(
    spec: Model,
    rows: int,
    world: World,
    master: torch.dtype,
    compute: torch.dtype | None,
    exact: bool = False,
    float8: bool = False,
) -> dict[int, Transformer]:
    """Return this process's pipeline stages by number, cut and sharded, on the meta device.

    `master` is the type of weights, `compute` that of products (None: the same), in the blocks as float8 if asked.
    """
    layout = world.layout
    ranges = split_layers(spec.layers, layout.stages)
    mine = range(world.axis("pp").rank, layout.stages, layout.pp)
    parts = {}
    for stage in mine:
        first, last = stage == 0, stage == layout.stages - 1
        with torch.device("meta"):
            model = Transformer(spec, rows, ranges[stage], first, last, Exchange(world)).to(master)
        model.compute, model.recompute = compute, layout.recompute
        for module in model.modules():
            if isinstance(module, Linear | RMSNorm | Transformer):
                module.exact = exact
        if layout.tp > 1:
            cut(model, world.tensor_mesh)
        if float8:
            use_float8(model.layers)
        if layout.compile:
            compile_blocks(model, world)
        shard(model, world, compute, exact)
        parts[stage] = model
    return parts


def compile_blocks(model: Transformer, world: World) -> None:
    """Compile each block by itself: equal blocks share the work, and a sequence ramp compiles again."""
    if world.layout.async_tp:  # not run: no GPU was at hand
        from torch._inductor import config
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        if world.device.type != "cuda":
            raise ValueError("cluster.layout.async_tp: needs GPUs; leave it out on processors")
        config._micro_pipeline_tp = True
        enable_symm_mem_for_group(world.axis("tp").group.group_name)
    for block in model.layers.values():
        block.compile()


def build_parts(
    spec: Model,
    rows: int,
    seed: int,
    world: World,
    master: torch.dtype,
    compute: torch.dtype | None,
    exact: bool = False,
) -> dict[int, Transformer]:
    """Return this process's pipeline stages with the initial weights of `seed`."""
    parts = empty_parts(spec, rows, world, master, compute, exact)
    for model in parts.values():
        model.to_empty(device=world.device)
    fill(parts.values(), lambda name, shape: initial_value(spec, seed, name, shape), world)
    return parts


def fill(parts: Iterable[Transformer], value: Value, world: World) -> None:
    """Set every parameter of `parts` to this process's share of its value."""
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                share = my_share(value(name, parameter.shape), name, world)
                local(parameter).copy_(share.to(parameter.dtype))


def my_share(whole: Tensor, name: str, world: World) -> Tensor:
    """Return what this process holds of the parameter `name`: cut by tensor parallelism first, by FSDP then."""
    if world.mesh is None:
        return whole
    tensor, shards = world.axis("tp"), world.shards["fsdp"]
    where = placement(name)
    if tensor.size > 1 and isinstance(where, Shard):
        whole = whole.chunk(tensor.size, where.dim)[tensor.rank]
    pieces = whole.chunk(shards.size())
    rank = shards.get_local_rank()
    return pieces[rank] if rank < len(pieces) else whole[:0]
