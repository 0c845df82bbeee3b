"""Where committed checkpoints lie: a folder that all processes share (`remote` has the object store).

A checkpoint is built in a hidden folder, its manifest is written last, one rename commits it. Deleting starts with a
rename, so no reader sees a folder that loses its files one by one.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from llama3.parallel.mesh import World
from llama3.recipe.schema import Keep
from llama3.train.agree import led
from llama3.train.manifest import Manifest
from llama3.train.pins import Pins
from storage.filesystem import sync_folder
from storage.lease import LeaseHeld

SAVING, DELETING, DAMAGED, REPLACED = ".saving", ".deleting", ".damaged", ".replaced"
DIGITS = 18
"""Positions are written with this many digits, so that names sort as numbers."""


class Superseded(LeaseHeld):
    """A later attempt works on the stage, maybe on another machine; this one must end and commit nothing."""


class Place(NamedTuple):
    """A committed checkpoint; the later of two at one position sorts last."""

    position: int
    name: str


class Shelf(Protocol):
    """What `Checkpoints` needs of a place; unless said otherwise only the leading process calls it."""

    pins: Pins

    def building(self, position: int, serial: int) -> Path:
        """Return the folder into which this process writes save number `serial`."""

    def start(self, building: Path) -> None:
        """Clear the place before any process writes."""

    def stored(self, building: Path, path: Path) -> None:
        """Take a finished file; called by the process that wrote it, in several threads."""

    def commit(self, building: Path, manifest: Manifest) -> None:
        """Make the checkpoint visible, whole or not at all. Raises OSError and Superseded."""

    def check(self) -> None:
        """Raise Superseded if a later attempt has begun; nothing may be committed then."""

    def settle(self, building: Path, committed: bool, leads: bool) -> None:
        """Remove what a save leaves behind; every process calls it at the end of each."""

    def places(self) -> list[Place]:
        """Return the committed checkpoints, oldest first."""

    def clean(self, world: World) -> None:
        """Remove what killed processes left; every process calls it."""

    def fetch(self, place: Place, world: World) -> tuple[Path, Manifest]:
        """Return a folder that holds the files which its manifest names; every process calls it. Raises Damaged."""

    def release(self, path: Path) -> None:
        """Say that this process has loaded what `fetch` returned; every process calls it."""

    def set_aside(self, place: Place, reason: str) -> None:
        """Never offer this checkpoint again, but keep it for whoever asks why."""

    def delete(self, place: Place) -> None:
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

    def commit(self, building: Path, manifest: Manifest) -> None:
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

    def places(self) -> list[Place]:
        names = sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())
        return [Place(int(name), name) for name in names]

    def clean(self, world: World) -> None:
        led(world, self._clean)

    def fetch(self, place: Place, world: World) -> tuple[Path, Manifest]:
        path = self.folder / place.name
        return path, led(world, lambda: Manifest.read(path))

    def release(self, path: Path) -> None:
        """The checkpoint itself was loaded."""

    def set_aside(self, place: Place, reason: str) -> None:
        with suppress(FileNotFoundError):  # damaged because it was deleted under its reader
            self._move(self.folder / place.name, DAMAGED)

    def delete(self, place: Place) -> None:
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
