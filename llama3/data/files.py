"""Documents in files: txt, md, html, jsonl (plain, .gz, .zst) and parquet, local or remote, read as streams.

One reader per format, each holding one line or one batch of rows, so memory does not grow with the files. A JSON field
or column `url`, `language`, `licence` (or `license`) and `format` (`text` or `html`) is taken over where it exists.
What this gives up: a broken line stops the run instead of being skipped, because silent loss is worse than a late
error; `check_sources` opens every file before any work to find most of them early.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.document import Document
from llama3.recipe.data import Source
from storage.filesystem import filesystem_of, glob, local_path

_ENDINGS = {
    "txt": ("txt",),
    "md": ("md", "markdown"),
    "html": ("html", "htm", "xhtml"),
    "jsonl": ("jsonl", "ndjson"),
    "parquet": ("parquet",),
}
_FORMATS = {ending: name for name, endings in _ENDINGS.items() for ending in endings}
_PACKED = {"gz": "gzip", "zst": "zstd"}
_ROWS = 256


class SourceError(ValueError):
    """A source that cannot be read; the text names the file, what is wrong and what to do."""


def source_files(source: Source) -> list[tuple[str, str]]:
    """Return (uri, format) of the files of `source`, sorted; under `format: auto`, those whose ending is known."""
    found = []
    for uri in glob(source.uri):
        kind = file_format(uri) if source.format == "auto" else source.format
        if kind is not None:
            found.append((uri, kind))
    return found


def file_format(uri: str) -> str | None:
    """Return the format that the ending of `uri` names (`jsonl` for `a.jsonl.gz`), or None."""
    parts = uri.lower().rsplit("/", 1)[-1].split(".")
    if parts[-1] in _PACKED:
        parts.pop()
    return _FORMATS.get(parts[-1]) if len(parts) > 1 else None


def read_file(uri: str, kind: str, source: Source, name: str) -> Iterator[Document]:
    """Yield the documents of one file. Raises SourceError if it cannot be read as `kind`."""
    try:
        if kind == "parquet":
            yield from _rows(uri, source, name)
        elif kind == "jsonl":
            yield from _lines(uri, source, name)
        else:
            with _opened(uri) as stream:
                text = stream.read().decode("utf-8", "replace")
            yield _document({"text": text, "format": kind}, "text", uri, source, name)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise SourceError(f"{uri!r} cannot be read as {kind} ({error}); repair it or set format:") from error


@contextmanager
def _opened(uri: str) -> Iterator[Any]:
    """Open `uri` for reading bytes, unpacked by its ending; several packed members in a row are read as one file."""
    filesystem = filesystem_of(uri)
    with filesystem.open(_path(uri), "rb") as raw:
        packing = _PACKED.get(uri.lower().rsplit(".", 1)[-1])
        yield io.BufferedReader(pa.input_stream(raw, compression=packing)) if packing else raw


def _path(uri: str) -> str:
    return str(local_path(uri)) if uri.startswith("file://") else uri


def _lines(uri: str, source: Source, name: str) -> Iterator[Document]:
    with _opened(uri) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _document(_record(line, f"{uri}:{number}"), source.text, f"{uri}:{number}", source, name)


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SourceError(f"{place} is not JSON ({error}); write one object a line, in UTF-8") from error
    if not isinstance(record, dict):
        raise SourceError(f"{place} holds {type(record).__name__}, not an object; write one object a line")
    return record


def _rows(uri: str, source: Source, name: str) -> Iterator[Document]:
    with filesystem_of(uri).open(_path(uri), "rb") as raw:
        file = pq.ParquetFile(raw)
        known = set(file.schema_arrow.names)
        if source.text not in known:
            raise _no_text(uri, source.text, known)
        columns = [source.text, *(known & {"url", "language", "licence", "license", "format"} - {source.text})]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                for record in batch.to_pylist():
                    yield _document(record, source.text, uri, source, name)


def _document(record: dict[str, Any], field: str, place: str, source: Source, name: str) -> Document:
    """Return the document in `record`; what the recipe says of the whole source wins over the record's own fields."""
    if field not in record:
        raise _no_text(place, field, set(record))
    text = record[field]
    if not isinstance(text, str):
        raise SourceError(f"{place}: {field!r} holds {type(text).__name__}, not text; name another field with text:")
    licence = source.licence if source.licence != "unknown" else _text(record, "licence", "license") or "unknown"
    form = source.format if source.format in ("html", "txt", "md") else record.get("format")
    url = _text(record, "url") or place
    return Document(text, url, source.language or _text(record, "language"), licence, name, _kind(form))


def _kind(form: object) -> Any:
    return "html" if form in ("html", "xhtml") else "text"


def _text(record: dict[str, Any], *names: str) -> str | None:
    return next((value for name in names if isinstance(value := record.get(name), str) and value), None)


def _no_text(place: str, field: str, known: set[str]) -> SourceError:
    return SourceError(f"{place} has no text column {field!r}; name one of {', '.join(sorted(known))} with text:")
