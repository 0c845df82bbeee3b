"""Data parallelism by FSDP2: gradients and optimizer state are sharded over dp and cp together.

ZeRO-2 by default: weights stay gathered between forward and backward (Llama 3, section 3.3.2), which costs their memory
and saves half of the gathers; ZeRO-3 gathers again. Blocks travel and work in the compute type; the embedding, the last
norm and the output travel in fp32, because their gradients are sums over many tokens. Gradients are summed, not
averaged (the loss is a sum over targets), accumulated and reduced in fp32, or in fp64 where `exact` asks for sums that
do not depend on the number of processes. Each layer is a group, so gathers overlap with the layers before.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from llama3.model.transformer import Transformer
from llama3.parallel.mesh import World


def shard(model: Transformer, world: World, compute: torch.dtype | None, exact: bool) -> None:
    """Shard a model or a part of one in place. Its weights are master weights; blocks work in `compute`."""
    reduce = torch.float64 if exact else None
    if compute is not None and not exact:
        reduce = torch.float32
    blocks = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    ends = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    again = world.layout.zero == 3
    for block in model.layers.values():
        fully_shard(block, mesh=world.shards, reshard_after_forward=again, mp_policy=blocks)
    fully_shard(model, mesh=world.shards, reshard_after_forward=False, mp_policy=ends)
    for module in model.modules():  # neither setting reaches the groups inside a group
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def last_micro_batch(model: Transformer, last: bool, zero: int) -> None:
    """Have a sharded model reduce its gradients once, after the last micro-batch; a plain model needs nothing.

    With ZeRO-3 the layers give up what they gathered after every micro-batch.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)
    for block in model.layers.values() if zero == 3 else ():
        assert isinstance(block, FSDPModule)
        block.set_reshard_after_backward(True)


def release(model: Transformer) -> None:
    """Have a sharded model give up what a forward pass without gradients gathered: no backward pass will."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
