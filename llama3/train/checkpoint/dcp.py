"""One save: a state's tensors written by all processes through torch.distributed.checkpoint, committed by the leader.

`save_state` writes from the tensors themselves and returns when the folder is committed. A background save uses the
same path from a `Snapshot`, in a thread, over a process group of its own: collectives of two threads may not meet on
one group, and gloo's needs no device. Each save has one round of messages for the plan and one for the digests; the
commit happens within the second, so all processes learn in the same way whether it came to be.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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

from llama3.parallel.mesh import ParallelContext, local, raise_on_all_ranks, run_on_rank0_and_broadcast, tellable
from llama3.train.checkpoint.manifest import CheckpointManifest, Damaged, Malformed
from llama3.train.checkpoint.storage import Superseded
from storage.digests import FileDigest

T = TypeVar("T")

# Said at each save of one process. A filter of our own around the save would have to be set from a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Savable(Protocol):
    """What is saved: named tensors and three numbers, of a model with a shape."""

    position: int
    averaged: int
    spec: Any
    rows: int

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; writing into them changes the state."""

    def make_average(self, averaged: int) -> None:
        """Make room for an average over `averaged` positions that is about to be loaded."""


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint and what it cost."""

    position: int
    bytes: int
    """Of the whole checkpoint on the leading process, of its own part on the others."""
    blocked_s: float
    """Seconds that training stood still for the copy to host memory."""
    waited_s: float
    """Seconds that it waited before, because the save before was not finished."""
    total_s: float
    """From the beginning of the copy to the commit."""


def describe(state: Savable, stage: str, world: ParallelContext, attempt: str) -> CheckpointManifest:
    """Return the manifest of `state` as it is now, without files."""
    return CheckpointManifest(
        stage=stage,
        position=state.position,
        averaged=state.averaged,
        model=state.spec.model_dump(mode="json"),
        rows=state.rows,
        processes=world.size,
        attempt=attempt,
        files={},
    )


def save_state(
    folder: Path, state: Savable, stage: str, world: ParallelContext, threads: int = 4, attempt: str = ""
) -> None:
    """Write `state` into the new folder `folder`, manifest last; every process calls it.

    Raises RuntimeError on every process if it cannot be written.
    """

    manifest = describe(state, stage, world, attempt)
    planner = WritePlanner()
    planner.shapes = state.tensors()
    with torch.no_grad():
        planner.parts = {name: local(tensor) for name, tensor in planner.shapes.items()}
    writer = Writer(
        folder,
        world.rank,
        threads,
        start=lambda: folder.mkdir(parents=True),
        commit=lambda files: manifest.model_copy(update={"files": files}).write(folder),
    )
    write(planner, writer, world)


def write(planner: Any, writer: Any, world: ParallelContext, group: Any = None) -> None:
    """Let torch plan and write. Raises RuntimeError, on every process, and forgets the plan then."""
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with plain_errors(f"{writer.folder}: cannot be written"):
            save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=world.size == 1)
    except BaseException:
        planner.forget()
        raise


def own_group(world: ParallelContext, timeout_s: float) -> Any:
    """Return a group of all processes for the background thread; every process calls it at the same place."""
    if world.size == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


class Background(Generic[T]):
    """A call that runs in a thread. The thread does not keep the process alive: a save cut short is never chosen."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait; return what the call returned or raise what it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as failure:
            self._failure = failure


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` does not catch, into RuntimeError.

    If it came about because a later attempt has begun, that is raised: Superseded.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure in error.failures.values():
            if isinstance(failure[0], Superseded):
                raise failure[0] from None
        reasons = "; ".join(f"process {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise RuntimeError(f"{what}: {reasons}") from error


# How torch.distributed.checkpoint writes our checkpoints: safetensors files, one per thread and process, digested.
#
# torch's own safetensors writer copies each file twice in memory before it writes, with one thread, and would have
# to be read again for a digest. Here every byte is hashed and written in the same pass (4 threads reach the disk's
# speed), so the digest is of what was meant, not of what came back. The files are what `HuggingFaceStorageReader`
# reads: no pickle.

WRITE_BYTES = 4 << 20
"""Bytes hashed and written at a time: they stay in the processor's cache between the two."""
PUSH = 4 * WRITE_BYTES
"""Bytes after which the system is told to start writing to the disk. Left to itself it waits for the fsync, and the
disk stands idle while we hash: 0.6 s instead of 0.4 s for 545 MB (best of 6)."""
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


class WritePlanner(DefaultSavePlanner):
    """Decides who writes what: once. Afterwards each process repeats its part, and only says so to the others.

    Of a tensor that several processes hold, torch lets the one with least to write do it; that needs everybody's plan
    at one place, which is much at thousands of processes, so it is not done at each save. `forget` after a failure and
    when the state has other tensors. Processes that disagree about it make the save fail, never incomplete.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shapes: dict[str, Tensor] = {}
        """What is planned: torch takes 0.1 ms to look at each tensor that is handed to its `save`, so none is."""
        self.parts: dict[str, Tensor] = {}
        """This process's part of each, in host memory or not."""
        self.settled: SavePlan | None = None

    def forget(self) -> None:
        """Plan anew at the next save."""
        self.settled = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self.shapes, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], usable=False) if self.settled else super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        repeating = [not plan.usable for plan in all_plans]
        if all(repeating):
            return all_plans, Metadata({})
        if any(repeating):
            new = [rank for rank, old in enumerate(repeating) if not old]
            raise ValueError(f"processes {new} have a new plan, the others repeat theirs")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.settled is None:
            self.settled = new_plan
        return self.settled

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index.fqn].detach()


class Writer(StorageWriter):
    """Writes this process's files into `folder`; on the leading process commits what all have written.

    `stored` is called with each finished file, in the thread that wrote it; `commit` with the digests of all files.
    """

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
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Let the leading process clear the place before anybody writes: all plans wait for its own."""
        if is_coordinator and self.start:
            self.start()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's tensors, balanced over the threads. Raises OSError or RuntimeError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        bins = balanced([item for item in plan.items if size_of(item)], self.threads)

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
            raise tellable(error, self.rank) from error
        self.written = dict(result.storage_data for result in results)
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit (called on the leading process, when all have written)."""
        self.written = dict(sorted(result.storage_data for part in results for result in part))
        self.commit(self.written)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def size_of(item: WriteItem) -> int:
    """Return the bytes that this process writes of a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def balanced(items: list[WriteItem], bins: int) -> list[list[WriteItem]]:
    """Deal the largest item first, each to the bin with least in it; no bin is empty."""
    heap: list[tuple[int, int]] = [(0, number) for number in range(bins)]
    dealt: list[list[WriteItem]] = [[] for _ in range(bins)]
    for item in sorted(items, key=size_of, reverse=True):
        held, number = heapq.heappop(heap)
        dealt[number].append(item)
        heapq.heappush(heap, (held + size_of(item), number))
    return [bin for bin in dealt if bin]


def write_file(path: Path, items: list[WriteItem], data: Callable[[WriteItem], Any]) -> FileDigest:
    """Write tensors as one safetensors file, put it on the disk, return its digest.

    The format: 8 bytes length, a JSON header of that length, the tensors one after another (little endian); torch's
    reader wants the place of each part in its whole under `DCP_SHARDING_INFO`.
    """
    items = sorted(items, key=lambda item: -_itemsize(item))  # so that every tensor is aligned
    digest, size, pushed = hashlib.sha256(), 0, 0
    with path.open("xb") as file:
        for piece in _pieces(items, data):
            digest.update(piece)
            file.write(piece)
            size += len(piece)
            if size - pushed >= PUSH:
                file.flush()
                _push(file.fileno(), pushed, size - pushed)
                pushed = size
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(bytes=size, sha256=digest.hexdigest())


def _pieces(items: list[WriteItem], data: Callable[[WriteItem], Any]) -> Iterator[bytes | memoryview]:
    header = _header(items)
    yield len(header).to_bytes(8, "little") + header
    for item in items:
        tensor: Tensor = data(item)
        view = memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        assert len(view) == size_of(item), f"{item.index.fqn}: {len(view)} bytes, {size_of(item)} planned"
        for start in range(0, len(view), WRITE_BYTES):
            yield view[start : start + WRITE_BYTES]


def _header(items: list[WriteItem]) -> bytes:
    fields: dict[str, Any] = {}
    places, offset = {}, 0
    for item in items:
        assert item.tensor_data is not None
        name, chunk, end = item.index.fqn, item.tensor_data.chunk, offset + size_of(item)
        kind = TYPES[item.tensor_data.properties.dtype]
        fields[name] = {"dtype": kind, "shape": list(chunk.sizes), "data_offsets": [offset, end]}
        places[name] = {"saved_offsets": list(chunk.offsets)}
        offset = end
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    text = json.dumps({"__metadata__": about, **fields}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _push(handle: int, start: int, length: int) -> None:
    """Start writing a range to the disk: Linux does on this advice, and keeps pages that are not yet written."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype.itemsize


# Reading a checkpoint into tensors, however they are cut now, and verifying it, in one pass over the bytes.
#
# Each process reads the files that hold something of its own, whole and once, several at a time: what is hashed is
# copied to where torch's plan wants it. Reading to verify and then again to load took 0.46 s for 530 MB that the
# disk gives in 0.30 s. What this gives up: the tensors are already overwritten when a file proves damaged, so
# whoever falls back must load or make every one of them again; and a process that needs a slice of a file reads all
# of it.

READ_BYTES = 1 << 20
"""Bytes read and hashed at a time."""
DTYPES = {name: dtype for dtype, name in TYPES.items()}


class CheckpointReader(HuggingFaceStorageReader):
    """torch's reader of safetensors files, told what is in them; notes which files it read and what is wrong there.

    The headers of all files are read by one process and sent to the others: each opening every file would be the
    square of their number on the file system.
    """

    def __init__(self, folder: Path, manifest: CheckpointManifest, threads: int) -> None:
        super().__init__(str(folder), threads)
        self.manifest, self.known = manifest, Metadata({})
        self.problems: dict[str, str | None] = {}

    def read_metadata(self) -> Metadata:
        return self.known

    def headers(self) -> Metadata:
        """Return what the headers of all files say. Raises Malformed naming the file that has none."""
        try:
            return super().read_metadata()
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            for path in sorted(Path(self.path).glob("*.safetensors")):
                try:
                    with safe_open(path, "pt"):
                        pass
                except SafetensorError as reason:
                    why = f"{type(reason).__name__}: {reason}"
                    raise Malformed(f"{path}: its header cannot be read ({why})") from None
            raise Malformed(f"{self.path}: a header cannot be read ({type(error).__name__}: {error})") from None

    def compare(self, tensors: dict[str, Tensor]) -> None:
        """Raise Malformed unless the files hold all of `tensors`, in these shapes."""
        for name, tensor in sorted(tensors.items()):
            stored = self.known.state_dict_metadata.get(name)
            if stored is None:
                raise Malformed(f"{self.path}: tensor {name} is missing")
            if isinstance(stored, TensorStorageMetadata) and stored.size != tensor.shape:
                shapes = f"{list(stored.size)}, not {list(tensor.shape)}"
                raise Malformed(f"{self.path}: tensor {name} has the shape {shapes}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for. Raises OSError, or anything if a header is not what it was."""
        per_file: dict[str, dict[str, list[ReadItem]]] = {}
        for item in plan.items:
            path = self.storage_data[item.storage_index].relative_path
            per_file.setdefault(path, {}).setdefault(item.storage_index.fqn, []).append(item)
        paths = sorted(per_file, key=os.path.getsize, reverse=True)
        with ThreadPoolExecutor(self.thread_count) as pool:
            found = list(pool.map(lambda path: read_file(path, per_file[path], planner), paths))
        for path, digest in zip(paths, found, strict=True):
            self.problems[Path(path).name] = self.manifest.difference(path, digest)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def load(
    folder: Path, manifest: CheckpointManifest, tensors: dict[str, Tensor], world: ParallelContext, threads: int
) -> None:
    """Fill `tensors` in place from the files of `folder`; every process calls it.

    Raises Damaged on all if a file is not what `manifest` says, which may be vouched for and bad all the same: written
    from memory that flipped a bit, a header cannot be read or names other tensors.
    """
    reader = CheckpointReader(folder, manifest, threads)
    reader.known = run_on_rank0_and_broadcast(world, reader.headers)
    raise_on_all_ranks(world, lambda: reader.compare(tensors))
    torch_load(dict(tensors), storage_reader=reader, no_dist=world.size == 1)
    problems = {name: problem for part in world.gathered(reader.problems) for name, problem in part.items()}
    for _, problem in sorted(problems.items()):
        if problem:
            raise Damaged(problem)


def read_file(path: str, wanted: dict[str, list[ReadItem]], planner: LoadPlanner) -> FileDigest:
    """Copy the wanted slices of a safetensors file to where they belong; return the digest of the whole file."""
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        source = _Hashed(file)
        length = int.from_bytes(source.bytes(8), "little")
        fields = json.loads(source.bytes(length))
        fields.pop("__metadata__", None)
        buffer = torch.empty(0, dtype=torch.uint8)
        for name, field in sorted(fields.items(), key=lambda pair: pair[1]["data_offsets"]):
            items = wanted.get(name, [])
            straight = _straight(field, items, planner)
            if straight is not None:
                source.into(straight)
                continue
            buffer = buffer if buffer.numel() >= _size(field) else torch.empty(_size(field), dtype=torch.uint8)
            raw = buffer[: _size(field)]
            source.into(raw)
            for item in items:
                _place(raw.view(DTYPES[field["dtype"]]).view(field["shape"]), item, planner)
        source.bytes(os.fstat(file.fileno()).st_size - source.size)  # there should be no more
        return FileDigest(bytes=source.size, sha256=source.digest.hexdigest())


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: FileIO) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0

    def bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def into(self, raw: Tensor) -> None:
        self._fill(memoryview(raw.numpy()))  # type: ignore[arg-type]

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            count = self.file.readinto(view[at : at + READ_BYTES])
            if not count:
                raise OSError(f"{self.file.name}: ends after {self.size + at:,} bytes")
            self.digest.update(view[at : at + count])
            at += count
        self.size += at


def _size(field: dict[str, Any]) -> int:
    start, end = field["data_offsets"]
    return int(end - start)


def _straight(field: dict[str, Any], items: list[ReadItem], planner: LoadPlanner) -> Tensor | None:
    """Return the memory of the one tensor in host memory that wants exactly these bytes, or None."""
    if len(items) != 1:
        return None
    target: Tensor = planner.resolve_tensor(items[0]).detach()
    same = target.dtype == DTYPES[field["dtype"]] and list(target.shape) == field["shape"]
    fits = same and target.device.type == "cpu" and target.is_contiguous()
    return target.view(-1).view(torch.uint8) if fits else None


def _place(part: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    slices = tuple(slice(at, at + length) for at, length in zip(item.storage_offsets, item.lengths, strict=True))
    target = planner.resolve_tensor(item).detach()
    assert target.shape == part[slices].shape, f"{item.storage_index.fqn}: {target.shape} from {part[slices].shape}"
    target.copy_(part[slices])
    planner.commit_tensor(item, target)
