"""Writing and reading checkpoints: torch.distributed.checkpoint's safetensors files, digested as they are written.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.futures import Future

from herd.llama3.parallel.mesh import (
    ParallelContext,
    raise_on_all_ranks,
    run_on_rank0_and_broadcast,
    to_local,
)
from herd.llama3.train.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint, MalformedManifest
from herd.llama3.train.checkpoint.storage import SupersededError
from herd.storage.digests import FileDigest
from herd.storage.processes import parallel_map

WRITE_BYTES = 4 << 20
"""Bytes hashed and written at a time: they stay in the processor's cache between the two."""
PUSH = 4 * WRITE_BYTES
"""Bytes after which the system should start writing to the disk. Otherwise it waits for the fsync, and the disk is
idle while we hash: 0.6 s instead of 0.4 s for 545 MB (best of 6)."""
READ_BYTES = 1 << 20
"""Bytes read and hashed at a time."""
COPIED = 1 << 17
"""Bytes of a tensor up to which every process that has a copy writes it: step counts, and norms under TP. A process
then finds all that it needs in its own files; otherwise it would read whole files of others for a few bytes."""
THREADS = 4
"""Files that each process writes or reads at the same time."""
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

# torch warns at each load, because every process loads for itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Savable(Protocol):
    """A state that can be saved: named tensors and three numbers, of a model with a shape."""

    position: int
    averaged: int
    vocab_size: int
    loaded_seq_len: int
    """Longest sequence that the weights were trained on when they were loaded."""

    @property
    def config(self) -> Any:
        """Shape of the model, with the longest sequence that it was trained on."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; writing into them changes the state."""

    def make_average(self, averaged: int) -> None:
        """Allocate an average over `averaged` positions that is about to be loaded."""


class Save(Protocol):
    """Where one checkpoint is written: first the files of all processes, then the manifest."""

    folder: Path
    """Into which this process writes its files."""

    def start(self) -> None:
        """Prepare, on rank 0, before any process writes. Raises OSError."""

    def store_file(self, path: Path) -> None:
        """Store a finished file of `folder`; called by several threads of each process."""

    def commit(self, manifest: CheckpointManifest) -> None:
        """Make the checkpoint visible, on rank 0, whole or not at all. Raises OSError and SupersededError."""


class FolderSave:
    """A save into `folder`, which must be new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self) -> None:
        self.folder.mkdir(parents=True)

    def store_file(self, path: Path) -> None:
        """No-op: it was written in place."""

    def commit(self, manifest: CheckpointManifest) -> None:
        manifest.write(self.folder)


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint and what it cost."""

    position: int
    bytes: int
    """On rank 0 those of the whole checkpoint, on other ranks those that they wrote."""
    blocked_s: float
    """Seconds that training stopped for the copy to host memory."""
    waited_s: float
    """Seconds that training waited before that, because the previous save was not finished."""
    total_s: float
    """From the beginning of the copy to the commit."""


# Saving.


def save_state(
    folder: Path, state: Savable, stage: str, world: ParallelContext, threads: int = THREADS, attempt: str = ""
) -> None:
    """Write `state` into the new folder `folder`; every process calls it. Raises RuntimeError on all of them."""
    tensors = state.tensors()
    with torch.no_grad():
        shards = {name: to_local(tensor).detach() for name, tensor in tensors.items()}
    manifest = make_manifest(state, stage, world, attempt)
    write(FolderSave(folder), manifest, shards_to_write(tensors, world.rank), shards, world, threads)


def make_manifest(state: Savable, stage: str, world: ParallelContext, attempt: str) -> CheckpointManifest:
    """Return the manifest of `state` as it is now, without files."""
    return CheckpointManifest(
        stage=stage,
        position=state.position,
        averaged=state.averaged,
        model=state.config.model_dump(mode="json"),
        vocab_size=state.vocab_size,
        processes=world.size,
        attempt=attempt,
        files={},
    )


# torch's own safetensors writer copies each file twice in memory, uses one thread, and computes no digest. Its planner
# gathers what every process has on rank 0: 4.7M shards of the 405B on 16,384 GPUs.


def write(
    save: Save,
    manifest: CheckpointManifest,
    items: list[WriteItem],
    shards: dict[str, Tensor],
    world: ParallelContext,
    threads: int,
) -> dict[str, FileDigest]:
    """Write those of this process's `shards` that `items` names, then commit `manifest`; every process calls it.

    Returns the digests of all files on rank 0, of those that it wrote on the others. Raises, on all processes,
    RuntimeError if one of them fails, and SupersededError.
    """

    def start() -> None:
        try:
            save.start()
        except OSError as error:
            raise RuntimeError(f"{save.folder}: cannot be written: process 0: {error!r}") from error

    run_on_rank0_and_broadcast(world, start)
    written, failure = dict[str, FileDigest](), ""
    try:
        written = write_files(save, items, shards, world.rank, threads)
    except Exception as error:
        failure = f"process {world.rank}: {error!r}"
    gathered = world.gather_object((written, failure))
    all_written = {name: digest for files, _ in gathered for name, digest in files.items()}

    def commit() -> None:
        failures = [failure for _, failure in gathered if failure]
        try:
            if not failures:
                save.commit(manifest.model_copy(update={"files": dict(sorted(all_written.items()))}))
        except SupersededError:
            raise
        except Exception as error:
            failures = [f"process 0: {error!r}"]
        if failures:
            raise RuntimeError(f"{save.folder}: cannot be written: {'; '.join(failures)}")

    run_on_rank0_and_broadcast(world, commit)
    return all_written or written


def write_files(
    save: Save, items: list[WriteItem], shards: dict[str, Tensor], rank: int, threads: int
) -> dict[str, FileDigest]:
    """Write and store the shards `items`, balanced over the threads; return the digest of each file. Raises OSError."""
    save.folder.mkdir(parents=True, exist_ok=True)
    bins: list[list[WriteItem]] = [[] for _ in range(threads)]
    sizes = [0] * threads
    for item in sorted(items, key=size_of, reverse=True):  # to the bin with the fewest bytes
        smallest = sizes.index(min(sizes))
        bins[smallest].append(item)
        sizes[smallest] += size_of(item)

    def write_bin(number: int) -> tuple[str, FileDigest]:
        path = save.folder / f"{rank:05}-{number:02}.safetensors"
        digest = write_file(path, bins[number], shards)
        save.store_file(path)
        return path.name, digest

    with ThreadPoolExecutor(threads) as pool:
        return dict(pool.map(write_bin, [number for number, items in enumerate(bins) if items]))


def shards_to_write(tensors: dict[str, Tensor], rank: int) -> list[WriteItem]:
    """Return the shards of `tensors` that process `rank`, this one, writes; only their shapes and meshes are used.

    Takes 0.5 s for a process of the 405B on 16,384 GPUs.
    """
    ranks = writing_ranks(tensors, rank)
    return [item for item in local_shards(tensors) if ranks[item.index.fqn] == rank]


def local_shards(tensors: dict[str, Tensor]) -> list[WriteItem]:
    """Return this process's shards of `tensors`, as torch describes them; empty ones are left out."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors)
    return list(filter(size_of, planner.create_local_plan().items))


def writing_ranks(tensors: dict[str, Tensor], rank: int) -> dict[str, int]:
    """Return for each of `tensors` the process that writes the shard of it that `rank`, this process, has.

    A process writes its shards, also the small ones of which others have copies. Of the copies of a large shard one is
    written, such that all processes write about as much; those with copies agree, because they have the same tensors.
    """
    ranks, loads = dict.fromkeys(tensors, rank), dict[int, list[int]]()
    tensor: Any
    for name, tensor in sorted(tensors.items(), key=lambda pair: -pair[1].nbytes):
        if hasattr(tensor, "device_mesh") and tensor.nbytes > COPIED:
            axes = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
            copies = tuple(slice(None) if placement.is_replicate() else coordinate for coordinate, placement in axes)
            holders = tensor.device_mesh.mesh[copies].flatten().tolist()
            load = loads.setdefault(len(holders), [0] * len(holders))
            smallest = load.index(min(load))
            load[smallest] += tensor.nbytes
            ranks[name] = holders[smallest]
    return ranks


def size_of(item: WriteItem) -> int:
    """Return the bytes that this process writes of a tensor."""
    data: Any = item.tensor_data
    size: int = data.chunk.sizes.numel() * data.properties.dtype.itemsize
    return size


def write_file(path: Path, items: list[WriteItem], shards: dict[str, Tensor]) -> FileDigest:
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
            view = memoryview(shards[item.index.fqn].cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
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
    ranks = set(writing_ranks(tensors, world.rank).values()) if manifest.processes == world.size else ()
    # the files in which this process finds its shards if it wrote them in the present layout
    names: Collection[str] = [name for name in manifest.files if name.startswith(tuple(f"{n:05}-" for n in ranks))]

    def fill() -> None:
        not_empty = {name: tensor for name, tensor in tensors.items() if to_local(tensor).numel()}
        try:
            torch_load(not_empty, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # which `except Exception` misses
            reasons = "; ".join(repr(failure[0]) for failure in error.failures.values())
            raise RuntimeError(f"{folder}: cannot be loaded: process {world.rank}: {reasons}") from error

    download(names)
    try:
        raise_on_all_ranks(world, lambda: reader.read_own_files(names, tensors))
        if not all(world.all_gather_object(reader.complete)):
            download(manifest.files)
            # One process reads all headers: each opening every file would be the square of their number.
            reader.metadata = run_on_rank0_and_broadcast(world, lambda: reader.headers(manifest.files))
            raise_on_all_ranks(world, lambda: reader.compare(tensors))
            names = sorted(manifest.files)[world.rank :: world.size]  # to verify, if that fails
        raise_on_all_ranks(world, fill)
    except (RuntimeError, OSError, MalformedManifest):
        # A damaged file is the likely cause, and its error says more.
        raise_on_all_ranks(world, lambda: manifest.check(folder, names))
        raise
    problems = {name: problem for rank in world.all_gather_object(reader.problems) for name, problem in rank.items()}
    for _, problem in sorted(problems.items()):
        raise DamagedCheckpoint(problem)


class CheckpointReader(FileSystemReader):
    """torch's reader, given the headers of safetensors files; records the problems of the files that it reads."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, threads: int) -> None:
        super().__init__(str(folder))
        self.folder, self.manifest, self.threads, self.metadata = folder, manifest, threads, Metadata({})
        self.complete = False
        """Whether the files that this process wrote hold all that it needs."""
        self.problems: dict[str, str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def headers(self, names: Collection[str]) -> Metadata:
        """Return the headers of the files `names`. Raises MalformedManifest naming a file whose header is not one."""
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
        files = sorted(name for name in names if name.endswith(".safetensors"))
        headers = parallel_map(lambda name: read_header(self.folder / name), files)
        stored_chunks = ((name, *entry) for name, header in zip(files, headers, strict=True) for entry in header)
        for name, tensor, dtype, chunk in stored_chunks:
            index = MetadataIndex(tensor, chunk.offsets)
            if index in metadata.storage_data:
                continue  # a copy
            metadata.storage_data[index] = (name, chunk.sizes)
            ends = torch.Size(start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            stored: Any = metadata.state_dict_metadata.setdefault(
                tensor, TensorStorageMetadata(TensorProperties(dtype), ends, [])
            )
            stored.size = torch.Size(map(max, stored.size, ends))
            stored.chunks.append(chunk)
        return metadata

    def read_own_files(self, names: Collection[str], tensors: dict[str, Tensor]) -> None:
        """Read the headers of `names`: do they hold this process's shards of `tensors` as it would write them now?"""
        self.metadata = self.headers(names)
        for item in local_shards(tensors):
            data: Any = item.tensor_data
            if self.metadata.storage_data.get(item.index, ("", ()))[1] != data.chunk.sizes:
                return
            stored: Any = self.metadata.state_dict_metadata[item.index.fqn]
            stored.size = data.size  # the other shards are in files that this process does not read
        self.complete = True

    def compare(self, tensors: dict[str, Tensor]) -> None:
        """Raise MalformedManifest unless the files hold all of `tensors`, in these shapes."""
        for name, tensor in sorted(tensors.items()):
            stored = self.metadata.state_dict_metadata.get(name)
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
    """Return name, type and chunk of each tensor of a file that `write_file` wrote. Raises MalformedManifest."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            fields = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))
        sharding = json.loads(fields.pop("__metadata__")["DCP_SHARDING_INFO"])
        return [
            (
                name,
                DTYPES[field["dtype"]],
                ChunkStorageMetadata(torch.Size(sharding[name]["saved_offsets"]), torch.Size(field["shape"])),
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
                requested = stored[tuple(slice(start, start + count) for start, count in offsets)]
                target = planner.resolve_tensor(item).detach()
                assert target.shape == requested.shape, item.storage_index.fqn
                target.copy_(requested)
                planner.commit_tensor(item, target)
        fill(bytearray(os.fstat(file.fileno()).st_size - position))  # hash what follows: there should be nothing
        return FileDigest(bytes=position, sha256=digest.hexdigest())
