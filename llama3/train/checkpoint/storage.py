"""Where committed checkpoints are stored: a folder that all processes share, or an object store.

Both commit a checkpoint whole or not at all, with its manifest written last. Pins keep a checkpoint from being deleted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from llama3.parallel.mesh import ParallelContext, raise_on_all_ranks, run_on_rank0_and_broadcast
from llama3.recipe.sections import Keep
from llama3.train.checkpoint.manifest import MANIFEST, CheckpointManifest, Damaged
from storage.digests import digest_file, each
from storage.filesystem import is_local, local_path, sync_folder, write_atomic
from storage.lease import LeaseHeld
from storage.objects import children, create_bytes, get_bytes, get_file, put_bytes, put_file, remove, remove_all

PINS = "pins"
DAY = 86_400.0
SAVING, DELETING, DAMAGED, REPLACED = ".saving", ".deleting", ".damaged", ".replaced"
DIGITS = 18
"""Positions are written with this many digits, so that names sort as numbers."""
ATTEMPTS = "attempts"
MARK = "damaged.txt"
"""Beside the files of a checkpoint that failed to verify: why."""


class Superseded(LeaseHeld):
    """A later attempt works on the stage, maybe on another machine; this one must end and commit nothing."""


class CheckpointRef(NamedTuple):
    """A committed checkpoint; the later of two at one position sorts last."""

    position: int
    name: str


class Pins:
    """The pins of the checkpoints under `root`, a folder or an object store's URI: one small file for each.

    A pin is made by one write and removed by one delete, so processes need not know of each other. A deletion that
    began before the pin was written is not stopped; the reader then finds files missing.
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
        """Remove the pin, if it exists."""
        remove(self._uri(position, reason))

    def all(self) -> dict[int, list[str]]:
        """Return the reasons by position; expired pins are deleted."""
        reasons: dict[int, list[str]] = {}
        for name in children(self.root):
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
    def held(self, position: int, reason: str) -> Iterator[None]:
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
    only the leading process calls the methods.
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
        """Make the checkpoint visible, whole or not at all. Raises OSError and Superseded."""
        manifest.write(building)
        final = self.folder / f"{manifest.position:0{DIGITS}}"
        old = self._rename(final, REPLACED) if final.exists() else None  # after a rollback, positions come again
        building.rename(final)
        sync_folder(self.folder)
        if old:
            shutil.rmtree(old)

    def check(self) -> None:
        """Raise Superseded if a later attempt has begun. No-op: the folder lease already excludes other writers."""

    def end_save(self, building: Path, committed: bool, leads: bool) -> None:
        """Remove temporary files of a save; every process calls it at the end of each."""
        if leads and not committed:
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

    def fetch(self, ref: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        """Return a folder that holds the files which its manifest names; every process calls it. Raises Damaged."""
        path = self.folder / ref.name
        return path, run_on_rank0_and_broadcast(world, lambda: CheckpointManifest.read(path))

    def release(self, path: Path) -> None:
        """Free what `fetch` returned; every process calls it. No-op: that is the checkpoint itself."""

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

    Each process uploads its files; when all have, the leader stores `manifest.json` with one request. A prefix without
    a manifest is not a checkpoint. Two attempts at one position leave two whole checkpoints, never a mixed one, even on
    servers that let two writers win a conditional PUT. A load downloads the whole checkpoint to each machine.

    Only one attempt may write at a time (the stage's lease); others may read. Each attempt takes a number in
    `<uri>/attempts/` when it starts, and before a commit checks that it is still the newest: a machine that was given
    up by mistake ends there. No clocks are compared.
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
        manifest.compare(children(prefix).keys(), prefix)
        self.check()
        put_bytes(f"{prefix}/{MANIFEST}", manifest.text().encode())

    def check(self) -> None:
        if self.number is None:
            return
        newest = max(children(f"{self.uri}/{ATTEMPTS}"), default="")
        if newest != f"{self.number:06}" or get_bytes(f"{self.uri}/{ATTEMPTS}/{newest}") != self.attempt.encode():
            raise Superseded(
                f"{self.uri}: attempt {newest or 'unknown'} trains this stage now, here or on another machine; this "
                f"one is number {self.number} and ends"
            )

    def end_save(self, building: Path, committed: bool, leads: bool) -> None:
        shutil.rmtree(building.parent, ignore_errors=True)
        if leads and not committed:
            self._remove(self._prefix(building))

    def refs(self) -> list[CheckpointRef]:
        refs = []
        for position in filter(str.isdigit, children(self.uri)):
            for attempt in children(f"{self.uri}/{position}"):
                names = children(f"{self.uri}/{position}/{attempt}").keys()
                if MANIFEST in names and MARK not in names:
                    refs.append(CheckpointRef(int(position), f"{position}/{attempt}"))
        return refs

    def remove_leftovers(self, world: ParallelContext) -> None:
        run_on_rank0_and_broadcast(world, self._register_attempt)
        run_on_rank0_and_broadcast(world, self._remove_unfinished)
        if self._local_rank(world)[0] == 0:
            shutil.rmtree(self.staging, ignore_errors=True)
        world.wait()

    def fetch(self, ref: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        """Download and verify, each process its part. Also raises OSError if a file cannot be downloaded."""
        prefix, folder = f"{self.uri}/{ref.name}", self.staging / ref.name
        manifest = run_on_rank0_and_broadcast(world, lambda: self._read_manifest(prefix))
        rank, count = self._local_rank(world)

        def download(name: str) -> None:
            uri = f"{prefix}/{name}"
            problem = None
            for _ in range(2):  # wrong bytes may have changed in transit only
                try:
                    get_file(uri, folder / name)
                    digest = digest_file(folder / name)
                except FileNotFoundError as error:
                    raise Damaged(f"{uri}: is missing") from error
                problem = manifest.difference(uri, digest)
                if problem is None:
                    return
            raise Damaged(problem)

        def download_all() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            each(download, sorted(manifest.files)[rank::count])

        raise_on_all_ranks(world, download_all)
        return folder, manifest

    def release(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def quarantine(self, ref: CheckpointRef, reason: str) -> None:
        put_bytes(f"{self.uri}/{ref.name}/{MARK}", reason.encode())

    def delete(self, ref: CheckpointRef) -> None:
        self._remove(f"{self.uri}/{ref.name}")

    def _read_manifest(self, prefix: str) -> CheckpointManifest:
        """Return the manifest, after comparing names and sizes of the stored files with it. Raises Damaged."""
        try:
            manifest = CheckpointManifest.parse(get_bytes(f"{prefix}/{MANIFEST}"), f"{prefix}/{MANIFEST}")
        except FileNotFoundError as error:
            raise Damaged(f"{prefix}/{MANIFEST}: is missing") from error
        sizes = children(prefix)
        manifest.compare(sizes.keys() - {MANIFEST}, prefix)
        for name, digest in manifest.files.items():
            if sizes[name] != digest.bytes:
                raise Damaged(f"{prefix}/{name}: has {sizes[name]:,} bytes, {digest.bytes:,} were written")
        return manifest

    def _register_attempt(self) -> None:
        """Take a number above that of every earlier attempt, and delete their numbers."""
        if self.number is not None:
            return
        earlier = children(f"{self.uri}/{ATTEMPTS}")
        number = int(max(earlier, default="0")) + 1
        while not create_bytes(f"{self.uri}/{ATTEMPTS}/{number:06}", self.attempt.encode()):
            number += 1
        for name in earlier:
            remove(f"{self.uri}/{ATTEMPTS}/{name}")
        self.number = number

    def _remove_unfinished(self) -> None:
        """Remove what earlier attempts left without a manifest; a later attempt may still be writing its prefix."""
        for position in filter(str.isdigit, children(self.uri)):
            for attempt in children(f"{self.uri}/{position}"):
                prefix = f"{self.uri}/{position}/{attempt}"
                if attempt < self.attempt and MANIFEST not in children(prefix):
                    remove_all(prefix)

    def _remove(self, prefix: str) -> None:
        remove(f"{prefix}/{MANIFEST}")  # first: without it, the prefix is not a checkpoint
        remove_all(prefix)

    def _prefix(self, building: Path) -> str:
        return f"{self.uri}/{building.relative_to(self.staging).as_posix()}"

    def _local_rank(self, world: ParallelContext) -> tuple[int, int]:
        """Return the number of this process among those of its machine, and how many they are."""
        hosts = world.gathered(socket.gethostname())
        return hosts[: world.rank].count(hosts[world.rank]), hosts.count(hosts[world.rank])


CheckpointStore = LocalCheckpointStore | RemoteCheckpointStore


def kept(positions: list[int], keep: Keep) -> set[int]:
    """Return which of `positions` (ascending) the rule keeps: the newest few, and the first after each milestone."""
    newest = set(positions[-keep.last :])
    if keep.every is None:
        return newest
    first: dict[int, int] = {}
    for position in positions:
        first.setdefault(position // keep.every, position)
    return newest | {position for milestone, position in first.items() if milestone}
