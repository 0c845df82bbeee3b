"""Leases: at most one live process makes a thing, and whoever lost one finds out before it commits.

On a local root a lease is an flock, held as long as the process lives: a killed process leaves nothing behind, and
nobody guesses from a time-out. On an object store it is an object with beats (storage/beats.py), because a store knows
no processes. Each holder gets a fence, a number higher than that of every holder before it. What this gives up: a
network file system must support flock across hosts (NFSv4 does), and the files of leases stay (some 200 bytes each).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from storage.beats import BeatLease, Watch, watch_all
from storage.holder import Holder, LeaseHeld, LeaseLost, Timing
from storage.root import Root

__all__ = ["FileLease", "Lease", "LeaseHeld", "LeaseLost", "Timing", "folder_lease", "holders", "lease"]

Wait = Callable[[str], None]
PROBES = 4
"""Tries of a lease that is not waited for: `holders` takes each lock for an instant to see whether it is free."""
PROBE_S = 0.02
POLL_S = 0.2
_locks: set[int] = set()
"""File descriptors of the locks that this process holds."""


class Lease(Protocol):
    """A lease that this process holds."""

    @property
    def fence(self) -> int:
        """Higher than that of every earlier holder."""
        ...

    def check(self) -> None:
        """Raise LeaseLost if another process took over. Call it last before anything is made visible."""
        ...


class FileLease:
    """A lease by flock on a file."""

    def __init__(self, file: IO[str], path: Path, fence: int) -> None:
        self.file, self.path, self.fence = file, path, fence

    def check(self) -> None:
        """Raise LeaseLost if the file was deleted, so that another could lock one of the same name."""
        if not _same(self.file, self.path):
            raise LeaseLost(f"lease {self.path}: its file was removed; another process may hold it now")


@contextmanager
def lease(
    root: Root,
    name: str,
    holder: str,
    wait: Wait | None = None,
    *,
    lost: Callable[[], None] | None = None,
    timing: Timing = Timing(),  # noqa: B008  (frozen)
) -> Iterator[Lease]:
    """Hold the lease `name` (`runs/quickstart-3`) of `root` for `holder` until the block ends.

    Without `wait`, raises LeaseHeld naming the live holder; with it waits, and calls it once with who holds the lease.
    `lost` is called, in a thread, as soon as a remote lease is seen to have been taken over. Raises OSError.
    """
    if root.is_local:
        with _hold(_file(root, name), root.join(name), holder, wait) as held:
            yield held
        return
    with BeatLease(root, name, Holder.here(holder), timing, lost) as beating:
        beating.acquire(wait)
        yield beating


@contextmanager
def folder_lease(folder: Path, holder: str, wait: Wait | None = None) -> Iterator[Lease]:
    """Hold a local folder for `holder` until the block ends. Raises OSError.

    Raises LeaseHeld naming the live holder, or calls `wait` with its name and waits for it.
    """
    with _hold(folder / "lease", str(folder), holder, wait) as held:
        yield held


def holders(root: Root, names: list[str], timing: Timing = Timing()) -> dict[str, str]:  # noqa: B008
    """Return which of the leases `names` are held, and by whom.

    At once on a local root. On a remote one a holder of another machine is believed alive when its beat changes, so
    this takes up to `timing.beat_s`, and `timing.silence_s` if one of them is dead.
    """
    if not root.is_local:
        return watch_all([Watch(root, name, timing) for name in names])
    found = {name: _held_by(_file(root, name)) for name in names}
    return {name: text for name, text in found.items() if text}


def _file(root: Root, name: str) -> Path:
    return root.file("leases", *name.split("/"))


@contextmanager
def _hold(path: Path, place: str, holder: str, wait: Wait | None) -> Iterator[FileLease]:
    with _locked(path, place, wait) as file:
        before = Holder.parse(file.read())
        record = Holder.here(holder, fence=before.fence + 1 if before else 1)
        file.seek(0)
        file.write(record.text() + "\n")
        file.truncate()
        file.flush()
        _locks.add(file.fileno())
        try:
            yield FileLease(file, path, record.fence)
        finally:
            _locks.discard(file.fileno())


@contextmanager
def _locked(path: Path, place: str, wait: Wait | None) -> Iterator[IO[str]]:
    """Yield the file `path`, locked, its pointer at the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tried, told = 0, False
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
            if _lock(file) and _same(file, path):
                file.seek(0)
                yield file
                return
            tried += 1
            if wait is None and tried >= PROBES:
                raise LeaseHeld(f"{place} is used by {_named(file)}")
            if wait is not None and tried >= PROBES and not told:
                wait(_named(file))
                told = True
        time.sleep(PROBE_S if tried < PROBES else POLL_S)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(file: IO[str], path: Path) -> bool:
    """Return whether the open file is still the one of that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _held_by(path: Path) -> str:
    """Return who holds the lock of `path`, or ""."""
    try:
        file = path.open()
    except FileNotFoundError:
        return ""
    with file:
        return "" if _lock(file) else _named(file)


def _named(file: IO[str]) -> str:
    file.seek(0)
    record = Holder.parse(file.read())
    return str(record) if record else "another process"


def _leave() -> None:
    """Let go, in a forked child, of the locks of its parent: the kernel would keep them as long as the child lives."""
    for number in _locks:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
    _locks.clear()


os.register_at_fork(after_in_child=_leave)
