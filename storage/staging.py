"""Staging folders for unfinished work, and locks between the processes of one machine.

A staging folder belongs to a live process as long as that process holds the flock of `.locks/staging/<folder>`; the
kernel releases it when the process dies, so folders of dead processes are recognized without guessing from ages.
A network file system must support flock across hosts (NFSv4 does).
"""

from __future__ import annotations

import fcntl
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

STAGING = ".staging"
LOCKS = ".locks"
FOREIGN_S = 86_400
"""Age at which a staging folder without a lock file (a copied one) counts as abandoned."""


@contextmanager
def file_lock(root: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` of the folder `root` against other processes and threads; waits for it."""
    with _opened(root, name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staging_folder(root: Path) -> Iterator[Path]:
    """Yield an empty folder inside `root`; it is deleted at the end unless it was renamed."""
    name = uuid.uuid4().hex
    folder, lock = root / STAGING / name, f"staging/{name}"  # not inside the folder, which a commit renames
    with _opened(root, lock) as file:
        with file_lock(root, STAGING):  # else `clear_staging` could run between the lock and the folder
            fcntl.flock(file, fcntl.LOCK_EX)
            folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            (root / LOCKS / lock).unlink(missing_ok=True)


def discard(root: Path, folder: Path) -> None:
    """Delete a folder inside `root` atomically for readers, by renaming it first. No error if it is absent."""
    with staging_folder(root) as trash:
        try:
            folder.rename(trash / folder.name)
        except FileNotFoundError:
            return


def clear_staging(root: Path, older_than_s: float = 0.0) -> tuple[int, int]:
    """Delete staging folders of dead processes that were not written to for `older_than_s` seconds.

    Returns the number of folders and bytes. Raises OSError.
    """
    count, freed = 0, 0
    with file_lock(root, STAGING):
        for folder in sorted((root / STAGING).glob("*")):
            lock = root / LOCKS / f"staging/{folder.name}"
            age = time.time() - newest_mtime(folder)
            if age < (older_than_s if lock.exists() else max(older_than_s, FOREIGN_S)) or _is_locked(lock):
                continue
            count, freed = count + 1, freed + disk_usage(folder)
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
    return count, freed


def newest_mtime(folder: Path) -> float:
    """Return the newest modification time in a folder, in seconds since 1970; 0 if it is absent."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)


def disk_usage(folder: Path) -> int:
    """Return the disk usage of a folder in bytes; holes in sparse files count 0."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def _is_locked(lock: Path) -> bool:
    """Return whether a process holds the lock file."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _opened(root: Path, name: str) -> IO[str]:
    path = root / LOCKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a")
