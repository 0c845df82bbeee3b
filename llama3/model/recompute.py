"""Recompute cheap activations in backward; keep only their inputs (Megatron, arXiv 2205.05198, section 4.2.2).

Used for normed and gathered inputs, SwiGLU products and gathered keys. Autograd saves such a value once per reader; in
`recomputed` it saves a promise, which the first reader in backward fulfills (with the same bits) and the last drops.
Costs one pass over memory, or one gather, per value, and per half of a split (zero-bubble) backward. Disables
autograd's check for in-place writes. Not for torch.compile, nor inside torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F


def recomputed(value: Tensor, make: Callable[..., Tensor], *inputs: Tensor, enabled: bool = True) -> Any:
    """Return a context in which autograd saves, instead of tensors that share memory with `value`, how to make them.

    `make(*inputs)` must give the same bits in the same memory layout, with collectives in the same order on every
    process. `inputs` stay in memory. A no-op unless `enabled`, and without gradients.
    """
    if not enabled or not torch.is_grad_enabled():
        return nullcontext()
    promise, memory = _Promise(make, tuple(tensor.detach() for tensor in inputs)), _memory(value)

    def pack(saved: Tensor) -> Any:
        if _memory(saved) != memory:
            return saved.detach()  # saving an operation's own result would create a reference cycle
        promise.readers += 1
        return _View(promise, saved.size(), saved.stride(), int(saved.storage_offset()))

    return saved_tensors_hooks(pack, _unpack)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] (SwiGLU, arXiv 2002.05202); autograd saves only gate and up."""
    apply: Any = _Gated.apply  # torch leaves it untyped
    product: Tensor = apply(gate, up)
    return product


def gate_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up without gradients, allocating one tensor."""
    return F.silu(gate).mul_(up)


class _Promise:
    """A value that the first reader in a backward pass makes and the last one drops."""

    def __init__(self, make: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.make, self.inputs = make, inputs
        self.readers = self.remaining = 0
        self.value: Tensor | None = None

    def read(self) -> Tensor:
        """Return the value; each reader calls this once per backward pass."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.make(*self.inputs)
            self.remaining = self.readers
        value = self.value
        self.remaining -= 1
        if not self.remaining:
            self.value = None
        return value


@dataclass(frozen=True)
class _View:
    """The view of a promised value that a reader saved."""

    promise: _Promise
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Any) -> Tensor:
    if not isinstance(packed, _View):
        tensor: Tensor = packed
        return tensor
    return packed.promise.read().as_strided(packed.size, packed.stride, packed.offset)


def _memory(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata  # a fake tensor has no address
    return storage


class _Gated(torch.autograd.Function):
    """silu(gate) * up with silu(gate) recomputed in backward: the operations of torch, in less memory."""

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
