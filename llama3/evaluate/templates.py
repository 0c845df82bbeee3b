"""Fill in the templates of a task, in a separate process with limits on processor time, memory and size.

A task file may be untrusted. jinja2's sandbox keeps templates from the objects of this process, but not from loops,
powers and regular expressions that never end, some inside C code that no signal handler interrupts. So a process with
limits by the kernel reads the rows and fills the templates in; it is started once and serves all tasks.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

import regex
from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from herd.llama3.evaluate.answer_extraction import replace_matches
from herd.llama3.evaluate.task import TASK_KINDS, RenderedRow
from herd.llama3.evaluate.task_yaml import EXPRESSION, TEMPLATE, DataRow, TaskFile, parse_rows

SECONDS = 10
"""Processor time for one row, plus a second for each MB of its file."""
MEMORY = 2 * 2**30
"""Bytes of address space, plus that of the interpreter and BYTES_A_BYTE for each byte of the file."""
BYTES_A_BYTE = 32
QUESTION = 2**24
"""Characters of one question, plus four for each byte of the file."""
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Environment variables of the process: no key of a store."""
_FAULTS = (TemplateError, regex.error, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""Errors that a template raises for unexpected values."""


class Templates:
    """The compiled templates of one task."""

    def __init__(self, file: TaskFile) -> None:
        """Raises ValueError naming the field whose template is invalid."""
        self.file = file
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        environment.filters["regex_replace"] = replace_matches
        self._compiled: dict[str, Callable[..., Any]] = {}
        for field, info in TaskFile.model_fields.items():
            source = getattr(file, field)
            try:
                if TEMPLATE in info.metadata and source:
                    self._compiled[field] = environment.from_string(source).render
                elif EXPRESSION in info.metadata and source:
                    self._compiled[field] = environment.compile_expression(source, undefined_to_none=False)
            except TemplateError as error:
                raise ValueError(f"{file.name}: {field}: {source!r} is not a template ({error.message})") from None
            except MemoryError:
                raise ValueError(f"{file.name}: {field}: {source[:80]!r} takes too much memory") from None

    def question(self, row: DataRow) -> RenderedRow:
        """Return the question of `row`. Raises ValueError naming file, line, field and remedy."""
        file, templates = self.file, _TemplateRow(self._compiled, row)
        question = TASK_KINDS[file.kind].render(templates)
        contexts, continuations = question.contexts, question.continuations
        if not all(text.strip() for text in continuations):
            raise ValueError(f"{row.location}: continuation: is empty; give a text to score, or leave the row out")
        example = ""
        if file.shots.count:
            answers = continuations or (templates.text("answer"),)
            right = (texts[question.gold] if len(texts) > 1 else texts[0] for texts in (contexts, answers))
            example = file.joint.join(right)
        hashed = "\0".join([*contexts, "", *continuations, "", *question.golds, "", question.tests])
        name = hashlib.sha256(hashed.encode()).hexdigest()[:16]
        group, preamble = templates.text("group"), templates.text("preamble")
        return replace(question, id=name, group=group, preamble=preamble, example=example)


@dataclass(frozen=True)
class _TemplateRow:
    """A `TemplateRow`: the compiled templates of a task on one row."""

    compiled: dict[str, Callable[..., Any]]
    row: DataRow

    @property
    def location(self) -> str:
        return self.row.location

    def text(self, field: str, **variables: str) -> str:
        return str(self._value(field, variables)) if field in self.compiled else ""

    def texts(self, field: str) -> tuple[str, ...]:
        value = self._value(field)
        value = list(value) if isinstance(value, Iterator) else value
        if not isinstance(value, list | tuple) or len(value) < 2 or not all(_is_text(item) for item in value):
            raise ValueError(f"{self.location}: {field}: {value!r} must be a list of two or more texts")
        texts = tuple(map(str, value))
        if field == "choices" and (empty := [index for index, text in enumerate(texts) if not text.strip()]):
            raise ValueError(f"{self.location}: choices: {empty[0]} is empty; give a text to score")
        return texts

    def gold_index(self, count: int) -> int:
        gold = self._value("gold")
        if gold is None:
            raise ValueError(f"{self.location}: gold: is missing; give the place of the right one, 0 to {count - 1}")
        if type(gold) is not int or not 0 <= gold < count:
            raise ValueError(
                f"{self.location}: gold: {gold!r} must be the place of the right one, a number from 0 to {count - 1}"
            )
        return gold

    def gold_texts(self) -> tuple[str, ...]:
        value = self._value("gold")
        golds = value if isinstance(value, list | tuple) else [value]
        if not golds or not all(_is_text(gold) and str(gold).strip() for gold in golds):
            raise ValueError(f"{self.location}: gold: {value!r} must be a right answer, or a list of them")
        return tuple(str(gold).strip() for gold in golds)

    def _value(self, field: str, variables: dict[str, str] | None = None) -> Any:
        try:
            value = self.compiled[field]({"row": self.row.fields, **self.row.fields, **(variables or {})})
            return str(value) if isinstance(value, Undefined) else value  # str() of an undefined value raises
        except _FAULTS as error:
            known = ", ".join(map(str, self.row.fields))
            raise ValueError(f"{self.location}: {field}: {error}; the row has {known}") from None
        except (MemoryError, RecursionError) as error:
            raise ValueError(
                f"{self.location}: {field}: takes too much memory ({type(error).__name__}); write a smaller text"
            ) from None


def _is_text(item: object) -> bool:
    return isinstance(item, str | int | float) and not isinstance(item, bool)


# The parent's side: one worker process, started on first use.


class TemplateJob(NamedTuple):
    """The header of a job for the worker; the bytes of the file follow."""

    task: dict[str, Any]
    uri: str
    """Of the data file; empty: only compile the templates."""
    size: int
    most: int | None
    seconds: int


def check_templates(file: TaskFile) -> None:
    """Raise ValueError naming the field whose template is invalid or takes too long to compile."""
    for _ in _worker_results(file, "", b"", None):
        pass


def render_rows(file: TaskFile, uri: str, data: bytes, most: int | None) -> list[RenderedRow]:
    """Return the questions of the rows, or of the first `most`, of the data file `uri`, whose bytes are `data`.

    Raises ValueError naming file, row, field and remedy.
    """
    questions = []
    for answer in _worker_results(file, uri, data, most):
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in answer]
        questions.append(RenderedRow(*values))
    return questions


_workers: list[tuple[int, subprocess.Popen[bytes]]] = []
"""The worker with the id of the process that started it; none or one."""
_lock = Lock()


def _worker() -> subprocess.Popen[bytes]:
    """Return the worker; start it if there is none."""
    if _workers and _workers[0][0] != os.getpid():  # this process was forked from the one that started the worker
        _workers.clear()
    if not _workers:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "herd.llama3.evaluate.templates"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        _workers.append((os.getpid(), worker))
        atexit.register(_stop_worker)
    return _workers[0][1]


def _stop_worker() -> int:
    """End the worker, if there is one and this process started it; return its exit status."""
    owner, worker = _workers.pop() if _workers else (0, None)
    if worker is None or owner != os.getpid():
        return 0
    with suppress(BrokenPipeError):
        worker.communicate()
    return worker.wait()


def _worker_results(file: TaskFile, uri: str, data: bytes, most: int | None) -> Iterator[list[Any]]:
    """Yield the worker's answers to a job, one for each row. The worker is restarted after a job that did not end."""
    job = TemplateJob(file.model_dump(mode="json", exclude_unset=True), uri, len(data), most, SECONDS)
    count, ended, alive = 0, False, True
    with _lock:
        worker = _worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(job).encode() + b"\n" + data)
            worker.stdin.flush()
            for line in worker.stdout:
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
                worker.kill()
            status = 0 if ended else _stop_worker()
    label = f"{uri}: row {count + 1}: its templates take" if uri else f"{file.name}: its templates take"
    if status == -signal.SIGXCPU:
        raise ValueError(f"{label} more than {SECONDS} s of processor time; write ones that end sooner")
    raise RuntimeError(f"{file.name}: the process that fills in templates ended with {status}; give the command again")


# The worker's side.


def main(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Run jobs one after the other, until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while header := jobs.readline():
        job = TemplateJob(*json.loads(header))
        data = jobs.read(job.size)
        error = ""
        try:
            _set_limits(job)
            for question in _filled(job, data):
                answers.write(json.dumps(astuple(question)).encode() + b"\n")
                answers.flush()
                _set_limits(job)
        except (ValueError, RecursionError) as fault:
            error = str(fault)
        except MemoryError:
            error = (
                f"{job.uri or job.task['name']}: its templates take more than {MEMORY >> 30} GiB; write smaller texts"
            )
        answers.write(json.dumps({"error": error}).encode() + b"\n")
        answers.flush()


def _filled(job: TemplateJob, data: bytes) -> Iterator[RenderedRow]:
    file = TaskFile.model_validate(job.task)
    templates = Templates(file)
    if not job.uri:
        return
    for row in parse_rows(job.uri, data, file.split_at, job.most):
        question = templates.question(row)
        size = sum(map(len, (*question.contexts, *question.continuations, *question.golds, question.preamble)))
        if size + len(question.example) + len(question.tests) + len(question.program) > QUESTION + 4 * job.size:
            raise ValueError(
                f"{row.location}: its templates give more than {QUESTION:,} characters; write smaller texts"
            )
        yield question


def _set_limits(job: TemplateJob) -> None:
    """Set the limits on processor time, for the next row, and on the memory of this process."""
    seconds = int(time.process_time()) + job.seconds + job.size // 10**6 + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":  # other systems count libraries differently
        resource.setrlimit(
            resource.RLIMIT_AS, (_BASE_MEMORY + MEMORY + BYTES_A_BYTE * job.size, resource.RLIM_INFINITY)
        )


_BASE_MEMORY = 0
"""Bytes of address space of the interpreter and its libraries."""

if __name__ == "__main__":
    if sys.platform == "linux":
        _BASE_MEMORY = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    main(sys.stdin.buffer, sys.stdout.buffer)
