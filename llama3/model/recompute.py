"""What is cheap is made again: of a value, only what it was made from is kept for the backward pass.

A normed residual stream, gathered or not, a product of two hidden tensors and keys gathered over a sequence cost far
less to make than to keep (Megatron, arXiv 2205.05198, section 4.2.2, does so for gathered inputs). Autograd saves such
a value once for each matrix product that reads it. Within `made_again` it saves a promise instead: the first product
of a backward pass has the value made, the last one drops it. What is made again has the bits that it had before.

What this gives up: one pass over memory, or one gather, more for each value, on GPUs and between them, always; and
autograd's check that nobody wrote into what was kept. With a backward pass cut in two (zero-bubble) each half makes the
values. Not meant for torch.compile, which decides itself what to keep, nor inside torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F


def made_again(value: Tensor, make: Callable[..., Tensor], *kept: Tensor, wanted: bool = True) -> Any:
    """Return a context in which autograd keeps, of all that shares memory with `value`, only how to make it.

    `make(*kept)` must give the same bits in the same memory layout, with collectives in the same order on every
    process. `kept` stays in memory instead. Nothing happens unless `wanted`, and none of it without gradients.
    """
    if not wanted or not torch.is_grad_enabled():
        return nullcontext()
    return _keeping(_Promise(make, tuple(each.detach() for each in kept)), _memory(value))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] (SwiGLU, arXiv 2002.05202); of it autograd keeps only gate and up."""
    apply: Any = _Gated.apply  # torch leaves it untyped
    product: Tensor = apply(gate, up)
    return product


def gate_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, outside of any gradient and with one new tensor."""
    return F.silu(gate).mul_(up)


class _Promise:
    """A value that is made for the first of its readers in a backward pass and dropped by the last."""

    def __init__(self, make: Callable[..., Tensor], kept: tuple[Tensor, ...]) -> None:
        self.make, self.kept = make, kept
        self.readers = self.left = 0
        self.value: Tensor | None = None

    def read(self) -> Tensor:
        """Return the value; to be called once in a backward pass by each reader."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.make(*self.kept)
            self.left = self.readers
        value = self.value
        self.left -= 1
        if not self.left:
            self.value = None
        return value


@dataclass(frozen=True)
class _View:
    """How a reader sees a promised value."""

    promise: _Promise
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _keeping(promise: _Promise, memory: int) -> AbstractContextManager[None]:
    def pack(saved: Tensor) -> Any:
        if _memory(saved) != memory:
            return saved.detach()  # an operation's own result would keep the operation alive, and it the result
        promise.readers += 1
        return _View(promise, saved.size(), saved.stride(), int(saved.storage_offset()))

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Any) -> Tensor:
    if not isinstance(packed, _View):
        tensor: Tensor = packed
        return tensor
    return packed.promise.read().as_strided(packed.size, packed.stride, packed.offset)


def _memory(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata  # a fake tensor has no address
    return place


class _Gated(torch.autograd.Function):
    """silu(gate) * up, whose backward pass makes silu(gate) again: the steps of torch's own, in less memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_up = F.silu(gate).mul_(gradients[0])
        d_gate = gradients[0] * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, d_up
