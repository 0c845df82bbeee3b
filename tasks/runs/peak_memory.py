"""Peak memory of a run: this process and everything it started.

The proportional set size is summed over the process tree, so shared pages count once. The kernel walks every page for
it, with the trainer's memory map locked (4 % of a core at one look in two seconds), so it is read only after the
resident size, which costs nothing, has grown.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

INTERVAL_S = 2.0
GROWN = 1.01
"""How much larger than at the last look the resident size must be for another one."""


class PeakMemory:
    """Highest memory seen so far, in GiB."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._resident = 0

    def sample(self) -> None:
        me = psutil.Process()
        processes = [me, *me.children(recursive=True)]
        resident = sum(_bytes(process.memory_info) for process in processes)
        if resident > GROWN * self._resident:
            self._resident = resident
            self.gib = max(self.gib, sum(_bytes(process.memory_full_info) for process in processes) / 2**30)


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Sample the process tree's memory every two seconds while the block runs."""
    peak, stop = PeakMemory(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak.sample()
            stop.wait(INTERVAL_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def give_back() -> None:
    """Return to the system what a step used: else the C library keeps it while the trainer needs it."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _bytes(look: Callable[[], Any]) -> int:
    """Return the proportional set size, where `look` says it, else the resident size; 0 for a process that is gone."""
    try:
        info = look()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0
