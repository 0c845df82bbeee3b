"""A local folder whose files are in an object store and are downloaded when they are read, with a disk limit.

The folder holds the artifact's manifest and `lazy-folder.json` with the address. Small files are downloaded whole at
the first open and stay (index and tables, about 2 % of the tokens). Token shards of more than a page (1 MiB) are sparse
files: a reader holds pages, which downloads missing ones by range requests. Every download is checked by SHA-256. All
processes of a machine share the bytes, inside the folder or, if machines share that, below HERD_CACHE.
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

from herd.storage.artifact import LAZY_FOLDER, MANIFEST, VERIFIED, Artifact, FileStat, VerifiedFiles
from herd.storage.digests import PAGE, PAGE_DIGEST, PAGED, FileDigest, digest_file
from herd.storage.filesystem import write_atomic
from herd.storage.object_artifact import LAZY, PAGES, RemoteArtifact, download_verified, get_verified_pages
from herd.storage.processes import boot_id

Ints = NDArray[np.int64]
CACHE = "HERD_CACHE"
"""Variable that names a folder on a local disk of the machine."""
THREADS = 16
"""Concurrent requests of a process: the first byte of an object takes some 30 ms, however many follow."""
RUN = 8
"""Adjacent pages per request."""
HELD = 64
"""Pages that a reader should hold at a time, at most. The disk limit is exceeded by held pages until they are freed."""
FRESH = 2**30
"""Limit in bytes of a folder that is opened for inspection and not for training."""
MARKS, ORDER, BOOT = "marks", "order", "boot"
SPARE = 2**16
"""Slots in the eviction order beyond one per page: a page whose downloader died appears twice."""
KEEP_SIZE, PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)

# The page table: which pages are on the disk, for all processes of the machine.
#
# `marks` has a byte per page, 1 if the page is present. A lock on the same byte (an "open file description" lock, man
# fcntl, which the kernel frees when its owner dies) is shared while the page is read and exclusive while it is
# downloaded or evicted. A single flock would serialize readers and starve eviction, and processes that read the same
# batch would each download it. `order` is a ring of page numbers, first in first out: readers of shuffled documents
# do not need a page again before the next epoch. A page is marked after its bytes are written and unmarked before
# they are freed, both under its lock. After a power cut marks can outlive the bytes, so a table of another boot is
# cleared. Needs Linux and a local disk that can punch holes (ext4, XFS, btrfs, tmpfs).


class PageTable:
    """The pages of a cache in `folder`, numbered from 0 to `count`."""

    def __init__(
        self, folder: Path, count: int, limit: int, drop: Callable[[int], None], clear: Callable[[], None]
    ) -> None:
        """Open or create the table; at most `limit` pages are kept.

        `drop` frees the bytes of a page, `clear` those of all pages.
        """
        self.folder, self.count, self.limit, self._free = folder, count, limit, drop
        self.capacity = count + SPARE
        with self._locked_order():
            boot, path = boot_id(), folder / BOOT
            if not path.exists() or path.read_text() != boot:  # new, or of an earlier boot: start empty
                for name, size in ((MARKS, count), (ORDER, 8 * (2 + self.capacity))):
                    with (folder / name).open("ab") as file:
                        file.truncate(0)
                        file.truncate(size)
                clear()
                path.write_text(boot)
        self.marks = np.memmap(folder / MARKS, np.uint8, "r+", shape=(count,)) if count else np.zeros(0, np.uint8)
        self._order = np.memmap(folder / ORDER, np.int64, "r+", shape=(2 + self.capacity,))

    @property
    def kept(self) -> int:
        """Pages on the disk or being downloaded (a lower bound)."""
        return int(self._order[1] - self._order[0])

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a file descriptor for locks; closing it releases all of them."""
        handle = os.open(self.folder / MARKS, os.O_RDWR)
        try:
            yield handle
        finally:
            os.close(handle)

    def share(self, handle: int, pages: Ints, wait: bool = False) -> Ints:
        """Lock the present ones of `pages` (ascending) for reading; return the absent ones, unlocked.

        Without `wait` a page that another process is downloading counts as absent.
        """
        absent = []
        for first, stop in adjacent_runs(pages):
            if lock_bytes(handle, fcntl.F_RDLCK, first, stop - first, wait=False):  # the whole run by one call
                for page in (np.flatnonzero(self.marks[first:stop] == 0) + first).tolist():
                    lock_bytes(handle, fcntl.F_UNLCK, page, 1)
                    absent.append(page)
                continue
            for page in range(first, stop):
                locked = lock_bytes(handle, fcntl.F_RDLCK, page, 1, wait)
                if locked and self.marks[page]:
                    continue
                if locked:
                    lock_bytes(handle, fcntl.F_UNLCK, page, 1)
                absent.append(page)
        return np.array(absent, np.int64)

    def claim(self, handle: int, pages: Ints) -> Ints:
        """Lock for writing those of `pages` that no process has locked; return them."""
        claimed = [page for page in pages.tolist() if lock_bytes(handle, fcntl.F_WRLCK, page, 1, wait=False)]
        return np.array(claimed, np.int64)

    def mark_fetched(self, handle: int, pages: Ints) -> None:
        """Mark `pages` as present after their bytes are written; downgrade their locks to read locks."""
        for page in pages.tolist():
            self.marks[page] = 1
            lock_bytes(handle, fcntl.F_RDLCK, page, 1)

    def reserve(self, pages: Ints) -> None:
        """Add `pages`, which the caller is about to download, and evict the oldest unused pages.

        If all pages are in use, the limit is exceeded.
        """
        with self._locked_order(), self.opened() as handle:
            for page in pages.tolist():
                self._append(page)
            most = min(self.limit, self.capacity - len(pages) - 1)
            for _ in range(self.kept):
                if self.kept <= most:
                    break
                # Crash-safe: a process killed in this body leaves a page listed twice or already evicted.
                head = int(self._order[0])
                page = int(self._order[2 + head % self.capacity])
                if lock_bytes(handle, fcntl.F_WRLCK, page, 1, wait=False):
                    self.marks[page] = 0
                    self._free(page)
                    lock_bytes(handle, fcntl.F_UNLCK, page, 1)
                else:  # in use: to the end of the ring
                    self._append(page)
                self._order[0] = head + 1

    def _append(self, page: int) -> None:
        tail = int(self._order[1])
        self._order[2 + tail % self.capacity] = page
        self._order[1] = tail + 1

    @contextmanager
    def _locked_order(self) -> Iterator[None]:
        handle = os.open(self.folder / ORDER, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_bytes(handle, fcntl.F_WRLCK, 0, 1)
            yield
        finally:
            os.close(handle)


def adjacent_runs(pages: Ints) -> list[tuple[int, int]]:
    """Return the runs [first, stop) of adjacent numbers in `pages` (ascending)."""
    if not len(pages):
        return []
    edges = np.flatnonzero(np.diff(pages) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(pages, edges)]


def punch_hole(handle: int, start: int, length: int) -> None:
    """Free the disk space of the bytes [start, start + length) of an open file; they read as zeros. Raises OSError."""
    mode = ctypes.c_int(KEEP_SIZE | PUNCH_HOLE)
    if _libc.fallocate(ctypes.c_int(handle), mode, ctypes.c_int64(start), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def lock_bytes(handle: int, kind: int, start: int, length: int, wait: bool = True) -> bool:
    """Lock or unlock bytes by an open file description lock; return whether the lock was granted."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


# The lazy folder.


class LazyFolderConfig(BaseModel):
    """`lazy-folder.json`."""

    uri: str
    """Prefix of the files in the store."""
    limit: int
    """Bytes of pages to keep on a machine."""


class FileListing(BaseModel):
    """The fields of the artifact's manifest that a lazy folder needs."""

    files: dict[str, FileDigest]
    pages: dict[str, FileDigest] = {}
    """File of more than a page -> digest of the object that holds its page digests."""


def lazy_folder(artifact: Artifact, limit_bytes: int) -> Path:
    """Return a folder from which `artifact` can be read; its files are downloaded on demand.

    Readers must open files with `ensure_local` and pages with `lazy_folder_of(...).held`. At most `limit_bytes` of
    pages are kept on the machine (0: the previous limit, 1 GiB for a new folder). A complete local copy is returned
    unchanged. Raises OSError.
    """
    if not isinstance(artifact, RemoteArtifact) or artifact._whole():
        return artifact.path
    folder = artifact.root.file(LAZY, artifact.label, artifact.manifest.attempt)
    return make_lazy(folder, artifact.uri, artifact.manifest.text(), limit_bytes)


def make_lazy(folder: Path, uri: str, manifest: str, limit_bytes: int) -> Path:
    """Create `folder` as a lazy folder for the files under `uri` listed in `manifest` (JSON), or change its limit."""
    path = folder / LAZY_FOLDER
    before = LazyFolderConfig.model_validate_json(path.read_text()) if path.exists() else None
    assert before is None or before.uri == uri, f"{folder}: is for {before and before.uri}"
    where = LazyFolderConfig(uri=uri, limit=limit_bytes or (before.limit if before else FRESH))
    if before is None:
        write_atomic(folder / MANIFEST, manifest)
    if where != before:
        write_atomic(path, where.model_dump_json() + "\n")
    return folder


def ensure_local(path: Path) -> Path:
    """Return the path at which the file `path` can be opened; for a plain folder that is `path` itself.

    In a lazy folder a small file is downloaded; a large one has bytes only in the pages that are held. Raises
    WrongBytes, FileNotFoundError for a name that the manifest does not list, and OSError.
    """
    lazy = lazy_folder_of(path.parent)
    return path if lazy is None else lazy.path(path.relative_to(lazy.folder).as_posix())


def lazy_folder_of(folder: Path) -> LazyFolder | None:
    """Return the lazy folder that is or contains `folder`, one object per process; None for a plain folder."""
    return _lazy_of(folder, os.getpid())


@lru_cache(4096)
def _lazy_of(folder: Path, process: int) -> LazyFolder | None:
    for base in (folder, *folder.parents[:2]):
        if (base / LAZY_FOLDER).is_file():
            return _open_lazy_folder(base, process)
    return None


@lru_cache(64)
def _open_lazy_folder(folder: Path, process: int) -> LazyFolder:
    return LazyFolder(folder)


class LazyFolder:
    """A lazy folder opened by this process; thread-safe."""

    def __init__(self, folder: Path) -> None:
        where = LazyFolderConfig.model_validate_json((folder / LAZY_FOLDER).read_text())
        listing = FileListing.model_validate_json((folder / MANIFEST).read_bytes())
        self.folder, self.uri = folder, where.uri
        root = os.environ.get(CACHE, "")
        base = Path(root) / hashlib.sha256(where.uri.encode()).hexdigest()[:16] if root else folder
        self.cache = base / socket.gethostname()
        self._files = listing.files
        self._paged = sorted(name for name in listing.pages if name.endswith(PAGED))
        self._digests = {f"{PAGES}/{name}": digest for name, digest in listing.pages.items()}
        for directory in (self.cache, *{(self.cache / name).parent for name in self._paged}):
            directory.mkdir(parents=True, exist_ok=True)
        self._stamp = VerifiedFiles(self.cache / VERIFIED)
        self._verified = self._stamp.read()
        """Small files that this machine has verified since it booted."""
        counts = [-(-self._files[name].bytes // PAGE) for name in self._paged]
        edges = np.cumsum([0, *counts], dtype=np.int64)
        self.first = dict(zip(self._paged, edges.tolist(), strict=False))
        """Number of the first page of each large file; numbers continue across files."""
        self._edges, self.limit, self.limit_bytes = edges, max(1, where.limit // PAGE), where.limit
        if self.limit < edges[-1]:
            _check_punch_hole(self.cache)
        self.piece = max(1, min(HELD, self.limit // 4))
        """Pages that a reader should hold at a time."""
        self.table = PageTable(self.cache, int(edges[-1]), self.limit, self._drop, self._clear)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lazy")
        self._prefetch = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._known: set[str] = set()

    def path(self, name: str) -> Path:
        """See `ensure_local`."""
        path = self.cache / name
        if name in self._known:
            return path
        digest = self._files.get(name) or self._digests.get(name)
        if digest is None:
            raise FileNotFoundError(f"{self.uri}/{name}: is not in the artifact's manifest")
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in self.first:
            with self._writing(name):  # creates the sparse file
                pass
        elif (stat := FileStat.from_path(path)) is None or self._verified.get(name) != stat:
            with (self.cache / "whole").open("ab") as lock:  # one process downloads, others wait
                lock_bytes(lock.fileno(), fcntl.F_WRLCK, zlib.crc32(name.encode()), 1)
                if not path.exists() or (
                    self._verified.get(name) != FileStat.from_path(path) and digest_file(path) != digest
                ):
                    download_verified(f"{self.uri}/{name}", digest, path)
                self._stamp.add_folder(self.cache, [name])
        self._known.add(name)
        return path

    def pages_of(self, name: str) -> int:
        """Return the number of pages of a file; 0 if it is downloaded whole."""
        return -(-self._files[name].bytes // PAGE) if name in self.first else 0

    def fetch(self, paths: Iterable[Path]) -> None:
        """Download small files in parallel. Raises as `ensure_local`."""
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        list(self._pool.map(self.path, [name for name in names if name not in self._known]))

    @contextmanager
    def held(self, pages: Ints) -> Iterator[None]:
        """Download missing ones of `pages` (numbers, ascending) and keep all until the block ends.

        Raises WrongBytes and OSError.
        """
        with self.table.opened() as handle:
            absent = self.table.share(handle, pages)
            while len(absent):
                claimed = self.table.claim(handle, absent)
                self._download(claimed[self.table.marks[claimed] != 1])
                self.table.mark_fetched(handle, claimed)
                # No deadlock: a process waits for others only when it holds no page exclusively.
                absent = self.table.share(handle, np.setdiff1d(absent, claimed), wait=True)
            yield

    def later(self, do: Callable[[], None]) -> None:
        """Run `do` in a background thread, in order of submission. Errors are ignored: the reader will meet them."""

        def call() -> None:
            with suppress(OSError):
                do()

        self._prefetch.submit(call)

    def _download(self, pages: Ints) -> None:
        if not len(pages):
            return
        self.table.reserve(pages)
        requests: list[Future[None]] = []
        for first, stop in adjacent_runs(pages):
            for start in range(first, stop, RUN):
                for span in self._in_files(start, min(start + RUN, stop)):
                    requests.append(self._pool.submit(self._download_run, *span))
        wait(requests)  # all, even if one failed: no thread may write after the locks are released
        for request in requests:
            request.result()

    def _in_files(self, first: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield (file, first page in the file, stop) for the pages [first, stop)."""
        while first < stop:
            number = int(np.searchsorted(self._edges, first, "right")) - 1
            end = min(stop, int(self._edges[number + 1]))
            yield self._paged[number], first - int(self._edges[number]), end - int(self._edges[number])
            first = end

    def _download_run(self, name: str, first: int, stop: int) -> None:
        """Download, verify and write the pages [first, stop) of a large file."""
        end = min(stop * PAGE, self._files[name].bytes)
        with self.path(f"{PAGES}/{name}").open("rb") as file:
            file.seek(first * PAGE_DIGEST)
            digests = file.read((stop - first) * PAGE_DIGEST)
        data, written = get_verified_pages(f"{self.uri}/{name}", first, end, digests), 0
        with self._writing(name) as handle:
            while written < len(data):
                written += os.pwrite(handle, memoryview(data)[written:], first * PAGE + written)

    def _drop(self, page: int) -> None:
        ((name, number, _),) = self._in_files(page, page + 1)
        with self._writing(name) as handle:
            punch_hole(handle, number * PAGE, PAGE)

    @contextmanager
    def _writing(self, name: str) -> Iterator[int]:
        """Open a large file, creating it if absent."""
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


def _check_punch_hole(folder: Path) -> None:
    """Raise OSError if the file system of `folder` cannot free parts of a file."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        try:
            punch_hole(file.fileno(), 0, 1)
        except OSError as error:
            message = f"{folder}: its file system cannot punch holes in files; set {CACHE} to a folder on a local disk"
            raise OSError(error.errno, message) from error
