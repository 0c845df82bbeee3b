"""Read documents from files in batches: Parquet, Arrow, JSON lines, JSON, CSV, web archives, whole documents.

Fields or columns `url`, `language`, `license` (or `licence`), `format` (`text`, `md`, `html`, `tex`) and those of
`document.FIELDS` are read if they exist; settings of the recipe's source win. Every input error is either a SourceError
or counted by reason (`ReadErrors`).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, IncompleteRead
from itertools import chain
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from herd.llama3.data.readers.code import BINARY, GENERATED, LEFT_OUT, is_binary, is_generated, language_of
from herd.llama3.data.readers.document import FIELDS, BatchBuilder, DocumentBatch, Row, format_of, record_date
from herd.llama3.data.readers.fields import (
    MISSING,
    column_path,
    column_type,
    field_names,
    is_text,
    may_be_text,
    path_columns,
    text_column,
    text_of,
    value_of,
)
from herd.llama3.data.readers.files import (
    COLUMNS,
    DAMAGE,
    MAX_LINE,
    NO_PAGE,
    READ,
    SPECIAL,
    UNKNOWN,
    Fault,
    File,
    ReadErrors,
    SourceError,
    decompress,
    is_unchanged,
    open_raw,
    read_all,
    split_lines,
)
from herd.llama3.recipe.data_schema import Source
from herd.storage.filesystem import StoreError, filesystem_of, is_local, with_retries
from herd.storage.processes import parallel_map

BATCH = 4_000_000
"""Approximate characters of text in a batch."""
CONTENT_REQUESTS, CONTENT_PER_ID = 32, 100
"""Contents that a work item downloads at once; characters of a content for one of its id, roughly."""
_MOST_ROWS = 8192
_ID, _GIT_HASH = re.compile(r"[\w.-]+", re.ASCII), re.compile(r"[0-9a-f]{40}")
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
_LICENSE = ("licence", "license")
"""Spellings of this field in data sets; the first one wins."""
_WARC_HEADER = 1 << 20
"""Maximum bytes of a record header in a web archive."""
TOO_LONG = Fault("line_too_long", f"is longer than {MAX_LINE // 10**6} MB; cut it into documents")
BAD_UTF8 = Fault("bad_utf8", "is not UTF-8; convert it")
UTF16 = Fault("bad_utf8", "is UTF-16; convert it to UTF-8")
UNREAD = {
    UNKNOWN: Fault("unknown_format", f"has an ending that is not read ({READ}); write format:, name it under ignore:"),
    SPECIAL: Fault("not_a_file", "is a pipe, a device or a link to nothing; remove it, name it under ignore:"),
}


def parquet_batches(raw: Any, file: File, source: Source, skips: ReadErrors, most: int) -> Iterator[DocumentBatch]:
    """Yield the rows of `file` in batches of about `most` bytes. Raises SourceError, or Arrow's and OS errors."""
    parquet = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
    path = column_path(parquet.schema_arrow, source.text)
    metadata = parquet.metadata
    if fault := _fault_of(parquet.schema_arrow, source.text, path):
        skips.fault(file.uri, file.uri, fault, file.size, documents=metadata.num_rows)
        return
    # bytes of all columns, not of the text: pyarrow 25 aborts the process at a damaged description of one column
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    batch_rows = max(1, min(_MOST_ROWS, most * int(metadata.num_rows) // max(size, 1)))
    rows_read = 0
    for batch in parquet.iter_batches(batch_rows, columns=[".".join(path), *_columns(parquet.schema_arrow, path)]):
        yield _batch(batch, rows_read, file, source, path, skips)
        rows_read += len(batch)


def arrow_batches(raw: Any, file: File, source: Source, skips: ReadErrors, most: int) -> Iterator[DocumentBatch]:
    """Yield the rows of an Arrow file or stream (`.feather`, `.arrow`) like those of a Parquet file."""
    is_file = raw.read(6) == b"ARROW1"  # otherwise a stream, which has no magic number
    raw.seek(0)
    reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
    batches = (reader.get_batch(index) for index in range(reader.num_record_batches)) if is_file else iter(reader)
    path = column_path(reader.schema, source.text)
    if fault := _fault_of(reader.schema, source.text, path):
        documents = sum(len(batch) for batch in batches)
        skips.fault(file.uri, file.uri, fault, file.size, documents=documents)
        return
    columns, rows_read = [path[0], *_columns(reader.schema, path)], 0
    for batch in batches:
        chosen = batch.select(columns)
        step = max(1, min(_MOST_ROWS, most * len(batch) // max(batch[path[0]].nbytes, 1)))
        for start in range(0, len(batch), step):
            piece = chosen.slice(start, step)
            yield _batch(piece, rows_read, file, source, path, skips)
            rows_read += len(piece)


def _columns(schema: Any, path: list[str]) -> list[str]:
    """Return the columns to read beside the text. A name that occurs twice is ambiguous and skipped."""
    used = {"url", "language", *_LICENSE, "format", *FIELDS} - {path[0]}
    return [name for name in schema.names if name in used and schema.names.count(name) == 1]


def _column_fault(names: Collection[str], field: str) -> Fault:
    """Return the fault of a table or record without the column `field`, or with two of them."""
    if field in names:
        return Fault("doubled_column", f"has two columns {field!r}; rename one")
    known = ", ".join(sorted(names)) or "none"
    if len(names) == 1 and (separator := re.search("[;\t]", known)):
        remedy = "convert it to commas or JSON lines"
        return Fault("no_text_field", f"has one column, {known!r}: its separator looks like {separator[0]!r}; {remedy}")
    return Fault("no_text_field", f"has no text column {field!r}; name one of {known} with text:")


def _fault_of(schema: Any, field: str, path: list[str]) -> Fault | None:
    if not path:
        return _column_fault([field] if field in schema.names else field_names(schema), field)
    kind = column_type(schema, path)
    if may_be_text(kind):
        return None
    inner = [f"{field}.{name}" for name in field_names(kind)] if pa.types.is_struct(kind) else []
    return _not_text(field, kind, inner, "column")


def _not_text(field: str, kind: object, inner: list[str], what: str) -> Fault:
    other = f"one of {', '.join(inner)}" if inner else f"another {what}"
    return Fault("not_text", f"{field!r} holds {kind}, not text; name {other} with text:")


def _batch(batch: Any, before: int, file: File, source: Source, path: list[str], skips: ReadErrors) -> DocumentBatch:
    """Return the readable rows of an Arrow batch that starts at row `before` of the file."""
    locations = [f"{file.uri}:{number}" for number in range(before + 1, before + len(batch) + 1)]
    text, good = text_column(batch, path), np.ones(len(batch), np.bool_)
    for index in _not_utf8(text):
        fault = Fault("bad_utf8", "is a row whose text is not UTF-8; convert it")
        skips.fault(file.uri, locations[index], fault, len(text[index].as_buffer()))
        good[index] = False
    url, language, license = (_texts(batch, *names) for names in (("url",), ("language",), _LICENSE))
    named = path_columns(file.uri)
    urls = [own or named.get("url") or location for own, location in zip(url, locations, strict=True)]
    languages = [source.language or own or named.get("language") for own in language]
    stated = named.get("license", "unknown")
    licenses = [source.license if source.license != "unknown" else own or stated for own in license]
    formats = [format_of(own or named.get("format")) for own in _texts(batch, "format")]
    dates = _dates(batch)
    if date := record_date(dict(named)):
        dates = [own or date for own in dates]
    return DocumentBatch(text, locations, urls, languages, licenses, formats, dates).keep(good)


def _texts(batch: Any, *names: str) -> list[str | None]:
    """Return the first text column among `names`, or None for every row."""
    for name in names:
        if name in batch.schema.names and is_text(batch.schema.field(name).type):
            column = batch[name].cast(pa.large_string())
            bad = set(_not_utf8(column).tolist())
            return [None if i in bad else column[i].as_py() for i in range(len(column))] if bad else column.to_pylist()
    return [None] * len(batch)


def _dates(batch: Any) -> list[str]:
    """Return the date of each row, from the first column that has one."""
    columns: dict[str, list[object]] = {}
    for name in FIELDS:
        if name not in batch.schema.names:
            continue
        column = batch[name]
        if pa.types.is_timestamp(column.type):  # nanoseconds do not fit Python's datetime
            column = column.cast(pa.timestamp("s", "UTC" if column.type.tz else None), safe=False)
        try:
            columns[name] = list(column.to_pylist())
        except (ValueError, OverflowError):  # a year beyond 9999, text that is not UTF-8
            columns[name] = [None] * len(column)
    if not columns:
        return [""] * len(batch)
    return [record_date(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _not_utf8(text: Any) -> NDArray[np.int64]:
    """Return the indices of texts that are not UTF-8, which Parquet does not guarantee."""
    bad = []
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        for index in range(len(text)):
            try:
                text[index].as_py()
            except UnicodeDecodeError:
                bad.append(index)
    return np.array(bad, np.int64)


def read_files(files: Iterable[File], source: Source, skips: ReadErrors, most: int = BATCH) -> Iterator[DocumentBatch]:
    """Yield the documents of `files` in order, in batches of about `most` characters. Raises SourceError."""
    builder = BatchBuilder(max(1, most // CONTENT_PER_ID) if source.contents else most)
    batches = chain(chain.from_iterable(_read(file, source, skips, builder) for file in files), builder.take())
    return (_contents(batch, source.contents, skips) for batch in batches) if source.contents else batches


def _contents(batch: DocumentBatch, address: str, skips: ReadErrors) -> DocumentBatch:
    """Return the documents whose ids are the texts of `batch`. Raises SourceError if the store fails."""

    def content(key: str) -> str | Fault:
        if not _ID.fullmatch(key):
            return Fault("bad_id", f"has {key[:80]!r} for an id; remove the row")
        uri = address.replace("{}", key)
        try:
            data = with_retries(uri, lambda: filesystem_of(uri).cat_file(uri))
            unpacked = read_all(decompress(io.BytesIO(data), "content.gz")) if data[:2] == b"\x1f\x8b" else data
        except FileNotFoundError:
            return Fault("missing_content", f"names {uri!r}, which does not exist; remove the row")
        except StoreError as error:
            raise SourceError(f"{error}; run again when it can be read; finished files are not read again") from error
        except DAMAGE as error:
            return Fault("damaged_content", f"names {uri!r}, which cannot be unpacked ({error}); remove the row")
        if isinstance(unpacked, int):
            return TOO_LONG
        git_hash = hashlib.sha1(b"blob %d\0" % len(unpacked) + unpacked, usedforsecurity=False).hexdigest()
        if _GIT_HASH.fullmatch(key) and key != git_hash:
            return Fault("wrong_content", f"names {uri!r}, which has another git hash ({git_hash}); remove the row")
        return _decoded(unpacked, "html")  # the kind whose encoding is guessed

    texts, good = [""] * len(batch), np.ones(len(batch), np.bool_)
    for index, text in enumerate(parallel_map(content, batch.text.to_pylist(), CONTENT_REQUESTS)):
        if isinstance(text, Fault):
            skips.fault(batch.location[index].rpartition(":")[0], batch.location[index], text)
            good[index] = False
        else:
            texts[index] = text
    return batch.with_text(pa.array(texts, pa.large_string())).keep(good)


def _read(file: File, source: Source, skips: ReadErrors, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read one file and handle errors of the whole file, among them a change since it was listed."""
    if file.kind in UNREAD:
        skips.fault(file.uri, file.uri, UNREAD[file.kind], file.size)
        return
    if file.kind in LEFT_OUT:
        skips.count(file.uri, file.uri, file.kind, file.size)
        return
    raw = None
    try:
        if not is_unchanged(file):
            _gone(file)
        with open_raw(file) as raw:
            if file.kind in COLUMNS:
                yield from builder.take()
                columns = parquet_batches if file.kind == "parquet" else arrow_batches
                yield from columns(raw, file, source, skips, builder.most)
            elif file.kind == "jsonl":
                yield from _json_lines(_unpacked(raw, file), file, source, skips, builder)
            else:
                yield from _READERS.get(file.kind, _whole)(raw, file, source, skips, builder)
        if not is_unchanged(file):
            _gone(file)
    except DAMAGE as error:
        skips.fault(file.uri, file.uri, _damage(file, raw, error), file.size)


def _gone(file: File, error: Exception | None = None) -> NoReturn:
    raise SourceError(
        f"{file.uri!r} was deleted or changed since it was listed; run again when no process writes there"
    ) from error


def _damage(file: File, raw: Any, error: Exception) -> Fault:
    """Return the fault of a damaged file. Raises SourceError if the machine or the store failed, not the file.

    A remote file is first read again to its end, so that a network error is not reported as damage.
    """
    failure = error if raw is None else getattr(raw, "failure", None)
    if failure is None and isinstance(error, OSError) and error.errno is not None:
        failure = error
    if failure is None:
        try:
            if not is_local(file.uri):
                raw.verify()
            if not is_unchanged(file):
                _gone(file)
        except OSError as again:
            failure = again
    if isinstance(failure, FileNotFoundError):
        _gone(file, failure)
    if failure is not None:
        remedy = "run again when it can be read; finished files are not read again"
        raise SourceError(f"{file.uri!r} was not read to its end ({failure}); {remedy}") from failure
    remedy = "repair it, name it under ignore: or set format:"
    if isinstance(error, _Utf16Error):
        return UTF16
    return Fault("truncated_file", f"cannot be read as {file.kind} ({error}); {remedy}")


class _Utf16Error(UnicodeError):
    """A file of records is UTF-16."""


def _unpacked(raw: Any, file: File) -> Iterator[bytes]:
    """Return the unpacked bytes of a file of records, in pieces. Raises _Utf16Error."""
    pieces = decompress(raw, file.uri)
    first = next(pieces, b"")
    if _utf16(first):
        raise _Utf16Error
    return chain([first], pieces)


def _utf16(data: bytes | bytearray) -> str:
    """Return the encoding if `data` begins as UTF-16: with its mark, or as Latin text without it. Else return ""."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    zeros = [data[start:1024:2].count(0) * 5 for start in (0, 1)]
    few, many = min(len(data), 1024) // 4, min(len(data), 1024)
    if len(data) >= 8 and max(zeros) > many and min(zeros) < few:
        return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
    return ""


def _json_lines(
    pieces: Iterable[bytes], file: File, source: Source, skips: ReadErrors, builder: BatchBuilder
) -> Iterator[DocumentBatch]:
    number = 0
    for lines in split_lines(iter(pieces), MAX_LINE):
        lines.reverse()
        while lines:
            number += 1
            line, location = lines.pop(), f"{file.uri}:{number}"  # pop: no second reference to a line of 200 MB
            if isinstance(line, int):
                skips.fault(file.uri, location, TOO_LONG, line)
            elif line and not line.isspace():
                row = _record(parse_json(line), location, source, file)
                if isinstance(row, Fault):
                    skips.fault(file.uri, location, row, len(line))
                elif builder.add(row):
                    del line, row  # this frame waits while the batch is normalized and written
                    yield from builder.take()


def _json(raw: Any, file: File, source: Source, skips: ReadErrors, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read a list of objects, one object, or one object per line (common in .json files)."""
    pieces, beginning = _unpacked(raw, file), bytearray()
    for piece in pieces:
        beginning += piece
        if (b"\n" in piece and b"\n" in beginning.removeprefix(_BOM).lstrip()) or len(beginning) > MAX_LINE:
            break
    full = beginning.removeprefix(_BOM).strip()
    first = full.partition(b"\n")[0]
    if first[:1] == b"{" and len(first) < len(full) and isinstance(parse_json(first), dict):
        yield from _json_lines(chain([bytes(beginning)], pieces), file, source, skips, builder)
        return
    data = read_all(chain([bytes(beginning)], pieces), MAX_LINE)
    if isinstance(data, bytes) and not data.strip():
        return
    too_long = Fault("line_too_long", f"{TOO_LONG.message}, one object a line")
    value = parse_json(data) if isinstance(data, bytes) else too_long
    if isinstance(value, Fault) and isinstance(data, bytes) and data.strip().count(b"\n"):
        yield from _json_lines([data], file, source, skips, builder)  # reports each bad line
        return
    size = data if isinstance(data, int) else len(data)
    for number, record in enumerate(value if isinstance(value, list) else [value], 1):
        location = f"{file.uri}:{number}" if isinstance(value, list) else file.uri
        row = _record(record, location, source, file)
        if isinstance(row, Fault):
            lost = size
            if isinstance(value, list):
                lost //= len(value)
                with suppress(TypeError):  # orjson does not write integers beyond 64 bits and deep nesting
                    lost = len(orjson.dumps(record))
            skips.fault(file.uri, location, row, lost)
        elif builder.add(row):
            yield from builder.take()


def _csv(raw: Any, file: File, source: Source, skips: ReadErrors, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read a table with the column names in its first row."""
    csv.field_size_limit(MAX_LINE)
    sizes: list[int] = []
    table = csv.reader(_text_lines(raw, file, skips, sizes), delimiter="\t" if file.kind == "tsv" else ",", strict=True)
    names: list[str] | None = None
    while True:
        sizes.clear()
        try:
            cells = next(table, None)
        except csv.Error as error:
            if "unexpected end" in str(error):  # an unclosed quote has swallowed all rows after it
                raise EOFError(error) from error
            remedy = "write quotes around cells and double those inside"
            fault = Fault("bad_csv", f"is not a row of a table ({error}); {remedy}")
            skips.fault(file.uri, f"{file.uri}:{table.line_num}", fault, sum(sizes))
            continue
        if cells is None:
            return
        location = f"{file.uri}:{table.line_num}"
        if not cells:
            continue
        if names is None:
            names = [name.strip() for name in cells]
            if names.count(source.text) != 1:
                skips.fault(file.uri, file.uri, _column_fault(names, source.text), file.size)
                return
        elif len(cells) != len(names):
            fault = Fault("bad_csv", f"has {len(cells)} cells, the first row {len(names)}; write as many")
            skips.fault(file.uri, location, fault, sum(sizes))
        else:
            record = dict(zip(names, cells, strict=True))
            try:
                record[source.text].encode()
            except UnicodeEncodeError:
                skips.fault(file.uri, location, BAD_UTF8, sum(sizes))
                continue
            clean = {name: cell for name, cell in record.items() if not _SURROGATE.search(cell)}
            if builder.add(_fields(clean, clean[source.text], location, source, file)):
                del cells, record, clean
                yield from builder.take()


def _text_lines(raw: Any, file: File, skips: ReadErrors, sizes: list[int]) -> Iterator[str]:
    """Yield the lines of a file with their line ends, and add their bytes to `sizes`.

    Bytes that are not UTF-8 become surrogates.
    """
    number, start = 0, _BOM
    for lines in split_lines(_unpacked(raw, file), MAX_LINE):
        for line in lines:
            number += 1
            if isinstance(line, int):
                skips.fault(file.uri, f"{file.uri}:{number}", TOO_LONG, line)
            else:
                sizes.append(len(line))
                yield line.removeprefix(start).decode("utf-8", "surrogateescape") + "\n"
            start = b""


def _warc(raw: Any, file: File, source: Source, skips: ReadErrors, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read a web archive: HTML or plain text of responses, text of conversions (.wet)."""
    stream = io.BufferedReader(_Pieces(decompress(raw, file.uri)))
    number = 0
    while (headers := _warc_header(stream)) is not None:
        number += 1
        location, kind, length = f"{file.uri}:{number}", headers.get("warc-type"), int(headers["content-length"])
        if kind not in ("response", "conversion") or length > MAX_LINE:
            if kind in ("response", "conversion"):
                skips.fault(file.uri, location, TOO_LONG, length)
            for offset in range(0, length, _WARC_HEADER):
                _exactly(stream, min(_WARC_HEADER, length - offset))
            continue
        page = _page(_exactly(stream, length), kind)
        if page is None:
            skips.count(file.uri, location, NO_PAGE, length)
            continue
        form, body, charset = page
        text = _decoded(body, form, charset)
        if isinstance(text, Fault):
            skips.fault(file.uri, location, text, len(body))
            continue
        url = headers.get("warc-target-uri", "").strip("<>")
        record = {"url": url, "date": headers.get("warc-date"), "format": form}
        if builder.add(_fields(record, text, location, source, file)):
            del page, body, text
            yield from builder.take()


class _Pieces(io.RawIOBase):
    """A raw stream over an iterator of byte strings."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest or next(self._pieces, b"")
        size = min(len(buffer), len(data))
        buffer[:size], self._rest = data[:size], data[size:]
        return size


def _warc_header(stream: Any) -> dict[str, str] | None:
    """Return the header of the next record with lower-case names, or None at the end. Raises EOFError."""
    line = b"\n"
    while line in (b"\r\n", b"\n"):
        line = stream.readline(_WARC_HEADER)
    if not line:
        return None
    if not line.startswith(b"WARC/"):
        raise EOFError("no record of a web archive begins where one should")
    headers, size = {}, 0
    while (line := stream.readline(_WARC_HEADER)) not in (b"\r\n", b"\n"):
        size += len(line)
        if not line.endswith(b"\n") or size > _WARC_HEADER:
            raise EOFError("the header of a record does not end")
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name.strip().lower()] = value.strip()
    if not headers.get("content-length", "").isdecimal():
        raise EOFError("a record has no length")
    return headers


def _exactly(stream: Any, size: int) -> bytes:
    data: bytes = stream.read(size)
    if len(data) < size:
        raise EOFError("it ends too early")
    return data


def _page(body: bytes, kind: str | None) -> tuple[str, bytes, str] | None:
    """Return format, bytes and charset of the page in a record, or None if it is not a page of text."""
    if kind == "conversion":
        return "txt", body, "utf-8"
    if body.startswith(b"HTTP/2"):
        body = b"HTTP/1.1" + body[body.find(b" ") :]
    try:
        socket = SimpleNamespace(makefile=lambda mode: io.BytesIO(body))  # the part that HTTPResponse uses
        answer = HTTPResponse(socket)  # type: ignore[arg-type]
        answer.begin()
        data = answer.read()
    except IncompleteRead as short:  # crawlers truncate long pages; some keep the header of the packed page
        data = short.partial or body.partition(b"\r\n\r\n")[2]
    except (HTTPException, ValueError):
        return None
    if answer.headers.get("Content-Encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
        with suppress(zlib.error):
            data = zlib.decompressobj(47).decompress(data, MAX_LINE)
    form = {"text/html": "html", "application/xhtml+xml": "html", "text/plain": "txt", "text/markdown": "md"}
    media = form.get(answer.headers.get_content_type()) if answer.status == 200 else None
    return (media, data, str(answer.headers.get_content_charset() or "")) if media else None


def _whole(raw: Any, file: File, source: Source, skips: ReadErrors, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read a file that is one document."""
    data = read_all(decompress(raw, file.uri), MAX_LINE)
    text = _decoded(data, file.kind) if isinstance(data, bytes) else TOO_LONG
    record = {"format": file.kind}
    if file.kind == "code":
        record["language"] = language_of(file.uri.rsplit("/", 1)[-1])
        reason = BINARY if isinstance(data, bytes) and is_binary(data) else ""
        if reason := reason or (GENERATED if isinstance(text, str) and is_generated(text) else ""):
            skips.count(file.uri, file.uri, reason, file.size)
            return
    if isinstance(text, Fault):
        skips.fault(file.uri, file.uri, text, data if isinstance(data, int) else len(data))
    elif builder.add(_fields(record, text, file.uri, source, file)):
        del data, text
        yield from builder.take()


def _decoded(data: bytes, kind: str, charset: str = "") -> str | Fault:
    """Return `data` as text. The encoding of HTML comes from its server, its meta tag or a guess, in this order."""
    if wide := _utf16(data):
        return UTF16 if kind != "html" else data.decode(wide, "replace").removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        if kind != "html" and not charset:
            return BAD_UTF8
    encoding = charset or detect_encoding(data, html5_compatible=True) or "windows-1252"
    return str(bytes_to_str(data, encoding))


def _record(record: Any, location: str, source: Source, file: File) -> Row | Fault:
    """Return the document in a JSON object, or the fault."""
    if isinstance(record, Fault):
        return record
    if not isinstance(record, dict):
        return Fault("bad_json", f"holds {type(record).__name__}, not an object; write one object a line")
    field = source.text
    if (value := value_of(record, field)) is MISSING:
        return _column_fault(field_names(record), field)
    if not isinstance(text := text_of(value), str):
        inner = [f"{field}.{name}" for name in field_names(value)] if isinstance(value, dict) else []
        return _not_text(field, type(value).__name__, inner, "field")
    return _fields(record, text, location, source, file)


def parse_json(data: bytes | bytearray) -> Any:
    """Return the value of a JSON text without lone surrogates, or the fault."""
    with suppress(ValueError):
        return orjson.loads(data)
    try:  # orjson refuses NaN and lone surrogates, which data sets contain
        record = json.loads(data.decode().removeprefix("\ufeff"))
        return json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "ignore"))
    except UnicodeDecodeError as error:
        return Fault("bad_utf8", f"is not UTF-8 ({error.reason} at byte {error.start}); convert it")
    except (ValueError, RecursionError) as error:
        return Fault("bad_json", f"is not JSON ({error}); write one object a line")


def _fields(record: dict[str, Any], text: str, location: str, source: Source, file: File) -> Row:
    """Return the row for `text`. Settings of the source win over fields of the record, these over those of the path."""
    if named := path_columns(file.uri):
        record = named | {name: value for name, value in record.items() if value is not None}
    get = record.get
    url, language, license = get("url"), source.language or get("language"), source.license
    if license == "unknown":
        own = get(_LICENSE[0]) or get(_LICENSE[1])
        license = own if isinstance(own, str) else license
    url = url if isinstance(url, str) and url else location
    language = language if isinstance(language, str) and language else None
    return text, location, url, language, license, format_of(get("format")), record_date(record)


_READERS = {"json": _json, "csv": _csv, "tsv": _csv, "warc": _warc}
