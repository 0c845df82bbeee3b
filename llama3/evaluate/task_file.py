"""A task as YAML: which rows of a published set are asked, how they are written, and how answers count.

A task holds no data, only templates over the fields of the rows, so a set is used as its authors publish it. Fields of
text are jinja2 templates (`"{{ question }}"`); `choices`, `contexts` and `gold` are expressions: what would stand
between the braces. Nothing is stripped: a model reads the texts as the templates give them. There is no code in a task:
a set that templates cannot express is converted once, outside, or given as a folder of rendered requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from llama3.evaluate.extract import check_writing
from llama3.evaluate.task import Normalise, Writing
from llama3.recipe.plain import read_plain
from llama3.recipe.section import Section

TASK_NAME = r"[a-z0-9][a-z0-9_.-]*"
FileKind = Literal["choice", "letters", "schema", "cloze", "rolling", "generate", "code"]
CONTENT: dict[FileKind, tuple[set[str], set[str]]] = {
    "choice": ({"context", "choices", "gold"}, set()),
    "letters": ({"context", "choices", "gold"}, {"line"}),
    "schema": ({"contexts", "continuation", "gold"}, set()),
    "cloze": ({"context", "continuation"}, set()),
    "rolling": (set(), {"text", "split_at"}),
    "generate": ({"context", "gold"}, {"answer", "writing"}),
    "code": ({"context", "tests"}, {"answer", "program", "writing"}),
}
"""Kind -> the fields that it needs, and those that it may have and others not."""
_OF_SOME = set().union(*(needed | allowed for needed, allowed in CONTENT.values()))


class Shots(Section):
    """Solved examples before each question; never the question itself."""

    count: int = Field(default=0, ge=0)
    data: str | None = None
    """File of the examples; left out: that of the questions."""
    choose: Literal["first", "seed"] = "seed"
    """`first`: the first of the file (or group); `seed`: drawn anew for each question, from `seed` and its text."""
    seed: int = 0
    same_group: bool = False
    """Only from the question's own `group`."""


class TaskFile(Section):
    """One task."""

    name: str = Field(pattern=f"^{TASK_NAME}$")
    """Its score is called `eval/<name>`."""
    version: int = Field(default=1, ge=1)
    """Raise it with every change that gives other requests or another score."""
    kind: FileKind
    """`choice`: the likeliest of several answers. `letters`: the same, but the answers stand in the question and their
    letters are scored. `schema`: one ending, the likeliest of several beginnings. `cloze`: right if each token of the
    continuation is the model's likeliest. `rolling`: bits per byte of whole texts. `generate`: the model writes, and
    what is extracted is compared with `gold`. `code`: what the model writes is run with `tests`."""
    data: list[str] = Field(min_length=1)
    """Files of questions: .jsonl, .json, .parquet, or .txt for `rolling`, all but Parquet also with .gz. A name begins
    in the recipe's `evaluate.data`, one with `./` beside this file; absolute paths and URIs are taken as they are."""
    sha256: dict[str, str] = Field(default_factory=dict)
    """File -> SHA-256 (hex) that it must have."""
    preamble: str = ""
    """Template of what stands before everything, shots included; give it its own line ends."""
    context: str = ""
    """Template of the question."""
    contexts: str = ""
    """Expression: the list of beginnings (`schema`)."""
    choices: str = ""
    """Expression: the list of answers."""
    continuation: str = ""
    """Template of the ending that is scored (`schema`, `cloze`)."""
    gold: str = ""
    """Expression: place of the right one, from 0; for `generate` the right answer, or a list of them."""
    answer: str = ""
    """Template of the answer that a solved example shows (`generate`, `code`)."""
    tests: str = ""
    """Template of the Python that is run after `program` and the model's answer together (`code`)."""
    program: str = "{{ context }}"
    """Template of what stands before the answer in the program that is run (`code`)."""
    text: str = "{{ text }}"
    """Template of the text that is scored (`rolling`)."""
    split_at: str = ""
    """Regular expression at whose matches a new text of a .txt file begins; `^` and `$` match at lines (`rolling`)."""
    line: str = "{{ letter }}. {{ choice }}"
    """Template of a line that shows an answer (`letters`)."""
    group: str = ""
    """Template of what the score is also averaged by, such as a subject."""
    before_answer: str = " "
    """Between question and answer. Spaces before the answer count as part of it, because tokens begin with them."""
    between_shots: str = "\n\n"
    shots: Shots = Shots()
    limit: int | None = Field(default=None, ge=1)
    """Most questions: those whose text has the smallest hash, whatever their order; none: all."""
    normalise: Normalise = "bytes"
    """What the nats of an answer are divided by before the fewest win; `characters` leaves out spaces that join it."""
    average: Literal["items", "groups"] = "items"
    """`groups`: the mean of the groups' means."""
    chance: float | None = Field(default=None, ge=0, lt=1)
    """What guessing scores; left out: 1 / choices, or 0."""
    writing: Writing = Writing()
    """How answers are written (`generate`, `code`)."""

    @field_validator("data", mode="before")
    @classmethod
    def _one_file(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("shots", mode="before")
    @classmethod
    def _only_count(cls, value: object) -> object:
        return {"count": value} if isinstance(value, int) else value

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        needed, allowed = CONTENT[self.kind]
        given = self.model_fields_set
        if missing := sorted(needed - given):
            raise ValueError(f"{missing[0]}: is missing; kind {self.kind} needs it")
        if extra := sorted((given & _OF_SOME) - needed - allowed):
            raise ValueError(f"{extra[0]}: has no meaning for kind {self.kind}; leave it out")
        if self.shots.count and self.kind == "rolling":
            raise ValueError("shots: kind rolling scores whole texts and takes none; leave it out")
        if self.shots.count and self.kind in ("generate", "code") and not self.answer:
            raise ValueError(f"answer: is missing; the {self.shots.count} shots need to show one")
        if (self.shots.same_group or self.average == "groups") and not self.group:
            raise ValueError("group: is missing; shots.same_group and average: groups need it")
        if self.writing.k > self.writing.samples:
            raise ValueError(f"writing.k: {self.writing.k} of {self.writing.samples} samples; raise writing.samples")
        if "writing" in given:
            check_writing(self.writing)
        if unknown := sorted(self.sha256.keys() - set(self.files)):
            raise ValueError(f"sha256: {unknown[0]!r} is no data file of this task; those are {', '.join(self.files)}")
        return self

    @property
    def joint(self) -> str:
        """What stands between question and answer: nothing in code, unless `before_answer` is given."""
        return "" if self.kind == "code" and "before_answer" not in self.model_fields_set else self.before_answer

    @property
    def files(self) -> list[str]:
        """All data files, that of the shots included."""
        return [*self.data, *([self.shots.data] if self.shots.data and self.shots.count else [])]


def parse_task(data: object, place: str) -> TaskFile:
    """Return the task that the mapping `data` describes; `place` is what errors call it.

    Raises ValueError with one line per fault: file, field, remedy.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{place}: must be a mapping with the keys {', '.join(TaskFile.model_fields)}")
    try:
        return TaskFile.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(faults(error, place))) from None


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds. Raises ValueError if it cannot be read, or its aliases stand for too much."""
    try:
        return read_plain(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply; write it flat") from None


def faults(error: ValidationError, place: str) -> list[str]:
    """Return one line per fault that pydantic found in the file `place`."""
    return [f"{place}: {_fault(dict(fault))}" for fault in error.errors()]


def _fault(fault: dict[str, Any]) -> str:
    field = ".".join(str(part) for part in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    match fault["type"]:
        case "value_error":
            return f"{field}: {message}" if field else message
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{field}: unknown key; leave it out"
        case "missing":
            return f"{field}: is missing"
        case _:
            return f"{field}: {fault['input']!r}: {message[0].lower()}{message[1:]}"
