"""Negative log-likelihood per token without holding the logits of a whole batch.

128,256 fp32 logits per token are 8 GiB for 16K tokens, more than the rest of an 8B model's activations. The last matrix
product, the softmax and its gradient are therefore done for some tokens at a time, and the backward pass computes a
chunk's logits again. What this costs: one third more work in that product, 2 % of a step of the 8B. Small batches keep
their logits instead, up to a fixed amount. Chunks are small enough to stay in a processor's cache: the log-sum-exp of
4,096 tokens over 4,352 rows takes 28 ms of one core in chunks of 512 tokens, 80 ms in one piece by torch's logsumexp.
Products run in the type of the hidden states, sums and the softmax in fp32 (fp64 if the model is). torch's own fused variant returned
9.1 for a loss of 10.5 in bf16 on CPU (torch 2.13).

Shapes: T tokens, D model, V vocabulary rows, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llama3.model.exchange import Alone, Exchange

NO_TARGET = -100
CPU_CHUNK = 2**21  # logits worked on at a time: 8 MiB of fp32 stay in a cache
DEVICE_CHUNK = 2**27  # 512 MiB keep a GPU busy
KEPT = 2**24  # logits of a call that are kept for the backward pass, 32 MiB in bf16


def token_nats(
    hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, z_loss: float = 0.0, exchange: Exchange | None = None
) -> Tensor:
    """Return -log p(target) in nats, fp32 (fp64 for fp64 models) [B, S]; 0 where the target is `NO_TARGET`.

    With `z_loss` the gradient is that of nats + z_loss x log(Z)^2, Z the sum under the softmax (PaLM, arXiv 2204.02311,
    section 5), while the value stays the likelihood, so that losses compare. With an `exchange` that cuts the
    vocabulary, `weight_VD` is this process's rows; gradients of `hidden_BSD` are then its part of a sum.
    """
    apply: Any = _TokenNats.apply  # torch leaves it untyped
    nats_BS: Tensor = apply(hidden_BSD.flatten(0, 1), weight_VD, targets_BS, z_loss, exchange or Alone())
    return nats_BS


class _TokenNats(torch.autograd.Function):
    """p = softmax(h W^T); d nats / d logits = p - onehot(target); d log(Z)^2 / d logits = 2 log(Z) p."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_BS: Tensor, z_loss: float, exchange: Exchange
    ) -> Tensor:
        weight, targets_T = weight_VD.to(hidden_TD.dtype), targets_BS.flatten()
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        totals_T = torch.empty(len(targets_T), dtype=wide, device=hidden_TD.device)
        nats_BS = torch.empty(targets_BS.shape, dtype=wide, device=hidden_TD.device)
        nats_T = nats_BS.view(-1)
        rows_T = _rows(targets_T, exchange.first_row, len(weight))
        keep = len(targets_T) * len(weight) <= KEPT and any(ctx.needs_input_grad[:2])
        kept = []
        for part in _chunks(hidden_TD, weight):
            logits_CV = hidden_TD[part] @ weight.T
            totals_T[part] = _log_sum_exp(logits_CV, wide, exchange)
            found_C = logits_CV.gather(1, rows_T[part].clamp(min=0).unsqueeze(1)).squeeze(1).to(wide)
            nats_T[part] = totals_T[part] - exchange.total(found_C.masked_fill(rows_T[part] < 0, 0))
            if keep:
                kept.append(logits_CV)
        ctx.save_for_backward(hidden_TD, weight, targets_T, rows_T, totals_T, *kept)
        ctx.settings = weight_VD.dtype, z_loss
        return nats_BS.masked_fill_(targets_BS == NO_TARGET, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets_T, rows_T, totals_T, *kept = ctx.saved_tensors
        weight_dtype, z_loss = ctx.settings
        scale_T = gradients[0].flatten().masked_fill(targets_T == NO_TARGET, 0)
        softmax_scale_T = scale_T * (1 + 2 * z_loss * totals_T) if z_loss else scale_T
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=totals_T.dtype, device=weight.device)
        for number, part in enumerate(_chunks(hidden, weight)):
            logits_CV = kept[number] if kept else hidden[part] @ weight.T
            p_CV = (logits_CV.to(totals_T.dtype) - totals_T[part].unsqueeze(1)).exp_()
            p_CV.mul_(softmax_scale_T[part].unsqueeze(1))
            here_C = -scale_T[part].masked_fill(rows_T[part] < 0, 0)
            p_CV.scatter_add_(1, rows_T[part].clamp(min=0).unsqueeze(1), here_C.unsqueeze(1))
            d_logits_CV = p_CV.to(weight.dtype)
            d_hidden[part] = d_logits_CV @ weight
            d_weight += d_logits_CV.T @ hidden[part]
        return d_hidden, d_weight.to(weight_dtype), None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    elements = CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
    size = max(1, elements // len(weight))
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


def _rows(targets_T: Tensor, first_row: Callable[[int], int], rows: int) -> Tensor:
    """Return each target's row in this process's part of the weight, or -1 if it is absent or elsewhere."""
    rows_T = targets_T - first_row(rows)
    return rows_T.masked_fill((rows_T < 0) | (rows_T >= rows), -1)


def _log_sum_exp(logits_CV: Tensor, wide: torch.dtype, exchange: Exchange) -> Tensor:
    largest_C1 = exchange.largest(logits_CV.amax(-1, keepdim=True).to(wide))
    sums_C = (logits_CV.to(wide) - largest_C1).exp_().sum(-1)
    return exchange.total(sums_C).log_() + largest_C1.squeeze(1)
