"""Rotary position embedding (RoFormer, arXiv 2104.09864; base frequency 500,000 as in Llama 3, section 3.2).

Features i and i + E/2 of a head form one rotated pair, the layout of Hugging Face checkpoints; Meta's own files
interleave the pairs, so a writer of that format permutes the rows of q and k. Positions count from the start of the
sequence and not of the document: scores depend on differences only, so a document gives the same result anywhere.
The table is computed anew in every forward pass, in float64: it is S x E/2 numbers for all layers, and a stored one
would be a buffer to move, shard and keep out of checkpoints.

Shapes: B batch, S sequence, N heads, E features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(seq: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [S, 1, E/2] of the angles position x theta^(-2i/E), in the dtype and device of `like`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device) / head_dim
    positions = torch.arange(seq, dtype=torch.float64, device=like.device)
    angles = torch.outer(positions, theta**-exponents).unsqueeze(1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x_BSNE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys turned by the angles in `table`, computed in the table's precision."""
    cosine, sine = table
    first, second = x_BSNE.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x_BSNE.dtype)
