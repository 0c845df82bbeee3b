"""Size and SHA-256 of files: what a manifest says of each, and how to find out, with several threads.

Disks and networks flip bits that nothing else notices, so every manifest of ours holds digests. SHA-256 rather than a
checksum, because the same digest is also a name that nobody can forge; it costs 0.6 s per GB and core where the
processor has instructions for it.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel

THREADS = 4
"""Files read at the same time: hashing leaves Python's lock, and a disk answers several requests faster than one."""


class FileDigest(BaseModel):
    bytes: int
    sha256: str


def digest_file(path: Path, sync: bool = False) -> FileDigest:
    """Return size and SHA-256 of a file; with `sync`, put it on the disk too. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return FileDigest(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def digest_folder(folder: Path, sync: bool = False) -> dict[str, FileDigest]:
    """Return the digest of every file under `folder` by its relative name, sorted. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda path: digest_file(path, sync), paths))
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, found, strict=True)}
