"""Which pages of big remote files are on this machine's disk, for all of its processes: marks, locks and an order.

`marks` has a byte per page, 1 if its bytes are there; the same byte is the place of its lock (an "open file
description" lock, man fcntl: the kernel frees it when its holder dies, however it dies). Shared: the page is read and
must stay. Exclusive: it is being brought or dropped. `order` is a ring of page numbers as they came, first in, first
out: a reader of shuffled documents uses a page in one block and not again before the next epoch, so the oldest is the
one that will not be missed. One lock for the cache (flock) would be simpler, but readers that take turns would never
let the one in that drops pages, and eight processes that read the same batch would bring it eight times.

A page is marked after its bytes are written and unmarked before they are dropped, both under its lock, so no reader
ever sees the zeros of a hole. A power cut may keep a mark and lose the bytes: marks of another boot are not believed,
and the cache begins empty. What this gives up: Linux, and a local disk that can punch holes (ext4, XFS, btrfs, tmpfs).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.processes import boot_id

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
