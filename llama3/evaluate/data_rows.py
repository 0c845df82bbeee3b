"""Rows of a task's data file: JSON lines, JSON, Parquet or plain text, here or in an object store, checked by digest.

Published sets are small, so a file is read whole, once: its digest and its rows then come from the same bytes, and a
file that changes underneath cannot be half of each. What this gives up: sets of many gigabytes.
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
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.filesystem import filesystem_of, is_local, local_path

FORMATS = (".jsonl", ".json", ".parquet", ".txt")


class MissingFile(ValueError):
    """A data file that a task names and that is not there."""


@dataclass(frozen=True)
class Row:
    place: str
    """`FILE:LINE`, for messages."""
    fields: dict[str, Any]


@dataclass(frozen=True)
class DataFile:
    name: str
    """As the task writes it."""
    sha256: str
    """Of the file's bytes, as they lie there (compressed, if they are)."""
    rows: list[Row]


@dataclass(frozen=True)
class Places:
    """Where the names of data files in a task begin."""

    data: str | None = None
    """`evaluate.data`: a folder, here or in an object store."""
    beside: Path | None = None
    """The folder of the task's own file, for names that begin with `./`."""

    def uri(self, name: str) -> str:
        """Return where the data file `name` lies. Raises MissingFile if it takes `evaluate.data` and there is none."""
        if "://" in name or Path(name).expanduser().is_absolute():
            return name
        if name.startswith("./") and self.beside is not None:
            return str(self.beside / name)
        if self.data is None:
            raise MissingFile(f"evaluate.data: is not set, and {name} lies in it; name the folder of published sets")
        return f"{self.data.rstrip('/')}/{name}"


def read_rows(name: str, places: Places, sha256: str = "", split_at: str = "", most: int | None = None) -> DataFile:
    """Return the rows of the data file `name`, or the first `most` of them.

    A text file is one row with the field `text`, or one for each match of the regular expression `split_at`, at which
    a new text begins. Raises MissingFile if there is no such file and ValueError if its digest is not `sha256` (hex;
    empty: any will do), it cannot be read as what its name says, or it holds no row.
    """
    uri, data, found = read_bytes(name, places, sha256)
    return DataFile(name, found, parse_rows(uri, data, split_at, most))


def read_bytes(name: str, places: Places, sha256: str = "") -> tuple[str, bytes, str]:
    """Return where the data file `name` lies, its bytes and their SHA-256. Raises as `read_rows` does for them."""
    uri = places.uri(name)
    data = _read(uri)
    found = hashlib.sha256(data).hexdigest()
    if sha256 and found != sha256:
        raise ValueError(
            f"{uri}: sha256 is {found}, the task was written for {sha256}; get that file, or write the new digest into "
            "the task and raise its version"
        )
    return uri, data, found


def parse_rows(uri: str, data: bytes, split_at: str = "", most: int | None = None) -> list[Row]:
    """Return the rows of the file `uri`, whose bytes are `data`. Raises as `read_rows` does for them."""
    rows = list(islice(_rows(uri, data, split_at), most))
    if not rows:
        raise ValueError(f"{uri}: holds no row; give a file with questions")
    return rows


def file_sha256(uri: str) -> str:
    """Return the SHA-256 (hex) of a file's bytes. Raises MissingFile if there is none."""
    return hashlib.sha256(_read(uri)).hexdigest()


def _path(uri: str) -> str:
    return str(local_path(uri)) if is_local(uri) else uri


def _read(uri: str) -> bytes:
    try:
        data: bytes = filesystem_of(uri).cat_file(_path(uri))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingFile(f"{uri}: is not a file; put it there, or set evaluate.missing to skip") from None
    except (OSError, ImportError, ValueError) as error:  # no right to it, no such store, no such protocol
        raise ValueError(f"{uri}: cannot be read ({error}); check evaluate.data and the keys of its store") from None
    return data


def _rows(uri: str, data: bytes, split_at: str) -> Iterator[Row]:
    suffixes = [suffix for suffix in PurePosixPath(uri).suffixes if suffix != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in FORMATS:
        raise ValueError(f"{uri}: is none of {', '.join(FORMATS)} (or one of them with .gz); convert it")
    try:
        data = gzip.decompress(data) if uri.endswith(".gz") else data
        yield from _parse(uri, data, suffix, split_at)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException) as error:
        raise ValueError(f"{uri}: cannot be read as {suffix} ({error}); get it again") from None


def _parse(uri: str, data: bytes, suffix: str, split_at: str) -> Iterator[Row]:
    match suffix:
        case ".jsonl":
            lines = data.decode().split("\n")
            yield from (_object(f"{uri}:{n}", line) for n, line in enumerate(lines, 1) if line.strip())
        case ".json":
            yield from (_fields(f"{uri}:{n}", row) for n, row in enumerate(_list(uri, data.decode()), 1))
        case ".parquet":
            table = pq.read_table(io.BytesIO(data))
            yield from (Row(f"{uri}:{n}", row) for n, row in enumerate(table.to_pylist(), 1))
        case _:
            yield from _texts(uri, data.decode(), split_at)


def _object(place: str, line: str) -> Row:
    try:
        return _fields(place, json.loads(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: is not JSON ({error.msg}); write one object a line") from None


def _fields(place: str, row: object) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f'{place}: is not a JSON object with fields; write one such as {{"question": ...}}')
    return Row(place, row)


def _list(uri: str, text: str) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{uri}:{error.lineno}: is not JSON ({error.msg}); correct it") from None
    if not isinstance(rows, list):
        raise ValueError(f"{uri}: is not a JSON list of objects; write [{{...}}, ...]")
    return rows


def _texts(uri: str, text: str, split_at: str) -> Iterator[Row]:
    """Yield the texts between matches of `split_at`, each with the line at which it begins."""
    starts = [0, *(match.start() for match in re.finditer(split_at, text, re.MULTILINE))] if split_at else [0]
    line, last = 1, 0
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        line, last = line + text.count("\n", last, begin), begin
        if text[begin:end].strip():
            yield Row(f"{uri}:{line}", {"text": text[begin:end]})
