"""Linear layers and RMSNorm whose weights may be sharded, or of another dtype than their input; float8 products.

A weight is localized and cast where it is used, so fp32 master weights with bf16 products give the same bits whether or
not a wrapper has cast them before, without autocast. In a plain model the cast per micro-batch costs 1 % of a step.

Shapes: ... any leading axes, D input features, F output features, N tokens.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from herd.llama3.model.comms import Comms

GRID = 2.0**-30
"""`exact` rounds gradients of a sequence to multiples of this, so that sums do not depend on their order."""
Scaling = Literal["tensor", "row"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MKL_MODE = "MKL_CBWR"
"""MKL reads it at the first product of a process; AUTO keeps the fastest instructions of the processor."""
TINY = 1e-12
"""Minimum of an operand's largest value, against division by zero."""


def local_weight(weight: Tensor, exact: bool) -> Tensor:
    """Return the local shard of a weight, or the whole weight if it is not sharded.

    With `exact`, gradients are rounded to multiples of `GRID`: up to 2^22 of them add up exactly in the 53 bits of
    fp64, so any order of sequences gives the same bits. Values below 1e-9 are lost, a millionth of the usual gradient
    of a sequence's summed nats. Gradients of fp64 models are not rounded.
    """
    # By name: isinstance needs an import of 0.7 s, and under dynamo hasattr(DTensor, "to_local") is false.
    sharded: Any = weight if type(weight).__name__ == "DTensor" else None
    local: Tensor = weight if sharded is None else sharded.to_local()
    if not exact:
        return local
    apply: Any = _GridGradient.apply  # torch leaves it untyped
    with_rounded_gradient: Tensor = apply(local)
    return with_rounded_gradient


class _GridGradient(torch.autograd.Function):
    """Identity whose gradient is rounded to the grid."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0]
        return gradient if gradient.dtype == torch.float64 else (gradient / GRID).round_().mul_(GRID)


def use_reproducible_matmul() -> None:
    """Let products have the same bits at any address of their operands. Call it before the first product of a process.

    On some processors (seen: AMD EPYC with AVX-512) MKL's fp32 products, which torch uses on a CPU, choose instructions
    by alignment, so a resumed run may differ in its last bits. MKL's reproducible mode prevents that at no measurable
    cost; a mode that is set stays. The number of threads may still change the last bits of narrow products.
    """
    os.environ.setdefault(MKL_MODE, "AUTO")


class Weighted(nn.Module):
    """A module that reads its weights through `local_weight`."""

    exact: bool = False
    """Whether weight gradients are rounded, so that sums do not depend on order."""


class Linear(Weighted):
    """x W^T without bias."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.float8: Any = None
        """Scaling of float8 operands; None: no float8."""

    def forward(self, x: Tensor) -> Tensor:
        weight = local_weight(self.weight, self.exact).to(x.dtype)
        if self.float8 is None:
            return F.linear(x, weight)
        return float8_product(x, weight, self.float8)


class RMSNorm(Weighted):
    """x / rms(x) * w (arXiv 1910.07467), in fp32 or wider, returned in the dtype of x."""

    def __init__(self, dim: int, eps: float, comms: Comms) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.comms = comms

    def forward(self, x: Tensor) -> Tensor:
        weight = self.comms.tp_replicated(local_weight(self.weight, self.exact)).to(x.dtype)
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return F.rms_norm(x, weight.shape, weight, self.eps)
        apply: Any = _FusedRMSNorm.apply  # torch leaves it untyped
        normed: Tensor = apply(x, weight, self.eps)
        return normed


class _FusedRMSNorm(torch.autograd.Function):
    """torch's RMSNorm with a faster backward pass: on a CPU torch's own takes twice the time.

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
        wide = r.dtype  # fp32, or fp64 in an fp64 model
        x_ND, g_ND, r_N, weight_D = x.flatten(0, -2).to(wide), gradients[0].flatten(0, -2).to(wide), r.flatten(), weight
        gx_ND = g_ND * x_ND
        d_weight = torch.mv(gx_ND.T, r_N)
        shrink_N = torch.mv(gx_ND, weight_D.to(wide)) * r_N**3 / x.shape[-1]
        d_x = torch.mul(g_ND, weight_D.to(wide)).mul_(r_N.unsqueeze(1)).addcmul_(x_ND, shrink_N.unsqueeze(1), value=-1)
        return d_x.to(x.dtype).view_as(x), d_weight.to(weight.dtype), None


# Float8 matrix products of the blocks: half the bytes and twice the peak of bf16 on GPUs that support it.
#
# Dynamic scaling (Micikevicius et al., arXiv 2209.05433): operands are divided by their largest value and rounded to 8
# bits, e4m3 forward and e5m2 for gradients. `tensor` has one scale per operand (the faster product), `row` one per row,
# which isolates outliers. Weights, residual stream, attention, norms, embedding and output keep their dtype. A product
# has 3 to 4 % relative error (bf16: 0.3 %), its gradients 6 %.


def check_device(device: torch.device) -> None:
    """Raise ValueError if `device` has no fast float8 product."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"precision: fp8 needs a GPU of compute capability 8.9 or more, this is {device}; take bf16")


def use_float8(blocks: nn.Module, scaling: Scaling = "tensor") -> None:
    """Make every `Linear` below `blocks` multiply in float8. Call it before the blocks are compiled.

    Raises ValueError if an axis of a weight is not a multiple of 16.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear):
            if any(size % 16 for size in module.weight.shape):
                shape = " x ".join(map(str, module.weight.shape))
                raise ValueError(f"precision: fp8 needs axes of multiples of 16, {name} is {shape}; take bf16")
            module.float8 = scaling


def float8_product(x: Tensor, weight_FD: Tensor, scaling: Scaling) -> Tensor:
    """Return x W^T [..., F] in the dtype of x (bf16); x and W are rounded to e4m3, the gradient to e5m2."""
    apply: Any = _Float8Product.apply  # torch leaves it untyped
    out_NF: Tensor = apply(x.flatten(0, -2), weight_FD, scaling)
    return out_NF.view(*x.shape[:-1], -1)


class _Float8Product(torch.autograd.Function):
    """Y = X W^T; dX = dY W; dW = dY^T X. The second operand of each is column-major, as the kernels require."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        ctx.scaling = scaling
        return _multiply(x_ND, FORWARD, weight_FD.T, FORWARD, scaling)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_FD = ctx.saved_tensors
        d_NF = gradients[0]
        d_x = _multiply(d_NF, BACKWARD, weight_FD, FORWARD, ctx.scaling)
        d_weight = _multiply(d_NF.T, BACKWARD, x_ND, FORWARD, ctx.scaling)
        return d_x, d_weight, None


def _multiply(
    left_MK: Tensor, left_type: torch.dtype, right_KN: Tensor, right_type: torch.dtype, scaling: Scaling
) -> Tensor:
    """Return left @ right with both rounded to 8 bits; sums in fp32, result in the dtype of `left`."""
    left, left_scale = _rounded(left_MK, left_type, scaling)
    right, right_scale = _rounded(right_KN.T, right_type, scaling)  # rows of the transpose: contiguous columns
    if scaling == "row":
        right_scale = right_scale.T
    product: Tensor = torch._scaled_mm(
        left,
        right.T,
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=left_MK.dtype,
        use_fast_accum=left_type == FORWARD,  # gradients need full-precision sums
    )
    return product


def _rounded(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return x / scale in `dtype`, contiguous, and the scale (fp32): a scalar, or [rows, 1]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True) if scaling == "row" else wide.abs().amax()
    scale = largest.clamp(min=TINY) / torch.finfo(dtype).max
    return (wide / scale).to(dtype).contiguous(), scale
