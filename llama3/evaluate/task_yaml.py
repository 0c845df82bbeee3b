"""Tasks as YAML files, and the rows of their data files.

A task has no data and no code, only templates over the fields of the rows, so a set is used as it is published. Text
fields are jinja2 templates (`"{{ question }}"`); `choices`, `contexts` and `gold` are expressions (without the braces).
Nothing is stripped. Data files are JSON lines, JSON, Parquet or plain text, local or in an object store.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError, field_validator, model_validator

from herd.llama3.evaluate.generation_settings import GenerationSettings, check_generation_settings
from herd.llama3.evaluate.task import TASK_KINDS, Kind, Normalize, WrittenKind
from herd.llama3.recipe.base import FrozenModel
from herd.storage.filesystem import filesystem_of, is_local, local_path

TASK_NAME = r"[a-z0-9][a-z0-9_.-]*"
TEMPLATE, EXPRESSION = "template", "expression"
Template = Annotated[str, TEMPLATE]
"""A text with fields of the row in braces."""
Expression = Annotated[str, EXPRESSION]
"""An expression over the fields of the row."""
_OF_SOME = {field for kind in TASK_KINDS.values() for field in (*kind.needs, *kind.takes)}
FORMATS = (".jsonl", ".json", ".parquet", ".txt")


class Shots(FrozenModel):
    """Solved examples before each question; never the question itself."""

    count: int = Field(default=0, ge=0)
    data: str | None = None
    """File of the examples; default: that of the questions."""
    choose: Literal["first", "seed"] = "seed"
    """`first`: the first of the file (or group); `seed`: drawn for each question, from `seed` and its text."""
    seed: int = 0
    same_group: bool = False
    """Only from the question's own `group`."""


class TaskFile(FrozenModel):
    """One task."""

    name: str = Field(pattern=f"^{TASK_NAME}$")
    """Its score is called `eval/<name>`."""
    version: int = Field(default=1, ge=1)
    """Raise it with every change that gives other requests or another score."""
    kind: Kind
    """One of `TASK_KINDS`, which says what the kind needs and when an answer is right."""
    data: list[str] = Field(min_length=1)
    """Files of questions: .jsonl, .json, .parquet, or .txt for `rolling`, all but Parquet also with .gz. Names are
    relative to the recipe's `evaluate.data`, with `./` to the folder of this file; or absolute paths or URIs."""
    questions: int | None = Field(default=None, ge=1)
    """Rows of these files as published: what a promotion rule can show is judged by it before they are there."""
    sha256: dict[str, str] = Field(default_factory=dict)
    """File -> SHA-256 (hex) that it must have."""
    preamble: Template = ""
    """Template of the text before everything, shots included; give it its own line ends."""
    context: Template = ""
    """Template of the question."""
    contexts: Expression = ""
    """Expression: the list of beginnings (`schema`)."""
    choices: Expression = ""
    """Expression: the list of answers."""
    continuation: Template = ""
    """Template of the ending that is scored (`schema`, `cloze`)."""
    gold: Expression = ""
    """Expression: index of the right one, from 0; for `generate` the right answer, or a list of them."""
    answer: Template = ""
    """Template of the answer that a solved example shows (`generate`, `code`)."""
    tests: Template = ""
    """Template of the Python that is run after `program` and the model's answer together (`code`)."""
    program: Template = "{{ context }}"
    """Template of the text before the answer in the program that is run (`code`)."""
    text: Template = "{{ text }}"
    """Template of the text that is scored (`rolling`)."""
    split_at: str = ""
    """Regular expression at whose matches a new text of a .txt file begins; `^` and `$` match at lines (`rolling`)."""
    line: Template = "{{ letter }}. {{ choice }}"
    """Template of a line that shows an answer (`letters`)."""
    group: Template = ""
    """Template of a group by which the score is also averaged, such as a subject."""
    before_answer: str = " "
    """Text between question and answer; default for `code`: none. Spaces before the answer are part of it, because
    tokens begin with them."""
    between_shots: str = "\n\n"
    shots: Shots = Shots()
    limit: int | None = Field(default=None, ge=1)
    """Most questions: those whose text has the smallest hash, in any order; None: all."""
    normalize: Normalize = "bytes"
    """What the nats of an answer are divided by before the fewest win; `characters` excludes the joining spaces."""
    average: Literal["items", "groups"] = "items"
    """`groups`: the mean of the groups' means."""
    chance: float | None = Field(default=None, ge=0, lt=1)
    """The score of guessing; default: 1 / choices, or 0."""
    writing: GenerationSettings = GenerationSettings()
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
        kind, given = TASK_KINDS[self.kind], self.model_fields_set
        if missing := sorted({*kind.needs} - given):
            raise ValueError(f"{missing[0]}: is missing; kind {self.kind} needs it")
        if extra := sorted((given & _OF_SOME).difference(kind.needs, kind.takes)):
            raise ValueError(f"{extra[0]}: has no meaning for kind {self.kind}; leave it out")
        if self.shots.count and kind.whole_texts:
            raise ValueError(f"shots: kind {self.kind} scores whole texts and takes none; leave it out")
        if self.shots.count and isinstance(kind, WrittenKind) and not self.answer:
            raise ValueError(f"answer: is missing; the {self.shots.count} shots need to show one")
        if (self.shots.same_group or self.average == "groups") and not self.group:
            raise ValueError("group: is missing; shots.same_group and average: groups need it")
        if self.writing.k > self.writing.samples:
            raise ValueError(f"writing.k: {self.writing.k} of {self.writing.samples} samples; raise writing.samples")
        if "writing" in given:
            check_generation_settings(self.writing)
        if unknown := sorted(self.sha256.keys() - set(self.files)):
            raise ValueError(
                f"sha256: {unknown[0]!r} is not a data file of this task; its files are {', '.join(self.files)}"
            )
        return self

    @property
    def joint(self) -> str:
        """Text between question and answer; whole texts have none."""
        kind = TASK_KINDS[self.kind]
        given = "before_answer" in self.model_fields_set and not kind.whole_texts
        return self.before_answer if given else kind.before_answer

    @property
    def files(self) -> list[str]:
        """All data files, that of the shots included."""
        return [*self.data, *([self.shots.data] if self.shots.data and self.shots.count else [])]


def parse_task(data: object, location: str) -> TaskFile:
    """Return the task that the mapping `data` describes; `location` is its name in error messages.

    Raises ValueError with one line per fault: file, field, remedy.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{location}: must be a mapping with the keys {', '.join(TaskFile.model_fields)}")
    try:
        return TaskFile.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(validation_errors(error, location))) from None


def validation_errors(error: ValidationError, location: str) -> list[str]:
    """Return one line per fault that pydantic found in the file `location`."""
    lines = []
    for fault in error.errors():
        field = ".".join(str(key) for key in fault["loc"])
        message = str(fault["msg"]).removeprefix("Value error, ")
        match fault["type"]:
            case "value_error":
                text = f"{field}: {message}" if field else message
            case "extra_forbidden" | "unexpected_keyword_argument":
                text = f"{field}: unknown key; leave it out"
            case "missing":
                text = f"{field}: is missing"
            case _:
                text = f"{field}: {fault['input']!r}: {message[0].lower()}{message[1:]}"
        lines.append(f"{location}: {text}")
    return lines


# Data files. Published sets are small, so a file is read whole, once: its digest and its rows come from the same bytes.


class MissingFile(ValueError):
    """A data file that a task names does not exist."""


@dataclass(frozen=True)
class DataRow:
    location: str
    """`FILE:LINE`, for messages."""
    fields: dict[str, Any]


@dataclass(frozen=True)
class DataFile:
    name: str
    """As the task writes it."""
    sha256: str
    """Of the file's bytes as stored (compressed, if they are)."""
    rows: list[DataRow]


@dataclass(frozen=True)
class DataPaths:
    """The folders to which the names of data files in a task are relative."""

    data: str | None = None
    """`evaluate.data`: a folder, local or in an object store."""
    base_folder: Path | None = None
    """The folder of the task's own file, for names that begin with `./`."""

    def uri(self, name: str) -> str:
        """Return the path or URI of the data file `name`. Raises MissingFile if it needs `evaluate.data`, not set."""
        if "://" in name or Path(name).expanduser().is_absolute():
            return name
        if name.startswith("./") and self.base_folder is not None:
            return str(self.base_folder / name)
        if self.data is None:
            raise MissingFile(f"evaluate.data: is not set, and {name} lies in it; name the folder of published sets")
        return f"{self.data.rstrip('/')}/{name}"


def read_rows(
    name: str, data_paths: DataPaths, sha256: str = "", split_at: str = "", most: int | None = None
) -> DataFile:
    """Return the rows of the data file `name`, or the first `most` of them.

    A text file is one row with the field `text`, or one for each match of the regular expression `split_at`, at which
    a new text begins. Raises MissingFile if the file does not exist and ValueError if its digest is not `sha256` (hex;
    empty: any), it cannot be read in the format of its suffix, or it has no row.
    """
    uri, data, digest = read_bytes(name, data_paths, sha256)
    return DataFile(name, digest, parse_rows(uri, data, split_at, most))


def read_bytes(name: str, data_paths: DataPaths, sha256: str = "") -> tuple[str, bytes, str]:
    """Return the URI of the data file `name`, its bytes and their SHA-256. Raises as `read_rows` does for them."""
    uri = data_paths.uri(name)
    data = _read(uri)
    digest = hashlib.sha256(data).hexdigest()
    if sha256 and digest != sha256:
        raise ValueError(
            f"{uri}: sha256 is {digest}, the task was written for {sha256}; get that file, or write the new digest "
            "into the task and raise its version"
        )
    return uri, data, digest


def file_sha256(uri: str) -> str:
    """Return the SHA-256 (hex) of a file's bytes. Raises MissingFile if it does not exist."""
    return hashlib.sha256(_read(uri)).hexdigest()


def _read(uri: str) -> bytes:
    try:
        data: bytes = filesystem_of(uri).cat_file(str(local_path(uri)) if is_local(uri) else uri)
    except (FileNotFoundError, IsADirectoryError):
        raise MissingFile(f"{uri}: is not a file; put it there, or set evaluate.on_missing_data to skip") from None
    except (OSError, ImportError, ValueError) as error:  # no permission, no such store, no such protocol
        raise ValueError(f"{uri}: cannot be read ({error}); check evaluate.data and the keys of its store") from None
    return data


def count_rows(file: TaskFile, data_paths: DataPaths) -> int:
    """Return the number of questions in the data files of a task. Raises as `read_rows` does."""
    return sum(len(read_rows(name, data_paths).rows) for name in file.data)


def parse_rows(uri: str, data: bytes, split_at: str = "", most: int | None = None) -> list[DataRow]:
    """Return the rows of the file `uri`, whose bytes are `data`. Raises as `read_rows` does for them."""
    suffixes = [suffix for suffix in PurePosixPath(uri).suffixes if suffix != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in FORMATS:
        raise ValueError(f"{uri}: is none of {', '.join(FORMATS)} (or one of them with .gz); convert it")
    try:
        data = gzip.decompress(data) if uri.endswith(".gz") else data
        match suffix:
            case ".jsonl":
                rows = _json_lines(uri, data.decode())
            case ".json":
                rows = _json_list(uri, data.decode())
            case ".parquet":
                table = pq.read_table(io.BytesIO(data))
                rows = (DataRow(f"{uri}:{n}", row) for n, row in enumerate(table.to_pylist(), 1))
            case _:
                rows = _texts(uri, data.decode(), split_at)
        kept = list(islice(rows, most))
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException) as error:
        raise ValueError(f"{uri}: cannot be read as {suffix} ({error}); get it again") from None
    if not kept:
        raise ValueError(f"{uri}: holds no row; give a file with questions")
    return kept


def _json_lines(uri: str, text: str) -> Iterator[DataRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{uri}:{number}: is not JSON ({error.msg}); write one object a line") from None
        yield _json_row(f"{uri}:{number}", row)


def _json_list(uri: str, text: str) -> Iterator[DataRow]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{uri}:{error.lineno}: is not JSON ({error.msg}); correct it") from None
    if not isinstance(rows, list):
        raise ValueError(f"{uri}: is not a JSON list of objects; write [{{...}}, ...]")
    yield from (_json_row(f"{uri}:{number}", row) for number, row in enumerate(rows, 1))


def _json_row(location: str, row: object) -> DataRow:
    if not isinstance(row, dict):
        raise ValueError(f'{location}: is not a JSON object with fields; write one such as {{"question": ...}}')
    return DataRow(location, row)


def _texts(uri: str, text: str, split_at: str) -> Iterator[DataRow]:
    """Yield the texts between matches of `split_at`, each with the line at which it begins."""
    starts = [0, *(match.start() for match in re.finditer(split_at, text, re.MULTILINE))] if split_at else [0]
    line, last = 1, 0
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        line, last = line + text.count("\n", last, begin), begin
        if text[begin:end].strip():
            yield DataRow(f"{uri}:{line}", {"text": text[begin:end]})
