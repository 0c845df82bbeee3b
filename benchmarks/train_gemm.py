"""What the processor's matrix products reach: the peak that the share of the tuned step is of (see `train_side`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

SIZE, PRODUCTS = 1024, 8
"""Square matrices of so many rows, products in a step."""
FLOPS = 2 * SIZE**3 * PRODUCTS


def stepper(shape: Mapping[str, Any], bf16: bool) -> Callable[[], float]:
    """Return a function that multiplies and returns nothing of interest."""
    a, b = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16 if bf16 else torch.float32) for _ in range(2))

    def step() -> float:
        for _ in range(PRODUCTS):
            a @ b
        return 0.0

    return step
