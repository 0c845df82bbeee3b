"""Run programs that a model wrote, which nobody has read: do they pass their tests, and can they do no harm?

Each is one process in Linux namespaces (`sandbox_runner`), behind a filter of system calls (`syscalls`), with limits
on processor time, memory, files and threads. It has the standard library, a home of 16 MiB in memory, no network and no
file of the user. To pass it must come to its last line and exit with 0. What holds and what does not is said in
docs/explanations/sandbox.md. Linux 5.12 or later, x86_64 or aarch64; elsewhere programs are refused.
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

from llama3.evaluate.syscalls import filter_of

MEMORY = 2**30
"""Bytes of address space of a program, which is one process."""
FILE = 2**20
"""Bytes of the largest file, and of what is written to stderr."""
FILES = 64
"""Open files of a program."""
THREADS = 16
"""Threads of a program, the first one included."""
ASLEEP = 3
"""Seconds that a program may sleep for each second of processor time. Waiting for a processor is no sleep."""
WALL = (12, 60)
"""Seconds on the clock for each second of processor time: of the first try, and of the second, alone."""
RUNNER = Path(__file__).with_name("sandbox_runner.py")
LIMITS = {"AS": MEMORY, "FSIZE": FILE, "NOFILE": FILES, "NPROC": THREADS, "CORE": 0, "MSGQUEUE": 0}
REASON = 200
"""Most characters of a reason."""

Network = Literal["none", "allowed"]


@dataclass(frozen=True)
class Verdict:
    """How one program ended."""

    passed: bool
    reason: str
    """`passed`, or why not: `AssertionError: ...`, `more than 5 s of processor time`, ..."""
    judged: bool = True
    """False where this machine, and not the program, is why it did not pass: nothing is known about it then."""


def run_programs(
    programs: Sequence[str], seconds: float = 5.0, parallel: int = 2, network: Network = "none"
) -> list[Verdict]:
    """Return how each of `programs`, whole Python sources, ends, in their order; `parallel` run at once.

    `seconds` is the processor time of each, however long that takes on a busy machine. What could not be judged is run
    once more, alone. Raises ValueError before any runs if this machine cannot contain them and `network` is `none`.
    """
    if seconds <= 0 or parallel < 1:
        raise ValueError(f"seconds {seconds:g} must be above 0 and parallel {parallel} at least 1")
    if network == "none":
        check_contained()
    run = partial(_verdict, seconds=seconds, namespaces=network == "none")
    with ThreadPoolExecutor(parallel) as pool:
        verdicts = list(pool.map(partial(run, wall=WALL[0]), programs))
    pairs = zip(programs, verdicts, strict=True)
    return [verdict if verdict.judged else run(program, wall=WALL[1]) for program, verdict in pairs]


class NotContained(ValueError):
    """This machine cannot contain programs that nobody has read."""


def check_contained() -> None:
    """Raise NotContained, with what to do, if this machine cannot contain a program."""
    if obstacle := why_not_contained():
        raise NotContained(
            f"code: this machine cannot contain programs that a model wrote ({obstacle}); evaluate on Linux 5.12 or "
            "later where namespaces are permitted (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a container "
            "--cap-add SYS_ADMIN --security-opt seccomp=unconfined), or leave the code tasks out"
        )


@cache
def why_not_contained() -> str:
    """Return what keeps this machine from containing a program, or nothing where it can. Tried once in a process."""
    if sys.platform != "linux":
        return f"it runs {sys.platform}, not Linux"
    try:
        verdict = _verdict("", seconds=5.0, namespaces=True, wall=WALL[0])
    except ValueError as error:
        return str(error)
    return "" if verdict.passed else verdict.reason


def _verdict(program: str, *, seconds: float, namespaces: bool, wall: float) -> Verdict:
    task = {
        "seconds": seconds,
        "asleep": ASLEEP * seconds,
        "wall": wall * seconds,
        "namespaces": namespaces,
        "limits": {f"RLIMIT_{name}": most for name, most in LIMITS.items()},
        "calls": filter_of(os.uname().machine, network=not namespaces).hex(),
    }
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(RUNNER), json.dumps({"folder": folder, **task})],
            input=program.encode("utf-8", "replace"),
            capture_output=True,
            env={},
            start_new_session=True,
            check=False,
        )
    if ended.returncode:
        fault = _last_line(ended.stderr.decode(errors="replace")) or f"the runner ended with {ended.returncode}"
        return Verdict(False, fault, judged=False)
    return _judge(json.loads(ended.stdout), seconds, namespaces)


def _judge(ended: dict[str, Any], seconds: float, namespaces: bool) -> Verdict:
    status = ended["status"]
    if ended["fault"]:
        return Verdict(False, ended["fault"][:REASON], judged=False)
    if ended["stopped"] == "cpu" or ended["cpu"] > seconds:
        return Verdict(False, f"more than {seconds:g} s of processor time")
    if ended["stopped"] == "asleep":
        return Verdict(False, f"asleep for more than {ASLEEP * seconds:g} s")
    if ended["stopped"] == "wall":
        return Verdict(False, f"{ended['clock']:.0f} s gave it {ended['cpu']:.1f} s of processor time", judged=False)
    if status == 0:
        return Verdict(True, "passed") if ended["finished"] else Verdict(False, "it ended before its last line")
    if status == -signal.SIGKILL and namespaces:  # the first process of a tree cannot send that to itself
        return Verdict(False, "it was killed from outside; is this machine short of memory?", judged=False)
    if status < 0:
        return Verdict(False, f"ended by signal {-status}")
    return Verdict(False, _last_line(ended["errors"]) or f"exit code {status}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:REASON] if lines else ""
