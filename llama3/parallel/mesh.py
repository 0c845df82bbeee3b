"""Process groups: rank coordinates, the local device, and a few collectives.

Ranks are laid out [dp, pp, cp, tp], tp innermost, so that ranks that communicate most are neighbors (Llama 3, section
3.3.2). A single process makes no process group: every sum is the value itself.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from herd.llama3.parallel.layout import Backend, Layout

T = TypeVar("T")


class Axis(NamedTuple):
    """Rank and size on one mesh axis; `group` is None if the size is 1."""

    rank: int
    size: int
    group: Any = None


@dataclass(frozen=True)
class ParallelContext:
    """One process of `size`; `mesh` is None for a single process without a mesh."""

    rank: int
    size: int
    device: torch.device
    layout: Layout = field(default_factory=Layout)
    mesh: Any = None
    shards: Any = None
    """The FSDP mesh: dp and cp together, with replicas outside if there are any."""
    host_group: Any = None
    """A gloo group of all processes, for objects, so that the host does not wait for the device; None: the default."""

    @property
    def is_rank0(self) -> bool:
        """Whether this process is rank 0, which writes shared files."""
        return self.rank == 0

    @property
    def is_tp_rank0(self) -> bool:
        """Whether this process is tensor-parallel rank 0, which counts shared values."""
        return self.axis("tp").rank == 0

    def axis(self, name: Literal["dp", "pp", "cp", "tp"]) -> Axis:
        """Return this process's rank, size and group on an axis."""
        if self.mesh is None:
            return Axis(0, 1)
        if name == "dp":  # no group: only FSDP communicates on it
            inner = self.mesh["shard"]
            rank = self.mesh["replica"].get_local_rank() * inner.size() + inner.get_local_rank()
            return Axis(rank, self.mesh["replica"].size() * inner.size())
        axis = self.mesh[name]
        return Axis(axis.get_local_rank(), axis.size(), axis.get_group() if axis.size() > 1 else None)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes, in place; on every process the same bits."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every process."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Return every process's `value`, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.host_group)
        return [value for value in values if value is not None]

    def gather_object(self, value: T) -> list[T]:
        """Return every process's `value` on rank 0, in the order of ranks, and nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_rank0 else None
        torch.distributed.gather_object(value, values, dst=0, group=self.host_group)
        return values or []

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


@contextmanager
def init_distributed(
    device: str, timeout_s: int, layout: Layout | None = None, meshed: bool = False, backend: Backend = "auto"
) -> Iterator[ParallelContext]:
    """Join the processes of the launcher (from its environment variables), or run as a single process.

    `device` is cpu, cuda or auto. `meshed` makes a mesh even for one process, so that it takes the same path as many.
    A process that waits longer than `timeout_s` for another raises RuntimeError. Raises ValueError if `layout` does not
    fit the number of processes, or `backend` (see `resolve_backend`) is not here.
    """
    layout = layout or Layout()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    layout.dp(size)
    local_device = torch.device("cpu")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise ValueError(
                f"device: {device}, but process {index} of node {socket.gethostname()} sees {count} CUDA devices "
                f"(torch {torch.__version__}); correct the node's driver, its torch or processes_per_node, or train "
                "on processors with device: cpu and gpus: false"
            )
        local_device = torch.device("cuda", index)
        torch.cuda.set_device(local_device)
        card: Any = torch.cuda.get_device_properties(local_device)
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        if cpus := numa_cpus(address) & os.sched_getaffinity(0):  # torch.numa does this if numactl is installed
            os.sched_setaffinity(0, cpus)
    if size == 1 and not meshed:
        yield ParallelContext(0, 1, local_device, layout)
        return
    from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

    # Else gloo connects every process with every other in each group: 32,768 sockets at 16K ranks and two groups. Rank
    # 0, which gathers from all, still needs more than the usual soft limit of 1,024.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    library = resolve_backend(backend, local_device)
    options: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    if library != "gloo" and size > 1:  # connects at once, and later groups are split off: at 16K ranks minutes less
        options["device_id"] = local_device
    torch.distributed.init_process_group(library, timeout=timedelta(seconds=timeout_s), **options)
    try:
        meshes = make_meshes(local_device.type, layout, size)
        for group in distributed_c10d._world.pg_map:  # a mesh creates its groups with torch's default, 30 min on gloo
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        host_group = None
        if library != "gloo" and size > 1:
            host_group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        yield ParallelContext(rank, size, local_device, layout, *meshes, host_group)
    finally:
        torch.distributed.destroy_process_group()


def resolve_backend(backend: Backend, device: torch.device) -> str:
    """Return the backend of torch.distributed for `backend`: auto, nccl, gloo or ncclx.

    ncclx is Meta's NCCL, which torch reaches through torchcomms. Raises ValueError if it is not installed, or the
    process has no GPU for it.
    """
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend != "gloo" and device.type != "cuda":
        raise ValueError(
            f"cluster.backend: {backend} needs GPUs, and this process computes on the CPU; write gloo or auto"
        )
    if backend == "ncclx":
        from torch.distributed import config, distributed_c10d

        if not distributed_c10d._TORCHCOMM_AVAILABLE:
            raise ValueError(
                f"cluster.backend: ncclx needs torchcomms with NCCLX, which {socket.gethostname()} does not have; "
                "install it beside torch, or write nccl"
            )
        config.use_torchcomms = True
    return backend


def numa_cpus(address: str, sysfs: Path = Path("/sys")) -> set[int]:
    """Return the processors of the NUMA node of a PCI device such as 0000:dc:00.0; empty if the machine names none."""
    try:
        node = max(0, int((sysfs / "bus/pci/devices" / address / "numa_node").read_text()))  # -1: there is one node
        ranges = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().split(",")
    except OSError:
        return set()
    bounds = [[int(number) for number in cpus.split("-")] for cpus in ranges]
    return {cpu for ends in bounds for cpu in range(ends[0], ends[-1] + 1)}


def make_meshes(device: str, layout: Layout, size: int) -> tuple[Any, Any]:
    """Return the mesh of all processes and that of FSDP; also on the fake process group, for any number of them."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    shards = layout.dp(size) // layout.dp_replicate
    shape = (layout.dp_replicate, shards, layout.pp, layout.cp, layout.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard", "pp", "cp", "tp"))
    inner = mesh["shard", "cp"]._flatten("fsdp")
    return mesh, DeviceMesh._concatenate([mesh["replica"], inner]) if layout.dp_replicate > 1 else inner


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, sharing memory; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered on its mesh (all processes of it must call it); a plain one as it is."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


# Broadcast results and errors: peers of a process that fails alone would wait for their whole timeout.


def run_on_rank0_and_broadcast(world: ParallelContext, do: Callable[[], T]) -> T:
    """Call `do` on rank 0 and return its result, or raise its error, on every process."""
    value: T | None = None
    failure: Exception | None = None
    if world.is_rank0:
        try:
            value = do()
        except Exception as error:
            failure = picklable_error(error, world.rank)
    value, failure = world.broadcast_object((value, failure))
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def raise_on_all_ranks(world: ParallelContext, do: Callable[[], None]) -> None:
    """Call `do` on every process; if it fails on some, raise the failure of the lowest rank on all."""
    failure: Exception | None = None
    try:
        do()
    except Exception as error:
        failure = picklable_error(error, world.rank)
    first = next((error for (error,) in world.all_gather_object((failure,)) if error is not None), None)
    if first is not None:
        raise first


def picklable_error(error: Exception, rank: int) -> Exception:
    """Return an error that can be pickled: built-in errors and our own; others become a RuntimeError."""
    if type(error).__module__.split(".")[0] in ("builtins", "herd"):
        return error
    return RuntimeError(f"process {rank}: {type(error).__name__}: {error}")
