"""What a process runs on, for a stage or a benchmark: versions, driver, devices and how they are linked."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

from llama3.train.peak_flops import device_name

if TYPE_CHECKING:
    import torch

FILE = "environment.json"


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return facts by name; `topology` is the driver's table of links between GPUs, network cards and processors."""
    import torch

    facts = {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device_name(device),
        "processors": str(len(os.sched_getaffinity(0))),
    }
    if device.type != "cuda":
        return facts
    nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    facts |= {
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, nccl)),
        "devices": str(torch.cuda.device_count()),
        "driver": ", ".join(dict.fromkeys(_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split())),
        "topology": _nvidia_smi("topo", "-m"),
    }
    return facts


def _nvidia_smi(*words: str) -> str:
    """Return what the driver's tool prints; "" if it is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
