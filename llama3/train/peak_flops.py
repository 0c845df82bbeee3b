"""Peak speed of devices by the name that the driver gives, for utilisation (MFU).

Dense tensor-core FLOP/s of the makers' data sheets: their headline figures are for 2:4 sparsity and twice these. No
device reaches its peak: an H200 gives 769 to 798 of its 989 TFLOP/s in an 8,192^3 bf16 product, so an MFU of 50 % is
64 % of what a matrix product does. Names are compared whole, so a slice of a device (MIG) or a card that is not here
has no peak, and a utilisation is left out rather than guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the planner reads the table without torch
    import torch

CPUINFO = Path("/proc/cpuinfo")
_SXM_HOPPER = {"bf16": 989e12, "fp8": 1979e12}
_NVL_HOPPER = {"bf16": 835e12, "fp8": 1671e12}
_AMPERE = {"bf16": 312e12}  # no fp8
PEAKS: dict[str, dict[str, float]] = {
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
    "NVIDIA H100 80GB HBM3": _SXM_HOPPER,
    "NVIDIA H100 NVL": _NVL_HOPPER,
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp8": 1513e12},
    "NVIDIA H200": _SXM_HOPPER,
    "NVIDIA H200 NVL": _NVL_HOPPER,
    "NVIDIA GH200 480GB": _SXM_HOPPER,
    "NVIDIA B200": {"bf16": 2250e12, "fp8": 4500e12},
}
"""Device -> compute format -> dense FLOP/s."""


class PeakFlops(NamedTuple):
    """The peak that a utilisation is of."""

    flops: float
    """Operations per second and device."""
    format: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.0f} TFLOP/s dense {self.format}"


def peak_of(device: str, compute: str) -> PeakFlops | None:
    """Return the peak of the device with this name for products in `compute`, or None where it is not known."""
    flops = PEAKS.get(device, {}).get(compute)
    return None if flops is None else PeakFlops(flops, compute)


def described(device: str, compute: str) -> str:
    """Return how utilisation is counted on the device with this name, for the log."""
    peak = peak_of(device, compute)
    if peak is None:
        return f"{device}, {compute} peak unknown: no MFU"
    return f"{device}, MFU: 6N + causal attention over {peak}"


def device_name(device: torch.device) -> str:
    """Return what the driver, or the kernel for a processor, calls the device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else device.type
