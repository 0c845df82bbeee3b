"""A copy of the training state in host memory: what a checkpoint is written from while training goes on.

Making it is all that a step waits for. On CUDA the copies run on the training stream into pinned memory: nothing waits
on the host, and a later optimizer step cannot overtake them (12 GB of a 1B model take about 0.3 s at 40 GB/s). On a CPU
they are plain copies. The memory is kept and used again, so one more state must fit into host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama3.parallel.mesh import local


class Snapshot:
    """Host memory for one state; `parts` holds this process's tensors, `shapes` what they are parts of."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.shapes: dict[str, Tensor] = {}
        """The same names as tensors without data (meta device), sharded as the state is: what is planned with."""
        self._began: Any = None
        self._copied: Any = None

    @torch.no_grad()
    def prepare(self, tensors: dict[str, Tensor]) -> bool:
        """Make room for `tensors`; return whether there was none. Otherwise the first copy pays for the memory."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        if _kinds(parts) == _kinds(self.parts):
            return False
        pinned = any(part.is_cuda for part in parts.values())
        self.parts = {name: torch.zeros(p.shape, dtype=p.dtype, pin_memory=pinned) for name, p in parts.items()}
        self.shapes = {name: _without_data(tensor) for name, tensor in tensors.items()}
        return True

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> bool:
        """Copy `tensors`; return whether they are others than the time before. Call `wait` before reading `parts`."""
        changed = self.prepare(tensors)
        on_device = any(tensor.is_cuda for tensor in tensors.values())
        self._began, self._copied = (_event(), None) if on_device else (None, None)
        for name, tensor in tensors.items():
            self.parts[name].copy_(local(tensor), non_blocking=True)
        if on_device:
            self._copied = _event()
        return changed

    def wait(self) -> float:
        """Return when the copies are there, and the seconds for which they held up the device (on a CPU 0)."""
        if self._copied is None:
            return 0.0
        self._copied.synchronize()
        return float(self._began.elapsed_time(self._copied)) / 1000


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _kinds(parts: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (part.shape, part.dtype) for name, part in parts.items()}


def _without_data(tensor: Tensor) -> Tensor:
    part = local(tensor).to("meta")
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    cut: Any = tensor
    whole = {"shape": cut.shape, "stride": cut.stride()}
    return DTensor.from_local(part, cut.device_mesh, cut.placements, run_check=False, **whole)
