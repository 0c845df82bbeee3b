"""Folders for what is half made, and locks between the processes of one machine.

A staging folder belongs to a live process as long as that holds the flock of `.locks/staging/<folder>`; the kernel
frees it with the process, so what a killed one left is told from what a live one is writing, without guessing from
ages. The lock is not inside the folder, because the folder is what a commit renames into place. What this gives up:
on a network file system flock must work across hosts (NFSv4 does).
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
"""Age at which a staging folder that never had a lock (an older version's, somebody's copy) is taken for left over."""


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` among the processes and threads that use the folder `root`; waits for it."""
    with _opened(root, name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(root: Path) -> Iterator[Path]:
    """Yield an empty folder inside `root`; what is in it at the end is removed."""
    folder = root / STAGING / uuid.uuid4().hex
    lock = _lock_of(folder)
    with locked(root, STAGING):  # else a cleaner may come between the lock and the folder
        file = _opened(root, lock)
        fcntl.flock(file, fcntl.LOCK_EX)
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        (root / LOCKS / lock).unlink(missing_ok=True)
        file.close()


def discard(root: Path, folder: Path) -> None:
    """Remove a folder inside `root` so that nobody sees half of it: renamed first. One that is gone is no error."""
    with staged(root) as trash:
        try:
            folder.rename(trash / folder.name)
        except FileNotFoundError:
            return


def clear_staging(root: Path, older_than_s: float = 0.0) -> tuple[int, int]:
    """Remove the staging folders whose process is gone and that were not written to for `older_than_s` seconds.

    Returns how many folders and bytes. Raises OSError.
    """
    count, freed = 0, 0
    with locked(root, STAGING):
        for folder in sorted((root / STAGING).glob("*")):
            lock = root / LOCKS / _lock_of(folder)
            age = time.time() - newest(folder)
            if age < (older_than_s if lock.exists() else max(older_than_s, FOREIGN_S)) or _alive(lock):
                continue
            count, freed = count + 1, freed + size(folder)
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
    return count, freed


def newest(folder: Path) -> float:
    """Return when something in a folder was last written, in seconds since 1970; 0 if it is gone."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)


def size(folder: Path) -> int:
    """Return the bytes that the files in a folder take on the disk; holes take none."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def _lock_of(folder: Path) -> str:
    return f"staging/{folder.name}"


def _alive(lock: Path) -> bool:
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
