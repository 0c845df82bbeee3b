"""Compare stored files with what was committed, once per file and boot of a machine.

A stamp says which files were read and right since the machine started. It holds size, time and inode of each file, so
a file that was written since is read again; what decays on the disk is found after the next boot, or by `herd verify`,
which believes no stamp. A machine reads an artifact at the speed of SHA-256 (1 to 2 GB/s a core), before the first use.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from storage.digests import FileDigest, digest_file
from storage.manifest import MANIFEST, DamagedArtifact, Manifest
from storage.processes import boot_id
from storage.staging import locked

LAZY_FOLDER = "lazy-folder.json"
"""File of a folder that brings its bytes from an object store (storage/lazy.py)."""
VERIFIED = ".verified"
"""Folder of the stamps in a root's working folder."""
YOUNG_NS = 10**8
"""A file written so shortly before is not stamped: a second write could leave it with the same time."""
KEPT_S = 90 * 86400.0
"""Stamps of boots before that are removed."""


class Facts(NamedTuple):
    """What changes when a file is written."""

    bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Facts | None:
        """Return the facts of a file, None if it is no file."""
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino) if path.is_file() else None


class Stamp:
    """Which files were read and right since this machine started; lines are only added, so processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / _boot()

    def read(self) -> dict[str, Facts]:
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return {}
        known = {}
        for line in lines:
            with suppress(ValueError, TypeError):  # a line cut short: that file is read again
                name, *facts = json.loads(line)
                known[name] = Facts(*facts)
        return known

    def add(self, files: Mapping[str, Facts]) -> None:
        """Say that files are right. A folder in which nothing can be written costs reading them again."""
        old = time.time_ns() - YOUNG_NS
        lines = "".join(json.dumps([name, *facts]) + "\n" for name, facts in files.items() if facts.modified_ns < old)
        with suppress(OSError):
            if lines and not self.path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                for earlier in self.folder.iterdir():
                    if time.time() - earlier.stat().st_mtime > KEPT_S:
                        earlier.unlink()
            if lines:
                with self.path.open("a") as file:
                    file.write(lines)

    def add_folder(self, folder: Path, names: Iterable[str]) -> None:
        """Say that files of `folder` are right as they are now."""
        self.add({name: facts for name in names if (facts := Facts.of(folder / name))})

    def forget(self) -> None:
        """Have every machine read the files again."""
        shutil.rmtree(self.folder, ignore_errors=True)


def stamp_of(local: Path, label: str) -> Stamp:
    """Return the stamp of the artifact `label` in the working folder `local`."""
    return Stamp(local / VERIFIED / label)


def wrong_files(folder: Path, files: Mapping[str, FileDigest], stamp: Stamp, again: bool = False) -> list[str]:
    """Return the names of `files` whose bytes in `folder` are not what was committed, sorted.

    Files that the stamp knows as they are now are not read, unless `again`: then all are, from the disk and not from
    memory. Raises OSError for what is no fault of the bytes (a file that may not be read).
    """
    known = {} if again else stamp.read()
    facts = {name: Facts.of(folder / name) for name in files}
    wrong = {name for name, entry in files.items() if (now := facts[name]) is None or now.bytes != entry.bytes}
    unknown = [name for name in files if name not in wrong and known.get(name) != facts[name]]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        right = list(pool.map(lambda name: _is_right(folder / name, files[name], again), unknown))
    stamp.add({name: now for name, fine in zip(unknown, right, strict=True) if fine and (now := facts[name])})
    return sorted(wrong.union(name for name, fine in zip(unknown, right, strict=True) if not fine))


def verify_folder(folder: Path) -> None:
    """Verify a folder of a committed artifact, or the artifact itself, before this machine uses it.

    Of the processes of a machine one reads, the others wait for it. A folder without a manifest, or in one, is not
    looked at. Raises DamagedArtifact naming the files; then every machine reads the artifact again.
    """
    for place in (folder, folder.parent):
        if (place / LAZY_FOLDER).exists():  # its bytes are verified as they come
            return
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            manifest = Manifest.parse((place / MANIFEST).read_bytes(), f"{place / MANIFEST}", moved=True)
            break
    else:
        return
    part = "" if place == folder else f"{folder.name}/"
    local, files = place.parents[1], {name: entry for name, entry in manifest.files.items() if name.startswith(part)}
    stamp = stamp_of(local, manifest.label)
    lock = locked(local, f"{VERIFIED}/{manifest.label}") if os.access(local, os.W_OK) else nullcontext()
    with lock:
        wrong = wrong_files(place, files, stamp)
    if wrong:
        stamp.forget()
        raise DamagedArtifact(damage(manifest.label, wrong))


def damage(label: str, names: Iterable[str]) -> str:
    """Return what is wrong with an artifact in words."""
    first, *more = sorted(names)
    text = f"{first} and {len(more)} more files" if more else first
    return f"artifact {label}: {text} changed since it was committed; run again, which sets it aside and makes it again"


def _is_right(path: Path, entry: FileDigest, fresh: bool) -> bool:
    try:
        if fresh:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest_file(path).sha256 == entry.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


@cache
def _boot() -> str:
    try:
        return boot_id()
    except OSError:  # no /proc
        return socket.gethostname()
