"""Writing and reading checkpoints with torch.distributed.checkpoint: safetensors files, digested as they are written.

`save_state` writes from the tensors themselves and returns when the folder is committed. A background save writes from
a `Snapshot` (see `manager`) in a thread. Nothing is pickled, and loading reshards to the present layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
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
from herd.llama3.train.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint, MalformedManifest
from herd.llama3.train.checkpoint.storage import SupersededError
from herd.storage.digests import FileDigest

WRITE_BYTES = 4 << 20
"""Bytes hashed and written at a time: they stay in the processor's cache between the two."""
PUSH = 4 * WRITE_BYTES
"""Bytes after which the system should start writing to the disk. Otherwise it waits for the fsync, and the disk is
idle while we hash: 0.6 s instead of 0.4 s for 545 MB (best of 6)."""
READ_BYTES = 1 << 20
"""Bytes read and hashed at a time."""
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
def unwrap_dcp_errors(action: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` misses, into RuntimeError or its SupersededError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure in error.failures.values():
            if isinstance(failure[0], SupersededError):
                raise failure[0] from None
        reasons = "; ".join(f"process {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
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

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self.shapes, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], usable=False) if self.final_plan else super().create_local_plan()

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
            self.final_plan = new_plan
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
    folder: Path, manifest: CheckpointManifest, tensors: dict[str, Tensor], world: ParallelContext, threads: int
) -> None:
    """Fill `tensors` in place from the files of `folder`; every process calls it.

    Raises, on all processes, DamagedCheckpoint if a file is not what `manifest` says (`tensors` may be overwritten by
    then), MalformedManifest if a header cannot be read or names other tensors.
    """
    reader = CheckpointReader(folder, manifest, threads)
    # One process reads all headers: each opening every file would be the square of their number on the file system.
    reader.known = run_on_rank0_and_broadcast(world, reader.headers)
    raise_on_all_ranks(world, lambda: reader.compare(tensors))
    torch_load(dict(tensors), storage_reader=reader, process_group=world.host_group, no_dist=world.size == 1)
    problems = {name: problem for rank in world.all_gather_object(reader.problems) for name, problem in rank.items()}
    for _, problem in sorted(problems.items()):
        if problem:
            raise DamagedCheckpoint(problem)


class CheckpointReader(HuggingFaceStorageReader):
    """torch's reader of safetensors files, given their headers; records the problems of the files that it reads."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, threads: int) -> None:
        super().__init__(str(folder), threads)
        self.manifest, self.known = manifest, Metadata({})
        self.problems: dict[str, str | None] = {}

    def read_metadata(self) -> Metadata:
        return self.known

    def headers(self) -> Metadata:
        """Return the headers of all files. Raises MalformedManifest naming the file with an unreadable header."""
        try:
            return super().read_metadata()
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            for path in sorted(Path(self.path).glob("*.safetensors")):
                try:
                    with safe_open(path, "pt"):
                        pass
                except SafetensorError as reason:
                    why = f"{type(reason).__name__}: {reason}"
                    raise MalformedManifest(f"{path}: its header cannot be read ({why})") from None
            raise MalformedManifest(f"{self.path}: a header cannot be read ({type(error).__name__}: {error})") from None

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
            path = self.storage_data[item.storage_index].relative_path
            per_file.setdefault(path, {}).setdefault(item.storage_index.fqn, []).append(item)
        paths = sorted(per_file, key=os.path.getsize, reverse=True)
        with ThreadPoolExecutor(self.thread_count) as pool:
            digests = list(pool.map(lambda path: read_file(path, per_file[path], planner), paths))
        for path, digest in zip(paths, digests, strict=True):
            self.problems[Path(path).name] = self.manifest.difference(path, digest)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_file(path: str, requests: dict[str, list[ReadItem]], planner: LoadPlanner) -> FileDigest:
    """Copy the requested slices of a safetensors file into their tensors; return the digest of the whole file."""
    with open(path, "rb", buffering=0) as file:
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
