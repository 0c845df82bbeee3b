"""Leases: at most one live process works on a thing, and a process that lost its lease finds out before it commits.

On a local root a lease is an flock, which the kernel releases when the process dies; a network file system must support
flock across hosts (NFSv4 does). On an object store it is an object with heartbeats. Each holder gets a fence (fencing
token), a number higher than that of every earlier holder. Lease files stay (some 200 bytes each).
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import IO, Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from herd.storage.digests import digest_json
from herd.storage.processes import machine_id, start_ticks
from herd.storage.root import Root, mark_format

PROBES = 4
"""Tries before a lock counts as held: `holders` takes each lock for an instant to see whether it is free."""
PROBE_S = 0.02
POLL_S = 0.2
TRIES = 5
"""Reads of a record that arrives damaged or disappears."""
Wait = Callable[[str], None]
State = Literal["free", "held", "unsure"]
_locks: set[int] = set()
"""File descriptors of the locks that this process holds."""


class LeaseHeld(RuntimeError):
    """Another live process holds the lease."""


class LeaseLost(RuntimeError):
    """Another process took the lease over; nothing may be committed under it any more."""


@dataclass(frozen=True)
class LeaseTiming:
    """Intervals of leases on an object store; all processes that share a root must use the same."""

    beat_s: float = 10.0
    """Between two heartbeats of a holder."""
    lease_timeout_s: float = 30.0
    """Lease timeout: a holder is dead if a competitor sees no new heartbeat for this long."""
    grace_s: float = 0.3
    """Wait after a create: by then a server that let two writers win shows only the last one."""

    @property
    def poll_s(self) -> float:
        """Between two reads of a competitor."""
        return self.lease_timeout_s / 15


class Lease(Protocol):
    """A lease that this process holds."""

    @property
    def fence(self) -> int:
        """Higher than that of every earlier holder."""
        ...

    def check(self) -> None:
        """Raise LeaseLost if another process took over. Call it last, before anything is made visible."""
        ...


@contextmanager
def lease(
    root: Root,
    name: str,
    holder: str,
    wait: Wait | None = None,
    *,
    lost: Callable[[], None] | None = None,
    timing: LeaseTiming = LeaseTiming(),
) -> Iterator[Lease]:
    """Hold the lease `name` (`runs/quickstart-3`) of `root` for `holder` until the block ends.

    Without `wait`, raises LeaseHeld naming the live holder; with it, calls it once with the holder's name and waits.
    `lost` is called in a thread as soon as a remote lease is found to be taken over. Raises OSError, and ValueError for
    a root of another format.
    """
    mark_format(root)
    if root.is_local:
        with _hold_file(_lease_file(root, name), root.join(name), holder, wait) as file_lease:
            yield file_lease
        return
    with BeatLease(root, name, LeaseRecord.here(holder), timing, lost) as beat_lease:
        beat_lease.acquire(wait)
        yield beat_lease


@contextmanager
def folder_lease(folder: Path, holder: str, wait: Wait | None = None) -> Iterator[Lease]:
    """Hold a lease on a local folder for `holder` until the block ends; `wait` as in `lease`.

    Raises LeaseHeld naming the live holder, and OSError.
    """
    with _hold_file(folder / "lease", str(folder), holder, wait) as file_lease:
        yield file_lease


def lease_holders(root: Root, names: list[str], timing: LeaseTiming = LeaseTiming()) -> dict[str, str]:
    """Return the holder of each lease of `names` that is held.

    Immediate on a local root. On an object store a holder on another machine counts as alive while its heartbeat
    changes: this takes up to `timing.beat_s`, and `timing.lease_timeout_s` if a holder is dead.
    """
    held: dict[str, str] = {}
    if root.is_local:
        for name in names:
            with suppress(FileNotFoundError), _lease_file(root, name).open() as file:
                if not _lock(file):
                    held[name] = _holder_of(file)
        return held
    watches = [LeaseObservation(root, name, timing) for name in names]
    while watches:
        states = [(watch, watch.look()) for watch in watches]
        held |= {watch.name: str(watch.holder) for watch, state in states if state == "held"}
        watches = [watch for watch, state in states if state == "unsure"]
        if watches:
            time.sleep(timing.poll_s)
    return held


def lease_holder(root: Root, name: str) -> LeaseRecord | None:
    """Return the record of the live holder of a lease, None if it is free; takes as long as `lease_holders`."""
    if not lease_holders(root, [name]):
        return None
    if root.is_local:
        return LeaseRecord.parse(_lease_file(root, name).read_text())
    observation = LeaseObservation(root, name, LeaseTiming())
    observation.look()
    return observation.holder


# The record of a lease.


class LeaseRecord(BaseModel):
    """Who holds a lease. The record contains its own digest: a flipped bit would make a live holder look dead."""

    model_config = ConfigDict(extra="forbid")

    holder: str
    pid: int
    host: str
    since: str
    machine: str = ""
    """Boot and process-id namespace (see `machine_id`); empty without /proc."""
    started: int = 0
    """Start time of the process in clock ticks since boot: tells it from a later process with the same id."""
    fence: int = 0
    token: str = ""
    """Unique to each attempt to hold the lease."""
    beat: int = 0
    released: bool = False
    seal: str = ""
    """Digest of the other fields."""

    @classmethod
    def here(cls, holder: str, fence: int = 0) -> LeaseRecord:
        """Return the record of this process."""
        pid, since = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
        process = {"pid": pid, "started": start_ticks(pid) or 0, "host": socket.gethostname(), "machine": machine_id()}
        return cls(holder=holder, since=since, fence=fence, **process)

    @classmethod
    def parse(cls, text: str | bytes) -> LeaseRecord | None:
        """Return the record in `text`, or None if it is incomplete or damaged (writer killed, bit flipped)."""
        try:
            record = cls.model_validate_json(text)
        except ValidationError:
            return None
        return record if record.seal == record._digest() else None

    def text(self) -> str:
        """Return the JSON document to store."""
        return self.model_copy(update={"seal": self._digest()}).model_dump_json()

    def _digest(self) -> str:
        return digest_json(self.model_dump(exclude={"seal"}))

    def alive(self) -> bool | None:
        """Return whether the process lives; None for a process of another machine."""
        if not self.machine or self.machine != machine_id():
            return None
        return start_ticks(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.holder} (process {self.pid} on {self.host} since {self.since})"


# Leases on a local root.


class FileLease:
    """A lease by flock on a file."""

    def __init__(self, file: IO[str], path: Path, fence: int) -> None:
        self.file, self.path, self.fence = file, path, fence

    def check(self) -> None:
        """Raise LeaseLost if the file was deleted, so that another process could lock a new file of that name."""
        if not _is_same_file(self.file, self.path):
            raise LeaseLost(f"lease {self.path}: its file was removed; another process may hold it now")


@contextmanager
def _hold_file(path: Path, name: str, holder: str, wait: Wait | None) -> Iterator[FileLease]:
    with _locked(path, name, wait) as file:
        before = LeaseRecord.parse(file.read())
        record = LeaseRecord.here(holder, fence=before.fence + 1 if before else 1)
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
def _locked(path: Path, name: str, wait: Wait | None) -> Iterator[IO[str]]:
    """Yield the locked file `path`, positioned at its start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tries, waiting = 0, False
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
            if _lock(file) and _is_same_file(file, path):
                file.seek(0)
                yield file
                return
            tries += 1
            if wait is None and tries >= PROBES:
                raise LeaseHeld(f"{name} is used by {_holder_of(file)}")
            if wait is not None and tries >= PROBES and not waiting:
                wait(_holder_of(file))
                waiting = True
        time.sleep(PROBE_S if tries < PROBES else POLL_S)


def _lease_file(root: Root, name: str) -> Path:
    return root.file("leases", *name.split("/"))


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(file: IO[str], path: Path) -> bool:
    """Return whether `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _holder_of(file: IO[str]) -> str:
    file.seek(0)
    return str(LeaseRecord.parse(file.read()) or "another process")


def _close_inherited_locks() -> None:
    """In a forked child: close the parent's locks, which the kernel would keep as long as the child lives."""
    for descriptor in _locks:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor, inheritable=False)
        os.close(null)
    _locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


# Leases on an object store: one object per holder, named by its fence and rewritten with every heartbeat.
#
# A holder on another machine is dead if a competitor reads the record 15 times within 30 s and never sees a new
# heartbeat. Only answered reads count and no clocks are compared, so an outage of the store ends no lease. Between
# `check` and a commit a process can still be suspended, so a commit also creates its manifest exclusively.


class LeaseObservation:
    """What one competitor knows about a lease."""

    def __init__(self, root: Root, name: str, timing: LeaseTiming) -> None:
        self.root, self.timing, self.name = root, timing, name
        self.path_parts = ("leases", *name.split("/"))
        self.holder: LeaseRecord | None = None
        self.top = 0
        """The highest fence seen."""
        self.looks = 0
        """Consecutive reads with the same holder and heartbeat."""
        self.beaten = False
        """Whether a new heartbeat was seen."""

    def look(self) -> State:
        """Read the lease once more and return what is known now. Raises OSError."""
        before, self.holder = self.holder, self._newest()
        if self.holder is None or self.holder.released:
            return "free"
        if (alive := self.holder.alive()) is False:
            return "free"
        if before is None or (before.fence, before.beat) == (self.holder.fence, self.holder.beat):
            self.looks += 1
        else:
            self.looks, self.beaten = 0, True
        if self.looks > self.timing.lease_timeout_s / self.timing.poll_s:
            return "free"
        return "held" if alive or self.beaten else "unsure"

    def file(self, fence: int) -> tuple[str, ...]:
        return (*self.path_parts, f"{fence}.json")

    def fences(self) -> list[int]:
        """Return the existing fences in order."""
        stems = (name.removesuffix(".json") for name in self.root.names(*self.path_parts))
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def record(self, fence: int) -> LeaseRecord | None:
        """Return the record of a holder, None if it is absent; a damaged one is read again (bits flip in transit)."""
        for _ in range(TRIES):
            text = self.root.read(*self.file(fence))
            if text is None:
                return None
            if (record := LeaseRecord.parse(text)) is not None:
                return record
        return None

    def _newest(self) -> LeaseRecord | None:
        for _ in range(TRIES):
            fences = self.fences()
            if not fences:
                return None
            self.top = fences[-1]
            if (record := self.record(self.top)) is not None or self.root.read(*self.file(self.top)) is not None:
                return record
        raise OSError(f"{self.root.join(*self.path_parts)}: the lease objects disappear between listing and reading")


class BeatLease:
    """A lease on an object store, with heartbeats while it is held."""

    def __init__(
        self, root: Root, name: str, record: LeaseRecord, timing: LeaseTiming, lost: Callable[[], None] | None
    ) -> None:
        self.watch, self.timing, self.on_loss = LeaseObservation(root, name, timing), timing, lost
        self.record = record.model_copy(update={"token": uuid.uuid4().hex})
        self.root, self.path_parts = root, root.join(*self.watch.path_parts)
        self._ended, self._thread = Event(), Thread(target=self._beat, name=f"lease {name}", daemon=True)

    @property
    def fence(self) -> int:
        return self.record.fence

    def acquire(self, wait: Wait | None) -> None:
        """Take the lease, if need be from a dead holder. Without `wait`, raises LeaseHeld if the holder lives."""
        waiting = False
        while True:
            state = self.watch.look()
            if state == "free":
                if self._create():
                    break
                self.watch.look()
                state = "held"  # the faster competitor lives
            if wait is None and state == "held":
                raise LeaseHeld(f"{self.root.join(self.watch.name)} is used by {self.watch.holder}")
            if wait is not None and not waiting:
                wait(str(self.watch.holder))
                waiting = True
            time.sleep(self.timing.poll_s)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if the lease was taken over; OSError if the store is unreachable."""
        fences = self.watch.fences()
        if fences and fences[-1] > self.fence:
            winner = self.watch.record(fences[-1]) or "another process"
            raise LeaseLost(f"lease {self.path_parts}: {winner} took over (fence {fences[-1]})")
        record = self.watch.record(self.fence)
        if record is None or record.token != self.record.token:
            raise LeaseLost(f"lease {self.path_parts}: {record or 'another process'} took over (fence {self.fence})")

    def _create(self) -> bool:
        """Create the next fence; return whether this process now holds the lease."""
        self.record = self.record.model_copy(update={"fence": self.watch.top + 1})
        if not self.root.create(self.record.text(), *self.watch.file(self.fence)):
            return False
        # Some servers let two creators win (OpenStack Swift: 1 to 4 of 16 racing writers): the object read now decides.
        time.sleep(self.timing.grace_s)
        record = self.watch.record(self.fence)
        if record is None or record.token != self.record.token:
            return False
        fences = self.watch.fences()
        if fences and fences[-1] > self.fence:  # others held the lease while this process was suspended
            return False
        for fence in fences:
            if fence < self.fence:
                with suppress(OSError):
                    self.root.remove(*self.watch.file(fence))
        return True

    def _beat(self) -> None:
        while not self._ended.wait(self.timing.beat_s):
            with suppress(OSError):  # the store is unreachable: retry at the next heartbeat
                try:
                    self.check()
                except LeaseLost:
                    if self.on_loss is not None:
                        self.on_loss()
                    return
                self._write(beat=self.record.beat + 1)

    def _write(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        self.root.write(self.record.text(), *self.watch.file(self.fence))

    def __enter__(self) -> BeatLease:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease, unless it was lost. If the store is unreachable, the lease times out."""
        if self._thread.ident is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError, LeaseLost):
            self.check()
            self._write(released=True)
