"""Number formats of weights and of matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from llama3.model.linear import check_device
from llama3.recipe.schema import Recipe

EXACT_ENOUGH = 1e-3
"""Largest allowed error of a 512-term fp32 product of unit normals: fp32 gives less than 2e-4, bf16 inputs 0.4."""


@dataclass(frozen=True)
class Precision:
    """`master` is the type of weights, gradients and optimizer state; activations and products are in `compute`."""

    master: torch.dtype
    compute: torch.dtype | None = None
    """None: as `master`."""
    float8: bool = False
    """Whether products in the blocks are in float8 (see `llama3.model.linear`)."""

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Precision:
        """Return the formats of `recipe.compute` and set torch's fp32 products. Raises ValueError if fp8 is missing."""
        if recipe.compute == "fp32" and device.type == "cpu":
            fast_fp32()
        if recipe.compute == "fp64":
            return cls(torch.float64)
        float8 = recipe.compute == "fp8"
        if float8:
            check_device(device)
        return cls(torch.float32, torch.bfloat16 if float8 or recipe.compute == "bf16" else None, float8)


def fast_fp32() -> None:
    """Select the faster of torch's two libraries for fp32 products, if its products really are fp32 on this CPU.

    MKL uses its fastest kernels on Intel only: there oneDNN takes 1.2 times its CPU time, elsewhere MKL 2.3 times that
    of oneDNN. The choice is by vendor and not by measuring, so that a restarted run makes the same choice.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    vendor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
    torch.set_float32_matmul_precision("highest" if vendor == "GenuineIntel" else "medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, dtype=torch.float64, generator=generator) for _ in range(2))
    if float((a.float() @ b.float() - a @ b).abs().max()) > EXACT_ENOUGH:
        torch.set_float32_matmul_precision("highest")
