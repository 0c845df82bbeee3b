"""Checkpoints in an object store: `<uri>/<position>/<attempt>-<save>/`, where nothing is overwritten or renamed.

Each process writes its files to a local folder, sends them, and asks for their size; when all have, the leader stores
`manifest.json` with one request and reads it back. A prefix without a manifest is no checkpoint, whoever died while
writing it; two attempts at one position leave two whole checkpoints, never a mixed one, even on servers that let two
writers win a conditional PUT. Readers download and verify before they believe. What this gives up: a load brings the
whole checkpoint to each machine, so its local disk must hold one.

Each attempt numbers itself when it starts, in `<uri>/attempts/`, and looks before it commits whether a later one has:
a machine that was given up by mistake, and is not dead, ends there. No clocks are compared.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from llama3.parallel.mesh import World
from llama3.train.agree import led, together
from llama3.train.manifest import MANIFEST, Damaged, Manifest
from llama3.train.pins import Pins
from llama3.train.shelf import DIGITS, Place, Superseded
from storage.digests import digest_file
from storage.filesystem import is_local
from storage.objects import children, create_bytes, get_bytes, get_file, put_bytes, put_file, remove, remove_all
from storage.threads import each

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

    def commit(self, building: Path, manifest: Manifest) -> None:
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

    def places(self) -> list[Place]:
        found = []
        for position in filter(str.isdigit, children(self.uri)):
            for attempt in children(f"{self.uri}/{position}"):
                inside = children(f"{self.uri}/{position}/{attempt}").keys()
                if MANIFEST in inside and MARK not in inside:
                    found.append(Place(int(position), f"{position}/{attempt}"))
        return found

    def clean(self, world: World) -> None:
        led(world, self._begin)
        led(world, self._clean)
        if self._among(world)[0] == 0:
            shutil.rmtree(self.staging, ignore_errors=True)
        world.wait()

    def fetch(self, place: Place, world: World) -> tuple[Path, Manifest]:
        manifest = led(world, lambda: self._manifest(place))
        folder = self.staging / place.name
        rank, count = self._among(world)
        together(world, lambda: self._download(place, manifest, folder, sorted(manifest.files)[rank::count]))
        return folder, manifest

    def release(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, place: Place, reason: str) -> None:
        put_bytes(f"{self.uri}/{place.name}/{MARK}", reason.encode())

    def delete(self, place: Place) -> None:
        self._remove(f"{self.uri}/{place.name}")

    def _manifest(self, place: Place) -> Manifest:
        prefix = f"{self.uri}/{place.name}"
        try:
            manifest = Manifest.parse(get_bytes(f"{prefix}/{MANIFEST}"), f"{prefix}/{MANIFEST}")
        except FileNotFoundError as error:
            raise Damaged(f"{prefix}/{MANIFEST}: is missing") from error
        sizes = children(prefix)
        manifest.compare(sizes.keys() - {MANIFEST}, prefix)
        for name, digest in manifest.files.items():
            if sizes[name] != digest.bytes:
                raise Damaged(f"{prefix}/{name}: has {sizes[name]:,} bytes, {digest.bytes:,} were written")
        return manifest

    def _download(self, place: Place, manifest: Manifest, folder: Path, names: list[str]) -> None:
        """Bring `names` into `folder` and verify them. Raises Damaged, or OSError if they cannot be brought."""
        folder.mkdir(parents=True, exist_ok=True)
        each(lambda name: self._one(place, manifest, folder, name), names)

    def _one(self, place: Place, manifest: Manifest, folder: Path, name: str) -> None:
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

    def _among(self, world: World) -> tuple[int, int]:
        """Return which of the processes on this machine I am, and how many they are."""
        hosts = world.gathered(socket.gethostname())
        return hosts[: world.rank].count(hosts[world.rank]), hosts.count(hosts[world.rank])
