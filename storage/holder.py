"""Who holds a lease, written so that a person and a competitor can read it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.digests import digest_json
from storage.processes import boot_id


class LeaseHeld(RuntimeError):
    """Another live process holds the lease."""


class LeaseLost(RuntimeError):
    """Another process took the lease over; nothing may be committed under it any more."""


@dataclass(frozen=True)
class Timing:
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
