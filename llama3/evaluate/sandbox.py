"""Run programs that a model wrote, which nobody has read: do they pass their tests, and can they do no harm?

Each program runs by itself in Linux namespaces (`sandbox_runner`): no network; no environment; a file tree of the
interpreter and the system's libraries, read-only, so that no file of the user can be read; a home of 16 MiB in memory;
limits on processor time, memory, file size, open files and processes; a process tree that ends with the program. It
has the standard library only. Its output is thrown away but for the last line of stderr, which says why it failed.
To pass, it must come to its last line and exit with 0: one that calls `sys.exit(0)` before its tests has not passed.
That is proof against accident, not intent: a program can read its own file and pretend.

What this gives up. No filter of system calls: a hole in the kernel is a way out; run the evaluation in a virtual
machine where that matters. Memory is limited by process, so the most is PROCESSES times MEMORY. Linux 5.12 or later.
Where namespaces are forbidden (many containers), programs are refused; `network="allowed"` runs them with limits
alone, without namespaces: they reach the network and every file of the user, and a program of root may start any
number of processes. That is for machines that hold nothing: a container for this purpose.

Measured here: all 164 reference solutions of HumanEval pass; the hostile programs of the tests are contained.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

MEMORY = 2**30
"""Bytes of address space of one process."""
FILE = 2**20
"""Bytes of the largest file, and of what is written to stderr."""
FILES = 64
"""Open files of one process."""
PROCESSES = 16
"""Processes and threads of one program."""
PATIENCE = 3
"""Seconds on the clock for each second of processor time, before a program is stopped."""
RUNNER = Path(__file__).with_name("sandbox_runner.py")
LIMITS = {"AS": MEMORY, "FSIZE": FILE, "NOFILE": FILES, "NPROC": PROCESSES, "CORE": 0}
REASON = 200
"""Most characters of a reason."""

Network = Literal["none", "allowed"]


@dataclass(frozen=True)
class Verdict:
    """How one program ended."""

    passed: bool
    reason: str
    """`passed`, or why not: `AssertionError: ...`, `more than 5 s of processor time`, ..."""


def run_programs(
    programs: Sequence[str], seconds: float = 5.0, parallel: int = 2, network: Network = "none"
) -> list[Verdict]:
    """Return how each of `programs`, whole Python sources, ends, in their order; `parallel` run at once.

    `seconds` is the processor time of each, rounded to whole seconds, at least 1. Raises ValueError before any runs if
    this machine permits no namespaces and `network` is `none`.
    """
    if seconds <= 0 or parallel < 1:
        raise ValueError(f"seconds {seconds:g} must be above 0 and parallel {parallel} at least 1")
    if network == "none":
        check_contained()
    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(partial(_verdict, seconds=seconds, namespaces=network == "none"), programs))


def check_contained() -> None:
    """Raise ValueError if this machine permits no namespaces."""
    if obstacle := why_not_contained():
        raise ValueError(
            f"code: this machine cannot contain programs that a model wrote ({obstacle}); leave the code tasks out, "
            "permit user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            'kernel.apparmor_restrict_unprivileged_userns), or pass network="allowed" on a machine that holds nothing'
        )


@cache
def why_not_contained() -> str:
    """Return what keeps this machine from containing a program, or nothing where it can. Tried once in a process."""
    if sys.platform != "linux":
        return f"it runs {sys.platform}, not Linux"
    verdict = _verdict("", seconds=5.0, namespaces=True)
    return "" if verdict.passed else verdict.reason


def _verdict(program: str, *, seconds: float, namespaces: bool) -> Verdict:
    wall = PATIENCE * seconds
    limits = {f"RLIMIT_{name}": most for name, most in LIMITS.items()}
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        task = {"folder": folder, "seconds": seconds, "wall": wall, "namespaces": namespaces, "limits": limits}
        ended = subprocess.run(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(RUNNER), json.dumps(task)],
            input=program.encode("utf-8", "replace"),
            capture_output=True,
            env={},
            start_new_session=True,
            check=False,
        )
    if ended.returncode:
        return Verdict(False, _last_line(ended.stderr.decode(errors="replace")))
    return _judge(json.loads(ended.stdout), seconds)


def _judge(ended: dict[str, Any], seconds: float) -> Verdict:
    status = ended["status"]
    if ended["timeout"]:
        return Verdict(False, f"more than {PATIENCE * seconds:g} s on the clock")
    if status == 0 and ended["finished"]:
        return Verdict(True, "passed")
    if status == 0:
        return Verdict(False, "it ended before its last line")
    # The kernel stops by its clock's ticks, which on a busy machine run ahead of the time that it counts.
    if -status in (signal.SIGKILL, signal.SIGXCPU) and ended["cpu"] >= 0.5 * max(1, round(seconds)):
        return Verdict(False, f"more than {max(1, round(seconds))} s of processor time")
    if status < 0:
        return Verdict(False, f"ended by signal {-status}")
    return Verdict(False, _last_line(ended["errors"]) or f"exit code {status}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:REASON] if lines else ""
