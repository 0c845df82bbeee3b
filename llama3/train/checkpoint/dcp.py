"""Writing and reading checkpoints with torch.distributed.checkpoint: safetensors files, digested as they are written.

`save_state` writes from the tensors themselves and returns when the folder is committed. A background save writes from
a `Snapshot` (see `manager`) in a thread. Nothing is pickled, and loading reshards to the present layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from herd.llama3.parallel.mesh import (
    ParallelContext,
    picklable_error,
    raise_on_all_ranks,
    run_on_rank0_and_broadcast,
    to_local,
)
from herd.llama3.train.checkpoint.manifest import (
    CheckpointManifest,
    DamagedCheckpoint,
    MalformedManifest,
    share_of_files,
)
from herd.llama3.train.checkpoint.storage import SupersededError
from herd.storage.digests import FileDigest, parallel_map

WRITE_BYTES = 4 << 20
"""Bytes hashed and written at a time: they stay in the processor's cache between the two."""
PUSH = 4 * WRITE_BYTES
"""Bytes after which the system should start writing to the disk. Otherwise it waits for the fsync, and the disk is
idle while we hash: 0.6 s instead of 0.4 s for 545 MB (best of 6)."""
READ_BYTES = 1 << 20
"""Bytes read and hashed at a time."""
COPIED = 1 << 16
"""Bytes of a tensor up to which every process that has a copy writes it: step counts, and norms under TP. A process
then finds all that it needs in its own files; otherwise it would read whole files of others for a few bytes."""
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in TYPES.items()}

# torch warns at each save of one process. A filter around the save itself would have to be set from a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Savable(Protocol):
    """A state that can be saved: named tensors and three numbers, of a model with a shape."""

    position: int
    averaged: int
    config: Any
    rows: int

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; writing into them changes the state."""

    def make_average(self, averaged: int) -> None:
        """Allocate an average over `averaged` positions that is about to be loaded."""


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint and what it cost."""

    position: int
    bytes: int
    """Of the whole checkpoint on rank 0, of its own files on the others."""
    blocked_s: float
    """Seconds that training stopped for the copy to host memory."""
    waited_s: float
    """Seconds that training waited before that, because the previous save was not finished."""
    total_s: float
    """From the beginning of the copy to the commit."""


# Saving.


def save_state(
    folder: Path, state: Savable, stage: str, world: ParallelContext, threads: int = 4, attempt: str = ""
) -> None:
    """Write `state` into the new folder `folder`; every process calls it. Raises RuntimeError on all of them."""
    manifest = make_manifest(state, stage, world, attempt)
    planner = WritePlanner()
    planner.shapes = state.tensors()
    with torch.no_grad():
        planner.parts = {name: to_local(tensor) for name, tensor in planner.shapes.items()}
    writer = Writer(
        folder,
        world.rank,
        threads,
        start=lambda: folder.mkdir(parents=True),
        commit=lambda files: manifest.model_copy(update={"files": files}).write(folder),
    )
    write(planner, writer, world)


def make_manifest(state: Savable, stage: str, world: ParallelContext, attempt: str) -> CheckpointManifest:
    """Return the manifest of `state` as it is now, without files."""
    return CheckpointManifest(
        stage=stage,
        position=state.position,
        averaged=state.averaged,
        model=state.config.model_dump(mode="json"),
        rows=state.rows,
        processes=world.size,
        attempt=attempt,
        files={},
    )


def write(planner: WritePlanner, writer: Writer, world: ParallelContext, group: Any = None) -> None:
    """Let torch plan, write and commit. On failure, drops the plan and raises RuntimeError on every process."""
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with unwrap_dcp_errors(f"{writer.folder}: cannot be written"):
            save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=group or world.host_group,
                no_dist=world.size == 1,
            )
    except BaseException:
        planner.final_plan = None  # make a new plan at the next save
        raise


@contextmanager
def unwrap_dcp_errors(action: str, first_rank: int = 0) -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` misses, into RuntimeError or its SupersededError.

    torch counts processes from `first_rank`.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure in error.failures.values():
            if isinstance(failure[0], SupersededError):
                raise failure[0] from None
        reasons = "; ".join(f"process {first_rank + rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise RuntimeError(f"{action}: {reasons}") from error


class WritePlanner(DefaultSavePlanner):
    """Plans once which process writes what; later saves repeat the plan, for gathering plans is slow at 1000s of ranks.

    Set `final_plan` to None after a failure and when the state has other tensors. If processes disagree about
    repeating, the save fails.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shapes: dict[str, Tensor] = {}
        """The tensors to plan: not passed to torch's `save`, which takes 0.1 ms to look at each."""
        self.parts: dict[str, Tensor] = {}
        """This process's part of each, in host memory or not."""
        self.final_plan: SavePlan | None = None
        self._own = SavePlan([])
        """What this process has, before torch leaves each part to one of those that have it."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self.shapes, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        if self.final_plan:
            return SavePlan([], usable=False)
        self._own = super().create_local_plan()
        return self._own

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        repeating = [not plan.usable for plan in all_plans]
        if all(repeating):
            return all_plans, Metadata({})
        if any(repeating):
            new = [rank for rank, repeats in enumerate(repeating) if not repeats]
            raise ValueError(f"processes {new} have a new plan, the others repeat theirs")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.final_plan is None:
            planned = {item.index for item in new_plan.items}
            copies = [item for item in self._own.items if size_of(item) <= COPIED and item.index not in planned]
            self.final_plan = replace(new_plan, items=[*new_plan.items, *copies])
        return self.final_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index.fqn].detach()


class Writer(StorageWriter):
    """Writes this process's files into `folder`; on rank 0 commits what all have written.

    `stored` is called with each finished file, in the thread that wrote it; `commit` with the digests of all files.
    """

    # torch's own safetensors writer copies each file twice in memory, uses one thread, and computes no digest.

    def __init__(
        self,
        folder: Path,
        rank: int,
        threads: int,
        commit: Callable[[dict[str, FileDigest]], None],
        start: Callable[[], None] | None = None,
        stored: Callable[[Path], None] | None = None,
    ) -> None:
        self.folder, self.rank, self.threads = folder, rank, threads
        self.start, self.stored, self.commit = start, stored, commit
        self.written: dict[str, FileDigest] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """No-op: nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Let rank 0 clear the folder. No process writes before: all plans wait for rank 0's."""
        if is_coordinator and self.start:
            self.start()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's tensors, balanced over the threads. Raises OSError or RuntimeError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        bins: list[list[WriteItem]] = [[] for _ in range(self.threads)]
        sizes = [0] * self.threads
        for item in sorted(filter(size_of, plan.items), key=size_of, reverse=True):  # to the bin with the fewest bytes
            smallest = sizes.index(min(sizes))
            bins[smallest].append(item)
            sizes[smallest] += size_of(item)
        bins = [items for items in bins if items]

        def write(number: int) -> WriteResult:
            path = self.folder / f"{self.rank:05}-{number:02}.safetensors"
            digest = write_file(path, bins[number], planner.resolve_data)
            if self.stored:
                self.stored(path)
            return WriteResult(bins[number][0].index, digest.bytes, (path.name, digest))

        done: Future[list[WriteResult]] = Future()
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                results = list(pool.map(write, range(len(bins))))
        except Exception as error:
            raise picklable_error(error, self.rank) from error
        self.written = dict(result.storage_data for result in results)
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; called on rank 0 when all have written."""
        self.written = dict(sorted(result.storage_data for rank_results in results for result in rank_results))
        self.commit(self.written)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def size_of(item: WriteItem) -> int:
    """Return the bytes that this process writes of a tensor."""
    data: Any = item.tensor_data
    size: int = data.chunk.sizes.numel() * data.properties.dtype.itemsize
    return size


def write_file(path: Path, items: list[WriteItem], data: Callable[[WriteItem], Any]) -> FileDigest:
    """Write tensors as one safetensors file, sync it to the disk, return its digest.

    The format: 8 bytes length, JSON header, tensors (little endian). torch's reader needs `DCP_SHARDING_INFO`.
    """
    pairs: list[tuple[WriteItem, Any]] = [(item, item.tensor_data) for item in items]
    pairs.sort(key=lambda pair: -pair[1].properties.dtype.itemsize)  # so that every tensor is aligned
    fields: dict[str, Any] = {}
    sharding, offset = {}, 0
    for item, tensor_data in pairs:
        name, chunk, end = item.index.fqn, tensor_data.chunk, offset + size_of(item)
        dtype = TYPES[tensor_data.properties.dtype]
        fields[name] = {"dtype": dtype, "shape": list(chunk.sizes), "data_offsets": [offset, end]}
        sharding[name] = {"saved_offsets": list(chunk.offsets)}
        offset = end
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    header = json.dumps({"__metadata__": metadata, **fields}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        for item, _ in pairs:
            tensor: Tensor = data(item)
            view = memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            assert len(view) == size_of(item), f"{item.index.fqn}: {len(view)} bytes, {size_of(item)} planned"
            for start in range(0, len(view), WRITE_BYTES):
                yield view[start : start + WRITE_BYTES]

    digest, size, pushed = hashlib.sha256(), 0, 0
    with path.open("xb") as file:
        for chunk_bytes in chunks():
            # Hashed before it is written: the digest is of what was meant, not of what the disk returns.
            digest.update(chunk_bytes)
            file.write(chunk_bytes)
            size += len(chunk_bytes)
            if size - pushed >= PUSH:
                file.flush()
                if hasattr(os, "posix_fadvise"):  # Linux starts writing on this advice and keeps unwritten pages
                    os.posix_fadvise(file.fileno(), pushed, size - pushed, os.POSIX_FADV_DONTNEED)
                pushed = size
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(bytes=size, sha256=digest.hexdigest())


# Loading: read, verify and reshard in one pass over the bytes (reading twice took 0.46 s for 530 MB instead of 0.30 s).


def load(
    folder: Path,
    manifest: CheckpointManifest,
    tensors: dict[str, Tensor],
    world: ParallelContext,
    threads: int,
    download: Callable[[Collection[str]], None],
) -> None:
    """Fill `tensors` in place from the files of `folder`; every process calls it.

    `download` brings files into `folder`; all processes call it, each with the names that it needs. If as many
    processes with the same layout wrote the checkpoint, each reads its own files, and nothing grows with their number.

    Raises, on all processes, DamagedCheckpoint if a file is not what `manifest` says (`tensors` may be overwritten by
    then), MalformedManifest if a header cannot be read or names other tensors.
    """
    reader = CheckpointReader(folder, manifest, threads)
    names: Collection[str] = own_files(manifest, tensors, world)

    def fill() -> None:
        with unwrap_dcp_errors(f"{folder}: cannot be loaded", world.rank):
            parts = {name: tensor for name, tensor in tensors.items() if to_local(tensor).numel()}
            torch_load(parts, storage_reader=reader, no_dist=True)

    download(names)
    try:
        raise_on_all_ranks(world, lambda: reader.read_own(names, tensors))
        if not all(world.all_gather_object(reader.complete)):
            download(manifest.files)
            # One process reads all headers: each opening every file would be the square of their number.
            reader.known = run_on_rank0_and_broadcast(world, lambda: reader.headers(manifest.files))
            raise_on_all_ranks(world, lambda: reader.compare(tensors))
            names = share_of_files(manifest, world)
        raise_on_all_ranks(world, fill)
    except (RuntimeError, OSError, MalformedManifest):
        # A damaged file is the likely cause, and its error says more.
        raise_on_all_ranks(world, lambda: manifest.check(folder, names))
        raise
    problems = {name: problem for rank in world.all_gather_object(reader.problems) for name, problem in rank.items()}
    for _, problem in sorted(problems.items()):
        raise DamagedCheckpoint(problem)


def own_files(manifest: CheckpointManifest, tensors: dict[str, Tensor], world: ParallelContext) -> list[str]:
    """Return the files in which this process finds its parts of `tensors` if it wrote them in the present layout.

    That is its own files, and those of processes with copies of its parts, of which one wrote each.
    """
    if manifest.processes != world.size:
        return []
    ranks = {world.rank}
    tensor: Any
    for tensor in tensors.values():
        if hasattr(tensor, "device_mesh") and to_local(tensor).nbytes > COPIED:
            places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
            copies = tuple(slice(None) if placement.is_replicate() else place for place, placement in places)
            ranks.update(tensor.device_mesh.mesh[copies].flatten().tolist())
    return [name for name in manifest.files if name.startswith(tuple(f"{rank:05}-" for rank in ranks))]


class CheckpointReader(FileSystemReader):
    """torch's reader, given the headers of safetensors files; records the problems of the files that it reads."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, threads: int) -> None:
        super().__init__(str(folder))
        self.folder, self.manifest, self.threads, self.known = folder, manifest, threads, Metadata({})
        self.complete = False
        """Whether `read_own` found all that this process needs."""
        self.problems: dict[str, str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.known

    def headers(self, names: Collection[str]) -> Metadata:
        """Return the headers of the files `names`. Raises MalformedManifest naming a file whose header is not one."""
        known = Metadata({}, storage_data={}, storage_meta=StorageMeta())
        files = sorted(name for name in names if name.endswith(".safetensors"))
        headers = parallel_map(lambda name: read_header(self.folder / name), files)
        parts = ((name, *part) for name, header in zip(files, headers, strict=True) for part in header)
        for name, tensor, dtype, chunk in parts:
            index = MetadataIndex(tensor, chunk.offsets)
            if index in known.storage_data:
                continue  # a copy
            known.storage_data[index] = (name, chunk.sizes)
            ends = torch.Size(start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            stored: Any = known.state_dict_metadata.setdefault(
                tensor, TensorStorageMetadata(TensorProperties(dtype), ends, [])
            )
            stored.size = torch.Size(map(max, stored.size, ends))
            stored.chunks.append(chunk)
        return known

    def read_own(self, names: Collection[str], tensors: dict[str, Tensor]) -> None:
        """Read the headers of `names`: do they hold this process's parts of `tensors` as it would write them now?"""
        self.known = self.headers(names)
        planner = WritePlanner()
        planner.shapes = tensors
        planner.set_up_planner({})
        for item in filter(size_of, planner.create_local_plan().items):
            data: Any = item.tensor_data
            if self.known.storage_data.get(item.index, ("", ()))[1] != data.chunk.sizes:
                return
            stored: Any = self.known.state_dict_metadata[item.index.fqn]
            stored.size = data.size  # the other parts are in files that this process does not read
        self.complete = True

    def compare(self, tensors: dict[str, Tensor]) -> None:
        """Raise MalformedManifest unless the files hold all of `tensors`, in these shapes."""
        for name, tensor in sorted(tensors.items()):
            stored = self.known.state_dict_metadata.get(name)
            if stored is None:
                raise MalformedManifest(f"{self.path}: tensor {name} is missing")
            if isinstance(stored, TensorStorageMetadata) and stored.size != tensor.shape:
                shapes = f"{list(stored.size)}, not {list(tensor.shape)}"
                raise MalformedManifest(f"{self.path}: tensor {name} has the shape {shapes}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the files that hold something of `plan`, each whole and once, several at a time. Raises OSError."""
        per_file: dict[str, dict[str, list[ReadItem]]] = {}
        for item in plan.items:
            name, _ = self.storage_data[item.storage_index]
            per_file.setdefault(name, {}).setdefault(item.storage_index.fqn, []).append(item)
        names = sorted(per_file, key=lambda name: self.manifest.files[name].bytes, reverse=True)
        with ThreadPoolExecutor(self.threads) as pool:
            digests = list(pool.map(lambda name: read_file(self.folder / name, per_file[name], planner), names))
        for name, digest in zip(names, digests, strict=True):
            if problem := self.manifest.difference(str(self.folder / name), digest):
                self.problems[name] = problem
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_header(path: Path) -> list[tuple[str, torch.dtype, ChunkStorageMetadata]]:
    """Return name, type and place of each tensor of a file that `write_file` wrote. Raises MalformedManifest."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            fields = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))
        places = json.loads(fields.pop("__metadata__")["DCP_SHARDING_INFO"])
        return [
            (
                name,
                DTYPES[field["dtype"]],
                ChunkStorageMetadata(torch.Size(places[name]["saved_offsets"]), torch.Size(field["shape"])),
            )
            for name, field in fields.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedManifest(f"{path}: its header cannot be read ({type(error).__name__}: {error})") from None


def read_file(path: Path, requests: dict[str, list[ReadItem]], planner: LoadPlanner) -> FileDigest:
    """Copy the requested slices of a safetensors file into their tensors; return the digest of the whole file."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest, position = hashlib.sha256(), 0

        def fill(data: bytearray | Any) -> None:
            """Read the next bytes of the file into `data` and hash them."""
            nonlocal position
            view, filled = memoryview(data), 0
            while filled < len(view):
                count = file.readinto(view[filled : filled + READ_BYTES])
                if not count:
                    raise OSError(f"{path}: ends after {position + filled:,} bytes")
                digest.update(view[filled : filled + count])
                filled += count
            position += filled

        fill(prefix := bytearray(8))
        fill(header := bytearray(int.from_bytes(prefix, "little")))
        fields = json.loads(header)
        fields.pop("__metadata__", None)
        buffer = torch.empty(0, dtype=torch.uint8)
        for name, field in sorted(fields.items(), key=lambda pair: pair[1]["data_offsets"]):
            items, size = requests.get(name, []), int(field["data_offsets"][1] - field["data_offsets"][0])
            if len(items) == 1:  # straight into the tensor if it is in host memory and needs exactly these bytes
                target: Tensor = planner.resolve_tensor(items[0]).detach()
                same = target.dtype == DTYPES[field["dtype"]] and list(target.shape) == field["shape"]
                if same and target.device.type == "cpu" and target.is_contiguous():
                    fill(target.view(-1).view(torch.uint8).numpy())
                    continue
            buffer = buffer if buffer.numel() >= size else torch.empty(size, dtype=torch.uint8)
            raw = buffer[:size]
            fill(raw.numpy())
            for item in items:
                stored = raw.view(DTYPES[field["dtype"]]).view(field["shape"])
                offsets = zip(item.storage_offsets, item.lengths, strict=True)
                part = stored[tuple(slice(start, start + count) for start, count in offsets)]
                target = planner.resolve_tensor(item).detach()
                assert target.shape == part.shape, f"{item.storage_index.fqn}: {target.shape} from {part.shape}"
                target.copy_(part)
                planner.commit_tensor(item, target)
        fill(bytearray(os.fstat(file.fileno()).st_size - position))  # hash what follows: there should be nothing
        return FileDigest(bytes=position, sha256=digest.hexdigest())
