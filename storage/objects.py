"""Whole files in an object store, with checks after each write.

Objects are written by `put_file` (which aborts its upload on error) and single PUTs only: an exception inside
`fs.open(..., "wb")` leaves a truncated object that others can see. After a write the size is read again, small objects
are read back. One bad reply proves nothing, because headers are lost and bits flip on the way back too.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import shutil
import tempfile
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from herd.storage.filesystem import (
    StoreError,
    filesystem_of,
    is_below,
    is_local,
    is_object_store,
    local_path,
    temporary_file_beside,
    with_retries,
)

CONFLICTS = 5
"""Tries of an exclusive write that is refused although no object exists."""
TRIES = 3
"""Uploads of an object, and size requests after each, before a write fails."""
PAUSE_S = 0.2
BLOCK, KEPT = 8 << 20, 8
"""Bytes per fetch, and blocks kept in memory: Parquet seeks back and forth between columns."""


class ObjectInfo(NamedTuple):
    """Size and age of an object in a listing."""

    bytes: int
    modified: float
    """Seconds since 1970 by the server's clock."""


def put_file(path: Path, uri: str) -> None:
    """Upload the file `path` as the object `uri`. Raises OSError if the stored size differs afterwards."""
    filesystem, sent, stored = filesystem_of(uri), path.stat().st_size, 0
    for _ in range(TRIES):
        filesystem.put_file(str(path), uri)
        for _ in range(TRIES):
            stored = size_of(uri) or 0
            if stored == sent:
                return
            time.sleep(PAUSE_S)
    raise OSError(f"{uri}: {stored:,} bytes are stored, {sent:,} were sent, {TRIES} times")


def copy_object(source: str, uri: str) -> None:
    """Copy an object inside the store. Raises OSError if the stored size differs afterwards."""
    filesystem_of(uri).cp_file(source, uri)
    if (stored := size_of(uri)) != (size := size_of(source)):
        raise OSError(f"{uri}: {stored or 0:,} bytes are stored, {source} has {size or 0:,}; try again")


def put_bytes(uri: str, data: bytes) -> None:
    """Upload `data` as the object `uri` by one request. Raises OSError if other bytes are read back."""
    filesystem = filesystem_of(uri)
    for _ in range(TRIES):
        filesystem.pipe_file(uri, data)
        if _holds(uri, data):
            return
    raise OSError(f"{uri}: holds other bytes than were sent, {TRIES} times")


def create_bytes(uri: str, data: bytes) -> bool:
    """Create a file or an object exclusively; return whether this call created it. Raises OSError.

    `data` must not be empty and must differ between writers (contain the writer's name): the bytes read back decide who
    won, because a lost reply makes our own write look like another's, and some servers let two writers win.
    """
    if is_local(uri):
        path = local_path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file_beside(path, data) as temporary:
            try:
                os.link(temporary, path)  # unlike a rename it fails if the file exists
            except FileExistsError:
                return False
        return True
    filesystem = filesystem_of(uri)
    for _ in range(CONFLICTS):
        created = True
        try:
            filesystem.pipe_file(uri, data, mode="create")
        except OSError as error:
            if not _exists_already(error):
                raise
            created = False
        try:
            return _holds(uri, data)
        except FileNotFoundError:
            if created:  # deleted since, with what it names perhaps: it must not come back
                return True
            time.sleep(0.5)  # a conflict with a writer that failed
    raise OSError(f"{uri}: refused as existing {CONFLICTS} times, but absent when read; try again")


def get_bytes(uri: str) -> bytes:
    """Return the bytes of the object `uri`. Raises FileNotFoundError."""
    data: bytes = filesystem_of(uri).cat_file(uri)
    return data


def get_file(uri: str, path: Path) -> None:
    """Download the object `uri` to the file `path`, unverified. Raises FileNotFoundError."""
    filesystem_of(uri).get_file(uri, str(path))


def size_of(uri: str) -> int | None:
    """Return the size of the object `uri` in bytes, None if absent. Requests the object itself, not a listing."""
    for tries_left in range(TRIES)[::-1]:
        try:
            info = filesystem_of(uri).info(uri)
            break
        except FileNotFoundError:
            return None
        except KeyError:  # s3fs, if a reply lost its headers
            if not tries_left:
                raise OSError(f"{uri}: the store did not report the size in {TRIES} tries") from None
    return int(info["size"]) if info["type"] == "file" else None


def list_children(uri: str) -> dict[str, int]:
    """Return name -> size of the entries in `uri`, sorted; a folder has size 0. Empty if `uri` does not exist."""
    return {name: int(entry["size"] or 0) for name, entry in _entries(uri)}


def _entries(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and fsspec info of the entries in `uri`, sorted. Empty if `uri` does not exist."""
    try:
        entries = filesystem_of(uri).ls(uri, detail=True)
    except FileNotFoundError:
        return []
    named = [(str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], entry) for entry in entries]
    return sorted(named, key=lambda pair: pair[0])


def list_objects(uri: str) -> dict[str, ObjectInfo]:
    """Return relative name -> info of every object below `uri`, sorted. One request per 1,000 objects."""
    filesystem = filesystem_of(uri)
    start = len(str(filesystem._strip_protocol(uri))) + 1
    objects = filesystem.find(uri, detail=True)
    return {name[start:]: _object_info(info) for name, info in sorted(objects.items()) if name[start:]}


def list_objects_in(uri: str, prefix: str) -> dict[str, ObjectInfo]:
    """Return name -> info of the objects in `uri` whose names begin with `prefix` (not empty), sorted."""
    objects = filesystem_of(uri).find(uri, maxdepth=1, prefix=prefix, detail=True)
    return {name.rsplit("/", 1)[-1]: _object_info(info) for name, info in sorted(objects.items())}


def remove(uri: str) -> None:
    """Delete the object `uri`; no error if it is absent."""
    with suppress(FileNotFoundError):
        filesystem_of(uri).rm_file(uri)


def remove_all(uri: str) -> None:
    """Delete everything under `uri`. Raises OSError if something remains."""
    filesystem = filesystem_of(uri)
    with suppress(FileNotFoundError):
        filesystem.rm(uri, recursive=True)
    if left := filesystem.find(uri):  # s3fs does not report objects that a bulk delete refused
        raise OSError(f"{uri}: {len(left)} objects were not deleted, e.g. {left[0]}; check the permission to delete")


def _object_info(info: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(int(info["size"]), info["LastModified"].timestamp())


def _holds(uri: str, data: bytes) -> bool:
    """Return whether an object holds `data`; other bytes count when they are read twice."""
    before = None
    for _ in range(CONFLICTS):
        stored = get_bytes(uri)
        if stored in (data, before):
            break
        before = stored
    return stored == data


def _exists_already(error: BaseException) -> bool:
    """Return whether a conditional write failed because the object exists; servers report that in several ways."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(cause, FileExistsError) or status in (409, 412):
            return True
        cause = cause.__cause__
    return False


class RemoteFile(io.RawIOBase):
    """A remote file of known size, read in blocks; each is fetched again until it is complete.

    A parser may replace an error by its own: `failure` is the error of the store, if any. `verify` reads the file once
    more, so that bytes changed by the network are not taken for damage in the store.
    """

    def __init__(self, uri: str, size: int) -> None:
        super().__init__()
        self.uri, self.size = uri, size
        self.failure: OSError | None = None
        """The error of the store, if a read failed."""
        self._offset = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._sums: dict[int, int] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = max(0, offset + (0, self._offset, self.size)[whence])
        return self._offset

    def read(self, size: int | None = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self.size, self._offset + size)
        chunks = []
        while self._offset < stop:
            number, start = divmod(self._offset, BLOCK)
            chunks.append(self._block(number)[start : start + stop - self._offset])
            self._offset += len(chunks[-1])
        return b"".join(chunks)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def verify(self) -> None:
        """Read all bytes once more. Raises StoreError if bytes are missing or differ from the first read."""
        for number in range(-(-self.size // BLOCK)):
            self._fetch(number)

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        data = self._fetch(number)
        self._blocks[number] = data
        if len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)
        return data

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK
        try:
            data = _fetch_range(self.uri, start, min(self.size, start + BLOCK))
            if self._sums.setdefault(number, zlib.crc32(data)) != zlib.crc32(data):
                raise StoreError(f"{self.uri}: two reads of the bytes from {start:,} on differ")
        except OSError as error:
            self.failure = error
            raise
        return data


def _fetch_range(uri: str, start: int, stop: int) -> bytes:
    return with_retries(uri, partial(_request_range, uri, start, stop))


def _request_range(uri: str, start: int, stop: int) -> bytes:
    filesystem = filesystem_of(uri)
    if is_object_store(uri):  # its client reads a range by one call, which has a deadline
        data = bytes(filesystem.cat_file(uri, start=start, end=stop))
    else:
        with filesystem.open(uri, "rb", cache_type="none") as file:
            file.seek(start)
            data = bytes(file.read(stop - start))
    if len(data) != stop - start:
        raise StoreError(f"{len(data):,} bytes came instead of {stop - start:,} from {start:,} on")
    return data


# Files by path or URI, for work items that may run anywhere


def open_file(uri: str) -> str | RemoteFile:
    """Return what readers of Parquet take: the path of a local file, or an opened remote one."""
    if is_local(uri):
        return str(local_path(uri))
    if (size := size_of(uri)) is None:
        raise FileNotFoundError(errno.ENOENT, "not found", uri)
    return RemoteFile(uri, size)


def read_range(uri: str, start: int, stop: int) -> bytes:
    """Return the bytes of a file from `start` to `stop`. Raises OSError if it ends before."""
    if not is_local(uri):
        return _fetch_range(uri, start, stop)
    with local_path(uri).open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise OSError(f"{uri}: ends at {start + len(data):,}, before byte {stop:,}; delete the file")
    return data


def read_file(uri: str) -> bytes:
    """Return the bytes of a file or object. Raises FileNotFoundError."""
    return local_path(uri).read_bytes() if is_local(uri) else get_bytes(uri)


@contextmanager
def atomic_file(uri: str) -> Iterator[Path]:
    """Yield a path of this machine; the file written there becomes `uri` when the block succeeds, else it is deleted.

    Not synced: after a power cut a local file may be empty.
    """
    path = local_path(uri) if is_local(uri) else Path(tempfile.gettempdir(), uri.rpartition("/")[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        if is_local(uri):
            os.replace(temporary, path)
        else:
            put_file(temporary, uri)
    finally:
        temporary.unlink(missing_ok=True)


def local_folder(uri: str) -> Path:
    """Return a local folder, or a copy of a remote one, which the process downloads once and keeps until it ends."""
    return local_path(uri) if is_local(uri) else _downloaded(uri, os.getpid())


@cache
def _downloaded(uri: str, pid: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="herd-copy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in list_objects(uri):
        if not is_below(name):
            raise ValueError(f"{uri}/{name}: {name!r} is not a name below a folder; delete or rename the object")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        get_file(f"{uri}/{name}", folder / name)
    return folder


def put_folder(folder: Path, uri: str) -> None:
    """Upload the files of a local folder, at any depth."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put_file(path, f"{uri}/{path.relative_to(folder).as_posix()}")


def file_names(uri: str) -> list[str]:
    """Return the names of the files in a folder, sorted, without hidden ones; empty for an absent folder."""
    if is_local(uri):
        try:
            with os.scandir(local_path(uri)) as entries:
                return sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
        except FileNotFoundError:
            return []
    return [name for name, entry in _entries(uri) if entry["type"] == "file" and not name.startswith(".")]


def remove_tree(uri: str) -> None:
    """Delete a folder with all its files; no error if it is absent."""
    if is_local(uri):
        shutil.rmtree(local_path(uri), ignore_errors=True)
    else:
        remove_all(uri)
