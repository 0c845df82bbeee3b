"""Templates of a task filled in by a process of its own, with limits on processor time, memory and size.

A task file may come from elsewhere. Jinja's sandbox keeps templates from the objects of this process, but not from
loops, powers and regular expressions that never end, some inside C code that no signal handler interrupts. So a process
with the kernel's limits reads the rows and fills the templates in; it is started once and serves all tasks.
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
from dataclasses import astuple, dataclass
from pathlib import Path
from string import ascii_uppercase
from threading import Lock
from typing import IO, Any, NamedTuple

import regex
from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama3.evaluate.answer_extraction import replaced
from llama3.evaluate.task_yaml import DataRow, TaskFile, parse_rows

# Templates of a task, and what they make of one row: a question as text, checked.
#
# jinja2's sandbox runs them, because a task file may come from elsewhere: it can read the row's fields and nothing
# else of this process. A field that a row lacks is an error, never an empty text. What this gives up: speed; the
# 14,042 questions of MMLU take seconds.

TEXTS = ("preamble", "context", "continuation", "answer", "tests", "program", "text", "line", "group")
EXPRESSIONS = ("contexts", "choices", "gold")
_FAULTS = (TemplateError, regex.error, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What the evaluation of a template over unexpected values raises."""


@dataclass(frozen=True)
class RenderedRow:
    """A row as text, before solved examples are put in front of it."""

    id: str
    """Hash of what is asked: the same whatever file, place or examples it comes with."""
    group: str
    preamble: str
    contexts: tuple[str, ...]
    """One, or a schema's several beginnings."""
    continuations: tuple[str, ...]
    """The choices, or the one ending; none where the model writes."""
    gold: int
    golds: tuple[str, ...]
    """Answers that count as right where the model writes."""
    shown: str
    """Context and right answer, as a solved example shows them; empty where none is asked for."""
    tests: str
    program: str


class Templates:
    """The compiled templates of one task."""

    def __init__(self, file: TaskFile) -> None:
        """Raises ValueError naming the field that is no template."""
        self.file = file
        machine = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        machine.filters["regex_replace"] = replaced
        self._made: dict[str, Callable[..., Any]] = {}
        for field in TEXTS + EXPRESSIONS:
            source = getattr(file, field)
            try:
                if field in EXPRESSIONS and source:
                    self._made[field] = machine.compile_expression(source, undefined_to_none=False)
                elif field in TEXTS and source:
                    self._made[field] = machine.from_string(source).render
            except TemplateError as error:
                raise ValueError(f"{file.name}: {field}: {source!r} is no template ({error.message})") from None
            except MemoryError:
                raise ValueError(f"{file.name}: {field}: {source[:80]!r} takes too much memory") from None

    def question(self, row: DataRow) -> RenderedRow:
        """Return the question of `row`. Raises ValueError naming file, line, field and remedy."""
        file = self.file
        match file.kind:
            case "rolling":
                return self._made_of(row, ("",), (self._text("text", row),))
            case "cloze":
                return self._made_of(row, (self._text("context", row),), (self._text("continuation", row),))
            case "schema":
                contexts = self._list("contexts", row)
                return self._made_of(row, contexts, (self._text("continuation", row),), self._place(row, len(contexts)))
            case "choice":
                choices = self._list("choices", row)
                return self._made_of(row, (self._text("context", row),), choices, self._place(row, len(choices)))
            case "letters":
                return self._letters(row)
            case _:
                return self._written(row)

    def _letters(self, row: DataRow) -> RenderedRow:
        choices = self._list("choices", row)
        if len(choices) > len(ascii_uppercase):
            raise ValueError(f"{row.place}: choices: {len(choices)} are more than there are letters; use kind: choice")
        letters = tuple(ascii_uppercase[: len(choices)])
        pairs = zip(letters, choices, strict=True)
        lines = [self._text("line", row, letter=letter, choice=choice) for letter, choice in pairs]
        context = "\n".join([self._text("context", row), *lines])
        return self._made_of(row, (context,), letters, self._place(row, len(choices)))

    def _written(self, row: DataRow) -> RenderedRow:
        """Return a question whose answer the model writes."""
        context = self._text("context", row)
        golds = () if self.file.kind == "code" else self._golds(row)
        tests = self._text("tests", row)
        program = self._text("program", row, context=context) if self.file.kind == "code" else ""
        if self.file.kind == "code" and not tests.strip():
            raise ValueError(f"{row.place}: tests: are empty; give Python that fails on a wrong answer")
        shown = context + self.file.joint + self._text("answer", row) if self.file.shots.count else ""
        return self._made_of(row, (context,), (), 0, golds, shown, tests, program)

    def _made_of(
        self,
        row: DataRow,
        contexts: tuple[str, ...],
        continuations: tuple[str, ...],
        gold: int = 0,
        golds: tuple[str, ...] = (),
        shown: str = "",
        tests: str = "",
        program: str = "",
    ) -> RenderedRow:
        if continuations and not all(text.strip() for text in continuations):
            raise ValueError(f"{row.place}: continuation: is empty; give a text to score, or leave the row out")
        if self.file.shots.count and continuations:
            shown = _right(contexts, gold) + self.file.joint + _right(continuations, gold)
        named = "\0".join([*contexts, "", *continuations, "", *golds, "", tests])
        name = hashlib.sha256(named.encode()).hexdigest()[:16]
        group, preamble = self._text("group", row), self._text("preamble", row)
        return RenderedRow(name, group, preamble, contexts, continuations, gold, golds, shown, tests, program)

    def _text(self, field: str, row: DataRow, **more: str) -> str:
        return str(self._evaluated(field, row, more)) if field in self._made else ""

    def _list(self, field: str, row: DataRow) -> tuple[str, ...]:
        """Return two or more texts."""
        found = self._evaluated(field, row)
        found = list(found) if isinstance(found, Iterator) else found
        if not isinstance(found, list | tuple) or len(found) < 2 or not all(_is_text(item) for item in found):
            raise ValueError(f"{row.place}: {field}: {found!r} must be a list of two or more texts")
        texts = tuple(map(str, found))
        if field == "choices" and (empty := [place for place, text in enumerate(texts) if not text.strip()]):
            raise ValueError(f"{row.place}: choices: {empty[0]} is empty; give a text to score")
        return texts

    def _place(self, row: DataRow, count: int) -> int:
        gold = self._evaluated("gold", row)
        if gold is None:
            raise ValueError(f"{row.place}: gold: is missing; give the place of the right one, 0 to {count - 1}")
        if type(gold) is not int or not 0 <= gold < count:
            raise ValueError(
                f"{row.place}: gold: {gold!r} must be the place of the right one, a number from 0 to {count - 1}"
            )
        return gold

    def _golds(self, row: DataRow) -> tuple[str, ...]:
        found = self._evaluated("gold", row)
        golds = found if isinstance(found, list | tuple) else [found]
        if not golds or not all(_is_text(gold) and str(gold).strip() for gold in golds):
            raise ValueError(f"{row.place}: gold: {found!r} must be a right answer, or a list of them")
        return tuple(str(gold).strip() for gold in golds)

    def _evaluated(self, field: str, row: DataRow, more: dict[str, str] | None = None) -> Any:
        try:
            found = self._made[field]({"row": row.fields, **row.fields, **(more or {})})
            return str(found) if isinstance(found, Undefined) else found  # which raises
        except _FAULTS as error:
            known = ", ".join(map(str, row.fields))
            raise ValueError(f"{row.place}: {field}: {error}; the row has {known}") from None
        except (MemoryError, RecursionError) as error:
            raise ValueError(
                f"{row.place}: {field}: takes too much memory ({type(error).__name__}); write a smaller text"
            ) from None


def _is_text(item: object) -> bool:
    return isinstance(item, str | int | float) and not isinstance(item, bool)


def _right(texts: tuple[str, ...], gold: int) -> str:
    return texts[gold] if len(texts) > 1 else texts[0]


SECONDS = 10
"""Processor time for one row, beyond a second for each MB of its file."""
MEMORY = 2 * 2**30
"""Bytes of address space, beyond what the interpreter has and BYTES_A_BYTE for each byte of the file."""
BYTES_A_BYTE = 32
QUESTION = 2**24
"""Characters of one question, beyond four for each byte of the file."""
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Variables that the process gets: no key of a store."""


class TemplateJob(NamedTuple):
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


def fill(file: TaskFile, uri: str, data: bytes, most: int | None) -> list[RenderedRow]:
    """Return the questions of the rows, or of the first `most`, of the data file `uri`, whose bytes are `data`.

    Raises ValueError naming file, row, field and remedy.
    """
    return [_question(line) for line in _answers(file, uri, data, most)]


def _question(line: list[Any]) -> RenderedRow:
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in line]
    return RenderedRow(*values)


class _Worker:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama3.evaluate.templates"],
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
    job = TemplateJob(file.model_dump(mode="json", exclude_unset=True), uri, len(data), most, SECONDS)
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
        job = TemplateJob(*json.loads(header))
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


def _filled(job: TemplateJob, data: bytes) -> Iterator[RenderedRow]:
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


def _limit(job: TemplateJob) -> None:
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
