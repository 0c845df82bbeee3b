"""Prices and power of GPUs, assumed where a cluster file does not give them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Prices:
    """Prices and power; each field states the source of its default."""

    gpu_hour: float = 2.5
    """USD per GPU-hour. Assumed: rented H100s went for 2 to 4 in 2024 and 2025."""
    gpu_watts: float = 700.0
    """Of one GPU (arXiv 2407.21783, section 3.3.1)."""
    gpu_load: float = 0.9
    """Average draw in training over `gpu_watts`. Assumed."""
    server_watts: float = 300.0
    """Processors, fans and cards, per GPU. Assumed: eight-GPU servers draw 8 to 10 kW."""
    pue: float = 1.1
    """Power of the site over that of its servers. Assumed, as of large sites."""
    gb_month: float = 0.02
    """USD per GB and month of storage. Assumed, as of object stores."""
    spare_share: float = 0.0
    """Spare hosts as a share of the job; they cost as much as the others, and their idle power is not counted."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value:g} is not an amount; write a number of 0 or more")
        if self.pue < 1:
            raise ValueError(f"pue: {self.pue:g} is below 1; a site draws at least what its servers draw")
        if self.gpu_load > 1:
            raise ValueError(f"gpu_load: {self.gpu_load:g} is above 1; write the share of gpu_watts that is drawn")

    @property
    def watts(self) -> float:
        """Power of the site for each GPU: the GPU, its share of the server, and cooling."""
        return (self.gpu_watts * self.gpu_load + self.server_watts) * self.pue
