"""Leases: at most one live process makes a thing, and whoever lost one finds out before it commits.

On a local root a lease is an flock, held as long as the process lives: a killed process leaves nothing behind, and
nobody guesses from a time-out. On an object store it is an object with beats (storage/lease.py), because a store knows
no processes. Each holder gets a fence, a number higher than that of every holder before it. What this gives up: a
network file system must support flock across hosts (NFSv4 does), and the files of leases stay (some 200 bytes each).
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
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import IO, Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.digests import digest_json
from storage.processes import boot_id
from storage.root import Root

# Who holds a lease, written so that a person and a competitor can read it.


class LeaseHeld(RuntimeError):
    """Another live process holds the lease."""


class LeaseLost(RuntimeError):
    """Another process took the lease over; nothing may be committed under it any more."""


@dataclass(frozen=True)
class LeaseTiming:
    """How fast leases on an object store are; all processes that share a root must agree on it."""

    beat_s: float = 10.0
    """Between two beats of a holder."""
    silence_s: float = 30.0
    """A holder whose beat did not change while a competitor looked so long is dead."""
    settle_s: float = 0.3
    """After a create: a server that let two writers win has shown the last one by then."""

    @property
    def poll_s(self) -> float:
        """Between two looks of a competitor."""
        return self.silence_s / 15


class Holder(BaseModel):
    """The record of a lease; it carries its own digest, because a flipped bit would make a live holder a dead one."""

    model_config = ConfigDict(extra="forbid")

    holder: str
    pid: int
    host: str
    since: str
    machine: str = ""
    """This boot of this machine and its space of process ids; empty where there is no /proc."""
    started: int = 0
    """When the process started, in clock ticks since the boot: tells it from a later one of the same id."""
    fence: int = 0
    token: str = ""
    """Unlike that of every other attempt to hold the lease."""
    beat: int = 0
    released: bool = False
    seal: str = ""
    """Digest of the rest."""

    @classmethod
    def here(cls, holder: str, fence: int = 0) -> Holder:
        """Return the record of this process."""
        pid, since = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
        process = {"pid": pid, "started": _started(pid) or 0, "host": socket.gethostname(), "machine": machine()}
        return cls(holder=holder, since=since, fence=fence, **process)

    @classmethod
    def parse(cls, text: str | bytes) -> Holder | None:
        """Return the record in `text`, or None if it holds none (its writer was killed, or a bit flipped)."""
        try:
            record = cls.model_validate_json(text)
        except ValidationError:
            return None
        return record if record.seal in ("", record._digest()) else None  # earlier versions wrote none

    def text(self) -> str:
        """Return the document that is stored."""
        return self.model_copy(update={"seal": self._digest()}).model_dump_json()

    def _digest(self) -> str:
        return digest_json(self.model_dump(exclude={"seal"}))

    def alive(self) -> bool | None:
        """Return whether the process lives, or None if it is one of another machine."""
        if not self.machine or self.machine != machine():
            return None
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.holder} (process {self.pid} on {self.host} since {self.since})"


@cache
def machine() -> str:
    """Return a name of this boot of this machine and of its process ids, or "" if the system tells none."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return when a live process started, in clock ticks since the boot; None if it is gone or to be reaped."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


# Leases on an object store: one object per holder, numbered by fence, rewritten with every beat.
#
# A store knows no processes, so life is shown by beats, and death is concluded by a competitor that looked 15 times
# within 30 s and never saw a new one. Only looks that were answered count, and no clocks are compared: a store that
# was away for a minute takes no lease from anybody. The newcomer creates the next fence; a holder that wakes up
# later finds it. Some servers let two creators win (OpenStack Swift: 1 to 4 of 16 racing writers), so what is there
# a moment later decides. What this gives up: a dead holder on another machine costs 30 s, and between `check` and a
# commit a process can still be stopped, which is why a commit creates its manifest exclusively too.

State = Literal["free", "held", "unsure"]
TRIES = 5


class LeaseObservation:
    """What one competitor has seen of a lease."""

    def __init__(self, root: Root, name: str, timing: LeaseTiming) -> None:
        self.root, self.timing, self.name = root, timing, name
        self.place = ("leases", *name.split("/"))
        self.holder: Holder | None = None
        self.top = 0
        """The highest fence seen."""
        self.looks = 0
        """In which the same holder showed the same beat."""
        self.beaten = False

    def look(self) -> State:
        """Look once more and return what is known now. Raises OSError."""
        before, self.holder = self.holder, self._newest()
        if self.holder is None or self.holder.released:
            return "free"
        if (alive := self.holder.alive()) is False:
            return "free"
        if before is None or (before.fence, before.beat) == (self.holder.fence, self.holder.beat):
            self.looks += 1
        else:
            self.looks, self.beaten = 0, True
        if self.looks > self.timing.silence_s / self.timing.poll_s:
            return "free"
        return "held" if alive or self.beaten else "unsure"

    def file(self, fence: int) -> tuple[str, ...]:
        return (*self.place, f"{fence}.json")

    def fences(self) -> list[int]:
        """Return the fences that are there, in order."""
        found = (name.removesuffix(".json") for name in self.root.names(*self.place))
        return sorted(int(name) for name in found if name.isdigit())

    def record(self, fence: int) -> Holder | None:
        """Return the record of a holder, None if it is gone; a garbled one is read again, bits flip on the way."""
        for _ in range(TRIES):
            text = self.root.read(*self.file(fence))
            if text is None or (found := Holder.parse(text)) is not None:
                return None if text is None else found
        return None

    def _newest(self) -> Holder | None:
        for _ in range(TRIES):
            fences = self.fences()
            if not fences:
                return None
            self.top = fences[-1]
            if (found := self.record(self.top)) is not None or self.root.read(*self.file(self.top)) is not None:
                return found
        raise OSError(f"{self.root.join(*self.place)}: the objects of the lease vanish as fast as they are listed")


def watch_all(watches: list[LeaseObservation]) -> dict[str, str]:
    """Watch leases until it is known of each whether it is held; return the holders of those that are."""
    held: dict[str, str] = {}
    while watches:
        states = [(watch, watch.look()) for watch in watches]
        held |= {watch.name: str(watch.holder) for watch, state in states if state == "held"}
        watches = [watch for watch, state in states if state == "unsure"]
        if watches:
            time.sleep(watches[0].timing.poll_s)
    return held


class BeatLease:
    """A lease on an object store; beats while it is held."""

    def __init__(
        self, root: Root, name: str, record: Holder, timing: LeaseTiming, lost: Callable[[], None] | None
    ) -> None:
        self.watch, self.timing, self.on_loss = LeaseObservation(root, name, timing), timing, lost
        self.record = record.model_copy(update={"token": uuid.uuid4().hex})
        self.root, self.place = root, root.join(*self.watch.place)
        self._ended, self._thread = Event(), Thread(target=self._beat, name=f"lease {name}", daemon=True)

    @property
    def fence(self) -> int:
        return self.record.fence

    def acquire(self, wait: Callable[[str], None] | None) -> None:
        """Take the lease, and over from a dead holder. Raises LeaseHeld if one lives and there is no `wait`."""
        told = False
        while (state := self._try()) != "free":
            if wait is None and state == "held":
                raise LeaseHeld(f"{self.root.join(self.watch.name)} is used by {self.watch.holder}")
            if wait is not None and not told:
                wait(str(self.watch.holder))
                told = True
            time.sleep(self.timing.poll_s)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if a higher fence is there, or another's record under ours; OSError if nobody answers."""
        fences = self.watch.fences()
        if fences and fences[-1] > self.fence:
            raise LeaseLost(f"lease {self.place}: {self._newer(fences[-1])} took over (fence {fences[-1]})")
        found = self.watch.record(self.fence)
        if found is None or found.token != self.record.token:
            raise LeaseLost(f"lease {self.place}: {found or 'somebody who is gone'} took over (fence {self.fence})")

    def _newer(self, fence: int) -> str:
        return str(self.watch.record(fence) or "another process")

    def _try(self) -> State:
        """Take the lease if it is free and return "free"; else return what is known of its holder."""
        if (state := self.watch.look()) != "free" or self._create():
            return state
        self.watch.look()
        return "held"  # whoever was faster lives

    def _create(self) -> bool:
        """Try to become the next holder; return whether we are."""
        self.record = self.record.model_copy(update={"fence": self.watch.top + 1})
        data, file = self._bytes(), self.watch.file(self.fence)
        if not self.root.create(data, *file):
            return False
        time.sleep(self.timing.settle_s)
        found = self.watch.record(self.fence)
        if found is None or found.token != self.record.token:
            return False
        for fence in self.watch.fences():
            if fence < self.fence:
                with suppress(OSError):
                    self.root.remove(*self.watch.file(fence))
        return True

    def _beat(self) -> None:
        while not self._ended.wait(self.timing.beat_s):
            with suppress(OSError):  # the store is away: the next beat tries again
                try:
                    self.check()
                except LeaseLost:
                    if self.on_loss is not None:
                        self.on_loss()
                    return
                self._write(beat=self.record.beat + 1)

    def _write(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        self.root.write(self._bytes(), *self.watch.file(self.fence))

    def _bytes(self) -> bytes:
        return self.record.text().encode()

    def __enter__(self) -> BeatLease:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease, unless it was lost. A store that does not answer frees it by silence."""
        if self._thread.ident is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError, LeaseLost):
            self.check()
            self._write(released=True)


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
    timing: LeaseTiming = LeaseTiming(),
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


def holders(root: Root, names: list[str], timing: LeaseTiming = LeaseTiming()) -> dict[str, str]:
    """Return which of the leases `names` are held, and by whom.

    At once on a local root. On a remote one a holder of another machine is believed alive when its beat changes, so
    this takes up to `timing.beat_s`, and `timing.silence_s` if one of them is dead.
    """
    if not root.is_local:
        return watch_all([LeaseObservation(root, name, timing) for name in names])
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
