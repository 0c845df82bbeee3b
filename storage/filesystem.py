"""Local and remote files by URI (fsspec), and atomic local writes.

File systems are created once per process (an s3fs object does not work after a fork) and never cache listings: a stale
listing once hid a finished file from a second process. Calls of an object store have a deadline (`OBJECT_STORES`).
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
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

TRIES, FIRST_WAIT_S = 4, 0.5
"""Tries of a call, and seconds to wait after the first; each later wait is twice as long."""
Answer = TypeVar("Answer")
OBJECT_STORES = {"s3": "storage.s3:BoundedS3", "s3a": "storage.s3:BoundedS3"}
"""Scheme of a URI -> module and class of the client of an object store.

A client is an fsspec file system whose calls end by `call_deadline`. `pipe_file(..., mode="create")` never replaces an
object, `find` tells `LastModified`, and `server_time(uri)` and `abort_uploads(uri, before)` are as in `BoundedS3`.
"""
DEADLINE_S = 300.0
"""Default of HERD_S3_DEADLINE_S: seconds after which a call of an object store fails."""
HUB_ANSWER_S = 20
"""Default time limit in seconds without a byte for requests of the Hugging Face Hub client."""
_MAGIC = re.compile(r"[*?\[]")
_QUERY = re.compile(r"\?[^\s'\"<>]*[=&][^\s'\"<>]*")


class StoreError(OSError):
    """A store did not answer, or refused; says nothing about what it contains."""


class StoreTimeout(OSError):
    """An object store did not answer in time. Not a TimeoutError, because s3fs retries those."""


def call_deadline() -> float:
    """Return the deadline of a call in seconds. Raises ValueError if HERD_S3_DEADLINE_S is not a positive number."""
    text = os.environ.get("HERD_S3_DEADLINE_S", str(DEADLINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"HERD_S3_DEADLINE_S: {text!r} is not a number of seconds above 0; the default is 300")
    return seconds


def cache_folder() -> Path:
    """Return the user's cache folder of herd; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "herd"


def is_local(uri: str) -> bool:
    """Return whether `uri` is a plain path or a `file://` URI."""
    return "://" not in uri or uri.startswith("file://")


def local_path(uri: str) -> Path:
    """Return the path that a local `uri` names."""
    return Path(uri.removeprefix("file://")).expanduser()


def is_object_store(uri: str) -> bool:
    """Return whether `uri` is in a store that a root can be in: its client has deadlines (see `OBJECT_STORES`)."""
    return uri.partition("://")[0] in OBJECT_STORES


def filesystem_of(uri: str) -> Any:
    """Return the fsspec file system for `uri`, created once per process."""
    protocol = "file" if is_local(uri) else uri.split("://", 1)[0]
    return _filesystem(protocol, os.getpid())


@cache
def _filesystem(protocol: str, pid: int) -> Any:
    import fsspec

    if protocol == "hf":
        _bound_hub_requests()
    if protocol in OBJECT_STORES:
        module, _, name = OBJECT_STORES[protocol].partition(":")
        return getattr(import_module(module), name)()  # half a second to import, rarely needed
    return fsspec.filesystem(protocol)


def _bound_hub_requests() -> None:
    """Set a time limit on all requests of the Hub client in this process; by default listings have none."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def bound(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: given.get(name) or HUB_ANSWER_S for name in names}

    def client() -> Any:
        http_client = default_client_factory()
        http_client.event_hooks = {
            **http_client.event_hooks,
            "request": [*http_client.event_hooks["request"], bound],
        }
        return http_client

    set_client_factory(client)


def glob(uri: str) -> list[str]:
    """Return the files of `uri`, sorted: the file, all files below a folder, or the matches of a glob."""
    return [name for name, _ in list_files(uri)]


def list_files(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the files of `uri` (see `glob`) with their fsspec info, in few requests.

    A name that exists is taken literally, even if it looks like a glob. On this machine `type` is "other" for a pipe or
    a broken link. Raises OSError if a folder or a store does not answer: an empty list means that there are no files.
    """
    if is_local(uri):
        files = _local_files(str(local_path(uri)))
    else:
        files = with_retries(uri, partial(_remote_files, uri))
    prefix = "" if is_local(uri) else uri.split("://", 1)[0] + "://"
    named = ((name if name.startswith(prefix) else prefix + name, info) for name, info in files.items())
    return sorted((pair for pair in named if pair[1]["type"] != "directory"), key=lambda pair: pair[0])


def with_retries(uri: str, call: Callable[[], Answer]) -> Answer:
    """Call a store about `uri`, with retries and exponential backoff.

    Raises FileNotFoundError if the store reports 404, and StoreError for all other failures: clients raise many
    classes, and FileNotFoundError also when access is denied.
    """
    began = time.monotonic()
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except Exception as error:
            if _is_not_found(error):
                raise FileNotFoundError(errno.ENOENT, "not found", uri) from error
            if attempt == TRIES or time.monotonic() - began >= call_deadline():
                message = _QUERY.sub("?...", " ".join(str(error).split()))  # signed addresses contain a key
                raise StoreError(f"{uri}: {type(error).__name__}: {message} ({attempt} tries)") from error
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            filesystem_of(uri).invalidate_cache()  # the Hub client caches refusals
    raise AssertionError(TRIES)


def _is_not_found(error: BaseException) -> bool:
    """Return whether an error means "not found": status 404 or 410, or FileNotFoundError without any status."""
    not_found, cause = isinstance(error, FileNotFoundError), error
    while cause is not None:
        answer = getattr(cause, "response", None)
        meta = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
        status = meta.get("HTTPStatusCode") or getattr(answer, "status_code", None)
        if status is not None:
            return status in (404, 410)
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return not_found


def _remote_files(uri: str) -> dict[str, dict[str, Any]]:
    """Return the files of a remote `uri`; may include folders."""
    filesystem = filesystem_of(uri)
    filesystem.invalidate_cache()
    if "*" not in uri:
        try:
            info = filesystem.info(uri)
        except Exception as error:
            if not _is_not_found(error):
                raise
            info = None
        if info is not None:
            return dict(filesystem.find(uri, detail=True)) if info["type"] == "directory" else {uri: info}
    if not _MAGIC.search(uri):
        return {}
    try:
        if is_object_store(uri):  # fsspec's own glob skips folders that the store refuses to list
            root, pattern, depth = _glob(str(filesystem._strip_protocol(uri)))
            strict = {"maxdepth": depth, "on_error": "raise"} if depth else {}
            files = filesystem.find(root, detail=True, **strict)
            return {name: info for name, info in files.items() if pattern.match(name)}
        return dict(filesystem.glob(uri, detail=True))
    except Exception as error:
        if _is_not_found(error):
            return {}
        raise


def _local_files(path: str) -> dict[str, dict[str, Any]]:
    """Return the files of a local path."""
    if os.path.isdir(path):
        return dict(_walk(os.path.abspath(path), None, set()))
    if os.path.lexists(path):
        return {path: _local_info(path)}
    if not _MAGIC.search(path):
        return {}
    root, pattern, depth = _glob(os.path.abspath(path))
    files = _walk(root, depth, set()) if os.path.isdir(root) else ()
    return {name: info for name, info in files if pattern.match(name)}


def _walk(folder: str, depth: int | None, seen: set[tuple[int, int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the files below `folder`; each folder once, links to folders last."""
    status = os.stat(folder)
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
    for entry in ordered:
        if not os.path.isdir(entry.path):  # entry.is_dir() raises for a link to itself
            yield entry.path, _local_info(entry.path)
        elif depth is None or depth > 1:
            yield from _walk(entry.path, depth and depth - 1, seen)


def _local_info(path: str) -> dict[str, Any]:
    try:
        status = os.stat(path)
    except OSError:  # a link to nothing or to itself
        status = os.lstat(path)
    kind = "file" if stat.S_ISREG(status.st_mode) else "directory" if stat.S_ISDIR(status.st_mode) else "other"
    return {"name": path, "size": status.st_size, "type": kind, "mtime": status.st_mtime}


def _glob(path: str) -> tuple[str, re.Pattern[str], int | None]:
    """Return the folder above the first wildcard, the compiled pattern, and its depth below the folder."""
    from fsspec.utils import glob_translate

    mark = _MAGIC.search(path)
    assert mark is not None
    cut = path.rfind("/", 0, mark.start())
    depth = None if "**" in path else path.count("/", cut)
    return path[: max(cut, 0)] or "/", re.compile(glob_translate(path)), depth


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a local file atomically and durably, also across a crash or a power cut."""
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file_beside(path, payload) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


@contextmanager
def temporary_file_beside(path: Path, data: bytes) -> Iterator[Path]:
    """Yield a synced temporary file with `data` in the folder of `path`; deleted at the end unless renamed."""
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


def version_of(info: dict[str, Any]) -> str:
    """Return the field of a file's `info` that changes with its content: modification time or ETag."""
    return str(info.get("mtime") or info.get("ETag") or info.get("LastModified") or info.get("blob_id") or "")


def source_state(uri: str) -> list[list[object]]:
    """Return URI, size and `version_of` of each file of `uri`."""
    return [[name, info["size"], version_of(info)] for name, info in list_files(uri)]
