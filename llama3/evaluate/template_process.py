"""Templates of a task filled in by a process of its own, with limits on processor time, memory and size.

A task file may come from elsewhere. Jinja's sandbox keeps templates from the objects of this process, but not from
loops, powers and regular expressions that never end, some inside C code that no signal handler interrupts. So a process
with the kernel's limits reads the rows and fills the templates in; it is started once and serves all tasks.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

from llama3.evaluate.data_rows import parse_rows
from llama3.evaluate.task_file import TaskFile
from llama3.evaluate.templates import Question, Templates

SECONDS = 10
"""Processor time for one row, beyond a second for each MB of its file."""
MEMORY = 2 * 2**30
"""Bytes of address space, beyond what the interpreter has and BYTES_A_BYTE for each byte of the file."""
BYTES_A_BYTE = 32
QUESTION = 2**24
"""Characters of one question, beyond four for each byte of the file."""
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Variables that the process gets: no key of a store."""


class Job(NamedTuple):
    """What the process is told; the bytes of the file follow."""

    task: dict[str, Any]
    uri: str
    """Of the data file; empty: only the templates are to be compiled."""
    size: int
    most: int | None
    seconds: int


def check_templates(file: TaskFile) -> None:
    """Raise ValueError naming the field that is no template, or that takes too long to compile."""
    for _ in _answers(file, "", b"", None):
        pass


def fill(file: TaskFile, uri: str, data: bytes, most: int | None) -> list[Question]:
    """Return the questions of the rows, or of the first `most`, of the data file `uri`, whose bytes are `data`.

    Raises ValueError naming file, row, field and remedy.
    """
    return [_question(line) for line in _answers(file, uri, data, most)]


def _question(line: list[Any]) -> Question:
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in line]
    return Question(*values)


class _Worker:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama3.evaluate.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,
        )

    def end(self) -> int:
        """Let the process end, if this one started it; return its exit status."""
        if self.owner != os.getpid():
            return 0
        with suppress(BrokenPipeError):
            self.process.communicate()
        return self.process.wait()


_workers: list[_Worker] = []
"""None or one."""
_lock = Lock()


def _worker() -> _Worker:
    if _workers and _workers[0].owner != os.getpid():  # this process was forked off the one that started it
        _workers.clear()
    if not _workers:
        _workers.append(_Worker())
        atexit.register(_end)
    return _workers[0]


def _end() -> int:
    return _workers.pop().end() if _workers else 0


def _answers(file: TaskFile, uri: str, data: bytes, most: int | None) -> Iterator[list[Any]]:
    """Yield what the process says to a job, a line for each row; it is started anew after a job that did not end."""
    job = Job(file.model_dump(mode="json", exclude_unset=True), uri, len(data), most, SECONDS)
    count, ended, alive = 0, False, True
    with _lock:
        worker = _worker()
        assert worker.process.stdin is not None
        assert worker.process.stdout is not None
        try:
            worker.process.stdin.write(json.dumps(job).encode() + b"\n" + data)
            worker.process.stdin.flush()
            for line in worker.process.stdout:
                answer = json.loads(line)
                if isinstance(answer, list):
                    count += 1
                    yield answer
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
                worker.process.kill()
            status = 0 if ended else _end()
    place = f"{uri}: row {count + 1}: its templates take" if uri else f"{file.name}: its templates take"
    if status == -signal.SIGXCPU:
        raise ValueError(f"{place} more than {SECONDS} s of processor time; write ones that end sooner")
    raise RuntimeError(f"{file.name}: the process that fills in templates ended with {status}; give the command again")


def main(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Do the jobs that come, one after the other."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while header := jobs.readline():
        job = Job(*json.loads(header))
        data = jobs.read(job.size)
        error = ""
        try:
            _limit(job)
            for question in _filled(job, data):
                answers.write(json.dumps(astuple(question)).encode() + b"\n")
                answers.flush()
                _limit(job)
        except (ValueError, RecursionError) as fault:
            error = str(fault)
        except MemoryError:
            error = (
                f"{job.uri or job.task['name']}: its templates take more than {MEMORY >> 30} GiB; write smaller texts"
            )
        answers.write(json.dumps({"error": error}).encode() + b"\n")
        answers.flush()


def _filled(job: Job, data: bytes) -> Iterator[Question]:
    file = TaskFile.model_validate(job.task)
    templates = Templates(file)
    if not job.uri:
        return
    for row in parse_rows(job.uri, data, file.split_at, job.most):
        question = templates.question(row)
        size = sum(map(len, (*question.contexts, *question.continuations, *question.golds, question.preamble)))
        if size + len(question.shown) + len(question.tests) + len(question.program) > QUESTION + 4 * job.size:
            raise ValueError(f"{row.place}: its templates give more than {QUESTION:,} characters; write smaller texts")
        yield question


def _limit(job: Job) -> None:
    """Allow the next row its processor time, and this process its memory."""
    seconds = int(time.process_time()) + job.seconds + job.size // 10**6 + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":  # others count libraries otherwise
        resource.setrlimit(resource.RLIMIT_AS, (_OWN + MEMORY + BYTES_A_BYTE * job.size, resource.RLIM_INFINITY))


def _own() -> int:
    """Return the bytes of address space that the interpreter and its libraries have."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


_OWN = _own() if __name__ == "__main__" and sys.platform == "linux" else 0

if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
