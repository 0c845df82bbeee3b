"""One way to name and touch bytes, local or remote: URIs through fsspec.

File systems are made once per process (an s3fs object made before a fork refuses to work after it) and never cache
listings (a stale listing once hid a finished file from a second process); every call to an object store ends
(storage/s3.py). Local writes become visible whole or not at all.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

TRIES, FIRST_WAIT_S = 4, 0.5
"""Calls of a store before its failure is final, and the seconds after the first; each later wait is twice as long."""
Answer = TypeVar("Answer")
_MAGIC = re.compile(r"[*?\[]")
_QUERY = re.compile(r"\?[^\s'\"<>]*[=&][^\s'\"<>]*")


class StoreError(OSError):
    """A store that did not answer, or refused; says nothing about what is stored there."""


def cache_folder() -> Path:
    """Return the user's folder of what herd can make again; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "herd"


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
    import fsspec

    if protocol in ("s3", "s3a"):
        from storage.s3 import BoundedS3, options  # half a second to import, and most processes need none of it

        return BoundedS3(**options(), skip_instance_cache=True)
    if protocol == "hf":
        from storage.s3 import bound_hub_requests

        bound_hub_requests()
    return fsspec.filesystem(protocol)


def glob(uri: str) -> list[str]:
    """Return the files that `uri` names, sorted: a file itself, a folder's files at any depth, or a glob's matches."""
    return [name for name, _ in listing(uri)]


def listing(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the same files, each with what the file system says of it; in few requests.

    A name that exists is taken as it is, also where it looks like a glob. Of what is no regular file on this machine
    (a pipe, a broken link) `type` is "other". Raises OSError where a folder or a store does not answer: an empty list
    means that nothing is there.
    """
    if is_local(uri):
        found = _local_files(str(local_path(uri)))
    else:
        found = patiently(uri, partial(_remote_files, uri))
    prefix = "" if is_local(uri) else uri.split("://", 1)[0] + "://"
    named = ((name if name.startswith(prefix) else prefix + name, info) for name, info in found.items())
    return sorted((pair for pair in named if pair[1]["type"] != "directory"), key=lambda pair: pair[0])


def patiently(uri: str, call: Callable[[], Answer]) -> Answer:
    """Return what `call` returns, which asks a store about `uri`; if it fails, wait longer each time and call again.

    Raises FileNotFoundError where the store says that nothing is there, and StoreError where it does not say: a store
    that refuses access answers with that class, too, and its clients have errors of every other class.
    """
    began = time.monotonic()
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except Exception as error:
            if _absent(error):
                raise FileNotFoundError(errno.ENOENT, "not there", uri) from error
            from storage.s3 import deadline  # half a second to import

            if attempt == TRIES or time.monotonic() - began >= deadline():
                said = _QUERY.sub("?...", " ".join(str(error).split()))  # signed addresses hold a key
                raise StoreError(f"{uri}: {type(error).__name__}: {said} ({attempt} tries)") from error
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            filesystem_of(uri).invalidate_cache()  # the Hub's client remembers refusals
    raise AssertionError(TRIES)


def _absent(error: BaseException) -> bool:
    """Return whether a store says that something is not there: a 404, and no other status behind the same class."""
    known, cause = isinstance(error, FileNotFoundError), error
    while cause is not None:
        answer = getattr(cause, "response", None)
        meta = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
        status = meta.get("HTTPStatusCode") or getattr(answer, "status_code", None)
        if status is not None:
            return status in (404, 410)
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return known


def _remote_files(uri: str) -> dict[str, dict[str, Any]]:
    """Return the files that a remote `uri` names; folders may be among them."""
    filesystem = filesystem_of(uri)
    filesystem.invalidate_cache()
    if "*" not in uri:
        try:
            info = filesystem.info(uri)
        except Exception as error:
            if not _absent(error):
                raise
            info = None
        if info is not None:
            return dict(filesystem.find(uri, detail=True)) if info["type"] == "directory" else {uri: info}
    if not _MAGIC.search(uri):
        return {}
    try:
        if uri.startswith(("s3://", "s3a://")):  # fsspec's own glob leaves out what the store refuses to list
            root, pattern, depth = _glob(str(filesystem._strip_protocol(uri)))
            strict = {"maxdepth": depth, "on_error": "raise"} if depth else {}
            found = filesystem.find(root, detail=True, **strict)
            return {name: info for name, info in found.items() if pattern.match(name)}
        return dict(filesystem.glob(uri, detail=True))
    except Exception as error:
        if _absent(error):
            return {}
        raise


def _local_files(path: str) -> dict[str, dict[str, Any]]:
    """Return the files that a path of this machine names."""
    if os.path.isdir(path):
        return dict(_walked(os.path.abspath(path), None, set()))
    if os.path.lexists(path):
        return {path: _local_info(path)}
    if not _MAGIC.search(path):
        return {}
    root, pattern, depth = _glob(os.path.abspath(path))
    found = _walked(root, depth, set()) if os.path.isdir(root) else ()
    return {name: info for name, info in found if pattern.match(name)}


def _walked(folder: str, depth: int | None, seen: set[tuple[int, int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the files below `folder`, links to folders followed last, so that each folder counts once."""
    here = os.stat(folder)
    if (here.st_dev, here.st_ino) in seen:
        return
    seen.add((here.st_dev, here.st_ino))
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
    for entry in ordered:
        if not os.path.isdir(entry.path):  # entry.is_dir() raises for a link to itself
            yield entry.path, _local_info(entry.path)
        elif depth is None or depth > 1:
            yield from _walked(entry.path, depth and depth - 1, seen)


def _local_info(path: str) -> dict[str, Any]:
    try:
        found = os.stat(path)
    except OSError:  # a link to nothing or to itself
        found = os.lstat(path)
    kind = "file" if stat.S_ISREG(found.st_mode) else "directory" if stat.S_ISDIR(found.st_mode) else "other"
    return {"name": path, "size": found.st_size, "type": kind, "mtime": found.st_mtime}


def _glob(path: str) -> tuple[str, re.Pattern[str], int | None]:
    """Return of a glob the folder above its first mark, the pattern of the names, and how deep they lie below it."""
    from fsspec.utils import glob_translate

    mark = _MAGIC.search(path)
    assert mark is not None
    cut = path.rfind("/", 0, mark.start())
    depth = None if "**" in path else path.count("/", cut)
    return path[: max(cut, 0)] or "/", re.compile(glob_translate(path)), depth


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
