"""Which way tensor parallelism cuts each weight: columns, then rows, so that a pair of products needs one exchange.

q, k, v, gate and up are cut by output features, o and down by input features, embedding and output by vocabulary rows;
norms are whole on every process. Weights become DTensors, so that FSDP, checkpoints and norms know the global shape;
arithmetic is on local tensors (`llama3.model.linear`), half the time of DTensor's own dispatch in small models.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

BY_OUTPUT = ("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight", "embedding.weight", "output.weight")
BY_INPUT = ("o.weight", "down.weight")


def placement(name: str) -> Shard | Replicate:
    """Return how the weight called `name` lies on the tensor-parallel axis."""
    if name.endswith(BY_OUTPUT):
        return Shard(0)
    return Shard(1) if name.endswith(BY_INPUT) else Replicate()


def cut(model: nn.Module, mesh: Any) -> None:
    """Replace every weight of `model` (on the meta device) by a DTensor cut over the one-dimensional `mesh`."""
    for name, parameter in list(model.named_parameters()):
        owner_name, _, last = name.rpartition(".")
        made = distribute_tensor(parameter.detach(), mesh, [placement(name)], src_data_rank=None)
        assert isinstance(made, DTensor)
        model.get_submodule(owner_name).register_parameter(last, nn.Parameter(made))
