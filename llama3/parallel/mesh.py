"""The processes that train together: who I am on each axis, which device is mine, and the few sums that we share.

Ranks are laid out [dp, pp, cp, tp], tp innermost: ranks that talk most are neighbours (Llama 3, section 3.3.2). A
single process makes no process group: every sum is then the value itself, and nothing of `torch.distributed` needs
to be imported or agreed on. What this gives up: one layout for the whole model; experts or encoders would need more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from llama3.parallel.layout import Layout

T = TypeVar("T")


class Axis(NamedTuple):
    """My place on one axis of the mesh; `group` is None when I am alone on it."""

    rank: int
    size: int
    group: Any = None


@dataclass(frozen=True)
class ParallelContext:
    """One process among `size`; `mesh` is None when it is alone."""

    rank: int
    size: int
    device: torch.device
    layout: Layout = field(default_factory=Layout)
    mesh: Any = None
    shards: Any = None
    """The mesh over which FSDP cuts weights: dp and cp together, under replicas if there are any."""

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def first_of_copy(self) -> bool:
        """Whether this process counts what its tensor-parallel peers hold too."""
        return self.axis("tp").rank == 0

    def axis(self, name: Literal["dp", "pp", "cp", "tp"]) -> Axis:
        """Return my place on an axis."""
        if self.mesh is None:
            return Axis(0, 1)
        if name == "dp":  # no group: nothing is exchanged on it but gradients, by FSDP
            inner = self.mesh["shard"]
            rank = self.mesh["replica"].get_local_rank() * inner.size() + inner.get_local_rank()
            return Axis(rank, self.mesh["replica"].size() * inner.size())
        axis = self.mesh[name]
        return Axis(axis.get_local_rank(), axis.size(), axis.get_group() if axis.size() > 1 else None)

    @property
    def tensor_mesh(self) -> Any:
        """The mesh over which tensor parallelism cuts weights."""
        return self.mesh["tp"]

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
def init_distributed(
    device: str, timeout_s: int, layout: Layout | None = None, meshed: bool = False
) -> Iterator[ParallelContext]:
    """Join the processes that the launcher started (its environment variables), or be alone without them.

    `device` is cpu, cuda or auto. `meshed` makes a mesh even for one process, so that it takes the same path as many.
    A process that waits longer than `timeout_s` for another raises RuntimeError. Raises ValueError if `layout` does not
    fit the number of processes.
    """
    layout = layout or Layout()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    layout.dp(size)
    mine = _device(device)
    if size == 1 and not meshed:
        yield ParallelContext(0, 1, mine, layout)
        return
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    backend = "nccl" if mine.type == "cuda" else "gloo"
    own: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **own)
    try:
        meshes = make_meshes(mine.type, layout, size)
        wait_at_most(timeout_s)
        yield ParallelContext(rank, size, mine, layout, *meshes)
    finally:
        torch.distributed.destroy_process_group()


def wait_at_most(seconds: float) -> None:
    """Give every group there is this time-out: a mesh makes its groups with torch's own, of 30 minutes on gloo."""
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def make_meshes(device: str, layout: Layout, size: int) -> tuple[Any, Any]:
    """Return the mesh of all processes and that of FSDP; also on the fake process group, for any number of them."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    shards = layout.dp(size) // layout.replicas
    shape = (layout.replicas, shards, layout.pp, layout.cp, layout.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard", "pp", "cp", "tp"))
    inner = mesh["shard", "cp"]._flatten("fsdp")
    return mesh, DeviceMesh._concatenate([mesh["replica"], inner]) if layout.replicas > 1 else inner


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"device: {name}, but process {index} of node {socket.gethostname()} sees {count} CUDA devices (torch "
            f"{torch.__version__}); correct the node's driver, its torch or processes_per_node, or train on processors "
            "with device: cpu and gpus: false"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, sharing memory; a plain tensor is its own part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered on its mesh (all processes of it must call it); a plain one as it is."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


# What one process finds out, all must know: results and failures that end the same way on every process.
#
# A process that raises while its peers wait for it costs them their whole time-out, and hides what went wrong.


def run_on_rank0_and_broadcast(world: ParallelContext, do: Callable[[], T]) -> T:
    """Return on every process what `do` returns on the leading one, which alone calls it; or raise what it raises."""
    value: T | None = None
    failure: Exception | None = None
    if world.leads:
        try:
            value = do()
        except Exception as error:
            failure = tellable(error, world.rank)
    value, failure = world.from_leader((value, failure))
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def raise_on_all_ranks(world: ParallelContext, do: Callable[[], None]) -> None:
    """Call `do` on every process; if it fails on some, raise the failure of the lowest rank on all."""
    failure: Exception | None = None
    try:
        do()
    except Exception as error:
        failure = tellable(error, world.rank)
    first = next((told for (told,) in world.gathered((failure,)) if told is not None), None)
    if first is not None:
        raise first


def tellable(error: Exception, rank: int) -> Exception:
    """Return an error that survives the way to another process: ours and the system's do, others become text."""
    if type(error).__module__.split(".")[0] in ("builtins", "llama3", "storage"):
        return error
    return RuntimeError(f"process {rank}: {type(error).__name__}: {error}")
