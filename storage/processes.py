"""Operating-system helpers: exit with the parent, CPU count, import path, boot id, free ports."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that started it ends, even by SIGKILL.

    Linux only; a no-op elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def processors() -> int:
    """Return the number of CPUs this process may use, or of all CPUs where the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fix_import_path() -> None:
    """Make child Pythons import this code, and nothing from their current directory.

    `python -m` and an empty entry in PYTHONPATH search it first: a user's `storage.py` would shadow ours.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    ours = Path(__file__).resolve().parent.parent
    installed = ours.name in ("site-packages", "dist-packages")  # on the path already, after the standard library
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, ["" if installed else str(ours), *given]))


def boot_id() -> str:
    """Return the id of this boot of the machine. Raises OSError where there is no /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def free_ports(count: int) -> list[int]:
    """Return distinct free loopback ports; another process may take one before it is used."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def free_port() -> int:
    """Return a free loopback port."""
    return free_ports(1)[0]


def peak_rss() -> int:
    """Return the largest resident size of this process so far, in bytes.

    From /proc, since `ru_maxrss` starts with the size of the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
