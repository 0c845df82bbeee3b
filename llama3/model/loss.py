"""Negative log-likelihood per token without the logits of a whole batch in memory.

Output product, softmax and gradients run over chunks of tokens; the fp32 logits of 16K tokens would take 8 GiB, more
than the other activations of an 8B model. Gradients are computed in the forward pass, right after the logits, and
backward only scales them, because the gradient of a sum is one number. The gradient of the output weights is in memory
from the forward pass on; compute a loss without gradients under no_grad. On a GPU two compiled kernels pass over the
logits in the type of the product: one reads them, one replaces them by their gradient.

Shapes: T tokens, D model, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from herd.llama3.model.comms import Comms, NoComms

NO_TARGET = -100
CPU_CHUNK = 2**21  # logits per chunk: 8 MiB of fp32 fit in a cache
CPU_TOKENS = 256  # minimum per chunk: each chunk adds to the whole gradient of the weights
DEVICE_CHUNK = 2**31  # bytes: adding to that gradient takes a small part of a chunk's time
FUSED = ("cuda",)  # devices whose passes are compiled if there are gradients: without them a compilation takes longer


class LossResult(NamedTuple):
    """Result of one pass over the tokens."""

    nll_T: Tensor
    d_hidden_TD: Tensor | None
    d_weight_VD: Tensor | None
    """fp32 or wider, the dtype of sums."""


class LossInputs(NamedTuple):
    """Hidden states, weights, targets and settings of the loss."""

    hidden_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    z_loss: float
    comms: Comms


def token_nll(
    hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, z_loss: float = 0.0, comms: Comms | None = None
) -> Tensor:
    """Return -log p(target) in nats, fp32 (fp64 for fp64 models) [B, S]; 0 where the target is `NO_TARGET`.

    With `z_loss` the gradient is that of nats + z_loss x log(Z)^2, Z the denominator of the softmax (PaLM, arXiv
    2204.02311, section 5); the value stays the likelihood, so that losses are comparable. With a vocabulary-parallel
    `comms`, `weight_VD` is this process's rows and the gradient of `hidden_BSD` a partial sum. Sum the result
    directly: tokens with different gradients make backward recompute everything.
    """
    apply: Any = _TokenNLL.apply  # torch leaves it untyped
    gradients = torch.is_grad_enabled() and (hidden_BSD.requires_grad or weight_VD.requires_grad)
    nll_T: Tensor = apply(
        hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), z_loss, comms or NoComms(), gradients
    )
    return nll_T.view_as(targets_BS).clone()  # FSDP2 warns of an output that is a view


class _TokenNLL(torch.autograd.Function):
    """p = softmax(h W^T); d nats / d logits = p - onehot(target); d log(Z)^2 / d logits = 2 log(Z) p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        z_loss: float,
        comms: Comms,
        gradients: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T)
        ctx.settings = z_loss, comms
        sweep = _sweep(LossInputs(hidden_TD, weight_VD, targets_T, z_loss, comms), None, gradients)
        ctx.gradients = [(sweep.d_hidden_TD, sweep.d_weight_VD)]
        return sweep.nll_T

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_TD, weight_VD, targets_T = ctx.saved_tensors
        (scale_T,) = outer
        # The gradient of a sum is one number for all tokens, expanded without a copy.
        uniform = len(scale_T) > 0 and (len(scale_T) == 1 or scale_T.stride() == (0,))
        factor = None
        if ctx.gradients and uniform:
            (d_hidden, d_weight), factor = ctx.gradients.pop(), scale_T[0]  # once only: they are scaled in place
        else:
            ctx.gradients.clear()
            _, d_hidden, d_weight = _sweep(LossInputs(hidden_TD, weight_VD, targets_T, *ctx.settings), scale_T, True)
        assert d_hidden is not None
        assert d_weight is not None
        # On the CPU, where reading the factor needs no synchronization, a multiplication by 1 is skipped.
        if factor is not None and not (factor.device.type == "cpu" and float(factor) == 1):
            d_hidden, d_weight = d_hidden.mul_(factor), d_weight.mul_(factor)
        return d_hidden, d_weight.to(weight_VD.dtype), None, None, None, None


def _sweep(problem: LossInputs, scale_T: Tensor | None, gradients: bool) -> LossResult:
    """Return the nats and, with `gradients`, those of their sum weighted by `scale_T` (None: all by 1).

    Products run in the dtype of the hidden states, sums and the softmax in fp32 (fp64 if the model is): torch's fused
    variant returned 9.1 for a loss of 10.5 in bf16 on CPU (torch 2.13).
    """
    hidden, weight, targets = problem.hidden_TD, problem.weight_VD.to(problem.hidden_TD.dtype), problem.targets_T
    comms, wide = problem.comms, _wide(hidden.dtype)
    nll_T = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    # The row of each target in this process's shard of the weight; -1 if absent or on another process.
    rows_T = targets - comms.vocab_start(len(weight))
    rows_T = rows_T.masked_fill((rows_T < 0) | (rows_T >= len(weight)), -1)
    counted_T = (targets != NO_TARGET).to(wide)
    d_hidden = torch.empty_like(hidden) if gradients else None
    d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if gradients else None
    fused = gradients and hidden.device.type in FUSED
    vocabulary = max(1, len(weight))
    if hidden.device.type == "cpu":
        size = max(CPU_CHUNK // vocabulary, CPU_TOKENS)
    else:
        size = max(1, DEVICE_CHUNK // (vocabulary * (hidden if fused else nll_T).element_size()))
    for start in range(0, len(hidden), size):
        chunk = slice(start, min(start + size, len(hidden)))
        e_CV, rows_C1 = hidden[chunk] @ weight.T, rows_T[chunk].unsqueeze(1)
        index_C1, absent_C1 = rows_C1.clamp(min=0), rows_C1 < 0
        if fused:
            local_C1, sums_C1, target_logit_C1 = _compiled(_read_logits)(e_CV, index_C1)
            largest_C1 = comms.all_reduce_max(local_C1)
            sums_C1, target_logit_C1 = sums_C1 * (local_C1 - largest_C1).exp(), target_logit_C1 - largest_C1
        else:
            e_CV = e_CV.to(wide)
            largest_C1 = comms.all_reduce_max(e_CV.amax(-1, keepdim=True))
            target_logit_C1 = e_CV.sub_(largest_C1).gather(1, index_C1)
            sums_C1 = e_CV.exp_().sum(-1, keepdim=True)
        target_logit_C1 = comms.all_reduce_sum(target_logit_C1.masked_fill(absent_C1, 0))
        sums_C1 = comms.all_reduce_sum(sums_C1)
        counted_C1 = counted_T[chunk].unsqueeze(1)
        nll_T[chunk] = ((sums_C1.log() - target_logit_C1) * counted_C1).squeeze(1)
        if d_hidden is None or d_weight is None:
            continue
        z_C1 = 1 + 2 * problem.z_loss * (sums_C1.log() + largest_C1)
        target_C1 = (sums_C1 / z_C1).masked_fill(absent_C1, 0)
        if fused:
            d_CV = _compiled(_replace_logits)(e_CV, largest_C1, index_C1, target_C1)
        else:
            d_CV = e_CV.scatter_add_(1, index_C1, -target_C1).to(weight.dtype)
        # times z / sum, d is the gradient of the logits
        factor_C1 = z_C1 / sums_C1 * counted_C1 * (1 if scale_T is None else scale_T[chunk].unsqueeze(1))
        d_hidden[chunk] = (d_CV @ weight).mul_(factor_C1)
        scaled_CD = (hidden[chunk] * factor_C1).to(hidden.dtype)
        if d_weight.dtype == d_CV.dtype:
            torch.addmm(d_weight, d_CV.T, scaled_CD, out=d_weight)
        elif d_weight.is_cuda:  # cuBLAS adds bf16 products to an fp32 sum without a pass of its own
            torch.addmm(d_weight, d_CV.T, scaled_CD, out_dtype=d_weight.dtype, out=d_weight)
        else:
            d_weight.add_(d_CV.T @ scaled_CD)
        del e_CV, d_CV  # before the next product
    return LossResult(nll_T, d_hidden, d_weight)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _read_logits(logits_CV: Tensor, index_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exp(logit - largest) and the logit at `index_C1`, each [C, 1]."""
    # Written with both keepdim, Inductor computes maximum and sum in one read (its online softmax).
    wide_CV = logits_CV.to(_wide(logits_CV.dtype))
    largest_C1 = wide_CV.amax(-1, keepdim=True)
    sums_C1 = (wide_CV - largest_C1).exp().sum(-1, keepdim=True)
    return largest_C1, sums_C1, wide_CV.gather(1, index_C1)


def _replace_logits(logits_CV: Tensor, largest_C1: Tensor, index_C1: Tensor, target_C1: Tensor) -> Tensor:
    """Replace the logits by exp(logit - largest), less `target_C1` at `index_C1`; return them."""
    e_CV = (logits_CV.to(_wide(logits_CV.dtype)) - largest_C1).exp()
    columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    return logits_CV.copy_(torch.where(columns_V == index_C1, e_CV - target_C1, e_CV))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
