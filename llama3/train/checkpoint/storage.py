"""Where committed checkpoints lie: a folder that all processes share (`remote` has the object store).

A checkpoint is built in a hidden folder, its manifest is written last, one rename commits it. Deleting starts with a
rename, so no reader sees a folder that loses its files one by one.
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
from typing import NamedTuple, Protocol

from llama3.parallel.mesh import ParallelContext, raise_on_all_ranks, run_on_rank0_and_broadcast
from llama3.recipe.sections import Keep
from llama3.train.checkpoint.manifest import MANIFEST, CheckpointManifest, Damaged
from storage.digests import digest_file, each
from storage.filesystem import is_local, local_path, sync_folder, write_atomic
from storage.lease import LeaseHeld
from storage.objects import children, create_bytes, get_bytes, get_file, put_bytes, put_file, remove, remove_all

# Pins: checkpoints that must not be deleted, because something points to them.
#
# One small file for each pin, `pins/<position>.<digest of the reason>`, beside the checkpoints (a folder or an
# object store): made by one write, taken away by one delete, so that processes that know nothing of each other can
# pin. Who only reads for a while pins with an end, so that a killed reader does not keep a checkpoint for ever.
# What this gives up: a deletion that began before the pin was written is not stopped; the reader then finds files
# missing.

PINS = "pins"
DAY = 86_400.0


class Pins:
    """The pins of the checkpoints under `place`, a folder or an object store's URI."""

    def __init__(self, place: str) -> None:
        self.place = f"{place.rstrip('/')}/{PINS}"

    def add(self, position: int, reason: str, seconds: float | None = None) -> None:
        """Keep the checkpoint at `position` as long as `reason` stands, at most `seconds`."""
        until = None if seconds is None else time.time() + seconds
        text = json.dumps({"position": position, "reason": reason, "until": until}).encode()
        uri = self._uri(position, reason)
        write_atomic(local_path(uri), text) if is_local(uri) else put_bytes(uri, text)

    def remove(self, position: int, reason: str) -> None:
        """Take the pin away; one that is gone already is no error."""
        remove(self._uri(position, reason))

    def all(self) -> dict[int, list[str]]:
        """Return the reasons by position; pins past their end are deleted."""
        found: dict[int, list[str]] = {}
        for name in children(self.place):
            if name.startswith("."):
                continue  # one that is just being written
            try:
                pin = json.loads(get_bytes(f"{self.place}/{name}"))
            except FileNotFoundError:
                continue
            if pin["until"] is not None and pin["until"] < time.time():
                remove(f"{self.place}/{name}")
            else:
                found.setdefault(pin["position"], []).append(pin["reason"])
        return found

    @contextmanager
    def held(self, position: int, reason: str) -> Iterator[None]:
        """Pin while the block runs; a day after it was killed the pin lapses."""
        self.add(position, reason, DAY)
        try:
            yield
        finally:
            self.remove(position, reason)

    def _uri(self, position: int, reason: str) -> str:
        return f"{self.place}/{position:018}.{hashlib.sha256(reason.encode()).hexdigest()[:12]}"


SAVING, DELETING, DAMAGED, REPLACED = ".saving", ".deleting", ".damaged", ".replaced"
DIGITS = 18
"""Positions are written with this many digits, so that names sort as numbers."""


class Superseded(LeaseHeld):
    """A later attempt works on the stage, maybe on another machine; this one must end and commit nothing."""


class CheckpointRef(NamedTuple):
    """A committed checkpoint; the later of two at one position sorts last."""

    position: int
    name: str


class CheckpointStore(Protocol):
    """What `Checkpoints` needs of a place; unless said otherwise only the leading process calls it."""

    pins: Pins

    def building(self, position: int, serial: int) -> Path:
        """Return the folder into which this process writes save number `serial`."""

    def start(self, building: Path) -> None:
        """Clear the place before any process writes."""

    def stored(self, building: Path, path: Path) -> None:
        """Take a finished file; called by the process that wrote it, in several threads."""

    def commit(self, building: Path, manifest: CheckpointManifest) -> None:
        """Make the checkpoint visible, whole or not at all. Raises OSError and Superseded."""

    def check(self) -> None:
        """Raise Superseded if a later attempt has begun; nothing may be committed then."""

    def settle(self, building: Path, committed: bool, leads: bool) -> None:
        """Remove what a save leaves behind; every process calls it at the end of each."""

    def places(self) -> list[CheckpointRef]:
        """Return the committed checkpoints, oldest first."""

    def clean(self, world: ParallelContext) -> None:
        """Remove what killed processes left; every process calls it."""

    def fetch(self, place: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        """Return a folder that holds the files which its manifest names; every process calls it. Raises Damaged."""

    def release(self, path: Path) -> None:
        """Say that this process has loaded what `fetch` returned; every process calls it."""

    def set_aside(self, place: CheckpointRef, reason: str) -> None:
        """Never offer this checkpoint again, but keep it for whoever asks why."""

    def delete(self, place: CheckpointRef) -> None:
        """Delete a checkpoint."""


class LocalShelf:
    """Checkpoints `<folder>/<position>`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.pins = folder, Pins(str(folder.parent))

    def building(self, position: int, serial: int) -> Path:
        return self.folder / f"{SAVING}-{position:0{DIGITS}}"

    def start(self, building: Path) -> None:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()

    def stored(self, building: Path, path: Path) -> None:
        """It is where it belongs."""

    def commit(self, building: Path, manifest: CheckpointManifest) -> None:
        manifest.write(building)
        final = self._path(manifest.position)
        old = self._move(final, REPLACED) if final.exists() else None  # a run that was rolled back comes by again
        building.rename(final)
        sync_folder(self.folder)
        if old:
            shutil.rmtree(old)

    def check(self) -> None:
        """The lease of the stage's folder sees to it."""

    def settle(self, building: Path, committed: bool, leads: bool) -> None:
        if leads and not committed:
            shutil.rmtree(building, ignore_errors=True)

    def places(self) -> list[CheckpointRef]:
        names = sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())
        return [CheckpointRef(int(name), name) for name in names]

    def clean(self, world: ParallelContext) -> None:
        run_on_rank0_and_broadcast(world, self._clean)

    def fetch(self, place: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        path = self.folder / place.name
        return path, run_on_rank0_and_broadcast(world, lambda: CheckpointManifest.read(path))

    def release(self, path: Path) -> None:
        """The checkpoint itself was loaded."""

    def set_aside(self, place: CheckpointRef, reason: str) -> None:
        with suppress(FileNotFoundError):  # damaged because it was deleted under its reader
            self._move(self.folder / place.name, DAMAGED)

    def delete(self, place: CheckpointRef) -> None:
        shutil.rmtree(self._move(self.folder / place.name, DELETING))

    def _clean(self) -> None:
        for old in self.folder.glob(f"{REPLACED}-*"):
            final = self.folder / old.name.removeprefix(f"{REPLACED}-")
            if not final.exists():  # killed between the two renames
                old.rename(final)
        for mark in (SAVING, DELETING, REPLACED):
            for left in self.folder.glob(f"{mark}-*"):
                shutil.rmtree(left)

    def _path(self, position: int) -> Path:
        return self.folder / f"{position:0{DIGITS}}"

    def _move(self, path: Path, mark: str) -> Path:
        aside = path.with_name(f"{mark}-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)


def kept(positions: list[int], keep: Keep) -> set[int]:
    """Return which of `positions` (ascending) the rule keeps: the newest few, and the first after each milestone."""
    newest = set(positions[-keep.last :])
    if keep.every is None:
        return newest
    first: dict[int, int] = {}
    for position in positions:
        first.setdefault(position // keep.every, position)
    return newest | {position for milestone, position in first.items() if milestone}


# Checkpoints in an object store: `<uri>/<position>/<attempt>-<save>/`, where nothing is overwritten or renamed.
#
# Each process writes its files to a local folder, sends them, and asks for their size; when all have, the leader
# stores `manifest.json` with one request and reads it back. A prefix without a manifest is no checkpoint, whoever
# died while writing it; two attempts at one position leave two whole checkpoints, never a mixed one, even on
# servers that let two writers win a conditional PUT. Readers download and verify before they believe. What this
# gives up: a load brings the whole checkpoint to each machine, so its local disk must hold one.
#
# Each attempt numbers itself when it starts, in `<uri>/attempts/`, and looks before it commits whether a later one
# has: a machine that was given up by mistake, and is not dead, ends there. No clocks are compared.

ATTEMPTS = "attempts"
MARK = "damaged.txt"
"""Beside the files of a checkpoint that failed to verify: why."""


class RemoteShelf:
    """See `Shelf`. Only one attempt may write at a time (the stage's lease); others may read."""

    def __init__(self, uri: str, folder: Path, attempt: str) -> None:
        """Use `folder/.staging/<host>` for files on their way. Raises ValueError if `uri` is not one."""
        if is_local(uri):
            raise ValueError(f"checkpoints: {uri!r} is not the URI of an object store; write s3://bucket/prefix")
        self.uri, self.attempt, self.pins = uri.rstrip("/"), attempt, Pins(uri)
        self.number: int | None = None
        """Of this attempt; None until it has cleaned up after earlier ones."""
        self.staging = folder / ".staging" / socket.gethostname()

    def building(self, position: int, serial: int) -> Path:
        return self.staging / f"{position:0{DIGITS}}" / f"{self.attempt}-{serial:04}"

    def start(self, building: Path) -> None:
        """The prefix is new: nothing to clear."""

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

    def settle(self, building: Path, committed: bool, leads: bool) -> None:
        shutil.rmtree(building.parent, ignore_errors=True)
        if leads and not committed:
            self._remove(self._prefix(building))

    def places(self) -> list[CheckpointRef]:
        found = []
        for position in filter(str.isdigit, children(self.uri)):
            for attempt in children(f"{self.uri}/{position}"):
                inside = children(f"{self.uri}/{position}/{attempt}").keys()
                if MANIFEST in inside and MARK not in inside:
                    found.append(CheckpointRef(int(position), f"{position}/{attempt}"))
        return found

    def clean(self, world: ParallelContext) -> None:
        run_on_rank0_and_broadcast(world, self._begin)
        run_on_rank0_and_broadcast(world, self._clean)
        if self._among(world)[0] == 0:
            shutil.rmtree(self.staging, ignore_errors=True)
        world.wait()

    def fetch(self, place: CheckpointRef, world: ParallelContext) -> tuple[Path, CheckpointManifest]:
        manifest = run_on_rank0_and_broadcast(world, lambda: self._manifest(place))
        folder = self.staging / place.name
        rank, count = self._among(world)
        raise_on_all_ranks(world, lambda: self._download(place, manifest, folder, sorted(manifest.files)[rank::count]))
        return folder, manifest

    def release(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, place: CheckpointRef, reason: str) -> None:
        put_bytes(f"{self.uri}/{place.name}/{MARK}", reason.encode())

    def delete(self, place: CheckpointRef) -> None:
        self._remove(f"{self.uri}/{place.name}")

    def _manifest(self, place: CheckpointRef) -> CheckpointManifest:
        prefix = f"{self.uri}/{place.name}"
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

    def _download(self, place: CheckpointRef, manifest: CheckpointManifest, folder: Path, names: list[str]) -> None:
        """Bring `names` into `folder` and verify them. Raises Damaged, or OSError if they cannot be brought."""
        folder.mkdir(parents=True, exist_ok=True)
        each(lambda name: self._one(place, manifest, folder, name), names)

    def _one(self, place: CheckpointRef, manifest: CheckpointManifest, folder: Path, name: str) -> None:
        """Download one file, a second time if its bytes are wrong: they may have changed on the way only."""
        uri = f"{self.uri}/{place.name}/{name}"
        problem = None
        for _ in range(2):
            try:
                get_file(uri, folder / name)
                found = digest_file(folder / name)
            except FileNotFoundError as error:
                raise Damaged(f"{uri}: is missing") from error
            problem = manifest.difference(uri, found)
            if problem is None:
                return
        raise Damaged(problem)

    def _begin(self) -> None:
        """Take a number above that of every attempt before. Their numbers are not needed any more."""
        if self.number is not None:
            return
        before = children(f"{self.uri}/{ATTEMPTS}")
        number = int(max(before, default="0")) + 1
        while not create_bytes(f"{self.uri}/{ATTEMPTS}/{number:06}", self.attempt.encode()):
            number += 1
        for name in before:
            remove(f"{self.uri}/{ATTEMPTS}/{name}")
        self.number = number

    def _clean(self) -> None:
        """Remove what earlier attempts left without a manifest; a later attempt's prefix is not ours to judge."""
        for position in filter(str.isdigit, children(self.uri)):
            for attempt in children(f"{self.uri}/{position}"):
                prefix = f"{self.uri}/{position}/{attempt}"
                if attempt < self.attempt and MANIFEST not in children(prefix):
                    remove_all(prefix)

    def _remove(self, prefix: str) -> None:
        remove(f"{prefix}/{MANIFEST}")  # first: from now on it is no checkpoint
        remove_all(prefix)

    def _prefix(self, building: Path) -> str:
        return f"{self.uri}/{building.relative_to(self.staging).as_posix()}"

    def _among(self, world: ParallelContext) -> tuple[int, int]:
        """Return which of the processes on this machine I am, and how many they are."""
        hosts = world.gathered(socket.gethostname())
        return hosts[: world.rank].count(hosts[world.rank]), hosts.count(hosts[world.rank])
