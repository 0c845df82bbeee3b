"""Documents out of files, as batches: one reader each for JSON lines, Parquet and files that are one document.

A JSON field or column `url`, `language`, `licence` (or `license`), `format` (`text`, `md` or `html`) and the date
fields of `dates.py` are taken over where they exist; what the recipe says of the whole source wins. Every fault of the
input has one of two ends, a SourceError or a count by reason (`skips.py`), and never a third. A text column of Parquet
stays Arrow; JSON goes through orjson, and what that refuses (NaN, halves of surrogate pairs) through `json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pyarrow as pa
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from llama3.data.dates import FIELDS, iso_date
from llama3.data.document import Batch, Gatherer, Row, format_of
from llama3.data.files import INFLATE_ERROR, MAX_LINE, File, Line, as_listed, chunks, packing, split_lines, whole
from llama3.data.parquet_rows import parquet_batches
from llama3.data.skips import Fault, Skips, SourceError
from llama3.recipe.data import Source

BATCH = 4_000_000
"""Characters of text in a batch, about."""
TOO_LONG = Fault("line_too_long", f"is longer than {MAX_LINE // 10**6} MB; cut it into documents")
VANISHED = Fault("vanished", "went away or changed since it was listed; run again when nobody writes there")
BAD_UTF8 = Fault("bad_utf8", "is not UTF-8; convert it")


def read_files(files: Iterable[File], source: Source, skips: Skips, most: int = BATCH) -> Iterator[Batch]:
    """Yield the documents of `files` in order, in batches of about `most` characters. Raises SourceError."""
    rows = Gatherer(most)
    for file in files:
        yield from _read(file, source, skips, rows)
    yield from rows.take()


def _read(file: File, source: Source, skips: Skips, rows: Gatherer) -> Iterator[Batch]:
    """Read one file as it was listed; what is wrong with the file as a whole is caught here."""
    if not as_listed(file):
        skips.fault(file.uri, file.uri, VANISHED)
        return
    try:
        if file.kind == "parquet":
            yield from rows.take()
            yield from parquet_batches(file, source, skips, rows.most)
        else:
            yield from (_lines if file.kind == "jsonl" else _whole)(file, source, skips, rows)
    except FileNotFoundError:
        skips.fault(file.uri, file.uri, VANISHED)
    except (EOFError, OSError, INFLATE_ERROR, pa.ArrowException) as error:
        skips.fault(file.uri, file.uri, _broken(file, error))
    else:
        if not as_listed(file):
            skips.fault(file.uri, file.uri, VANISHED)


def _broken(file: File, error: Exception) -> Fault:
    """Return the fault of a damaged file. Raises SourceError where the machine failed and not the file."""
    said = f"cannot be read as {file.kind} ({error}); repair it or set format:"
    numbered = isinstance(error, OSError) and error.errno is not None
    if numbered or not (packing(file.uri) or file.kind == "parquet"):
        raise SourceError(f"{file.uri!r} {said}") from error
    return Fault("truncated_file", said)


def _lines(file: File, source: Source, skips: Skips, rows: Gatherer) -> Iterator[Batch]:
    number = 0
    for lines in split_lines(chunks(file.uri), MAX_LINE):
        lines.reverse()
        while lines:  # nothing but the batch may hold a line of 200 MB
            number += 1
            if _add_line(lines.pop(), f"{file.uri}:{number}", file, source, skips, rows):
                yield from rows.take()


def _add_line(line: Line, place: str, file: File, source: Source, skips: Skips, rows: Gatherer) -> bool:
    """Take the document in a line, or note what is wrong with it, and return whether the batch is full."""
    found = _row(line, place, source)
    if isinstance(found, Fault):
        skips.fault(file.uri, place, found, line if isinstance(line, int) else len(line))
        return False
    return found is not None and rows.add(found)


def _whole(file: File, source: Source, skips: Skips, rows: Gatherer) -> Iterator[Batch]:
    """Read a file that is one document."""
    data = whole(file.uri, MAX_LINE)
    text = _decoded(data, file.kind) if isinstance(data, bytes) else TOO_LONG
    if isinstance(text, Fault):
        size = data if isinstance(data, int) else len(data)
        skips.fault(file.uri, file.uri, text, size)
    elif rows.add(_fields({"format": file.kind}, text, file.uri, source)):
        yield from rows.take()


def _decoded(data: bytes, kind: str) -> str | Fault:
    """Return `data` as text; HTML that is not UTF-8 says in which encoding it is, or shows it."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        if kind != "html":
            return BAD_UTF8
    encoding = detect_encoding(data, html5_compatible=True) or "windows-1252"
    return str(bytes_to_str(data, encoding))


def _row(line: Line, place: str, source: Source) -> Row | Fault | None:
    """Return the document in a line, what is wrong with the line, or None if there is nothing in it."""
    if isinstance(line, int):
        return TOO_LONG
    try:
        record = orjson.loads(line)
    except ValueError:
        if not line or line.isspace():
            return None
        record = _slowly(line)
    if not isinstance(record, dict):
        said = f"holds {type(record).__name__}, not an object; write one object a line"
        return record if isinstance(record, Fault) else Fault("bad_json", said)
    text = record.get(source.text)
    return _fields(record, text, place, source) if isinstance(text, str) else _no_text(record, source.text)


def _slowly(line: bytes | bytearray) -> Any:
    """Return what a line holds that orjson refuses, without halves of surrogate pairs, or the fault in it."""
    try:
        record = json.loads(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        return Fault("bad_utf8", f"is not UTF-8 ({error.reason} at byte {error.start}); convert it")
    except (ValueError, RecursionError) as error:
        return Fault("bad_json", f"is not JSON ({error}); write one object a line")
    if isinstance(record, dict):
        return {
            name: value.encode("utf-8", "ignore").decode() if isinstance(value, str) else value
            for name, value in record.items()
        }
    return record


def _no_text(record: dict[str, Any], field: str) -> Fault:
    if field not in record:
        known = ", ".join(sorted(record)) or "none"
        return Fault("no_text_field", f"has no text column {field!r}; name one of {known} with text:")
    value = record[field]
    if value is None:
        return Fault("null_text", f"has null in {field!r}; remove the record")
    return Fault("not_text", f"{field!r} holds {type(value).__name__}, not text; name another field with text:")


def _fields(record: dict[str, Any], text: str, place: str, source: Source) -> Row:
    """Return the document with `text`; what the recipe says of the whole source wins over the record's own fields."""
    get = record.get
    url, language, licence = get("url"), source.language or get("language"), source.licence
    if licence == "unknown":
        own = get("licence") or get("license")
        licence = own if isinstance(own, str) else licence
    date = ""
    for name in FIELDS:
        if name in record and (date := iso_date(record[name])):
            break
    return (
        text,
        place,
        url if isinstance(url, str) and url else place,
        language if isinstance(language, str) and language else None,
        licence,
        format_of(get("format")),
        date,
    )
