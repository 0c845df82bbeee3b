"""Tensor-parallel (with sequence parallelism) and context-parallel communication over process groups.

Tensor parallel (Megatron, arXiv 2205.05198): between the matrices each process holds some of the tokens. Context
parallel (Llama 3, section 3.3.2): a sequence has 2 x cp chunks, process i holds chunks i and 2 x cp - 1 - i, which
balances the causal mask; keys and values are gathered. The backward pass gathers inputs, keys and values again.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from herd.llama3.parallel.mesh import ParallelContext

# Functional collectives: torch.compile traces them, and the operators' names are stable, while torch's wrappers change.


def all_gather(shard: Tensor, dim: int, group: Any) -> Tensor:
    """Return the shards of all processes of `group` joined along `dim`, in the order of ranks."""
    size = group.size()
    flat = torch.ops._c10d_functional.all_gather_into_tensor(shard.contiguous(), size, group.group_name)
    joined: Tensor = torch.ops._c10d_functional.wait_tensor(flat)
    if dim == 0:
        return joined
    if shard.shape[0] == 1 and dim == 1:  # the shards are contiguous already
        return joined.reshape(1, -1, *shard.shape[2:])
    return torch.cat(joined.chunk(size), dim=dim)


def reduce_scatter(whole: Tensor, dim: int, group: Any) -> Tensor:
    """Return this process's shard along `dim` of the sum of `whole` over `group`."""
    size = group.size()
    stacked = whole if dim == 0 else torch.cat(whole.chunk(size, dim=dim))
    shard = torch.ops._c10d_functional.reduce_scatter_tensor(stacked.contiguous(), "sum", size, group.group_name)
    done: Tensor = torch.ops._c10d_functional.wait_tensor(shard)
    return done


def all_reduce(x: Tensor, operation: Literal["sum", "max"], group: Any) -> Tensor:
    """Return the elementwise sum or maximum of `x` over `group`, as a new tensor."""
    total: Tensor = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, group.group_name)
    )
    return total


class MeshComms:
    """Implement `herd.llama3.model.comms` for one process of a world."""

    def __init__(self, world: ParallelContext) -> None:
        self.tensor, self.context, self.pipeline = (world.axis(name) for name in ("tp", "cp", "pp"))

    def all_gather(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.tensor.size == 1 else _call(_AllGather, x_BSD, 1, self.tensor.group)

    def reduce_scatter(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.tensor.size == 1 else _call(_ReduceScatter, x_BSD, 1, self.tensor.group)

    def tp_replicated(self, weight: Tensor) -> Tensor:
        return weight if self.tensor.size == 1 else _call(_SumGradients, weight, self.tensor.group)

    def vocab_start(self, local_vocab_size: int) -> int:
        return local_vocab_size * self.tensor.rank

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x if self.tensor.size == 1 else all_reduce(x, "max", self.tensor.group)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x if self.tensor.size == 1 else all_reduce(x, "sum", self.tensor.group)

    def all_gather_logits(self, logits_TV: Tensor) -> Tensor:
        return logits_TV if self.tensor.size == 1 else all_gather(logits_TV, 1, self.tensor.group)

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.context.size == 1:
            return k, v
        gathered = _call(_AllGather, torch.cat([k, v], dim=-1), 1, self.context.group)
        k_all, v_all = gathered.chunk(2, dim=-1)
        return k_all, v_all

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.context.size == 1:
            positions = torch.arange(seq_len, device=device)
            return positions, positions
        positions = cp_positions(seq_len, self.context.size, device)
        return positions[self.context.rank], positions.flatten()

    def sequence(self, tokens: int, whole: bool) -> int:
        return tokens * self.context.size * (1 if whole else self.tensor.size)

    def from_last_stage(self, output: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        if self.pipeline.size == 1:
            return output
        last = self.pipeline.size - 1
        result = output if self.pipeline.rank == last else output.new_empty(shape, dtype=dtype)
        torch.distributed.broadcast(result, group=self.pipeline.group, group_src=last)
        return result


class InferenceComms(MeshComms):
    """Tensor parallelism without sequence parallelism: each process holds all tokens, since one decoded token cannot
    be divided. Not differentiable."""

    def all_gather(self, x_BSD: Tensor) -> Tensor:
        return x_BSD

    def reduce_scatter(self, x_BSD: Tensor) -> Tensor:
        return self.all_reduce_sum(x_BSD)

    def tp_replicated(self, weight: Tensor) -> Tensor:
        return weight

    def sequence(self, tokens: int, whole: bool) -> int:
        return tokens


def cp_positions(seq_len: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the positions that each of `size` context-parallel processes holds of a sequence, int64 [size, S / size].

    Head and tail chunk pairs: process 0 of 2 holds chunks 0 and 3 of four. Made on `device`, without a copy.
    """
    if size == 1:
        return torch.arange(seq_len, device=device).unsqueeze(0)
    chunks = torch.arange(seq_len, device=device).view(2 * size, -1)
    return torch.cat([chunks[:size], chunks[size:].flip(0)], dim=1)


def _call(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _AllGather(torch.autograd.Function):
    """All-gather along `dim`; the backward pass reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim_and_group = dim, group
        return all_gather(shard, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradients[0], *ctx.dim_and_group), None, None


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter along `dim`; the backward pass all-gathers."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim_and_group = dim, group
        return reduce_scatter(partial, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradients[0], *ctx.dim_and_group), None, None


class _SumGradients(torch.autograd.Function):
    """The same weight on every process; its gradient is the sum over their tokens."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], "sum", ctx.group), None
