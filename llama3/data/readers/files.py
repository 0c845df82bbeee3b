"""List the files of a source, detect changes, and read their bytes and lines as streams.

Files are local or remote, plain or packed (.gz, .zst, .bz2, .xz). A stream holds a few megabytes, or one line of at
most MAX_LINE bytes. `ReadErrors` stops at bad input or counts it.
"""

from __future__ import annotations

import bz2
import fnmatch
import io
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pyarrow as pa

from herd.llama3.data.readers.code import LEFT_OUT, NOT_CODE, reason_to_leave
from herd.llama3.recipe.data_schema import Source
from herd.storage.files import RemoteFile
from herd.storage.filesystem import (
    fetched_path,
    filesystem_of,
    is_local,
    list_files,
    local_path,
    split_glob,
    version_of,
    with_retries,
)

# Bad input: stop by default, or skip and count with `curate.on_error: skip`.

OVER_LIMIT = "over_limit"
EMPTY = "empty"
PASSED_OVER = "passed_over"
NO_PAGE = "no_page"
UNREAD_DATE = "unread_date"
"""Reason for documents that were read without their date, which was unreadable."""
NO_LOSS = (OVER_LIMIT, EMPTY, PASSED_OVER, NO_PAGE, *LEFT_OUT)
"""Reasons that are not errors of the input."""
SKIP = "curate.on_error: skip"
REMEDY = f"or set {SKIP}"
MOST_NAMED = 10_000
"""Skipped lines named per file and reason; the rest is one row with the file and a count."""
SCHEMA = pa.schema(
    {
        "domain": pa.string(),
        "source": pa.string(),
        "location": pa.string(),
        "reason": pa.string(),
        "documents": pa.int64(),
        "bytes": pa.int64(),
    }
)
"""`location`: file and line or row, or "" for the whole source; `bytes`: size of the raw line or text."""


class SourceError(ValueError):
    """A source that cannot be read; the message names the file, the fault and a remedy."""


class Fault(NamedTuple):
    """Why something cannot be read."""

    reason: str
    """Name to count it under: bad_json, not_text, ..."""
    message: str
    """The fault and its remedy; the end of a sentence that begins with the location."""


class ReadErrors:
    """Skipped input of one work item: (location, reason) -> documents and bytes."""

    def __init__(self, fail: bool = True) -> None:
        self.fail = fail
        self.documents: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.unread_dates = 0
        self._named: Counter[tuple[str, str]] = Counter()

    def fault(self, file: str, location: str, fault: Fault, size: int = 0, documents: int = 1) -> None:
        """Count a skipped fault. Raises SourceError if `fail` is set."""
        if self.fail:
            raise SourceError(f"{repr(location) if location == file else location} {fault.message}, {REMEDY}")
        self.count(file, location, fault.reason, size, documents)

    def count(self, file: str, location: str, reason: str, size: int, documents: int = 1) -> None:
        """Count skipped input that is not an error."""
        self._named[file, reason] += 1
        key = (location if self._named[file, reason] <= MOST_NAMED else file), reason
        self.documents[key] += documents
        self.bytes[key] += size

    @property
    def lost(self) -> dict[str, int]:
        """Reason -> skipped documents or files, without those of NO_LOSS and UNKNOWN files."""
        lost = Counter[str]()
        for (_, reason), count in self.documents.items():
            if reason not in (*NO_LOSS, "unknown_format", "not_a_file"):
                lost[reason] += count
        return dict(lost)

    def rows(self, domain: str, source: str) -> list[tuple[str, str, str, str, int, int]]:
        """Return the skipped input as rows of SCHEMA, sorted."""
        dates = [(domain, source, "", UNREAD_DATE, self.unread_dates, 0)] if self.unread_dates else []
        keys = sorted(self.documents)
        return [*dates, *((domain, source, *key, self.documents[key], self.bytes[key]) for key in keys)]


# isal inflates gzip two to three times as fast; both return all bytes before a break before they raise
_zlib: Any = zlib
with suppress(ImportError):
    from isal import isal_zlib as _zlib  # type: ignore[import-not-found,no-redef]
DAMAGE: tuple[type[Exception], ...] = (EOFError, OSError, UnicodeError, _zlib.error, lzma.LZMAError, pa.ArrowException)
"""Errors of damaged archives and Parquet files; an OSError with an errno comes from the machine."""

MAX_LINE = 256_000_000
"""Maximum bytes of a line, or of a file that is one document."""
_CHUNK = 1 << 20
_PACKED_CHUNK = 1 << 17
_ENDINGS = {
    "txt": ("txt",),
    "md": ("md", "markdown"),
    "html": ("html", "htm", "xhtml"),
    "tex": ("tex", "latex"),
    "json": ("json",),
    "jsonl": ("jsonl", "ndjson"),
    "csv": ("csv",),
    "tsv": ("tsv", "tab"),
    "warc": ("warc", "wet"),
    "parquet": ("parquet",),
    "arrow": ("arrow", "feather"),
}
_FORMATS = {ending: name for name, endings in _ENDINGS.items() for ending in endings}
READ = ", ".join(_ENDINGS)
COLUMNS = ("parquet", "arrow")
"""Formats that need random access, so they are never packed as a whole."""
_DOCUMENTS = ("txt", "md", "html", "tex", "code")
"""Formats of which a file is one document."""
_RECORDS = ("json", "jsonl", "csv", "tsv", "warc", *COLUMNS)
_PACKED = {"gz": "gz", "gzip": "gz", "zst": "zst", "zstd": "zst", "bz2": "bz2", "xz": "xz"}
_MAGIC = re.compile(rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<bz2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)")
UNKNOWN, SPECIAL = "unknown", "special"
"""Kinds of unreadable files: unknown ending; pipes, devices and broken links."""
_PAPERS = re.compile(
    r"(?i:(readme|licen[cs]e|copying|notice|authors|contributors|contributing|changelog|changes|citation|datasheet)\b.*)"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json|croissant\.json"
)
_WRITERS = re.compile(r"_success|_(common_)?metadata|_(committed|started)_.*|_temporary|_delta_log", re.I)
_MARKS = re.compile(r"(sha(1|256|512)|md5)sums?(\.txt)?|.*\.(crc|md5|sha1|sha256|sha512|asc|sig|_copying_)", re.I)
Line = bytes | bytearray | int
"""A line without its line end, or the length of a line longer than MAX_LINE."""


class File(NamedTuple):
    """A file as it was listed."""

    uri: str
    kind: str
    """A format, UNKNOWN or SPECIAL, or why a repository's file is left out (LEFT_OUT)."""
    size: int
    changed: str
    """The modification time, or the object store's tag."""


class SourceListing(NamedTuple):
    files: list[File]
    """Sorted by name, unreadable files included."""
    passed_over: int
    passed_over_bytes: int
    """Ignored files: hidden, `_SUCCESS` and the like, README beside records, checksums, or matched by `ignore`."""


def list_source(source: Source, named: list[tuple[str, dict[str, Any]]] | None = None) -> SourceListing:
    """Return the files of `source` as they are now, or among `named` (see `list_files`).

    Raises SourceError if they cannot be listed.
    """
    try:
        named = list_files(source.uri) if named is None else named
    except OSError as error:
        raise SourceError(
            f"{source.uri!r} cannot be listed ({error}); check the address and your access to it"
        ) from error
    # The folder above the first wildcard of a glob, and the pattern below it ("" without a glob)
    root = os.path.abspath(local_path(source.uri)) if is_local(source.uri) else source.uri.rstrip("/")
    pattern = ""
    if not (is_local(source.uri) and os.path.lexists(root)):
        root, pattern = split_glob(root, lambda folder: all(uri.startswith(f"{folder}/") for uri, _ in named))
        root = root.rstrip("/")
    kinds = {}
    for uri, info in named:
        auto = file_format(uri) or UNKNOWN
        if info["type"] != "other" and source.format == "code":
            reason = reason_to_leave(uri[len(root) :] if uri.startswith(f"{root}/") else uri.rsplit("/", 1)[-1])
            kinds[uri] = "code" if reason == NOT_CODE and _selects(pattern) else reason or "code"
            continue
        kinds[uri] = SPECIAL if info["type"] == "other" else auto if source.format == "auto" else source.format
    beside_records = any(kind in _RECORDS and not _is_paper(uri) for uri, kind in kinds.items())
    files, over = [], []
    for uri, info in named:
        size = info["size"]
        name = uri[len(root) :].lstrip("/") if uri.startswith(f"{root}/") else ""
        if name and _passed_over(name, pattern, source, kinds[uri], beside_records):
            over.append(int(size or 0))
        elif size is None:
            raise SourceError(f"{uri!r} has no size at its server; download it and name the folder")
        elif uri != uri.encode("utf-8", "replace").decode():
            raise SourceError(f"{uri!r} has a name that is not UTF-8; rename it")
        else:
            files.append(File(uri, kinds[uri], int(size), version_of(info)))
    return SourceListing(files, len(over), sum(over))


def source_files(source: Source) -> list[File]:
    """Return the files of `source`, sorted. Raises SourceError if they cannot be listed."""
    return list_source(source).files


def _is_paper(uri: str) -> bool:
    return bool(_PAPERS.fullmatch(uri.rsplit("/", 1)[-1]))


def _passed_over(below: str, pattern: str, source: Source, kind: str, beside_records: bool) -> bool:
    """Return whether a file is ignored: hidden, documentation, a checksum, or matched by `ignore`."""
    names = below.split("/")
    name = names[-1]
    if any(fnmatch.fnmatchcase(below, glob) or fnmatch.fnmatchcase(name, glob) for glob in source.ignore):
        return True
    asked = re.findall(r"(?:^|[/{,])([._])", pattern)
    if any(_is_hidden(part, source.format) and part[0] not in asked for part in names):
        return True
    if _selects(pattern) and kind != UNKNOWN:
        return False
    return bool(_MARKS.fullmatch(name)) or (_is_paper(name) and (kind == UNKNOWN or beside_records))


def _selects(pattern: str) -> bool:
    """Return whether a glob names files, not only their folders."""
    return bool(pattern.rsplit("/", 1)[-1].strip("*"))


def _is_hidden(name: str, form: str) -> bool:
    """Return whether Hadoop, Spark and Arrow skip a file or folder: `.git`, `_temporary`; not the column `_day=1`.

    In files that are documents, `_` means this only in names that Spark writes: code has `__init__.py`.
    """
    if name.startswith("_") and "=" not in name:
        return form not in _DOCUMENTS or bool(_WRITERS.fullmatch(name))
    return name.startswith(".")


def file_format(uri: str) -> str | None:
    """Return the format that the ending of `uri` names (`jsonl` for `a.jsonl.gz`), or None."""
    parts = uri.lower().rsplit("/", 1)[-1].split(".")
    packed = parts[-1] in _PACKED
    if packed:
        parts.pop()
    kind = _FORMATS.get(parts[-1]) if len(parts) > 1 else None
    return None if packed and kind in COLUMNS else kind


def file_ending(uri: str) -> str:
    """Return the ending of a name, with that of its packing (`.tar.gz`); "" without one."""
    parts = uri.rsplit("/", 1)[-1].rsplit(".", 2)
    return "" if len(parts) == 1 else f".{'.'.join(parts[1 if parts[-1].lower() in _PACKED else -1 :])}"


def is_unchanged(file: File) -> bool:
    """Return whether `file` still has its listed size and time. Raises OSError."""
    try:
        if is_local(file.uri):
            info = filesystem_of(file.uri).info(os.fspath(local_path(file.uri)))
        else:
            info = with_retries(file.uri, lambda: filesystem_of(file.uri).info(file.uri))
    except FileNotFoundError:
        return False
    return (int(info["size"] or 0), version_of(info)) == (file.size, file.changed)


@contextmanager
def open_raw(file: File) -> Iterator[Any]:
    """Open `file` and yield its raw bytes, still packed."""
    path = local_path(file.uri) if is_local(file.uri) else fetched_path(file.uri)
    if path is not None:
        with open(path, "rb") as raw:
            yield raw
    else:
        yield RemoteFile(file.uri, file.size)


def decompress(raw: Any, uri: str) -> Iterator[bytes]:
    """Yield the bytes of `raw`, unpacked by the ending of `uri`, in pieces of about a megabyte.

    Concatenated packed members are read as one. Raises one of DAMAGE where the packing breaks, after all bytes before.
    """
    kind = _PACKED.get(uri.lower().rsplit(".", 1)[-1])
    if kind in ("gz", "zst"):
        yield from _inflated(raw) if kind == "gz" else _unpacked_zstd(raw)
        return
    unpack: dict[str | None, Any] = {"bz2": bz2.open, "xz": lzma.open}
    read = unpack[kind](raw).read1 if kind in unpack else raw.read  # `read` drops the bytes before an error
    chunk = read(_CHUNK)
    if kind is None and (packed := _MAGIC.match(chunk)):
        name = f"{uri.rsplit('/', 1)[-1]}.{_PACKED[str(packed.lastgroup)]}"
        raise EOFError(f"it is packed with {packed.lastgroup}; name it {name}")
    while chunk:
        yield chunk
        chunk = read(_CHUNK)


def split_lines(pieces: Iterator[bytes], longest: int = MAX_LINE) -> Iterator[list[Line]]:
    """Yield the lines of `pieces`, as many at a time as a piece completes; the last one needs no line end.

    A line inside one piece is never too long, so pieces must not be longer than `longest`.
    """
    pending, size = bytearray(), 0
    for piece in pieces:
        first, *lines = piece.split(b"\n")
        size += len(first)
        if size <= longest:
            pending += first
        else:
            pending = bytearray()
        if lines:
            complete: list[Line] = [pending if size <= longest else size, *lines[:-1]]
            pending, size = bytearray(lines[-1]), len(lines[-1])
            yield complete
    if size:
        last: list[Line] = [pending if size <= longest else size]
        del pending  # the caller takes the line out of the list
        yield last


def read_all(pieces: Iterable[bytes], longest: int = MAX_LINE) -> bytes | int:
    """Return the bytes of `pieces`, or the number read so far if it exceeds `longest`."""
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
        if buffer.tell() > longest:
            return buffer.tell()
    return buffer.getvalue()


def _unpacked_zstd(raw: Any) -> Iterator[bytes]:
    stream, size = pa.input_stream(raw, compression="zstd"), _CHUNK
    while size:
        buffer = bytearray(b"\xff") * _CHUNK
        try:
            size = stream.readinto(buffer)
        except DAMAGE:
            # Arrow does not say how much it wrote; UTF-8 has no byte 0xff. An empty piece would end a web archive.
            if written := bytes(buffer.rstrip(b"\xff")):
                yield written
            raise
        yield bytes(memoryview(buffer)[:size])


def _inflated(raw: Any) -> Iterator[bytes]:
    """Yield the bytes of gzip members; zeros between and after them are padding."""
    member, fresh = _zlib.decompressobj(wbits=31), True
    packed = b""
    while packed := packed or raw.read(_PACKED_CHUNK):
        if fresh and not (packed := packed.lstrip(b"\0")):
            continue
        data = member.decompress(packed, _CHUNK)
        fresh, packed = False, member.unconsumed_tail
        if data:
            yield data
        if member.eof:
            packed = member.unused_data
            member, fresh = _zlib.decompressobj(wbits=31), True
    if not fresh:
        yield member.flush()
        if not member.eof:
            raise EOFError("it ends too early")
