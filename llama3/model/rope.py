"""Rotary position embedding (RoFormer, arXiv 2104.09864; base frequency 500,000 as in Llama 3, section 3.2).

Features i and i + E/2 of a head form one rotated pair, the layout of Hugging Face checkpoints; Meta's own files
interleave the pairs, so a writer of that format permutes the rows of q and k. Positions count from the start of the
sequence and not of the document: scores depend on differences only, so a document gives the same result anywhere.
Llama 3.1 slows the low frequencies, so that a model of 8,192 positions learns to read 131,072 (`RopeScaling`). The
table is computed anew in every forward pass, in float64: it is S x E/2 numbers for all layers, and a stored one would
be a buffer to move, shard and keep out of checkpoints.

Shapes: B batch, S sequence, N heads, E features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llama3.recipe.sections import RopeScaling


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [S, 1, E/2] of the angles position x frequency, in `dtype`, where `positions` [S] is.

    Positions are int64 and need not be consecutive: a part of a sequence passes its own. Where they differ from one
    sequence to the next they are [B, S], and the result [B, S, 1, E/2].
    """
    turns = frequencies(head_dim, theta, scaling, positions.device)
    angles = (positions.double().unsqueeze(-1) * turns).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle in radians that each pair of features turns per position [E/2], float64.

    Plain: f = theta^(-2i/E). Scaled, as in Llama 3.1: f (s + (1 - s) / factor), where s is how far the turns within
    the original length, original x f / 2 pi, lie between low_freq_factor (s = 0) and high_freq_factor (s = 1).
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
    """Return queries or keys turned by the angles in `table`, computed in the table's precision."""
    if not torch.is_grad_enabled():
        return _turn(x_BSNE, *table)
    apply: Any = _Rotated.apply  # torch leaves it untyped
    turned: Tensor = apply(x_BSNE, *table)
    return turned


class _Rotated(torch.autograd.Function):
    """The backward pass of a rotation is the rotation back: no products are kept, and nothing is joined by a copy."""

    @staticmethod
    def forward(ctx: Any, x_BSNE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x_BSNE, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(gradients[0], cosine, -sine), None, None


def _turn(x_BSNE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x_BSNE.chunk(2, dim=-1)
    if x_BSNE.dtype != cosine.dtype or torch.compiler.is_compiling():
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x_BSNE.dtype)
    turned = torch.empty_like(x_BSNE)
    one, other = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=one).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=other).addcmul_(first, sine)
    return turned
