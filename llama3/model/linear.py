"""Matrix products and norms whose weights may be cut, sharded, or of another type than their input.

A weight is turned into what the product needs where it is used: this process's part of it, in the type of the input.
So fp32 master weights with bf16 products give the same bits whether a wrapper has cast the weights before or not, and
nothing depends on autocast. What it gives up: a plain model casts its weights once per micro-batch, 1 % of a step.

Shapes: ... any leading axes, D input features, F output features, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama3.model.exchange import Exchange

GRID = 2.0**-30
"""Gradients of a sequence are rounded to multiples of this where sums must not depend on their order."""


def used(weight: Tensor, exact: bool) -> Tensor:
    """Return this process's part of a weight that is cut over processes; a whole one as it is.

    With `exact`, gradients go back as multiples of `GRID`: up to 2^22 of them add up without rounding in the 53 bits
    of fp64, so that any order of any number of sequences gives the same bits. What lies below 1e-9 is lost, a millionth
    of the usual gradient of a sequence's summed nats. fp64 models stay as they are.
    """
    part: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    if not exact:
        return part
    apply: Any = _OnGrid.apply  # torch leaves it untyped
    rounded: Tensor = apply(part)
    return rounded


class _OnGrid(torch.autograd.Function):
    """The same value; its gradient rounded to the grid."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0]
        return gradient if gradient.dtype == torch.float64 else (gradient / GRID).round_().mul_(GRID)


class Linear(nn.Module):
    """x W^T without bias."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.exact = False
        self.float8: Any = None
        """How operands are scaled to 8 bits, if they are (see `llama3.model.float8`)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = used(self.weight, self.exact).to(x.dtype)
        if self.float8 is None:
            return F.linear(x, weight)
        from llama3.model.float8 import float8_product

        return float8_product(x, weight, self.float8)


class RMSNorm(nn.Module):
    """x / rms(x) * w (arXiv 1910.07467), in fp32 at least, returned in the type of x."""

    def __init__(self, dim: int, eps: float, exchange: Exchange) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.exchange = exchange
        self.exact = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.exchange.shared(used(self.weight, self.exact)).to(x.dtype)
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return F.rms_norm(x, weight.shape, weight, self.eps)
        apply: Any = _Normed.apply  # torch leaves it untyped
        normed: Tensor = apply(x, weight, self.eps)
        return normed


class _Normed(torch.autograd.Function):
    """torch's RMSNorm with a backward pass in few passes over memory: on a CPU torch's takes twice the time.

    With r = 1 / rms(x) and g the gradient: dw = sum over tokens of g x r; dx = r g w - x r^3 (g x . w) / D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed: Tensor
        normed, r_N1 = torch.ops.aten._fused_rms_norm(x, weight_D.shape, weight_D, eps)
        ctx.save_for_backward(x, weight_D, r_N1)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        wide = r.dtype  # fp32, or fp64 of an fp64 model
        x_ND, g_ND, r_N, weight_D = x.flatten(0, -2).to(wide), gradients[0].flatten(0, -2).to(wide), r.flatten(), weight
        gx_ND = g_ND * x_ND
        d_weight = torch.mv(gx_ND.T, r_N)
        shrink_N = torch.mv(gx_ND, weight_D.to(wide)) * r_N**3 / x.shape[-1]
        d_x = torch.mul(g_ND, weight_D.to(wide)).mul_(r_N.unsqueeze(1)).addcmul_(x_ND, shrink_N.unsqueeze(1), value=-1)
        return d_x.to(x.dtype).view_as(x), d_weight.to(weight.dtype), None
