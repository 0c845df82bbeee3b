"""Leases: at most one live process may write a folder.

An flock is held as long as the process lives, so a killed process never leaves a stale lease and nobody has to guess
from a time-out. What this gives up: a network file system must support flock across hosts (NFSv4 does).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path


class LeaseHeld(RuntimeError):
    """Another live process holds the lease."""


@contextmanager
def lease(folder: Path, holder: str) -> Iterator[None]:
    """Hold `folder` for `holder` (a run's name) until the block ends.

    Raises LeaseHeld naming the live holder, and OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lease").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise LeaseHeld(f"{folder} is used by {_describe(file.read())}") from None
        record = {"holder": holder, "pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        file.truncate(0)
        file.write(json.dumps(record))
        file.flush()
        yield


def _describe(text: str) -> str:
    try:
        record = json.loads(text)
    except ValueError:
        return "another process"
    return f"{record['holder']} (process {record['pid']} on {record['host']} since {record['since']})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
