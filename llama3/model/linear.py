"""Linear layers and RMSNorm whose weights may be sharded, or of another dtype than their input; float8 products.

A weight is localized and cast where it is used, so fp32 master weights with bf16 products give the same bits whether or
not a wrapper has cast them before, without autocast. In a plain model the cast per micro-batch costs 1 % of a step.

Shapes: ... any leading axes, D input features, F output features, N tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from herd.llama3.model.comms import Comms

GRID = 2.0**-30
"""`exact` rounds gradients of a sequence to multiples of this, so that sums do not depend on their order."""
Scaling = Literal["tensor", "row"]
Casts = tuple[Tensor, Tensor, Tensor, Tensor]
"""A weight in float8 [F, D], its scale, the transpose [D, F] and its scale."""
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
        self.keeps_casts = False
        """Whether the weight in float8 is kept from one product to the next (see `casts_kept`)."""
        self.casts: Casts | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = local_weight(self.weight, self.exact)
        if self.float8 is None:
            return F.linear(x, weight.to(x.dtype))
        return float8_product(x, weight, self.float8, self.casts)


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
    """Make every `Linear` below `blocks` multiply in float8. Call it before they are compiled and sharded.

    Raises ValueError if an axis of a weight is not a multiple of 16.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear):
            if any(size % 16 for size in module.weight.shape):
                shape = " x ".join(map(str, module.weight.shape))
                raise ValueError(f"precision: fp8 needs axes of multiples of 16, {name} is {shape}; take bf16")
            module.float8 = scaling
    for block in blocks.children():
        block.register_forward_pre_hook(keep_casts)  # FSDP2 puts its own, which gathers, before it


@contextmanager
def casts_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context cast each float8 weight once, at its first use: 2 bytes a weight, dropped at the end.

    For the micro-batches of a step, between which no weight changes; elsewhere every product casts its weight.
    """
    linears = [module for model in models for module in model.modules() if isinstance(module, Linear)]
    linears = [linear for linear in linears if linear.float8 is not None]
    for linear in linears:
        linear.keeps_casts = True
    try:
        yield
    finally:
        for linear in linears:
            linear.keeps_casts, linear.casts = False, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def keep_casts(block: nn.Module, args: tuple[Any, ...]) -> None:
    """Cast the weights of `block` that keep their casts, unless they have them.

    Not in `Linear.forward`: a compiled or recomputed block would find them missing once and present later.
    """
    linears = [module for module in block.modules() if isinstance(module, Linear) and module.keeps_casts]
    if not linears or linears[0].casts is not None:
        return
    weights = [local_weight(linear.weight, exact=False).detach() for linear in linears]
    cast = _compiled_casts() if weights[0].is_cuda else weight_casts
    for linear, casts in zip(linears, cast(weights, args[0].dtype, linears[0].float8), strict=True):
        linear.casts = casts


@cache
def _compiled_casts() -> Any:
    return torch.compile(weight_casts, dynamic=False)


def weight_casts(weights: list[Tensor], dtype: torch.dtype, scaling: Scaling) -> list[Casts]:
    """Return the operands of both products of each weight, which is rounded to `dtype` first."""
    return [_both_layouts(weight.to(dtype), FORWARD, scaling) for weight in weights]


def float8_product(x: Tensor, weight_FD: Tensor, scaling: Scaling, casts: Casts | None = None) -> Tensor:
    """Return x W^T [..., F] in the dtype of x (bf16); x and W are rounded to e4m3, the gradient to e5m2.

    With `casts` the weight is not read.
    """
    apply: Any = _Float8Product.apply  # torch leaves it untyped
    out_NF: Tensor = apply(x.flatten(0, -2), weight_FD, scaling, casts)
    return out_NF.view(*x.shape[:-1], -1)


class _Float8Product(torch.autograd.Function):
    """Y = X W^T; dX = dY W; dW = dY^T X. The second operand of each is column-major, as the kernels require.

    X is kept in bf16: its owner keeps or recomputes it anyway (see `recompute`; torch.compile does too), so that the
    rounded transpose, a byte a value, would come on top: 28 % of the activations of an 8B.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, scaling: Scaling, casts: Casts | None) -> Tensor:
        ctx.scaling, ctx.kept = scaling, casts is not None
        x, x_scale = _operand(x_ND, FORWARD, scaling)
        if casts is None:
            weight, scale = _operand(weight_FD.to(x_ND.dtype), FORWARD, scaling)
            ctx.save_for_backward(x_ND, x_scale, weight_FD, scale)
        else:
            weight, scale, transposed, transposed_scale = casts
            ctx.save_for_backward(x_ND, x_scale, transposed, transposed_scale)
        ctx.weight_dtype = weight_FD.dtype
        return _multiply(x, x_scale, weight, scale, x_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_ND, x_scale, weight, weight_scale = ctx.saved_tensors
        d_NF, scaling, dtype = gradients[0], ctx.scaling, x_ND.dtype
        if not ctx.kept:
            weight, weight_scale = _transposed(weight.to(dtype), FORWARD, scaling, weight_scale)
        d, d_scale, d_transposed, d_transposed_scale = _both_layouts(d_NF, BACKWARD, scaling)
        x, x_scale = _transposed(x_ND, FORWARD, scaling, x_scale)
        d_x = _multiply(d, d_scale, weight, weight_scale, dtype)
        d_weight = _multiply(d_transposed, d_transposed_scale, x, x_scale, dtype)
        return d_x, d_weight.to(ctx.weight_dtype), None, None


def _multiply(left_MK: Tensor, left_scale: Tensor, right_NK: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right^T of float8 operands in `dtype`; sums in fp32."""
    by_row = right_scale.ndim > 0
    product: Tensor = torch._scaled_mm(
        left_MK,
        right_NK.T,
        scale_a=left_scale,
        scale_b=right_scale.T if by_row else right_scale,
        out_dtype=dtype,
        use_fast_accum=left_MK.dtype == FORWARD,  # gradients need full-precision sums
    )
    return product


def _operand(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return x / scale in `dtype`, contiguous, and the scale (fp32): a scalar, or [rows, 1]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True) if scaling == "row" else wide.abs().amax()
    scale = largest.clamp(min=TINY) / torch.finfo(dtype).max
    return (wide / scale).to(dtype).contiguous(), scale


def _transposed(x: Tensor, dtype: torch.dtype, scaling: Scaling, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operand of the transpose of `x`, whose own operand has `scale`: no second search for the largest.

    Rows of the transpose have other scales than rows of `x`.
    """
    if scaling == "row":
        return _operand(x.T, dtype, scaling)
    return (x.float() / scale).to(dtype).T.contiguous(), scale


def _both_layouts(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Casts:
    """Return the operands of `x` and of its transpose, which torch.compile writes in one pass over `x`."""
    rounded, scale = _operand(x, dtype, scaling)
    if scaling == "row":
        return rounded, scale, *_operand(x.T, dtype, scaling)
    return rounded, scale, rounded.T.contiguous(), scale
