"""Processes and threads: exit with the parent, names that tell whether one lives, import path, ports, memory, work."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil

THREADS = 4
"""Files read at the same time: hashing releases the GIL, and a disk is faster with several requests."""
READERS = 16
"""Small documents read at the same time: each is one request that waits for the network."""
PR_SET_PDEATHSIG = 1
PACKAGE_FOLDER = Path(__file__).absolute().parents[1]
"""The folder of the package herd: a checkout with any name, or `herd` in site-packages."""

T = TypeVar("T")
R = TypeVar("R")


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that started it ends, even by SIGKILL.

    Linux only; a no-op elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


COMMAND = threading.Event()
"""Set in a process that ends with what it does: a command, or a flow run of a worker; not in a notebook."""


def exit_within(seconds: float, say: Callable[[], object]) -> None:
    """End a process of COMMAND after `seconds`, as after SIGTERM, unless it has ended before; `say` is called then."""

    def leave() -> None:
        time.sleep(max(seconds, 0.0))
        say()
        os._exit(128 + signal.SIGTERM)

    if COMMAND.is_set() or "PREFECT__FLOW_RUN_ID" in os.environ:
        threading.Thread(target=leave, name="exit", daemon=True).start()


def processors() -> int:
    """Return the number of CPUs this process may use, or of all CPUs where the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fix_import_path() -> None:
    """Make child Pythons import nothing from their current directory; they import herd as this process did.

    `python -m` and an empty entry in PYTHONPATH search it first: a user's `herd.py` or `torch.py` would shadow ours.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def memory_kills(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this one's control groups the kernel has ended because memory ran out.

    0 where control groups do not count them.
    """
    kills = 0
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            name = "memory.oom_control" if controllers else "memory.events"
            with suppress(OSError):
                events = (mount / controllers / path.lstrip("/") / name).read_text().splitlines()
                kills += sum(int(event.split()[1]) for event in events if event.startswith("oom_kill "))
    return kills


def boot_id() -> str:
    """Return the id of this boot of the machine. Raises OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def machine_id() -> str:
    """Return an id of this boot and its process-id namespace; empty without /proc."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """Return the start time of a live process, in clock ticks since boot; None if it is dead or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else int(stat[19])


def process_name() -> str:
    """Return host, pid, start time and machine of this process: `vm-4711-1839-1a2b3c4d`, for `process_alive`."""
    pid = os.getpid()
    return f"{socket.gethostname()}-{pid}-{start_ticks(pid) or 0}-{_machine_digest()}"


def process_alive(name: str) -> bool | None:
    """Return whether the process with a name of `process_name` lives; None for another machine or another name."""
    match = re.fullmatch(r".*-(\d+)-(\d+)-([0-9a-f]{8})", name)
    if match is None or match[3] != _machine_digest() or not machine_id():
        return None
    return start_ticks(int(match[1])) == int(match[2])


def _machine_digest() -> str:
    return hashlib.sha256(machine_id().encode()).hexdigest()[:8]


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


def parallel_map(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return the result of `work` for each item, in order. Raises the first error once all threads have ended.

    After an error no queued item is started: `pool.map` would, and a server that hangs would cost its deadline twice.
    """
    items = list(items)
    if len(items) == 1:  # a thread takes longer than a small file
        return [work(items[0])]
    failed = threading.Event()

    def guarded(item: T) -> R:
        if failed.is_set():
            raise InterruptedError("another file failed first")
        try:
            return work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(guarded, item) for item in items]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, InterruptedError)), errors[0])
    return [future.result() for future in futures]


# Peak memory of a run: proportional set size of this process and its descendants, so shared pages count once.

INTERVAL_S = 2.0
GROWN = 1.01
"""The kernel walks all pages for the proportional size, with the memory map locked (4 % of a core at this interval).
So it is read only after the resident size, which is cheap to read, has grown by this factor."""


class PeakMemory:
    """Highest memory seen so far, in GiB."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._resident = 0

    def sample(self) -> None:
        process = psutil.Process()
        processes = [process, *process.children(recursive=True)]
        resident = sum(_bytes(process.memory_info) for process in processes)
        if resident > GROWN * self._resident:
            self._resident = resident
            self.gib = max(self.gib, sum(_bytes(process.memory_full_info) for process in processes) / 2**30)


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Sample the memory of the process tree every two seconds while the block runs."""
    peak = PeakMemory()

    def watch(stop: threading.Event) -> None:
        while not stop.is_set():
            peak.sample()
            stop.wait(INTERVAL_S)

    with in_background(watch):
        yield peak


@contextmanager
def in_background(watch: Callable[[threading.Event], object]) -> Iterator[None]:
    """Call `watch(stop)` in a thread while the block runs; `stop` is set at its end."""
    stop = threading.Event()
    thread = threading.Thread(target=watch, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _bytes(read: Callable[[], Any]) -> int:
    """Return the proportional set size if `read` returns it, else the resident size; 0 for a process that ended."""
    try:
        info = read()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0
