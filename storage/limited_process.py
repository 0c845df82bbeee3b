"""Run untrusted work in a separate process with limits by the kernel on processor time and memory.

Loops, powers and regular expressions that never end may be inside C code, which no signal handler interrupts. One
process is started on first use and serves all work, which is a generator of a module that it imports by name.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

MEMORY = 2 * 2**30
"""Bytes of address space, plus that of the interpreter and BYTES_A_BYTE for each byte of the data."""
BYTES_A_BYTE = 32
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Environment variables of the process: no key of a store."""


class LimitedJob(NamedTuple):
    """The header of a job for the process; its data follow."""

    module: str
    """Its function `run_limited(job, data)` yields JSON values."""
    job: dict[str, Any]
    size: int
    seconds: int
    """Processor time for each value, plus a second for each MB of data."""
    subject: str
    """What takes too much, for errors: `task.yaml: its templates`."""


def limited_values(
    module: str, job: dict[str, Any], data: bytes, seconds: int, subject: str, place: Callable[[int], str]
) -> Iterator[Any]:
    """Yield what `run_limited(job, data)` of `module` yields in the process.

    `place` names the work on the value of a number in an error. Raises the ValueError that it raises, and one if it
    exceeds a limit; then a new process serves the next job.
    """
    header = LimitedJob(module, job, len(data), seconds, subject)
    count, ended, alive = 0, False, True
    with _lock:
        worker = _worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(header).encode() + b"\n" + data)
            worker.stdin.flush()
            for line in worker.stdout:
                answer = json.loads(line)
                if "value" in answer:
                    count += 1
                    yield answer["value"]
                    continue
                ended = True
                if answer["error"]:
                    raise ValueError(answer["error"])
                return
            alive = False
        except BrokenPipeError:
            alive = False
        finally:
            if alive and not ended:  # this process was interrupted
                worker.kill()
            status = 0 if ended else _stop_worker()
    if status == -signal.SIGXCPU:
        raise ValueError(f"{place(count)} take more than {seconds} s of processor time; write ones that end sooner")
    raise RuntimeError(f"{subject}: the process that runs them ended with {status}; give the command again")


_workers: list[tuple[int, subprocess.Popen[bytes]]] = []
"""The process with the id of the one that started it; none or one."""
_lock = Lock()


def _worker() -> subprocess.Popen[bytes]:
    """Return the process; start it if there is none."""
    if _workers and _workers[0][0] != os.getpid():  # this process was forked from the one that started the worker
        _workers.clear()
    if not _workers:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "herd.storage.limited_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        _workers.append((os.getpid(), worker))
        atexit.register(_stop_worker)
    return _workers[0][1]


def _stop_worker() -> int:
    """End the process, if there is one and this one started it; return its exit status."""
    owner, worker = _workers.pop() if _workers else (0, None)
    if worker is None or owner != os.getpid():
        return 0
    with suppress(BrokenPipeError):
        worker.communicate()
    return worker.wait()


# The side of the process.


def main(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Run jobs one after the other, until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known: dict[str, Any] = {}
    base = 0
    while header := jobs.readline():
        job = LimitedJob(*json.loads(header))
        data = jobs.read(job.size)
        if job.module not in known:
            _set_memory(resource.RLIM_INFINITY)
            known[job.module] = import_module(job.module).run_limited
            if sys.platform == "linux":  # other systems count libraries differently
                base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        error = ""
        try:
            _set_limits(job, base)
            for value in known[job.module](job.job, data):
                answers.write(json.dumps({"value": value}).encode() + b"\n")
                answers.flush()
                _set_limits(job, base)
        except (ValueError, RecursionError) as fault:
            error = str(fault)
        except MemoryError:
            error = f"{job.subject} take more than {MEMORY >> 30} GiB; write smaller texts"
        answers.write(json.dumps({"error": error}).encode() + b"\n")
        answers.flush()


def _set_limits(job: LimitedJob, base: int) -> None:
    """Set the limits on processor time, for the next value, and on the memory of this process."""
    seconds = int(time.process_time()) + job.seconds + job.size // 10**6 + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if base:
        _set_memory(base + MEMORY + BYTES_A_BYTE * job.size)


def _set_memory(limit: int) -> None:
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
