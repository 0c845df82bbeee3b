"""Parallel work ends at the first error."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from herd.storage.processes import parallel_map


def test_after_the_first_error_nothing_new_is_begun() -> None:
    begun, gate = [], threading.Barrier(2)

    def work(item: int) -> int:
        begun.append(item)
        gate.wait(10)
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match=r"item [01]"):
        parallel_map(work, range(100), 2)
    assert sorted(begun) == [0, 1]
    assert parallel_map(str, range(20), 3) == [str(item) for item in range(20)]


@pytest.mark.parametrize(("head", "status"), [("COMMAND.set()", 143), ("", 0)], ids=["a command", "a notebook"])
def test_only_a_command_ends_when_the_time_after_a_stop_is_over(head: str, status: int) -> None:
    program = f"""
import time
from herd.storage.processes import COMMAND, exit_within
{head}
exit_within(0.1, lambda: print("too slow", flush=True))
time.sleep(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "too slow\n" if status else "")
