"""Templates of a task, and what they make of one row: a question as text, checked.

jinja2's sandbox runs them, because a task file may come from elsewhere: it can read the row's fields and nothing else
of this process. A field that a row lacks is an error, never an empty text. What this gives up: speed; the 14,042
questions of MMLU take seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import regex
from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama3.evaluate.data_rows import Row
from llama3.evaluate.extract import replaced
from llama3.evaluate.task_file import TaskFile

TEXTS = ("preamble", "context", "continuation", "answer", "tests", "program", "text", "line", "group")
EXPRESSIONS = ("contexts", "choices", "gold")
_FAULTS = (TemplateError, regex.error, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What the evaluation of a template over unexpected values raises."""


@dataclass(frozen=True)
class Question:
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

    def question(self, row: Row) -> Question:
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

    def _letters(self, row: Row) -> Question:
        choices = self._list("choices", row)
        if len(choices) > len(ascii_uppercase):
            raise ValueError(f"{row.place}: choices: {len(choices)} are more than there are letters; use kind: choice")
        letters = tuple(ascii_uppercase[: len(choices)])
        pairs = zip(letters, choices, strict=True)
        lines = [self._text("line", row, letter=letter, choice=choice) for letter, choice in pairs]
        context = "\n".join([self._text("context", row), *lines])
        return self._made_of(row, (context,), letters, self._place(row, len(choices)))

    def _written(self, row: Row) -> Question:
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
        row: Row,
        contexts: tuple[str, ...],
        continuations: tuple[str, ...],
        gold: int = 0,
        golds: tuple[str, ...] = (),
        shown: str = "",
        tests: str = "",
        program: str = "",
    ) -> Question:
        if continuations and not all(text.strip() for text in continuations):
            raise ValueError(f"{row.place}: continuation: is empty; give a text to score, or leave the row out")
        if self.file.shots.count and continuations:
            shown = _right(contexts, gold) + self.file.joint + _right(continuations, gold)
        named = "\0".join([*contexts, "", *continuations, "", *golds, "", tests])
        name = hashlib.sha256(named.encode()).hexdigest()[:16]
        group, preamble = self._text("group", row), self._text("preamble", row)
        return Question(name, group, preamble, contexts, continuations, gold, golds, shown, tests, program)

    def _text(self, field: str, row: Row, **more: str) -> str:
        return str(self._evaluated(field, row, more)) if field in self._made else ""

    def _list(self, field: str, row: Row) -> tuple[str, ...]:
        """Return two or more texts."""
        found = self._evaluated(field, row)
        found = list(found) if isinstance(found, Iterator) else found
        if not isinstance(found, list | tuple) or len(found) < 2 or not all(_is_text(item) for item in found):
            raise ValueError(f"{row.place}: {field}: {found!r} must be a list of two or more texts")
        texts = tuple(map(str, found))
        if field == "choices" and (empty := [place for place, text in enumerate(texts) if not text.strip()]):
            raise ValueError(f"{row.place}: choices: {empty[0]} is empty; give a text to score")
        return texts

    def _place(self, row: Row, count: int) -> int:
        gold = self._evaluated("gold", row)
        if gold is None:
            raise ValueError(f"{row.place}: gold: is missing; give the place of the right one, 0 to {count - 1}")
        if type(gold) is not int or not 0 <= gold < count:
            raise ValueError(
                f"{row.place}: gold: {gold!r} must be the place of the right one, a number from 0 to {count - 1}"
            )
        return gold

    def _golds(self, row: Row) -> tuple[str, ...]:
        found = self._evaluated("gold", row)
        golds = found if isinstance(found, list | tuple) else [found]
        if not golds or not all(_is_text(gold) and str(gold).strip() for gold in golds):
            raise ValueError(f"{row.place}: gold: {found!r} must be a right answer, or a list of them")
        return tuple(str(gold).strip() for gold in golds)

    def _evaluated(self, field: str, row: Row, more: dict[str, str] | None = None) -> Any:
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
