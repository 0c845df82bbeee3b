"""Peak memory of a run: this process and everything it started.

Proportional set size is summed over the process tree, so shared pages (libraries, forked interpreters) count once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

INTERVAL_S = 2.0


class Peak:
    """Highest memory seen so far, in GiB."""

    def __init__(self) -> None:
        self.gib = 0.0

    def sample(self) -> None:
        me = psutil.Process()
        total = sum(_proportional(process) for process in [me, *me.children(recursive=True)])
        self.gib = max(self.gib, total / 2**30)


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Sample the process tree's memory every two seconds while the block runs."""
    peak, stop = Peak(), threading.Event()

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


def _proportional(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0
