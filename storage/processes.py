"""What the operating system gives processes that belong together: an end with the parent, free ports to meet on, a name
of the boot that they share, processors, and the place of their modules.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that started it ends, even by SIGKILL.

    Only Linux can; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def processors() -> int:
    """Return how many processors this process may use; where the system does not tell, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fix_import_path() -> None:
    """Have every Python that is started from here on import this code, and nothing from the folder in which it starts.

    `python -m` looks there first, and so does an empty entry of PYTHONPATH: `storage.py` of a user would pass for ours.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    ours = Path(__file__).resolve().parent.parent
    installed = ours.name in ("site-packages", "dist-packages")  # found anyway, and after the standard library
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, ["" if installed else str(ours), *given]))


def boot_id() -> str:
    """Return what differs from boot to boot of this machine. Raises OSError where there is no /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def free_ports(count: int) -> list[int]:
    """Return different ports of loopback that nothing listens on now; somebody else may take one before it is used."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def free_port() -> int:
    """Return a port of loopback that nothing listens on now."""
    return free_ports(1)[0]


# Several files at the same time, and none after the first that failed.
#
# A pool's map goes on with what is queued while its caller learns of an error, so a server that hangs would be
# waited for once more than the deadline says.
