"""Negative log-likelihood per token without holding the logits of a whole batch.

128,256 fp32 logits per token are 8 GiB for 16K tokens, more than the rest of an 8B model's activations. So the last
matrix product, the softmax and its gradients are done for some tokens at a time, and the gradients are made right after
the logits, in the forward pass, when it is not yet known what they are multiplied by: of a sum over tokens that is one
number, and the backward pass multiplies by it. Only if tokens weigh differently does it compute everything again. What
this costs: the gradient of the output weights stands in memory from the forward pass on, and a loss whose gradient is
not asked for must be computed under no_grad. Per chunk there are four passes over the logits and three products, as in
the plain way, and what is in memory does not grow with the number of tokens.

Products run in the type of the hidden states, sums and the softmax in fp32 (fp64 if the model is). torch's own fused
variant returned 9.1 for a loss of 10.5 in bf16 on CPU (torch 2.13).

Shapes: T tokens, D model, V vocabulary rows, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama3.model.comms import Comms, NoComms

NO_TARGET = -100
CPU_CHUNK = 2**21  # logits worked on at a time: 8 MiB of fp32 stay in a cache
CPU_TOKENS = 256  # but no fewer tokens: each chunk adds to the whole gradient of the weights
DEVICE_CHUNK = 2**29  # 2 GiB of fp32: adding to that gradient takes little of a chunk's time


class Sweep(NamedTuple):
    """What one pass over the tokens gives."""

    nats_T: Tensor
    d_hidden_TD: Tensor | None
    d_weight_VD: Tensor | None
    """In the type of sums, fp32 at least."""


class LossInputs(NamedTuple):
    """Hidden states, weights and targets, and how to take the loss of them."""

    hidden_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    z_loss: float
    exchange: Comms


def token_nats(
    hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, z_loss: float = 0.0, exchange: Comms | None = None
) -> Tensor:
    """Return -log p(target) in nats, fp32 (fp64 for fp64 models) [B, S]; 0 where the target is `NO_TARGET`.

    With `z_loss` the gradient is that of nats + z_loss x log(Z)^2, Z the sum under the softmax (PaLM, arXiv 2204.02311,
    section 5), while the value stays the likelihood, so that losses compare. With an `exchange` that cuts the
    vocabulary, `weight_VD` is this process's rows; gradients of `hidden_BSD` are then its part of a sum. Sum the nats
    before anything else is done to them, and the backward pass computes nothing again.
    """
    apply: Any = _TokenNats.apply  # torch leaves it untyped
    gradients = torch.is_grad_enabled() and (hidden_BSD.requires_grad or weight_VD.requires_grad)
    nats_T: Tensor = apply(
        hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), z_loss, exchange or NoComms(), gradients
    )
    return nats_T.view_as(targets_BS)


class _TokenNats(torch.autograd.Function):
    """p = softmax(h W^T); d nats / d logits = p - onehot(target); d log(Z)^2 / d logits = 2 log(Z) p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        z_loss: float,
        exchange: Comms,
        gradients: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T)
        ctx.settings = z_loss, exchange
        found = _sweep(LossInputs(hidden_TD, weight_VD, targets_T, z_loss, exchange), None, gradients)
        ctx.found = [found]
        return found.nats_T

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_TD, weight_VD, targets_T = ctx.saved_tensors
        (scale_T,) = outer
        if ctx.found and _one_number(scale_T):
            found = ctx.found.pop()  # once: the weights' gradient is multiplied in place
            d_hidden, d_weight = _times(found.d_hidden_TD, scale_T[0]), _times(found.d_weight_VD, scale_T[0])
        else:
            ctx.found.clear()
            again = _sweep(LossInputs(hidden_TD, weight_VD, targets_T, *ctx.settings), scale_T, True)
            d_hidden, d_weight = _made(again.d_hidden_TD), _made(again.d_weight_VD)
        return d_hidden, d_weight.to(weight_VD.dtype), None, None, None, None


def _one_number(scale_T: Tensor) -> bool:
    """Return whether all tokens have the same gradient: that of a sum is one number, repeated without a copy."""
    return len(scale_T) > 0 and (len(scale_T) == 1 or scale_T.stride() == (0,))


def _times(gradient: Tensor | None, factor: Tensor) -> Tensor:
    """Multiply in place; on the CPU, where looking costs nothing, only if that changes something."""
    done = _made(gradient)
    return done if factor.device.type == "cpu" and float(factor) == 1 else done.mul_(factor)


def _made(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def _sweep(problem: LossInputs, scale_T: Tensor | None, gradients: bool) -> Sweep:
    """Return the nats and, with `gradients`, those of their sum weighted by `scale_T` (None: all by 1)."""
    hidden, weight, targets = problem.hidden_TD, problem.weight_VD.to(problem.hidden_TD.dtype), problem.targets_T
    wide = torch.promote_types(hidden.dtype, torch.float32)
    nats_T = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    rows_T = _rows(targets, problem.exchange.first_row, len(weight))
    counted_T = (targets != NO_TARGET).to(wide)
    d_hidden = torch.empty_like(hidden) if gradients else None
    d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if gradients else None
    for part in _chunks(hidden, weight):
        e_CV = (hidden[part] @ weight.T).to(wide)
        largest_C1 = problem.exchange.largest(e_CV.amax(-1, keepdim=True))
        e_CV.sub_(largest_C1)
        index_C1, absent_C = rows_T[part].clamp(min=0).unsqueeze(1), rows_T[part] < 0
        found_C = problem.exchange.total(e_CV.gather(1, index_C1).squeeze(1).masked_fill(absent_C, 0))
        sums_C = problem.exchange.total(e_CV.exp_().sum(-1))
        nats_T[part] = (sums_C.log() - found_C) * counted_T[part]
        if d_hidden is None or d_weight is None:
            continue
        z_C = 1 + 2 * problem.z_loss * (sums_C.log() + largest_C1.squeeze(1))
        target_C1 = (sums_C / z_C).masked_fill(absent_C, 0).unsqueeze(1)
        e_CV.scatter_add_(1, index_C1, -target_C1)  # e x z / sum is now the gradient of the logits
        factor_C1 = (z_C / sums_C * counted_T[part] * (1 if scale_T is None else scale_T[part])).unsqueeze(1)
        d_CV = e_CV.to(weight.dtype)
        d_hidden[part] = (d_CV @ weight).mul_(factor_C1)
        _add_product(d_weight, d_CV.T, (hidden[part] * factor_C1).to(hidden.dtype))
    return Sweep(nats_T, d_hidden, d_weight)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total.add_(left @ right)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    rows = max(1, len(weight))
    size = max(CPU_CHUNK // rows, CPU_TOKENS) if hidden.device.type == "cpu" else max(1, DEVICE_CHUNK // rows)
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


def _rows(targets_T: Tensor, first_row: Callable[[int], int], rows: int) -> Tensor:
    """Return each target's row in this process's part of the weight, or -1 if it is absent or elsewhere."""
    rows_T = targets_T - first_row(rows)
    return rows_T.masked_fill((rows_T < 0) | (rows_T >= rows), -1)
