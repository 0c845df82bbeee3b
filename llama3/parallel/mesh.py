"""The processes that train together: who I am, which device is mine, and the few sums that we share.

Data parallel only for now, so the mesh has one axis. A single process makes no process group: every sum is then the
value itself, and nothing of `torch.distributed` needs to be imported or agreed on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """One process among `size`; `mesh` is None when it is alone."""

    rank: int
    size: int
    device: torch.device
    mesh: Any = None

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes, in place; on every process the same bits."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def from_leader(self, value: T) -> T:
        """Return the leader's `value` on every process."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """Return every process's `value`, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return [value for value in values if value is not None]

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            torch.distributed.barrier()


@contextmanager
def joined(device: str, timeout_s: int) -> Iterator[World]:
    """Join the processes that torchrun started (its environment variables), or be alone without them.

    `device` is cpu, cuda or auto. A process that waits longer than `timeout_s` for another raises RuntimeError.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    mine = _device(device)
    if size == 1:
        yield World(0, 1, mine)
        return
    backend = "nccl" if mine.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(mine.type, (size,), mesh_dim_names=("dp",))
        yield World(rank, size, mine, mesh)
    finally:
        torch.distributed.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device: {name!r}, but this torch sees no CUDA device; write cpu or auto")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, sharing memory; a plain tensor is its own part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered on every process (all must call it); a plain one as it is."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
