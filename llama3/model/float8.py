"""Matrix products of the blocks in float8: half the bytes and twice the peak of bf16 on GPUs that have it.

Dynamic scaling (Micikevicius et al., arXiv 2209.05433): each product divides its operands by their largest value,
rounds them to 8 bits, e4m3 forward and e5m2 for gradients, and multiplies the result back. `tensor` takes one scale for
a whole operand, which costs a pass over it and is the faster product; `row` takes one per row of each operand and keeps
outliers apart. Weights, residual stream, attention, norms, embedding and output stay as they are. What it gives up:
3 to 4 % relative error of a product (bf16: 0.3 %), and layers whose axes 16 does not divide. Numerics are tested on the
CPU, whose version of the product is slow; it was not run on a GPU.

Shapes: N tokens, D input features, F output features.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from llama3.model.linear import Linear

Scaling = Literal["tensor", "row"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12


def check_device(device: torch.device) -> None:
    """Raise ValueError if `device` has no fast product in float8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"compute: fp8 needs a GPU of compute capability 8.9 or more, this is {device}; take bf16")


def use_float8(blocks: nn.Module, scaling: Scaling = "tensor") -> None:
    """Have every `Linear` below `blocks` multiply in float8. Call it before the blocks are compiled.

    Raises ValueError if an axis of a weight is no multiple of 16.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear):
            if any(size % 16 for size in module.weight.shape):
                shape = " x ".join(map(str, module.weight.shape))
                raise ValueError(f"compute: fp8 needs axes of multiples of 16, {name} is {shape}; take bf16")
            module.float8 = scaling


def float8_product(x: Tensor, weight_FD: Tensor, scaling: Scaling) -> Tensor:
    """Return x W^T [..., F] in the type of x (bf16); x and W are rounded to e4m3, the gradient to e5m2."""
    apply: Any = _Product.apply  # torch leaves it untyped
    out_NF: Tensor = apply(x.flatten(0, -2), weight_FD, scaling)
    return out_NF.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Y = X W^T; dX = dY W; dW = dY^T X. The second operand of each lies by columns, as the kernels want it."""

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
    """Return left @ right with both rounded to 8 bits; sums in fp32, result in the type of `left`."""
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
        use_fast_accum=left_type == FORWARD,  # gradients keep the sum of full precision
    )
    return product


def _rounded(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return x / scale in `dtype`, contiguous, and the scale (fp32): a number, or [rows, 1]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True) if scaling == "row" else wide.abs().amax()
    scale = largest.clamp(min=TINY) / torch.finfo(dtype).max
    return (wide / scale).to(dtype).contiguous(), scale
