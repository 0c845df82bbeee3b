"""Files in an object store, moved whole and checked: what checkpoints need of s3fs beyond naming a file.

An exception inside `with fs.open(..., "wb")` leaves a truncated object that others can see, so nothing is written but
by `put_file` (which aborts its upload) and single PUTs. A reply that says "stored" is not believed: the size is asked
for again, small objects are read back; and neither is one answer that says the opposite, because headers are lost and
bits flip on the way back too. What this gives up: a file must exist locally before it is sent.
"""

from __future__ import annotations

import io
import os
import time
import zlib
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from storage.filesystem import StoreError, filesystem_of, is_local, local_path, patiently, written_beside

BLOCK, KEPT = 8 << 20, 8
"""Bytes that are fetched at a time, and how many of such blocks are kept: Parquet goes to and fro between columns."""


class RemoteFile(io.RawIOBase):
    """A remote file of a known size, opened for reading."""

    def __init__(self, uri: str, size: int) -> None:
        super().__init__()
        self.uri, self.size = uri, size
        self.failure: OSError | None = None
        """Why the store did not give bytes that were asked for."""
        self._place = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._sums: dict[int, int] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self.size)[whence])
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self.size, self._place + size)
        parts = []
        while self._place < stop:
            number, offset = divmod(self._place, BLOCK)
            parts.append(self._block(number)[offset : offset + stop - self._place])
            self._place += len(parts[-1])
        return b"".join(parts)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def verify(self) -> None:
        """Read all bytes once more. Raises StoreError if one is missing, or another than at the first time."""
        for number in range(-(-self.size // BLOCK)):
            self._fetched(number)

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        data = self._fetched(number)
        self._blocks[number] = data
        if len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)
        return data

    def _fetched(self, number: int) -> bytes:
        start = number * BLOCK
        try:
            data = patiently(self.uri, partial(self._fetch, start, min(self.size, start + BLOCK)))
            if self._sums.setdefault(number, zlib.crc32(data)) != zlib.crc32(data):
                raise StoreError(f"{self.uri}: two reads of the bytes from {start:,} on differ")
        except OSError as error:
            self.failure = error
            raise
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        filesystem = filesystem_of(self.uri)
        if self.uri.startswith(("s3://", "s3a://")):  # with the deadline of storage/s3.py
            data = bytes(filesystem.cat_file(self.uri, start=start, end=stop))
        else:
            with filesystem.open(self.uri, "rb", cache_type="none") as file:
                file.seek(start)
                data = bytes(file.read(stop - start))
        if len(data) != stop - start:
            raise StoreError(f"{len(data):,} bytes came instead of {stop - start:,} from {start:,} on")
        return data


CONFLICTS = 5
"""Tries of an exclusive write that neither succeeds nor finds another's object."""
TRIES = 3
"""Times that something is sent, and that each is asked for, before it counts as not stored."""
PAUSE_S = 0.2


class ObjectInfo(NamedTuple):
    """What a listing says of an object."""

    bytes: int
    modified: float
    """Seconds since 1970, by the server's clock."""


def put_file(path: Path, uri: str) -> None:
    """Store the file `path` as the object `uri`. Raises OSError if it is not there afterwards with the same size."""
    filesystem, sent, stored = filesystem_of(uri), path.stat().st_size, 0
    for _ in range(TRIES):
        filesystem.put_file(str(path), uri)
        for _ in range(TRIES):
            stored = size_of(uri) or 0
            if stored == sent:
                return
            time.sleep(PAUSE_S)
    raise OSError(f"{uri}: {stored:,} bytes are stored, {sent:,} were sent, {TRIES} times")


def put_bytes(uri: str, data: bytes) -> None:
    """Store `data` as the object `uri` by one request. Raises OSError if other bytes are read back."""
    filesystem = filesystem_of(uri)
    for _ in range(TRIES):
        filesystem.pipe_file(uri, data)
        if _holds(uri, data):
            return
    raise OSError(f"{uri}: holds other bytes than were sent, {TRIES} times")


def create_bytes(uri: str, data: bytes) -> bool:
    """Write a file or an object that must not exist; return whether ours is the one that is there. Raises OSError.

    `data` must not be empty and must differ from what any other writer would write (hold the writer's name): what is
    read back decides, because a lost reply makes our own write look like another's, and some servers let two win.
    """
    if is_local(uri):
        return _create_local(local_path(uri), data)
    filesystem = filesystem_of(uri)
    for _ in range(CONFLICTS):
        try:
            filesystem.pipe_file(uri, data, mode="create")
        except OSError as error:
            if not _exists_already(error):
                raise
        try:
            return _holds(uri, data)
        except FileNotFoundError:  # a conflict with a writer who failed, or it was deleted meanwhile
            time.sleep(0.5)
    raise OSError(f"{uri}: refused as existing {CONFLICTS} times, and not there when read; try again")


def get_bytes(uri: str) -> bytes:
    """Return the bytes of the object `uri`. Raises FileNotFoundError."""
    data: bytes = filesystem_of(uri).cat_file(uri)
    return data


def get_file(uri: str, path: Path) -> None:
    """Copy the object `uri` to the file `path`, whose bytes are not to be trusted yet. Raises FileNotFoundError."""
    filesystem_of(uri).get_file(uri, str(path))


def size_of(uri: str) -> int | None:
    """Return the bytes of the object `uri`, None if there is none. Asks for the object itself, not a listing."""
    for tries_left in range(TRIES)[::-1]:
        try:
            info = filesystem_of(uri).info(uri)
            break
        except FileNotFoundError:
            return None
        except KeyError:  # s3fs, of a reply that has lost its headers
            if not tries_left:
                raise OSError(f"{uri}: the store does not tell its size, {TRIES} times") from None
    return int(info["size"]) if info["type"] == "file" else None


def children(uri: str) -> dict[str, int]:
    """Return the names directly under `uri` with their sizes, sorted; a folder has size 0. Nothing there: empty."""
    try:
        found = filesystem_of(uri).ls(uri, detail=True)
    except FileNotFoundError:
        return {}
    return dict(sorted((str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], int(entry["size"] or 0)) for entry in found))


def files_below(uri: str) -> dict[str, ObjectInfo]:
    """Return every object below `uri` by its name from there, sorted; nothing there: empty. One request per 1,000."""
    filesystem = filesystem_of(uri)
    start = len(str(filesystem._strip_protocol(uri))) + 1
    found = filesystem.find(uri, detail=True)
    return {name[start:]: _stored(info) for name, info in sorted(found.items()) if name[start:]}


def files_in(uri: str, prefix: str) -> dict[str, ObjectInfo]:
    """Return the objects directly under `uri` whose names begin with `prefix` (not empty), sorted."""
    found = filesystem_of(uri).find(uri, maxdepth=1, prefix=prefix, detail=True)
    return {name.rsplit("/", 1)[-1]: _stored(info) for name, info in sorted(found.items())}


def remove(uri: str) -> None:
    """Delete the object `uri`; one that is gone already is no error."""
    with suppress(FileNotFoundError):
        filesystem_of(uri).rm_file(uri)


def remove_all(uri: str) -> None:
    """Delete everything under `uri`, which may be nothing. Raises OSError if something is still there afterwards."""
    filesystem = filesystem_of(uri)
    with suppress(FileNotFoundError):
        filesystem.rm(uri, recursive=True)
    if left := filesystem.find(uri):  # s3fs says nothing of objects that a bulk delete could not delete
        raise OSError(f"{uri}: {len(left)} objects could not be deleted, {left[0]} among them; is deleting allowed?")


def _stored(info: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(int(info["size"]), info["LastModified"].timestamp())


def _holds(uri: str, data: bytes) -> bool:
    """Return whether an object holds `data`; other bytes are believed when they came twice."""
    before = None
    for _ in range(CONFLICTS):
        found = get_bytes(uri)
        if found in (data, before):
            break
        before = found
    return found == data


def _create_local(path: Path, data: bytes) -> bool:
    """Write beside the place and link there, which fails if something is there: never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path, data) as made:
        try:
            os.link(made, path)
        except FileExistsError:
            return False
    return True


def _exists_already(error: BaseException) -> bool:
    """Return whether a conditional write was refused because the object exists; servers say so in several ways."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(cause, FileExistsError) or status in (409, 412):
            return True
        cause = cause.__cause__
    return False
