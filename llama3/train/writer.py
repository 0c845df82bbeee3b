"""How torch.distributed.checkpoint writes our checkpoints: safetensors files, one per thread and process, digested.

torch's own safetensors writer copies each file twice in memory before it writes, with one thread, and would have to be
read again for a digest. Here every byte is hashed and written in the same pass (4 threads reach the disk's speed), so
the digest is of what was meant, not of what came back. The files are what `HuggingFaceStorageReader` reads: no pickle.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from llama3.train.agree import tellable
from storage.digests import FileDigest

CHUNK = 4 << 20
"""Bytes hashed and written at a time: they stay in the processor's cache between the two."""
PUSH = 4 * CHUNK
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


class Planner(DefaultSavePlanner):
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
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


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
