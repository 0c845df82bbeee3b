"""Files of a source: which there are, whether they are still as listed, and their bytes and lines as streams.

txt, md, html, jsonl (plain, .gz, .zst) and Parquet, local or remote. Memory does not grow with the files: a stream
holds a megabyte, or one line of at most MAX_LINE. gzip is inflated by isal where that package happens to be installed
(two to three times as fast), else by zlib; both give all bytes in front of a break before they complain of it.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pyarrow as pa

from llama3.recipe.data import Source
from storage.filesystem import changed, filesystem_of, is_local, listing, local_path

_zlib: Any = zlib
with suppress(ImportError):
    from isal import isal_zlib as _zlib  # type: ignore[import-not-found,no-redef]
INFLATE_ERROR: type[Exception] = _zlib.error
"""What broken gzip raises."""

MAX_LINE = 256_000_000
"""Bytes of the longest line, or of the longest file that is one document; what is longer is refused by name."""
_CHUNK = 1 << 20
_PACKED_CHUNK = 1 << 17
_ENDINGS = {
    "txt": ("txt",),
    "md": ("md", "markdown"),
    "html": ("html", "htm", "xhtml"),
    "jsonl": ("jsonl", "ndjson"),
    "parquet": ("parquet",),
}
_FORMATS = {ending: name for name, endings in _ENDINGS.items() for ending in endings}
_PACKED = ("gz", "zst")
Line = bytes | bytearray | int
"""A line without its end, or the length of one that is longer than MAX_LINE."""


class File(NamedTuple):
    """A file as it was when it was listed."""

    uri: str
    kind: str
    """txt, md, html, jsonl or parquet."""
    size: int
    changed: str
    """What differs when the content does: the time of the last change, or the object store's tag."""


def source_files(source: Source) -> list[File]:
    """Return the files of `source`, sorted; under `format: auto`, those whose ending is known."""
    found = []
    for uri, info in listing(source.uri):
        kind = file_format(uri) if source.format == "auto" else source.format
        if kind is not None:
            found.append(File(uri, kind, int(info["size"] or 0), changed(info)))
    return found


def file_format(uri: str) -> str | None:
    """Return the format that the ending of `uri` names (`jsonl` for `a.jsonl.gz`), or None."""
    parts = uri.lower().rsplit("/", 1)[-1].split(".")
    if parts[-1] in _PACKED:
        parts.pop()
    return _FORMATS.get(parts[-1]) if len(parts) > 1 else None


def as_listed(file: File) -> bool:
    """Return whether `file` is there with the size and time that it was listed with."""
    try:
        info = filesystem_of(file.uri).info(_path(file.uri))
    except FileNotFoundError:
        return False
    return (int(info["size"] or 0), changed(info)) == (file.size, file.changed)


def packing(uri: str) -> str | None:
    """Return `gz` or `zst` where the ending of `uri` says so."""
    ending = uri.lower().rsplit(".", 1)[-1]
    return ending if ending in _PACKED else None


@contextmanager
def opened(uri: str) -> Iterator[Any]:
    """Open `uri` for reading its bytes as they lie there."""
    if is_local(uri):
        with open(_path(uri), "rb") as raw:
            yield raw
    else:
        with filesystem_of(uri).open(uri, "rb") as raw:
            yield raw


def chunks(uri: str) -> Iterator[bytes]:
    """Yield the bytes of `uri`, unpacked by its ending, in pieces of about a megabyte.

    Packed members one after the other are read as one. Raises EOFError, zlib.error or OSError where the packing breaks.
    """
    with opened(uri) as raw:
        kind = packing(uri)
        if kind == "gz":
            yield from _inflated(raw)
            return
        stream = pa.input_stream(raw, compression="zstd") if kind == "zst" else raw
        while chunk := stream.read(_CHUNK):
            yield chunk


def split_lines(pieces: Iterator[bytes], longest: int = MAX_LINE) -> Iterator[list[Line]]:
    """Yield the lines of `pieces`, as many at a time as a piece completes; the last one needs no line end.

    A line inside one piece is never too long, so pieces must not be longer than `longest`.
    """
    pending, size = bytearray(), 0
    for piece in pieces:
        head, *lines = piece.split(b"\n")
        size += len(head)
        if size <= longest:
            pending += head
        else:
            pending = bytearray()
        if lines:
            complete: list[Line] = [pending if size <= longest else size, *lines[:-1]]
            pending, size = bytearray(lines[-1]), len(lines[-1])
            yield complete
    if size:
        yield [pending if size <= longest else size]


def whole(uri: str, longest: int = MAX_LINE) -> bytes | int:
    """Return the unpacked bytes of `uri`, or their number as far as read if they are more than `longest`."""
    buffer = io.BytesIO()
    for piece in chunks(uri):
        buffer.write(piece)
        if buffer.tell() > longest:
            return buffer.tell()
    return buffer.getvalue()


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


def _path(uri: str) -> str:
    return os.fspath(local_path(uri)) if is_local(uri) else uri
