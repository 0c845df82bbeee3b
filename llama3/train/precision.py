"""Number formats: what weights are kept in, what matrix products run in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from llama3.model.linear import check_device
from llama3.recipe.schema import Recipe

EXACT_ENOUGH = 1e-3
"""Largest error of a 512-term fp32 product of unit normals: true fp32 stays below 2e-4, bf16 inputs give 0.4."""


@dataclass(frozen=True)
class Precision:
    """`master` is the type of weights, gradients and optimizer state; activations and products are in `compute`."""

    master: torch.dtype
    compute: torch.dtype | None = None
    """None: as the weights."""
    float8: bool = False
    """Whether products in the blocks are in float8 (see `llama3.model.linear`)."""

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Precision:
        """Return the formats that `recipe.compute` names, and set torch's fp32 products accordingly.

        Raises ValueError for fp8 on a device that has no such products.
        """
        if recipe.compute == "fp32" and device.type == "cpu":
            fast_fp32()
        if recipe.compute == "fp64":
            return cls(torch.float64)
        float8 = recipe.compute == "fp8"
        if float8:
            check_device(device)
        return cls(torch.float32, torch.bfloat16 if float8 or recipe.compute == "bf16" else None, float8)


def fast_fp32() -> None:
    """Take the faster of torch's two libraries for fp32 products, if its products really are fp32 here.

    MKL keeps its fastest kernels for Intel: there oneDNN's cost 1.2 times its CPU time, elsewhere MKL's 2.3 times
    oneDNN's. The choice is by maker and not by measuring, so that a restarted run takes the same one.
    """
    torch.set_float32_matmul_precision("highest" if _processor_maker() == "GenuineIntel" else "medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, dtype=torch.float64, generator=generator) for _ in range(2))
    if float((a.float() @ b.float() - a @ b).abs().max()) > EXACT_ENOUGH:
        torch.set_float32_matmul_precision("highest")


def _processor_maker() -> str:
    """Return the processor's vendor as it calls itself, or nothing where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
