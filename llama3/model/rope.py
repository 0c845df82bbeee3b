"""Rotary position embedding (RoFormer, arXiv 2104.09864; base frequency 500,000 as in Llama 3, section 3.2).

Features i and i + E/2 of a head form a rotated pair, as in Hugging Face checkpoints; Meta's files interleave the pairs,
so a writer of that format permutes the rows of q and k. Positions count from the start of the sequence, not of the
document: scores depend on differences only. Llama 3.1 slows low frequencies to reach 131,072 tokens (`RopeScaling`).

Shapes: B batch, S sequence, N heads, E features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from herd.llama3.recipe.sections import RopeScaling


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [S, 1, E/2] of the angles position x frequency, in `dtype`, on the device of `positions`.

    `positions` is int64 [S], not necessarily consecutive (context parallelism). If they differ between sequences they
    are [B, S], and the result is [B, S, 1, E/2].
    """
    # Computed in float64 in each forward pass: a stored table would be a buffer to move, shard and keep out of files.
    turns = frequencies(head_dim, theta, scaling, positions.device)
    angles = (positions.double().unsqueeze(-1) * turns).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle per position of each pair of features in radians [E/2], float64.

    Plain: f = theta^(-2i/E). Scaled, as in Llama 3.1: f (s + (1 - s) / factor), where s interpolates the turns within
    the original length, original x f / 2 pi, from low_freq_factor (s = 0) to high_freq_factor (s = 1).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain
    turns = scaling.original * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotate(x_BSNE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys rotated by the angles in `table`, computed in the table's precision."""
    if not torch.is_grad_enabled():
        return _rotate(x_BSNE, *table)
    apply: Any = _Rotated.apply  # torch leaves it untyped
    rotated: Tensor = apply(x_BSNE, *table)
    return rotated


class _Rotated(torch.autograd.Function):
    """Backward is the inverse rotation, so no products are saved."""

    @staticmethod
    def forward(ctx: Any, x_BSNE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x_BSNE, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradients[0], cosine, -sine), None, None


def _rotate(x_BSNE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x_BSNE.chunk(2, dim=-1)
    if x_BSNE.dtype != cosine.dtype or torch.compiler.is_compiling():
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x_BSNE.dtype)
    rotated = torch.empty_like(x_BSNE)
    first_out, second_out = rotated.chunk(2, dim=-1)  # written in place: no copy to concatenate the halves
    torch.mul(first, cosine, out=first_out).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=second_out).addcmul_(first, sine)
    return rotated
