"""Where committed checkpoints are stored: a folder that all processes share, or an object store.

Both commit a checkpoint whole or not at all, with its manifest written last. Pins keep a checkpoint from being deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import compress, count
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from herd.llama3.parallel.mesh import ParallelContext, raise_on_all_ranks, run_on_rank0_and_broadcast
from herd.llama3.train.checkpoint.manifest import MANIFEST, CheckpointManifest, DamagedCheckpoint, JournalChunk
from herd.storage.digests import digest_bytes, digest_file
from herd.storage.filesystem import is_local, local_path, sync_folder, write_atomic
from herd.storage.lease import LeaseHeld
from herd.storage.objects import (
    create_bytes,
    get_bytes,
    get_file,
    list_children,
    put_bytes,
    put_file,
    remove,
    remove_all,
    size_of,
)
from herd.storage.processes import parallel_map

PINS = "pins"
DAY = 86_400.0
SAVING, DELETING, DAMAGED, REPLACED = ".saving", ".deleting", ".damaged", ".replaced"
DIGITS = 18
"""Positions are written with this many digits, so that names sort as numbers."""
ATTEMPTS = "attempts"
JOURNAL_CHUNKS = "journal"
JOURNAL = "journal.jsonl"
RECORDS = "segments.jsonl"
"""In the stage's folder: the chunks that its journal is known to hold."""
SMALL_FILES = re.compile(r"recipe\.yaml|skips\.json|attempts\.jsonl|incidents/\d+\.json|abandoned-\d+\.jsonl")
"""Files of the stage's folder that are stored with the journal."""
CHUNK_BYTES = 2**25
"""Bytes of the journal in a chunk, at most: each is one request, and is read back."""
TRIES = 3
MARK = "damaged.txt"
"""Beside the files of a checkpoint that failed to verify: why."""


class SupersededError(LeaseHeld):
    """A later attempt works on the stage, maybe on another machine; this one must end and commit nothing."""


class CheckpointRef(NamedTuple):
    """A committed checkpoint; the later of two at one position sorts last."""

    position: int
    name: str


class Pins:
    """The pins of the checkpoints under `root`, a folder or an object store's URI: one small file for each.

    A pin does not stop a deletion that began before; the reader then finds files missing.
    """

    def __init__(self, root: str) -> None:
        self.root = f"{root.rstrip('/')}/{PINS}"

    def add(self, position: int, reason: str, seconds: float | None = None) -> None:
        """Keep the checkpoint at `position` until `remove` is called with the same reason, at most `seconds`."""
        until = None if seconds is None else time.time() + seconds
        text = json.dumps({"position": position, "reason": reason, "until": until}).encode()
        uri = self._uri(position, reason)
        write_atomic(local_path(uri), text) if is_local(uri) else put_bytes(uri, text)

    def remove(self, position: int, reason: str) -> None:
        remove(self._uri(position, reason))

    def all(self) -> dict[int, list[str]]:
        """Return the reasons by position; expired pins are deleted."""
        reasons: dict[int, list[str]] = {}
        for name in list_children(self.root):
            if name.startswith("."):
                continue  # being written right now
            try:
                pin = json.loads(get_bytes(f"{self.root}/{name}"))
            except FileNotFoundError:
                continue
            if pin["until"] is not None and pin["until"] < time.time():
                remove(f"{self.root}/{name}")
            else:
                reasons.setdefault(pin["position"], []).append(pin["reason"])
        return reasons

    @contextmanager
    def pinned(self, position: int, reason: str) -> Iterator[None]:
        """Pin while the block runs; the pin of a killed process expires after a day."""
        self.add(position, reason, DAY)
        try:
            yield
        finally:
            self.remove(position, reason)

    def _uri(self, position: int, reason: str) -> str:
        return f"{self.root}/{position:018}.{hashlib.sha256(reason.encode()).hexdigest()[:12]}"


class LocalCheckpointStore:
    """Checkpoints `<folder>/<position>`, built in a hidden folder and committed by one rename.

    Deleting starts with a rename, so no reader sees a folder that loses its files one by one. Unless stated otherwise
    only rank 0 calls the methods.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.pins = folder, Pins(str(folder.parent))

    def building(self, position: int, serial: int) -> Path:
        """Return the folder into which this process writes save number `serial`."""
        return self.folder / f"{SAVING}-{position:0{DIGITS}}"

    def start(self, building: Path) -> None:
        """Clear that folder before any process writes."""
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()

    def stored(self, building: Path, path: Path) -> None:
        """Store a finished file; called by the process that wrote it, in several threads. No-op: written in place."""

    def commit(self, building: Path, manifest: CheckpointManifest) -> None:
        """Make the checkpoint visible, whole or not at all. Raises OSError and SupersededError."""
        manifest.write(building)
        final = self.folder / f"{manifest.position:0{DIGITS}}"
        old = self._rename(final, REPLACED) if final.exists() else None  # after a rollback, positions come again
        building.rename(final)
        sync_folder(self.folder)
        if old:
            shutil.rmtree(old)

    def check(self) -> None:
        """Raise SupersededError if a later attempt has begun. No-op: the folder lease excludes other writers."""

    def end_save(self, building: Path, committed: bool, is_rank0: bool) -> None:
        """Remove temporary files of a save; every process calls it at the end of each."""
        if is_rank0 and not committed:
            shutil.rmtree(building, ignore_errors=True)

    def refs(self) -> list[CheckpointRef]:
        """Return the committed checkpoints, oldest first."""
        names = sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())
        return [CheckpointRef(int(name), name) for name in names]

    def remove_leftovers(self, world: ParallelContext) -> None:
        """Remove what killed processes left; every process calls it."""

        def remove_hidden() -> None:
            for old in self.folder.glob(f"{REPLACED}-*"):
                final = self.folder / old.name.removeprefix(f"{REPLACED}-")
                if not final.exists():  # killed between the two renames
                    old.rename(final)
            for prefix in (SAVING, DELETING, REPLACED):
                for leftover in self.folder.glob(f"{prefix}-*"):
                    shutil.rmtree(leftover)

        run_on_rank0_and_broadcast(world, remove_hidden)

    def open(self, ref: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        """Return a folder for its files and its manifest; every process calls it. Raises DamagedCheckpoint."""
        path = self.folder / ref.name
        return path, run_on_rank0_and_broadcast(world, lambda: CheckpointManifest.read(path))

    def download(
        self, path: Path, manifest: CheckpointManifest, world: ParallelContext, names: Collection[str]
    ) -> None:
        """Bring the files `names` into `path`, which `open` returned; every process calls it. No-op: they are there."""

    def release(self, path: Path) -> None:
        """Free what `open` returned; every process calls it. No-op: that is the checkpoint itself."""

    def quarantine(self, ref: CheckpointRef, reason: str) -> None:
        """Never offer this checkpoint again, but keep its files."""
        with suppress(FileNotFoundError):  # damaged because it was deleted while it was read
            self._rename(self.folder / ref.name, DAMAGED)

    def delete(self, ref: CheckpointRef) -> None:
        shutil.rmtree(self._rename(self.folder / ref.name, DELETING))

    def _rename(self, path: Path, prefix: str) -> Path:
        hidden = path.with_name(f"{prefix}-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        return path.rename(hidden)


class RemoteCheckpointStore:
    """Checkpoints `<uri>/<position>/<attempt>-<save>/` in an object store, where nothing is overwritten or renamed.

    Each process uploads its files, then rank 0 stores `manifest.json`; a prefix without it is not a checkpoint. Only
    one attempt may write (the stage's lease): each takes a number in `<uri>/attempts/` when it starts, and checks
    before a commit that it is still the newest.
    """

    def __init__(self, uri: str, folder: Path, attempt: str) -> None:
        """Use `folder/.staging/<host>` for files in transit. Raises ValueError if `uri` is a local path."""
        if is_local(uri):
            raise ValueError(f"checkpoints: {uri!r} is not the URI of an object store; write s3://bucket/prefix")
        self.uri, self.attempt, self.pins = uri.rstrip("/"), attempt, Pins(uri)
        self.number: int | None = None
        """Of this attempt; None until `remove_leftovers` registers it."""
        self.staging = folder / ".staging" / socket.gethostname()

    def building(self, position: int, serial: int) -> Path:
        return self.staging / f"{position:0{DIGITS}}" / f"{self.attempt}-{serial:04}"

    def start(self, building: Path) -> None:
        """No-op: the prefix is new."""

    def stored(self, building: Path, path: Path) -> None:
        put_file(path, f"{self._prefix(building)}/{path.name}")
        path.unlink()

    def commit(self, building: Path, manifest: CheckpointManifest) -> None:
        prefix = self._prefix(building)
        manifest.compare(list_children(prefix).keys(), prefix)
        self.check()
        put_bytes(f"{prefix}/{MANIFEST}", manifest.text().encode())

    def check(self) -> None:
        if self.number is None:
            return
        newest = max(list_children(f"{self.uri}/{ATTEMPTS}"), default="")
        if newest != f"{self.number:06}" or get_bytes(f"{self.uri}/{ATTEMPTS}/{newest}") != self.attempt.encode():
            raise SupersededError(
                f"{self.uri}: attempt {newest or 'unknown'} trains this stage now, here or on another machine; this "
                f"one is number {self.number} and ends"
            )

    def end_save(self, building: Path, committed: bool, is_rank0: bool) -> None:
        shutil.rmtree(building.parent, ignore_errors=True)
        if is_rank0 and not committed:
            self._remove(self._prefix(building))

    def refs(self) -> list[CheckpointRef]:
        names = self._names()
        good = parallel_map(lambda name: self._has(name, MANIFEST) and not self._has(name, MARK), names)
        return [CheckpointRef(int(name.split("/")[0]), name) for name in compress(names, good)]

    def remove_leftovers(self, world: ParallelContext) -> None:
        run_on_rank0_and_broadcast(world, self._register_attempt)
        run_on_rank0_and_broadcast(world, self._remove_unfinished)
        hosts = world.all_gather_object(socket.gethostname())
        if hosts.index(hosts[world.rank]) == world.rank:
            shutil.rmtree(self.staging, ignore_errors=True)
        world.barrier()

    def open(self, ref: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        prefix, folder = f"{self.uri}/{ref.name}", self.staging / ref.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder, run_on_rank0_and_broadcast(world, lambda: self._read_manifest(prefix))

    def download(
        self, path: Path, manifest: CheckpointManifest, world: ParallelContext, names: Collection[str]
    ) -> None:
        """Download and verify what the machine's processes need and lack, each its part.

        Raises DamagedCheckpoint, and OSError if a file cannot be downloaded.
        """
        prefix = self._prefix(path)
        everything = len(names) == len(manifest.files)  # not gathered: 65,536 names from each of 16,384 processes
        gathered = world.all_gather_object((socket.gethostname(), None if everything else sorted(names)))
        here = [rank for rank, (host, _) in enumerate(gathered) if host == gathered[world.rank][0]]
        needed = set[str]().union(*(manifest.files if (own := gathered[rank][1]) is None else own for rank in here))

        def download(name: str) -> None:
            uri = f"{prefix}/{name}"
            problem = None
            for _ in range(2):  # wrong bytes may have changed in transit only
                try:
                    get_file(uri, path / name)
                    digest = digest_file(path / name)
                except FileNotFoundError as error:
                    raise DamagedCheckpoint(f"{uri}: is missing") from error
                problem = manifest.difference(uri, digest)
                if problem is None:
                    return
            raise DamagedCheckpoint(problem)

        def download_share() -> None:
            share = sorted(needed)[here.index(world.rank) :: len(here)]
            parallel_map(download, [name for name in share if not (path / name).exists()])

        raise_on_all_ranks(world, download_share)

    def release(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def quarantine(self, ref: CheckpointRef, reason: str) -> None:
        put_bytes(f"{self.uri}/{ref.name}/{MARK}", reason.encode())

    def delete(self, ref: CheckpointRef) -> None:
        self._remove(f"{self.uri}/{ref.name}")

    def _read_manifest(self, prefix: str) -> CheckpointManifest:
        """Return the manifest if the stored files have its names and sizes. Raises DamagedCheckpoint."""
        try:
            manifest = CheckpointManifest.parse(get_bytes(f"{prefix}/{MANIFEST}"), f"{prefix}/{MANIFEST}")
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{prefix}/{MANIFEST}: is missing") from error
        sizes = list_children(prefix)
        manifest.compare(sizes.keys() - {MANIFEST}, prefix)
        for name, digest in manifest.files.items():
            if sizes[name] != digest.bytes:
                raise DamagedCheckpoint(f"{prefix}/{name}: has {sizes[name]:,} bytes, {digest.bytes:,} were written")
        return manifest

    def _register_attempt(self) -> None:
        """Take a number above that of every earlier attempt, and delete their numbers."""
        if self.number is not None:
            return
        earlier = list_children(f"{self.uri}/{ATTEMPTS}")
        number = int(max(earlier, default="0")) + 1
        while not create_bytes(f"{self.uri}/{ATTEMPTS}/{number:06}", self.attempt.encode()):
            number += 1
        for name in earlier:
            remove(f"{self.uri}/{ATTEMPTS}/{name}")
        self.number = number

    def _remove_unfinished(self) -> None:
        """Remove what earlier attempts left without a manifest; a later attempt may still be writing its prefix."""
        earlier = [name for name in self._names() if name.split("/")[1] < self.attempt]
        for name in compress(earlier, parallel_map(lambda name: not self._has(name, MANIFEST), earlier)):
            remove_all(f"{self.uri}/{name}")

    def _names(self) -> list[str]:
        """Return `<position>/<attempt>-<save>` of each prefix with files, whole checkpoint or not, sorted."""
        positions = list(filter(str.isdigit, list_children(self.uri)))
        saves = parallel_map(lambda position: list_children(f"{self.uri}/{position}"), positions)
        return [f"{position}/{save}" for position, names in zip(positions, saves, strict=True) for save in names]

    def _has(self, name: str, file: str) -> bool:
        """Ask for the file alone: a checkpoint may have 65,536, and each listing has 1,000 at most."""
        return size_of(f"{self.uri}/{name}/{file}") is not None

    def _remove(self, prefix: str) -> None:
        remove(f"{prefix}/{MANIFEST}")  # first: without it, the prefix is not a checkpoint
        remove_all(prefix)

    def _prefix(self, building: Path) -> str:
        return f"{self.uri}/{building.relative_to(self.staging).as_posix()}"


CheckpointStore = LocalCheckpointStore | RemoteCheckpointStore


# The journal, in chunks beside remote checkpoints: the machine's disk may be lost.


class ChunkHeader(BaseModel):
    """The first line of a chunk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: JournalChunk | None
    start: int
    """Byte of the journal at which the chunk begins."""
    files: dict[str, str]
    """Text of the small files that were new or changed."""


class UploadRecord(BaseModel):
    """A line of RECORDS: the first `length` bytes of the journal, of this SHA-256, are in the chain that ends here."""

    segment: JournalChunk
    length: int
    sha256: str


class JournalUpload:
    """The journal chunks at `uri` of the stage in `work`, on rank 0.

    Before a remote checkpoint is committed, the new lines of the journal are stored with the small files of the run as
    `<uri>/journal/<position>-<attempt>-<save>-<chunk>.jsonl`; nothing is overwritten. A manifest names its chunk with
    its SHA-256, and each chunk names the one before it.
    """

    def __init__(self, uri: str, work: Path, attempt: str) -> None:
        self.uri, self.work, self.attempt = f"{uri.rstrip('/')}/{JOURNAL_CHUNKS}", work, attempt
        self._last: JournalChunk | None = None
        self._length, self._sum = 0, hashlib.sha256()
        """Of the journal as far as it is stored."""
        self._known: dict[str, str] = {}

    def mark(self) -> int:
        """Return where the journal ends now, for `store`."""
        journal = self.work / JOURNAL
        return journal.stat().st_size if journal.exists() else 0

    def store(self, position: int, serial: int, mark: int) -> JournalChunk:
        """Store the journal's new lines up to `mark` for save number `serial`; return the newest chunk.

        Raises OSError; the next call continues after the chunks that were stored.
        """
        texts = {name: (self.work / name).read_text() for name in self._small_files()}
        digests = {name: digest_bytes(text.encode()).sha256 for name, text in texts.items()}
        changed = {name: text for name, text in texts.items() if self._known.get(name) != digests[name]}
        for number in count():
            stop = min(mark, self._length + CHUNK_BYTES)
            with (self.work / JOURNAL).open("rb") as file:
                file.seek(self._length)
                lines = file.read(stop - self._length)
            # Small files go with the last chunk of a save.
            header = ChunkHeader(before=self._last, start=self._length, files=changed if stop == mark else {})
            name = f"{position:018}-{self.attempt}-{serial:04}-{number:03}.jsonl"
            data = header.model_dump_json().encode() + b"\n" + lines
            put_bytes(f"{self.uri}/{name}", data)
            self._last = JournalChunk(name=name, sha256=digest_bytes(data).sha256)
            self._record(lines)
            if stop == mark:
                break
        self._known |= {name: digests[name] for name in changed}
        assert self._last is not None
        return self._last

    def restore(self, chunk: JournalChunk) -> bool:
        """Restore the stage's folder to the checkpoint of `chunk`, unless the local journal holds it; return whether.

        Earlier files are moved to a folder `abandoned-<time>`. Takes one request per checkpoint ever saved, about 20 a
        second. Raises DamagedCheckpoint, and OSError if the store cannot be read.
        """
        if self._holds(chunk):
            return False
        chain = self._chain(chunk)
        # What another attempt left here is not the past of the checkpoint.
        abandoned = self.work / f"abandoned-{time.time_ns()}"
        for name in [JOURNAL, *self._small_files(), RECORDS]:
            if (self.work / name).exists():
                (abandoned / name).parent.mkdir(parents=True, exist_ok=True)
                (self.work / name).rename(abandoned / name)
        for name, text in {name: text for header, _ in chain for name, text in header.files.items()}.items():
            write_atomic(self.work / name, text)
        with (self.work / JOURNAL).open("wb") as file:  # not atomic: without RECORDS it is restored again
            for _, lines in chain:
                file.write(lines)
                self._length += len(lines)
                self._sum.update(lines)
            file.flush()
            os.fsync(file.fileno())
        self._last = chunk
        self._record(b"", joined=not chain or chain[0][0].start == 0)
        return True

    def _holds(self, chunk: JournalChunk) -> bool:
        """Return whether the local journal holds `chunk`; if so, find where the next chunk continues."""
        path, journal = self.work / RECORDS, self.work / JOURNAL
        if not path.exists() or not journal.exists():
            return False
        lines = [line for line in path.read_bytes().splitlines() if line.endswith(b"}")]  # the last may be torn
        records = [UploadRecord.model_validate_json(line) for line in lines]
        if chunk not in [record.segment for record in records]:
            return False
        last = records[-1]
        stored = hashlib.sha256()
        with journal.open("rb") as file:
            while block := file.read(min(CHUNK_BYTES, last.length - file.tell())):
                stored.update(block)
        if stored.hexdigest() == last.sha256:  # else records were abandoned, and the whole journal is stored again
            self._last, self._length, self._sum = last.segment, last.length, stored
        return True

    def _chain(self, chunk: JournalChunk) -> list[tuple[ChunkHeader, bytes]]:
        chain: list[tuple[ChunkHeader, bytes]] = []
        before: JournalChunk | None = chunk
        while before is not None:
            if (content := self._read(before)) is None:
                break
            chain.append(content)
            before = content[0].before
        chain.reverse()
        length = chain[0][0].start if chain else 0
        for header, lines in chain:
            if header.start != length:
                raise DamagedCheckpoint(
                    f"{self.uri}: chunks up to {chunk.name} do not join at byte {length} of the journal"
                )
            length += len(lines)
        return chain

    def _read(self, chunk: JournalChunk) -> tuple[ChunkHeader, bytes] | None:
        """Return the content of a chunk, or None if it was replaced by an empty object: the chain starts after it."""
        uri, problem = f"{self.uri}/{chunk.name}", ""
        for _ in range(TRIES):
            try:
                data = get_bytes(uri)
            except FileNotFoundError:
                problem = "is missing"
                continue
            if not data:
                return None
            if digest_bytes(data).sha256 != chunk.sha256:
                problem = "has changed since it was written"
                continue
            first, lines = data.split(b"\n", 1)
            try:
                header = ChunkHeader.model_validate_json(first)
            except ValidationError as error:
                raise DamagedCheckpoint(f"{uri}: does not begin with the header of a chunk ({error})") from None
            for name in header.files:
                if not SMALL_FILES.fullmatch(name):
                    raise DamagedCheckpoint(f"{uri}: holds a file {name!r}, which is not a file of a stage")
            return header, lines
        raise DamagedCheckpoint(
            f"{uri}: {problem}, so the stage's journal is not whole; put the object back, or an empty one to continue "
            "without the metrics up to there"
        )

    def _small_files(self) -> list[str]:
        paths = [*self.work.glob("*"), *self.work.glob("incidents/*")]
        names = (path.relative_to(self.work).as_posix() for path in sorted(paths) if path.is_file())
        return [name for name in names if SMALL_FILES.fullmatch(name)]

    def _record(self, lines: bytes, joined: bool = True) -> None:
        """Record that `lines`, the next of the journal, are stored; unless `joined`, the next chunk starts a chain."""
        assert self._last is not None
        self._length += len(lines)
        self._sum.update(lines)
        sha256 = self._sum.hexdigest() if joined else ""
        record = UploadRecord(segment=self._last, length=self._length, sha256=sha256)
        if not joined:
            self._last, self._length, self._sum = None, 0, hashlib.sha256()
        with (self.work / RECORDS).open("ab") as file:
            file.write(b"\n" + record.model_dump_json().encode() + b"\n")
