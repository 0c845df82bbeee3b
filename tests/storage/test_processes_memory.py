"""The peak counts what a process starts, and looks closely only when there is more to see."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from herd.storage import processes as memory
from herd.storage.processes import PeakMemory, peak_memory

MIB = 2**20
HOARD = "import sys, time; held = b'x' * ({} << 20); print('there', flush=True); time.sleep(60)"


@contextmanager
def hoarder() -> Iterator[None]:
    """A child that holds 300 MiB."""
    with subprocess.Popen([sys.executable, "-c", HOARD.format(300)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        try:
            yield
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait 20 s at most; whether it came true is the test's to say."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.slow
def test_what_a_child_holds_counts_and_stays_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "INTERVAL_S", 0.05)
    with peak_memory() as peak:
        wait_until(lambda: peak.gib > 0)
        before = peak.gib
        with hoarder():
            wait_until(lambda: peak.gib >= before + 0.25)
        highest = peak.gib
        time.sleep(0.2)
    assert 0 < before < highest - 0.25
    assert peak.gib == highest


@pytest.mark.slow
def test_pages_are_walked_only_when_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []
    walk = psutil.Process.memory_full_info
    monkeypatch.setattr(psutil.Process, "memory_full_info", lambda self: walked.append(self.pid) or walk(self))
    peak = PeakMemory()
    with hoarder():
        peak.sample()
        once = len(walked)
        assert once >= 2
        for _ in range(20):
            peak.sample()
        assert len(walked) == once
        grown = b"x" * (200 * MIB)
        peak.sample()
        assert len(walked) > once
    del grown
