"""Matrix products and norms whose weights may be cut, sharded, or of another type than their input.

A weight is turned into what the product needs where it is used: this process's part of it, in the type of the input.
So fp32 master weights with bf16 products give the same bits whether a wrapper has cast the weights before or not, and
nothing depends on autocast. What it gives up: a plain model casts its weights once per micro-batch, 1 % of a step.

Shapes: ... any leading axes, D input features, F output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama3.model.exchange import Exchange


def mine(weight: Tensor) -> Tensor:
    """Return this process's part of a weight that is cut over processes; a whole one as it is."""
    part: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return part


class Linear(nn.Module):
    """x W^T without bias."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, mine(self.weight).to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * w (arXiv 1910.07467), in fp32 at least, returned in the type of x."""

    def __init__(self, dim: int, eps: float, exchange: Exchange) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        weight = self.exchange.shared(mine(self.weight))
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)
