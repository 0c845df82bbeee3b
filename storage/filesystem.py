"""One way to name and touch bytes, local or remote: URIs through fsspec.

File systems are made once per process (an s3fs object made before a fork refuses to work after it) and never cache
listings (a stale listing once hid a finished file from a second process); every call to an object store ends
(storage/s3.py). Local writes become visible whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fsspec


def is_local(uri: str) -> bool:
    """Return whether `uri` is a plain path or a `file://` URI."""
    return "://" not in uri or uri.startswith("file://")


def local_path(uri: str) -> Path:
    """Return the path that a local `uri` names."""
    return Path(uri.removeprefix("file://")).expanduser()


def filesystem_of(uri: str) -> Any:
    """Return the fsspec file system that serves `uri`, made once in this process."""
    protocol = "file" if is_local(uri) else uri.split("://", 1)[0]
    return _filesystem(protocol, os.getpid())


@cache
def _filesystem(protocol: str, pid: int) -> Any:
    if protocol in ("s3", "s3a"):
        from storage.s3 import BoundedS3, options  # half a second to import, and most processes need none of it

        return BoundedS3(**options(), skip_instance_cache=True)
    return fsspec.filesystem(protocol)


def glob(uri: str) -> list[str]:
    """Return the files that `uri` names, sorted: a file itself, a folder's files at any depth, or a glob's matches."""
    return [name for name, _ in listing(uri)]


def listing(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the same files, each with what the file system says of it; in few requests."""
    filesystem, path = filesystem_of(uri), str(local_path(uri)) if is_local(uri) else uri
    if any(mark in path for mark in "*?["):
        found = filesystem.glob(path, detail=True)
    elif filesystem.isdir(path):
        found = filesystem.find(path, detail=True)
    else:
        found = {path: filesystem.info(path)} if filesystem.exists(path) else {}
    prefix = "" if is_local(uri) else uri.split("://", 1)[0] + "://"
    named = ((name if name.startswith(prefix) else prefix + name, info) for name, info in found.items())
    return sorted((pair for pair in named if pair[1]["type"] != "directory"), key=lambda pair: pair[0])


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a local file so that readers see the old bytes or the new ones, even after a crash or a power cut."""
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path, payload) as made:
        os.replace(made, path)
    sync_folder(path.parent)


@contextmanager
def written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """Yield a new file in the folder of `path` that holds `data` on disk; it is gone at the end, unless renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, 0o644)  # others may share the root
            os.fsync(handle)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def changed(info: dict[str, Any]) -> str:
    """Return what in a file's `info` changes with its content: its time, or the object store's tag."""
    return str(info.get("mtime") or info.get("ETag") or info.get("LastModified") or info.get("blob_id") or "")


def state(uri: str) -> list[list[object]]:
    """Return uri, size and what changes with the content of each file of `uri`."""
    return [[name, info["size"], changed(info)] for name, info in listing(uri)]
