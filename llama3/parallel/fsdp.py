"""Data parallelism by FSDP2 in ZeRO-2 mode: gradients and optimizer state are sharded, weights gathered once a step.

Weights stay gathered between forward and backward (Llama 3, section 3.3.2), which costs their memory and saves half of
the gathers. Gradients are summed, not averaged: the loss is already divided by the targets of the whole batch. They are
reduced in the weights' own precision. Each layer is a group, so gathers overlap with the layers before.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from llama3.model.initial import empty, initial_value
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import World
from llama3.recipe.schema import Model


def build_sharded(spec: Model, rows: int, seed: int, dtype: torch.dtype, world: World) -> Transformer:
    """Return this process's shard of a model with its initial weights, made from one whole matrix at a time."""
    model = empty(spec, rows).to(dtype)
    for block in model.layers.values():
        fully_shard(block, mesh=world.mesh, reshard_after_forward=False)
    fully_shard(model, mesh=world.mesh, reshard_after_forward=False)
    for module in model.modules():  # neither setting reaches the groups inside a group
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device=world.device)
    _initialise(model, seed)
    return model


def _initialise(model: Transformer, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            value = initial_value(model.spec, seed, name, parameter.shape).to(parameter.dtype)
            value = value.to(parameter.device)
            mine = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(mine.to_local())
