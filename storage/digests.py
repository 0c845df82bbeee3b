"""Size and SHA-256 of files and pages, computed by several threads.

SHA-256 and not a checksum, because the digest is also an unforgeable name; it costs 0.6 s per GB and core where the
processor has instructions for it. Token shards also have a digest per page (32 bytes per MiB), so that a range read can
be verified without the rest of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from herd.storage.filesystem import sync_folder

THREADS = 4
"""Files read at the same time: hashing releases the GIL, and a disk is faster with several requests."""
READERS = 16
"""Small documents read at the same time: each is one request that waits for the network."""
PAGE = 2**20
"""Bytes of a page; the last one of a file may be shorter."""
PAGED = ".bin"
"""Suffix of files that are read in pages (token shards); page digests double the cost, so others have none."""
PAGE_DIGEST = 32
"""Bytes of a page's SHA-256."""

T = TypeVar("T")
R = TypeVar("R")


class FileDigest(BaseModel):
    bytes: int
    sha256: str


def digest_bytes(data: bytes) -> FileDigest:
    """Return size and SHA-256 of `data`."""
    return FileDigest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def digest_json(data: object) -> str:
    """Return the SHA-256 (hex) of `data` as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_file(path: Path, sync: bool = False) -> FileDigest:
    """Return size and SHA-256 of a file; `sync` also flushes it to the disk. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return FileDigest(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def digest_pages(path: Path) -> tuple[FileDigest, bytes]:
    """Return the digest of a file and the concatenated SHA-256 of its pages, from one read. Raises OSError."""
    whole, pages, size = hashlib.sha256(), bytearray(), 0
    with path.open("rb") as file:
        while data := file.read(PAGE):
            whole.update(data)
            pages += hashlib.sha256(data).digest()
            size += len(data)
    return FileDigest(bytes=size, sha256=whole.hexdigest()), bytes(pages)


def first_wrong_page(data: bytes, digests: bytes) -> int | None:
    """Return the index of the first page in `data` that does not match `digests`; None if all match."""
    for number, start in enumerate(range(0, len(data), PAGE)):
        expected = digests[number * PAGE_DIGEST : (number + 1) * PAGE_DIGEST]
        if hashlib.sha256(memoryview(data)[start : start + PAGE]).digest() != expected:
            return number
    return None


def digest_folder(folder: Path, sync: bool = False) -> dict[str, FileDigest]:
    """Return relative name -> digest of every file under `folder`, sorted. Raises OSError.

    `sync` also flushes the files and the folders below `folder` to the disk.
    """
    entries = sorted(folder.rglob("*"))
    paths = [path for path in entries if path.is_file()]
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda path: digest_file(path, sync), paths))
    for path in entries if sync else ():
        if path.is_dir():
            sync_folder(path)
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, digests, strict=True)}


def parallel_map(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return the result of `work` for each item, in order. Raises the first error once all threads have ended.

    After an error no queued item is started: `pool.map` would, and a server that hangs would cost its deadline twice.
    """
    items = list(items)
    if len(items) == 1:  # a thread takes longer than a small file
        return [work(items[0])]
    failed = threading.Event()

    def guarded(item: T) -> R:
        if failed.is_set():
            raise InterruptedError("another file failed first")
        try:
            return work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(guarded, item) for item in items]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, InterruptedError)), errors[0])
    return [future.result() for future in futures]
