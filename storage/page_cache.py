"""A folder whose files are in an object store and come to this machine when they are read, with a limit on the disk.

The folder holds the artifact's manifest and `lazy-folder.json`, which says where the bytes are. Small files are brought
whole when they are first opened. Token shards of more than a page (1 MiB) are sparse files: whoever is about to read
pages holds them, which brings what is missing by range requests, several at a time. Nothing is believed before its
SHA-256 is right. The bytes lie in a folder named after the machine, for all of its processes (see `pages`), inside the
lazy folder or, if that is shared by machines, below HERD_CACHE.

What this gives up: small files stay (index and tables, about 2% of the tokens), so the limit is one for the pages; and
it is exceeded by what readers hold at one time, at most 64 pages or a quarter of the limit each, until the next page
comes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from storage.artifact import LAZY_FOLDER, MANIFEST, VERIFIED, Artifact, FileStat, Stamp
from storage.digests import PAGE, PAGE_DIGEST, PAGED, FileDigest, digest_file
from storage.filesystem import write_atomic
from storage.object_artifact import LAZY, PAGES, RemoteArtifact, verified_file, verified_pages
from storage.processes import boot_id

# Which pages of big remote files are on this machine's disk, for all of its processes: marks, locks and an order.
#
# `marks` has a byte per page, 1 if its bytes are there; the same byte is the place of its lock (an "open file
# description" lock, man fcntl: the kernel frees it when its holder dies, however it dies). Shared: the page is read
# and must stay. Exclusive: it is being brought or dropped. `order` is a ring of page numbers as they came, first
# in, first out: a reader of shuffled documents uses a page in one block and not again before the next epoch, so the
# oldest is the one that will not be missed. One lock for the cache (flock) would be simpler, but readers that take
# turns would never let the one in that drops pages, and eight processes that read the same batch would bring it
# eight times.
#
# A page is marked after its bytes are written and unmarked before they are dropped, both under its lock, so no
# reader ever sees the zeros of a hole. A power cut may keep a mark and lose the bytes: marks of another boot are
# not believed, and the cache begins empty. What this gives up: Linux, and a local disk that can punch holes (ext4,
# XFS, btrfs, tmpfs).

Ints = NDArray[np.int64]
MARKS, ORDER, BOOT = "marks", "order", "boot"
SPARE = 2**16
"""Places in the order beyond one for each page: one brought twice, because its bringer died, stands there twice."""
KEEP_SIZE, PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class PageTable:
    """The pages of a cache in `folder`, numbered from 0 to `count`."""

    def __init__(
        self, folder: Path, count: int, limit: int, drop: Callable[[int], None], clear: Callable[[], None]
    ) -> None:
        """Open the table, of which at most `limit` pages are kept; an empty one is made if there is none.

        `drop` frees the bytes of a page, `clear` those of all pages.
        """
        self.folder, self.count, self.limit, self._free, self._clear = folder, count, limit, drop, clear
        self.capacity = count + SPARE
        with self._locked_order():
            self._make()
        self.marks = np.memmap(folder / MARKS, np.uint8, "r+", shape=(count,)) if count else np.zeros(0, np.uint8)
        self._order = np.memmap(folder / ORDER, np.int64, "r+", shape=(2 + self.capacity,))

    @property
    def kept(self) -> int:
        """Pages that are on the disk or on their way, at least."""
        return int(self._order[1] - self._order[0])

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a handle for locks; closing it frees them all."""
        handle = os.open(self.folder / MARKS, os.O_RDWR)
        try:
            yield handle
        finally:
            os.close(handle)

    def share(self, handle: int, pages: Ints, wait: bool = False) -> Ints:
        """Lock `pages` (ascending) for reading as far as they are there; return the others, unlocked.

        Without `wait` a page that another process is bringing counts as not there.
        """
        absent = []
        for first, stop in runs(pages):
            if not lock_bytes(handle, fcntl.F_RDLCK, first, stop - first, wait=False):
                absent += [page for page in range(first, stop) if not self._share_one(handle, page, wait)]
                continue
            for page in (np.flatnonzero(self.marks[first:stop] == 0) + first).tolist():
                lock_bytes(handle, fcntl.F_UNLCK, page, 1)
                absent.append(page)
        return np.array(absent, np.int64)

    def claim(self, handle: int, pages: Ints) -> Ints:
        """Lock for writing those of `pages` that nobody holds; return them. Others are being brought, or read."""
        mine = [page for page in pages.tolist() if lock_bytes(handle, fcntl.F_WRLCK, page, 1, wait=False)]
        return np.array(mine, np.int64)

    def brought(self, handle: int, pages: Ints) -> None:
        """Mark `pages`, whose bytes are written; they are locked for reading from now on."""
        for page in pages.tolist():
            self.marks[page] = 1
            lock_bytes(handle, fcntl.F_RDLCK, page, 1)

    def reserve(self, pages: Ints) -> None:
        """Enter `pages`, which the caller is about to bring, and drop the oldest that nobody reads to make room.

        If all are in use, more than the limit are kept.
        """
        with self._locked_order(), self.opened() as handle:
            for page in pages.tolist():
                self._append(page)
            most = min(self.limit, self.capacity - len(pages) - 1)
            for _ in range(self.kept):
                if self.kept <= most:
                    break
                self._drop_oldest(handle)

    def _drop_oldest(self, handle: int) -> None:
        """Killed in between, this leaves a page twice in the order or already dropped, which is no harm."""
        head = int(self._order[0])
        page = int(self._order[2 + head % self.capacity])
        if lock_bytes(handle, fcntl.F_WRLCK, page, 1, wait=False):
            self.marks[page] = 0
            self._free(page)
            lock_bytes(handle, fcntl.F_UNLCK, page, 1)
        else:
            self._append(page)
        self._order[0] = head + 1

    def _append(self, page: int) -> None:
        tail = int(self._order[1])
        self._order[2 + tail % self.capacity] = page
        self._order[1] = tail + 1

    def _share_one(self, handle: int, page: int, wait: bool) -> bool:
        if not lock_bytes(handle, fcntl.F_RDLCK, page, 1, wait):
            return False
        if self.marks[page]:
            return True
        lock_bytes(handle, fcntl.F_UNLCK, page, 1)
        return False

    @contextmanager
    def _locked_order(self) -> Iterator[None]:
        handle = os.open(self.folder / ORDER, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_bytes(handle, fcntl.F_WRLCK, 0, 1)
            yield
        finally:
            os.close(handle)

    def _make(self) -> None:
        """Begin empty unless the table is of this boot. Bytes of pages that are not marked are written again."""
        boot, place = boot_id(), self.folder / BOOT
        if place.exists() and place.read_text() == boot:
            return
        for name, size in ((MARKS, self.count), (ORDER, 8 * (2 + self.capacity))):
            with (self.folder / name).open("ab") as file:
                file.truncate(0)
                file.truncate(size)
        self._clear()
        place.write_text(boot)


def runs(pages: Ints) -> list[tuple[int, int]]:
    """Return the runs [first, stop) of neighbours in `pages`, which ascend."""
    if not len(pages):
        return []
    edges = np.flatnonzero(np.diff(pages) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(pages, edges)]


def punch(handle: int, start: int, length: int) -> None:
    """Give the bytes [start, start + length) of an open file back to the disk; they read as zeros. Raises OSError."""
    mode = ctypes.c_int(KEEP_SIZE | PUNCH_HOLE)
    if _libc.fallocate(ctypes.c_int(handle), mode, ctypes.c_int64(start), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def lock_bytes(handle: int, kind: int, start: int, length: int, wait: bool = True) -> bool:
    """Lock or unlock bytes by the open file description; return whether it was granted."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


CACHE = "HERD_CACHE"
"""Variable that names a folder on a disk of the machine itself."""
THREADS = 16
"""Requests at the same time in a process: the first byte of an object takes some 30 ms, whatever comes after it."""
RUN = 8
"""Neighbouring pages that are asked for in one request."""
HELD = 64
"""Pages that a reader should hold at one time, at most."""
FRESH = 2**30
"""Limit in bytes of a folder that is opened for a look and not for training."""


class Where(BaseModel):
    """`lazy-folder.json`."""

    uri: str
    """Prefix of the files in the store."""
    limit: int
    """Bytes of pages that are kept on a machine."""


class FileListing(BaseModel):
    """What is needed of the artifact's manifest."""

    files: dict[str, FileDigest]
    pages: dict[str, FileDigest] = {}
    """File of more than a page -> digest of the object with the digests of its pages."""


def lazy_folder(artifact: Artifact, limit_bytes: int) -> Path:
    """Return a folder from which `artifact` can be read; what is in a store is brought when it is read.

    Readers must open its files with `brought` and, for pages, `lazy_of(...).held`. At most `limit_bytes` of pages are
    kept on a machine; 0: as many as before, 1 GiB if it is new. An artifact that is here whole is returned as it is.
    Raises OSError.
    """
    if not isinstance(artifact, RemoteArtifact) or artifact._whole():
        return artifact.path
    folder = artifact.root.file(LAZY, artifact.label, artifact.manifest.attempt)
    return make_lazy(folder, artifact.uri, artifact.manifest.text(), limit_bytes)


def make_lazy(folder: Path, uri: str, manifest: str, limit_bytes: int) -> Path:
    """Make `folder` a lazy one for the files under `uri` that `manifest` (JSON) lists, or give it another limit."""
    place = folder / LAZY_FOLDER
    before = Where.model_validate_json(place.read_text()) if place.exists() else None
    assert before is None or before.uri == uri, f"{folder}: is for {before and before.uri}"
    where = Where(uri=uri, limit=limit_bytes or (before.limit if before else FRESH))
    if before is None:
        write_atomic(folder / MANIFEST, manifest)
    if where != before:
        write_atomic(place, where.model_dump_json() + "\n")
    return folder


def brought(path: Path) -> Path:
    """Return where the file that `path` names can be opened: itself, unless it is in a lazy folder.

    There a small file is brought whole if it has not been; a big one is empty but for the pages that are held. Raises
    WrongBytes, FileNotFoundError for a name that the manifest does not list, and OSError.
    """
    lazy = lazy_of(path.parent)
    return path if lazy is None else lazy.path(path.relative_to(lazy.folder).as_posix())


def lazy_of(folder: Path) -> LazyFolder | None:
    """Return the lazy folder that `folder` is or lies in, one object in a process; None for plain ones."""
    return _lazy_of(folder, os.getpid())


@lru_cache(4096)
def _lazy_of(folder: Path, process: int) -> LazyFolder | None:
    for place in (folder, *folder.parents[:2]):
        if (place / LAZY_FOLDER).is_file():
            return _opened(place, process)
    return None


@lru_cache(64)
def _opened(folder: Path, process: int) -> LazyFolder:
    return LazyFolder(folder)


class LazyFolder:
    """A lazy folder as this process uses it; its threads may share it."""

    def __init__(self, folder: Path) -> None:
        where = Where.model_validate_json((folder / LAZY_FOLDER).read_text())
        listing = FileListing.model_validate_json((folder / MANIFEST).read_bytes())
        self.folder, self.uri = folder, where.uri
        self.cache = _cache_of(folder, where.uri) / socket.gethostname()
        self._files = listing.files
        self._paged = sorted(name for name in listing.pages if name.endswith(PAGED))
        self._digests = {f"{PAGES}/{name}": digest for name, digest in listing.pages.items()}
        for place in (self.cache, *{(self.cache / name).parent for name in self._paged}):
            place.mkdir(parents=True, exist_ok=True)
        self._stamp = Stamp(self.cache / VERIFIED)
        self._right = self._stamp.read()
        """Small files that this machine has verified since it started, as they were then."""
        counts = [-(-self._files[name].bytes // PAGE) for name in self._paged]
        edges = np.cumsum([0, *counts], dtype=np.int64)
        self.first = dict(zip(self._paged, edges.tolist(), strict=False))
        """Number of the first page of each big file; they are numbered through."""
        self._edges, self.limit, self.limit_bytes = edges, max(1, where.limit // PAGE), where.limit
        if self.limit < edges[-1]:
            _check_holes(self.cache)
        self.piece = max(1, min(HELD, self.limit // 4))
        """Pages that a reader should hold at one time."""
        self.table = PageTable(self.cache, int(edges[-1]), self.limit, self._drop, self._clear)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lazy")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._known: set[str] = set()

    def path(self, name: str) -> Path:
        """See `brought`."""
        place = self.cache / name
        if name in self._known:
            return place
        digest = self._files.get(name) or self._digests.get(name)
        if digest is None:
            raise FileNotFoundError(f"{self.uri}/{name}: is not in the artifact's manifest")
        place.parent.mkdir(parents=True, exist_ok=True)
        if name in self.first:
            with self._writing(name):
                pass
        elif (facts := FileStat.of(place)) is None or self._right.get(name) != facts:
            self._bring_whole(name, digest, place)
        self._known.add(name)
        return place

    def pages_of(self, name: str) -> int:
        """Return how many pages a file is brought in; 0: whole."""
        return -(-self._files[name].bytes // PAGE) if name in self.first else 0

    def fetch(self, paths: Iterable[Path]) -> None:
        """Bring small files, several at a time. Raises as `brought`."""
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        list(self._pool.map(self.path, [name for name in names if name not in self._known]))

    @contextmanager
    def held(self, pages: Ints) -> Iterator[None]:
        """Bring what is missing of `pages` (numbers, ascending) and keep them all until the block ends.

        Raises WrongBytes and OSError.
        """
        with self.table.opened() as handle:
            absent = self.table.share(handle, pages)
            while len(absent):
                mine = self.table.claim(handle, absent)
                there = self.table.marks[mine] == 1
                self._bring(mine[~there])
                self.table.brought(handle, mine)
                # Only now may it be waited for others: who holds a page that they want must not wait for them.
                absent = self.table.share(handle, np.setdiff1d(absent, mine), wait=True)
            yield

    def later(self, do: Callable[[], None]) -> None:
        """Call `do` in a thread, one after another; who needs what it failed to bring will find out why."""

        def call() -> None:
            with suppress(OSError):
                do()

        self._ahead.submit(call)

    def _bring(self, pages: Ints) -> None:
        if not len(pages):
            return
        self.table.reserve(pages)
        asked: list[Future[None]] = []
        for first, stop in runs(pages):
            for start in range(first, stop, RUN):
                for part in self._in_files(start, min(start + RUN, stop)):
                    asked.append(self._pool.submit(self._bring_run, *part))
        wait(asked)  # all, even if one has failed: none may write once the locks are gone
        for one in asked:
            one.result()

    def _in_files(self, first: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield file and pages in the file of the pages [first, stop)."""
        while first < stop:
            number = int(np.searchsorted(self._edges, first, "right")) - 1
            end = min(stop, int(self._edges[number + 1]))
            yield self._paged[number], first - int(self._edges[number]), end - int(self._edges[number])
            first = end

    def _bring_run(self, name: str, first: int, stop: int) -> None:
        """Write the pages [first, stop) of a big file to its place, all of them verified."""
        end = min(stop * PAGE, self._files[name].bytes)
        with self.path(f"{PAGES}/{name}").open("rb") as file:
            file.seek(first * PAGE_DIGEST)
            digests = file.read((stop - first) * PAGE_DIGEST)
        data, written = verified_pages(f"{self.uri}/{name}", first, end, digests), 0
        with self._writing(name) as handle:
            while written < len(data):
                written += os.pwrite(handle, memoryview(data)[written:], first * PAGE + written)

    def _bring_whole(self, name: str, digest: FileDigest, place: Path) -> None:
        """Bring a small file, unless it is there as committed; of processes that want it at the same time, one does."""
        with (self.cache / "whole").open("ab") as lock:
            lock_bytes(lock.fileno(), fcntl.F_WRLCK, zlib.crc32(name.encode()), 1)
            if not place.exists() or (self._right.get(name) != FileStat.of(place) and digest_file(place) != digest):
                verified_file(f"{self.uri}/{name}", digest, place)
            self._stamp.add_folder(self.cache, [name])

    def _drop(self, page: int) -> None:
        ((name, number, _),) = self._in_files(page, page + 1)
        with self._writing(name) as handle:
            punch(handle, number * PAGE, PAGE)

    @contextmanager
    def _writing(self, name: str) -> Iterator[int]:
        """Open a big file, which is made if it is not there."""
        handle = os.open(self.cache / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(handle).st_size != (size := self._files[name].bytes):
                os.ftruncate(handle, size)
            yield handle
        finally:
            os.close(handle)

    def _clear(self) -> None:
        for name in self._paged:
            (self.cache / name).unlink(missing_ok=True)


def _cache_of(folder: Path, uri: str) -> Path:
    """Return where the bytes of a lazy folder are kept."""
    place = os.environ.get(CACHE, "")
    return Path(place) / hashlib.sha256(uri.encode()).hexdigest()[:16] if place else folder


def _check_holes(folder: Path) -> None:
    """Raise OSError if files in `folder` cannot be partly freed."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        try:
            punch(file.fileno(), 0, 1)
        except OSError as error:
            text = f"{folder}: its file system cannot punch holes in files; set {CACHE} to a folder on a local disk"
            raise OSError(error.errno, text) from error
