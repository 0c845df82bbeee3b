"""Files by path or URI, for work items that may run on any machine: reading whole or in ranges, atomic writes, folders.

A local file is used where it is; a remote one is read by blocks or downloaded, and uploaded when it is complete.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import shutil
import tempfile
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from herd.storage.filesystem import (
    StoreError,
    filesystem_of,
    is_below,
    is_local,
    is_object_store,
    local_path,
    with_retries,
)
from herd.storage.objects import get_bytes, get_file, list_entries, list_objects, put_file, remove_all, size_of

BLOCK, KEPT = 16 << 20, 4
"""Bytes per fetch, and blocks kept in memory: Parquet seeks back and forth between columns."""


class RemoteFile(io.RawIOBase):
    """A remote file of known size, read in blocks; each is fetched again until it is complete.

    A parser may replace an error by its own: `failure` is the error of the store, if any. `verify` reads the file once
    more, so that bytes changed by the network are not taken for damage in the store.
    """

    def __init__(self, uri: str, size: int, block: int = BLOCK, kept: int = KEPT) -> None:
        super().__init__()
        self.uri, self.size, self._size, self._kept = uri, size, block, kept
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
            number, start = divmod(self._offset, self._size)
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
        for number in range(-(-self.size // self._size)):
            self._fetch(number)

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        data = self._fetch(number)
        self._blocks[number] = data
        if len(self._blocks) > self._kept:
            self._blocks.popitem(last=False)
        return data

    def _fetch(self, number: int) -> bytes:
        start = number * self._size
        try:
            data = _fetch_range(self.uri, start, min(self.size, start + self._size))
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
        raise StoreError(f"{len(data):,} bytes received instead of {stop - start:,} from byte {start:,} on")
    return data


def open_file(uri: str, block: int = BLOCK, kept: int = KEPT) -> str | RemoteFile:
    """Return a source for Parquet readers: the path of a local file, or a remote file that keeps `kept` blocks."""
    if is_local(uri):
        return str(local_path(uri))
    if (size := size_of(uri)) is None:
        raise FileNotFoundError(errno.ENOENT, "not found", uri)
    return RemoteFile(uri, size, block, kept)


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
    return [name for name, entry in list_entries(uri) if entry["type"] == "file" and not name.startswith(".")]


def remove_tree(uri: str) -> None:
    """Delete a folder with all its files; no error if it is absent."""
    if is_local(uri):
        shutil.rmtree(local_path(uri), ignore_errors=True)
    else:
        remove_all(uri)
