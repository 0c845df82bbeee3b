"""Where committed checkpoints are stored: a folder that all processes share, or an object store.

Both commit a checkpoint whole or not at all, with its manifest written last. Pins keep a checkpoint from being deleted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from herd.llama3.parallel.mesh import ParallelContext, raise_on_all_ranks, run_on_rank0_and_broadcast
from herd.llama3.train.checkpoint.journal_upload import JournalUpload
from herd.llama3.train.checkpoint.manifest import (
    DAMAGED_MARK,
    MANIFEST,
    SUPERSEDED_MARKS,
    CheckpointManifest,
    DamagedCheckpoint,
    superseded_mark,
)
from herd.storage.digests import digest_file
from herd.storage.filesystem import is_local, local_path, sync_folder, write_atomic
from herd.storage.lease import LeaseHeld
from herd.storage.objects import (
    create_bytes,
    get_bytes,
    get_file,
    list_children,
    list_objects,
    put_bytes,
    put_file,
    remove,
    remove_all,
    size_of,
)
from herd.storage.processes import parallel_map

PINS = "pins"
DAY = 86_400.0
SAVING, DELETING, DAMAGED, REPLACED, SUPERSEDED = ".saving", ".deleting", ".damaged", ".replaced", ".superseded"
DIGITS = 18
"""Positions are written with this many digits, so that names sort as numbers."""
ATTEMPTS = "attempts"
LATE_S = 600.0
"""How long after its last file the manifest of a save may still be stored."""


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

    def save(self, position: int, number: int) -> LocalSave:
        """Return where this attempt writes its save `number`, of the state at `position`; every process calls it."""
        return LocalSave(self, position)

    def check(self) -> None:
        """Raise SupersededError if a later attempt has begun. No-op: the folder lease excludes other writers."""

    def restore_journal(self, manifest: CheckpointManifest) -> bool:
        """Bring the journal up to `manifest` to this machine; return whether it was not there. No-op: it is."""
        return False

    def refs(self) -> list[CheckpointRef]:
        """Return the committed checkpoints, oldest first."""
        names = sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())
        return [CheckpointRef(int(name), name) for name in names]

    def remove_leftovers(self, world: ParallelContext) -> None:
        """Remove files of killed processes; every process calls it."""

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
        """Free the folder that `open` returned; every process calls it. No-op: it is the checkpoint itself."""

    def quarantine(self, ref: CheckpointRef, reason: str) -> None:
        """Never offer this checkpoint again, but keep its files."""
        with suppress(FileNotFoundError):  # damaged because it was deleted while it was read
            hide(self.folder / ref.name, DAMAGED)

    def supersede(self, ref: CheckpointRef) -> None:
        """Never offer this checkpoint again; keep its files until `remove_superseded`."""
        hide(self.folder / ref.name, SUPERSEDED)

    def superseded(self) -> list[str]:
        """Return the folders of the superseded checkpoints."""
        return sorted(str(path) for path in self.folder.glob(f"{SUPERSEDED}-*"))

    def remove_superseded(self) -> None:
        """Delete the superseded checkpoints, whose successor is committed now."""
        for folder in self.superseded():
            shutil.rmtree(folder)

    def delete(self, ref: CheckpointRef) -> None:
        shutil.rmtree(hide(self.folder / ref.name, DELETING))


class LocalSave:
    """A save into a LocalCheckpointStore."""

    def __init__(self, store: LocalCheckpointStore, position: int) -> None:
        self.store = store
        self.folder = store.folder / f"{SAVING}-{position:0{DIGITS}}"
        self.committed_folder = store.folder / f"{position:0{DIGITS}}"

    def start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def store_file(self, path: Path) -> None:
        """No-op: it was written in place."""

    def commit(self, manifest: CheckpointManifest) -> None:
        manifest.write(self.folder)
        final = self.committed_folder
        replaced = hide(final, REPLACED) if final.exists() else None  # after a rollback, positions come again
        self.folder.rename(final)
        sync_folder(final.parent)
        if replaced:
            shutil.rmtree(replaced)

    def clean_up(self, committed: bool, is_rank0: bool) -> None:
        if is_rank0 and not committed:
            shutil.rmtree(self.folder, ignore_errors=True)


def hide(folder: Path, prefix: str) -> Path:
    """Rename `folder`, which then is not a checkpoint anymore; return its new path."""
    hidden = folder.with_name(f"{prefix}-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    return folder.rename(hidden)


class RemoteCheckpointStore:
    """Checkpoints `<uri>/<position>/<attempt>-<save>/` in an object store, where nothing is overwritten or renamed.

    Each process uploads its files, then rank 0 stores `manifest.json`; a prefix without it is not a checkpoint. Only
    one attempt may write (the stage's lease): each takes a number in `<uri>/attempts/` when it starts, and checks
    before a commit that it is still the newest.
    """

    def __init__(self, uri: str, folder: Path, attempt: str, journal: JournalUpload | None = None) -> None:
        """Use `folder/.staging/<host>` for files in transit. Raises ValueError if `uri` is a local path.

        With a `journal`, rank 0 keeps it beside the checkpoints, because this machine's disk may be lost.
        """
        if is_local(uri):
            raise ValueError(f"checkpoints: {uri!r} is not the URI of an object store; write s3://bucket/prefix")
        self.uri, self.attempt, self.journal, self.pins = uri.rstrip("/"), attempt, journal, Pins(uri)
        self.number: int | None = None
        """Of this attempt; None until `remove_leftovers` registers it."""
        self.staging = folder / ".staging" / socket.gethostname()

    def save(self, position: int, number: int) -> RemoteSave:
        return RemoteSave(self, position, number)

    def check(self) -> None:
        if self.number is None:
            return
        newest = max(list_children(f"{self.uri}/{ATTEMPTS}"), default="")
        if newest != f"{self.number:06}" or get_bytes(f"{self.uri}/{ATTEMPTS}/{newest}") != self.attempt.encode():
            raise SupersededError(
                f"{self.uri}: attempt {newest or 'unknown'} trains this stage now, here or on another machine; this "
                f"one is number {self.number} and ends"
            )

    def restore_journal(self, manifest: CheckpointManifest) -> bool:
        return self.journal is not None and manifest.journal is not None and self.journal.restore(manifest.journal)

    def refs(self) -> list[CheckpointRef]:
        names = self._names()
        good = parallel_map(lambda name: self._has(name, MANIFEST) and not self._has(name, DAMAGED_MARK), names)
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
        """Download and verify what the machine's processes need and lack, each its share.

        Raises DamagedCheckpoint, and OSError if a file cannot be downloaded.
        """
        prefix = f"{self.uri}/{path.relative_to(self.staging).as_posix()}"
        everything = len(names) == len(manifest.files)  # not gathered: 65,536 names from each of 16,384 processes
        gathered = world.all_gather_object((socket.gethostname(), None if everything else sorted(names)))
        here = [rank for rank, (host, _) in enumerate(gathered) if host == gathered[world.rank][0]]
        requests = [manifest.files if (request := gathered[rank][1]) is None else request for rank in here]
        needed = set[str]().union(*requests)

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
        put_bytes(f"{self.uri}/{ref.name}/{DAMAGED_MARK}", reason.encode())

    def supersede(self, ref: CheckpointRef) -> None:
        put_bytes(f"{self.uri}/{SUPERSEDED_MARKS}/{superseded_mark(ref.name)}", b"")

    def superseded(self) -> list[str]:
        return [f"{self.uri}/{name}" for name in self._superseded()]

    def remove_superseded(self) -> None:
        for name in self._superseded():
            self.remove_prefix(f"{self.uri}/{name}")
            remove(f"{self.uri}/{SUPERSEDED_MARKS}/{superseded_mark(name)}")

    def delete(self, ref: CheckpointRef) -> None:
        self.remove_prefix(f"{self.uri}/{ref.name}")

    def remove_prefix(self, prefix: str) -> None:
        """Delete a save, whole or not."""
        remove(f"{prefix}/{MANIFEST}")  # first: without it, the prefix is not a checkpoint
        remove_all(prefix)

    def _read_manifest(self, prefix: str) -> CheckpointManifest:
        """Return the manifest if the stored files have its names and sizes. Raises DamagedCheckpoint."""
        uri = f"{prefix}/{MANIFEST}"
        try:
            try:
                manifest = CheckpointManifest.parse(get_bytes(uri), uri)
            except DamagedCheckpoint:  # maybe in transit only
                manifest = CheckpointManifest.parse(get_bytes(uri), uri)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{uri}: is missing") from error
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
        """Remove prefixes of earlier attempts without a manifest, unless one may still come.

        A later attempt may still be writing its prefix; and what a paused process or a slow server stores late must not
        be the manifest of files that are gone.
        """
        earlier = [name for name in self._names() if name.split("/")[1] < self.attempt]
        now = max((entry.modified for entry in list_objects(f"{self.uri}/{ATTEMPTS}").values()), default=0.0)
        for name in compress(earlier, parallel_map(lambda name: not self._has(name, MANIFEST), earlier)):
            if now - max(entry.modified for entry in list_objects(f"{self.uri}/{name}").values()) > LATE_S:
                remove_all(f"{self.uri}/{name}")

    def _names(self) -> list[str]:
        """Return `<position>/<attempt>-<save>` of each prefix with files that is not superseded, sorted."""
        children = list_children(self.uri)
        superseded = set(self._superseded()) if SUPERSEDED_MARKS in children else set[str]()
        positions = list(filter(str.isdigit, children))
        saves = parallel_map(lambda position: list_children(f"{self.uri}/{position}"), positions)
        names = [f"{position}/{save}" for position, each in zip(positions, saves, strict=True) for save in each]
        return [name for name in names if name not in superseded]

    def _superseded(self) -> list[str]:
        return sorted(mark.replace(".", "/", 1) for mark in list_children(f"{self.uri}/{SUPERSEDED_MARKS}"))

    def _has(self, name: str, file: str) -> bool:
        """Ask for the file alone: a checkpoint may have 65,536, and each listing has 1,000 at most."""
        return size_of(f"{self.uri}/{name}/{file}") is not None


class RemoteSave:
    """A save into a RemoteCheckpointStore."""

    def __init__(self, store: RemoteCheckpointStore, position: int, number: int) -> None:
        self.store, self.position, self.number = store, position, number
        name = f"{position:0{DIGITS}}/{store.attempt}-{number:04}"
        self.folder, self.prefix = store.staging / name, f"{store.uri}/{name}"
        self.journal_end = store.journal.mark() if store.journal else 0
        self.manifest_sent = False

    def start(self) -> None:
        """No-op: the prefix is new."""

    def store_file(self, path: Path) -> None:
        put_file(path, f"{self.prefix}/{path.name}")
        path.unlink()

    def commit(self, manifest: CheckpointManifest) -> None:
        if self.store.journal is not None:  # first: a checkpoint must not be ahead of the journal
            chunk = self.store.journal.store(self.position, self.number, self.journal_end)
            manifest = manifest.model_copy(update={"journal": chunk})
        manifest.compare(list_children(self.prefix).keys(), self.prefix)
        self.store.check()
        self.manifest_sent = True
        put_bytes(f"{self.prefix}/{MANIFEST}", manifest.text().encode())

    def clean_up(self, committed: bool, is_rank0: bool) -> None:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        if not is_rank0 or committed:
            return
        if self.manifest_sent:  # it may be stored late, and then names files that must be there
            remove(f"{self.prefix}/{MANIFEST}")
        else:
            self.store.remove_prefix(self.prefix)


CheckpointStore = LocalCheckpointStore | RemoteCheckpointStore
