"""Peak FLOP/s of devices by the name that the driver reports, the record of what a process runs on, and its clock.

Dense tensor-core figures of the data sheets, whose headline figures are for 2:4 sparsity and twice these. An H200
reaches 769 to 798 of its 989 TFLOP/s in an 8,192^3 bf16 product. Names are compared whole: a slice of a device (MIG) or
an unknown card has no peak, and no MFU is logged.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the planner reads the table without torch
    import torch

CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
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
    """The peak that a utilization is a fraction of."""

    flops: float
    """Operations per second and device."""
    format: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.0f} TFLOP/s dense {self.format}"


def peak_flops(device: str, compute: str) -> PeakFlops | None:
    """Return the peak of the device with this name for products in the format `compute`, or None if it is unknown."""
    flops = PEAKS.get(device, {}).get(compute)
    return None if flops is None else PeakFlops(flops, compute)


def describe_device(device: str, compute: str) -> str:
    """Return how utilization is computed on the device with this name, for the log."""
    peak = peak_flops(device, compute)
    if peak is None:
        return f"{device}, {compute} peak unknown: no MFU"
    return f"{device}, MFU: 6N + causal attention over {peak}"


def device_name(device: torch.device) -> str:
    """Return the name of the device as the driver reports it, of a CPU as /proc/cpuinfo does."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else device.type


ENVIRONMENT = "environment.json"
"""File of a stage's result with what `describe_environment` returns."""


def describe_environment(device: torch.device, hosts_and_devices: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the environment of the processes, by name; `hosts_and_devices` are theirs, in the order of ranks."""
    import torch

    hosts_and_devices = hosts_and_devices or [(socket.gethostname(), device_name(device))]
    hosts, devices = (list(dict.fromkeys(names)) for names in zip(*hosts_and_devices, strict=True))
    environment = {
        "hosts": ", ".join(hosts),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": ", ".join(devices),
        "devices": str(len(hosts_and_devices)),
        "processors": str(len(os.sched_getaffinity(0))),
    }
    if device.type != "cuda":
        return environment
    from herd.llama3.model.attention import flash_version

    nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", DRIVER.read_text()) if DRIVER.exists() else None
    return environment | {
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, nccl)),
        "driver": version[1] if version else "",
        "flash_attention": str(flash_version()),
    }


def describe_links(device: torch.device) -> dict[str, str]:
    """Return `topology`, the driver's table of links between GPUs, network cards and processors; {} on a processor."""
    return {"topology": _nvidia_smi("topo", "-m")} if device.type == "cuda" else {}


def _nvidia_smi(*arguments: str) -> str:
    """Return the output of the driver's tool; "" if it is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class DeviceTime:
    """The moment at which a device reaches this point of its work; on a GPU that is later than the host does."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._host_s = time.perf_counter()
        if device.type == "cuda":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Wait until the device is there; not for what is enqueued later."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Return the seconds from `earlier` to here; call `wait` before."""
        if self._event is None:
            return self._host_s - earlier._host_s
        return float(earlier._event.elapsed_time(self._event)) / 1e3
