"""Fill in the templates of a task, in a separate process with limits on processor time, memory and size.

A task file may be untrusted. jinja2's sandbox keeps templates from the objects of this process, but not from loops,
powers and regular expressions that never end. So a `limited_process` reads the rows and fills the templates in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import regex
from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from herd.llama3.evaluate.answer_extraction import replace_matches
from herd.llama3.evaluate.task import TASK_KINDS, RenderedRow
from herd.llama3.evaluate.task_yaml import EXPRESSION, TEMPLATE, DataRow, TaskFile, parse_rows
from herd.storage.limited_process import limited_values

SECONDS = 10
"""Processor time for one row, plus a second for each MB of its file."""
QUESTION = 2**24
"""Characters of one question, plus four for each byte of the file."""
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


def _worker_results(file: TaskFile, uri: str, data: bytes, most: int | None) -> Iterator[list[Any]]:
    """Yield the answers of the process, one for each row."""
    job = {"task": file.model_dump(mode="json", exclude_unset=True), "uri": uri, "most": most}

    def place(row: int) -> str:
        return f"{uri}: row {row + 1}: its templates" if uri else f"{file.name}: its templates"

    return limited_values(__name__, job, data, SECONDS, f"{uri or file.name}: its templates", place)


def run_limited(job: dict[str, Any], data: bytes) -> Iterator[list[Any]]:
    """Yield the question of each row of the data file; of a job without an address only compile the templates."""
    file = TaskFile.model_validate(job["task"])
    templates = Templates(file)
    if not job["uri"]:
        return
    for row in parse_rows(job["uri"], data, file.split_at, job["most"]):
        question = templates.question(row)
        size = sum(map(len, (*question.contexts, *question.continuations, *question.golds, question.preamble)))
        if size + len(question.example) + len(question.tests) + len(question.program) > QUESTION + 4 * len(data):
            raise ValueError(
                f"{row.location}: its templates give more than {QUESTION:,} characters; write smaller texts"
            )
        yield list(astuple(question))
