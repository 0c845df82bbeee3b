"""Local and remote files by URI (fsspec), and atomic local writes.

File systems are created once per process (an s3fs object does not work after a fork) and never cache listings: a stale
listing once hid a finished file from a second process. Calls of an object store have a deadline (`OBJECT_STORES`).
"""

from __future__ import annotations

import atexit
import errno
import ipaddress
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from glob import escape as glob_escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

TRIES, FIRST_WAIT_S = 4, 0.5
"""Tries of a call, and seconds to wait after the first; each later wait is twice as long."""
Answer = TypeVar("Answer")
OBJECT_STORES = {
    "s3": "herd.storage.s3:BoundedS3",
    "s3a": "herd.storage.s3:BoundedS3",
    "counted": "herd.storage.counted:CountedStore",
}
"""Scheme of a URI -> module and class of the client of an object store.

A client is an fsspec file system whose calls end by `call_deadline`. `pipe_file(..., mode="create")` never replaces an
object, `find` tells `LastModified`, and `server_time(uri)` and `abort_uploads(uri, before)` are as in `BoundedS3`.
"""
DEADLINE_S = 300.0
"""Default of HERD_S3_DEADLINE_S: seconds after which a call of an object store fails."""
HUB_ANSWER_S = 20
"""Default time limit in seconds without a byte for requests of the Hugging Face Hub client."""
FETCHED = "HERD_FETCHED"
"""Environment variable: the folder with copies of remote files (see `herd.storage.fetch`)."""
LISTINGS = "listings"
"""Folder of the manifests inside FETCHED."""
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


def use_writable_cache() -> None:
    """Keep caches in a temporary folder if the user's cannot be written: numba and Matplotlib need one."""
    with suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        if os.access(cache_folder(), os.W_OK):
            return
    os.environ.setdefault("HF_HOME", str(cache_folder().with_name("huggingface")))  # where its token may be
    os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="herd-cache-")
    os.environ.setdefault("MPLCONFIGDIR", folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.filterwarnings("ignore", "Failed to create the Prefect home")  # which herd does not use


PACKAGE = "package://"
"""Beginning of the name of a file that an installed package brings."""


def is_local(uri: str) -> bool:
    """Return whether `uri` is a plain path, a `file://` URI, or `package://name/file` of an installed package."""
    return "://" not in uri or uri.startswith(("file://", PACKAGE))


def local_path(uri: str) -> Path:
    """Return the path that a local `uri` names. Raises ValueError if the package that it names is not installed."""
    if not uri.startswith(PACKAGE):
        return Path(uri.removeprefix("file://")).expanduser()
    package, _, file = uri.removeprefix(PACKAGE).partition("/")
    found = find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"{uri}: there is no package {package!r} in this environment; install it, or name a path")
    return Path(found.submodule_search_locations[0], file)


def is_below(name: str) -> bool:
    """Return whether `name`, which a store may have made up, stays below the folder that it is joined to."""
    segments = PurePosixPath(name).parts
    return bool(segments) and not (name.startswith("/") or ".." in segments or "\0" in name or "\\" in name)


def is_object_store(uri: str) -> bool:
    """Return whether `uri` is in a store that a root can be in: its client has deadlines (see `OBJECT_STORES`)."""
    return uri.partition("://")[0] in OBJECT_STORES


def filesystem_of(uri: str) -> Any:
    """Return the fsspec file system for `uri`; of a fetched file, one that reads the copy."""
    return remote_filesystem(uri) if is_local(uri) or fetched_path(uri) is None else _CopyReader()


def remote_filesystem(uri: str) -> Any:
    """Return the fsspec file system for `uri`, created once per process; it does not know copies."""
    protocol = "file" if is_local(uri) else uri.split("://", 1)[0]
    return _filesystem(protocol, os.getpid())


@cache
def _filesystem(protocol: str, pid: int) -> Any:
    import fsspec

    if protocol in ("hf", "http", "https"):
        _bound_requests()  # of the files that `fetch` downloads too
    if protocol in ("http", "https"):
        return fsspec.filesystem(protocol, client_kwargs={"trace_configs": [_redirect_trace()]})
    if protocol in OBJECT_STORES:
        module, _, name = OBJECT_STORES[protocol].partition(":")
        return getattr(import_module(module), name)()  # half a second to import, rarely needed
    return fsspec.filesystem(protocol)


def _bound_requests() -> None:
    """Set a time limit on all requests of the Hub client in this process, and check its redirects.

    By default its listings have no limit.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def bound(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: given.get(name) or HUB_ANSWER_S for name in names}

    def check(response: Any) -> None:
        if response.has_redirect_location:
            check_redirect(str(response.url), response.headers["location"])

    def client() -> Any:
        http_client = default_client_factory()
        hooks = http_client.event_hooks
        http_client.event_hooks = {"request": [*hooks["request"], bound], "response": [*hooks["response"], check]}
        return http_client

    set_client_factory(client)


def _redirect_trace() -> Any:
    """Return a trace of aiohttp that checks redirects."""
    import aiohttp

    async def check(session: Any, context: Any, redirect: Any) -> None:
        check_redirect(str(redirect.response.url), redirect.response.headers["location"])

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    return trace


class RedirectRefused(ValueError):
    """A server sends a reader to an address that it should not reach through it."""


def check_redirect(address: str, location: str) -> None:
    """Raise RedirectRefused if `location` (absolute or relative) is more private than the address that leads to it.

    Else a public server in a recipe could have a machine read what only that machine may: of a cloud instance, its
    credentials at a link-local address.
    """
    target = urljoin(address, location)
    if urlsplit(target).netloc != urlsplit(address).netloc and _privacy(target) > _privacy(address):
        raise RedirectRefused(
            f"{address}: its server redirects to {_QUERY.sub('?...', target)}, which only machines here can reach; "
            "name that address itself if it is meant"
        )


def _privacy(address: str) -> int:
    """Return 3 if a host of `address` may be link-local, 2 for loopback, 1 for another private one, 0 for a public one.

    A name that is not known is public: nothing can be read from it.
    """
    import socket

    try:
        found = socket.getaddrinfo(urlsplit(address).hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return 0
    hosts = [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    hosts = [getattr(host, "ipv4_mapped", None) or host for host in hosts]
    return max(
        3 * host.is_link_local or 2 * (host.is_loopback or host.is_unspecified) or host.is_private for host in hosts
    )


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
    elif (listing := fetched_listing(uri)) is not None:
        return [(file.uri, file.info) for file in listing.files]
    else:
        return list_remote_files(uri)
    return sorted((pair for pair in files.items() if pair[1]["type"] != "directory"), key=lambda pair: pair[0])


def list_remote_files(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """Return `list_files` of a remote `uri` as its store answers now, whether it is fetched or not."""
    files = with_retries(uri, partial(_remote_files, uri))
    prefix = uri.split("://", 1)[0] + "://"
    named = ((name if name.startswith(prefix) else prefix + name, info) for name, info in files.items())
    return sorted((pair for pair in named if pair[1]["type"] != "directory"), key=lambda pair: pair[0])


def with_retries(uri: str, call: Callable[[], Answer]) -> Answer:
    """Call a store about `uri`, with retries and exponential backoff.

    Raises FileNotFoundError if the store reports 404, and StoreError for all other failures: clients raise many
    classes, and FileNotFoundError also when access is denied. Raises RedirectRefused.
    """
    began = time.monotonic()
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except Exception as error:
            if refusal := _redirect_refused(error):
                raise refusal from None
            if _is_not_found(error):
                raise FileNotFoundError(errno.ENOENT, "not found", uri) from error
            if attempt == TRIES or time.monotonic() - began >= call_deadline():
                raise StoreError(f"{uri}: {message_of(error)} ({attempt} tries)") from error
            time.sleep(min(seconds_to_wait(error, attempt), call_deadline()))
            remote_filesystem(uri).invalidate_cache()  # the Hub client caches refusals
    raise AssertionError(TRIES)


def message_of(error: BaseException) -> str:
    """Return class and text of an error on one line, without the queries of addresses: a signed one contains a key."""
    if isinstance(error, json.JSONDecodeError):
        return "no JSON comes; open the address in a browser: a login or a proxy may answer"
    return f"{type(error).__name__}: {_QUERY.sub('?...', ' '.join(str(error).split()))}"


def seconds_to_wait(error: BaseException, attempt: int) -> float:
    """Return the pause before try `attempt` + 1: what a busy server asks for, else exponential backoff."""
    answer = answer_of(error)
    headers = getattr(answer, "headers", None) or {}
    reset = re.search(r"\bt=(\d+)", headers.get("ratelimit", "")) if getattr(answer, "status_code", 0) == 429 else None
    retry_after = headers.get("retry-after", "")
    if reset or retry_after.isdigit():
        return float(reset[1] if reset else retry_after) + FIRST_WAIT_S
    return float(FIRST_WAIT_S * 2 ** (attempt - 1))


def answer_of(error: BaseException | None) -> Any:
    """Return the HTTP response, or botocore's dictionary of it, that `error` or a cause of it holds; None without."""
    while error is not None:
        if (answer := getattr(error, "response", None)) is not None:
            return answer
        error = error.__cause__ or error.__context__
    return None


def _redirect_refused(error: BaseException | None) -> RedirectRefused | None:
    """Return the refusal that an error is or that caused it: fsspec makes FileNotFoundError of any error."""
    while error is not None and not isinstance(error, RedirectRefused):
        error = error.__cause__ or error.__context__
    return error


def _is_not_found(error: BaseException) -> bool:
    """Return whether an error means "not found": status 404 or 410, or FileNotFoundError without any status."""
    not_found, cause = isinstance(error, FileNotFoundError) and not _redirect_refused(error), error
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
    filesystem = remote_filesystem(uri)
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
    if not is_glob(uri):
        return {}

    def is_folder(name: str) -> bool:
        try:
            return "*" not in name and filesystem.info(name)["type"] == "directory"
        except Exception as error:
            if not _is_not_found(error):
                raise
            return False

    try:
        if is_object_store(uri):  # fsspec's own glob skips folders that the store refuses to list
            root, pattern = split_glob(str(filesystem._strip_protocol(uri)), is_folder)
            matcher, depth = compile_glob(root, pattern)
            strict = {"maxdepth": depth, "on_error": "raise"} if depth else {}
            files = filesystem.find(root.rstrip("/"), detail=True, **strict)
            return {name: info for name, info in files.items() if matcher.match(name)}
        root, pattern = split_glob(uri, is_folder)
        found = (filesystem.glob(glob_escape(root) + each, detail=True) for each in alternatives(pattern))
        return {name: info for files in found for name, info in files.items()}
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
    if not is_glob(path):
        return {}
    root, pattern = split_glob(os.path.abspath(path), os.path.isdir)
    matcher, depth = compile_glob(root, pattern)
    files = _walk(root.rstrip("/") or "/", depth, set()) if os.path.isdir(root) else ()
    return {name: info for name, info in files if matcher.match(name)}


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
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    # mkstemp hides its file; others may share the root, if the umask allows
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Copies of remote files: a manifest per address, read by the address, so that no caller knows where the bytes are.


@dataclass
class FetchedFile:
    """A file of a remote address, and where its copy is."""

    uri: str
    size: int
    changed: str
    """`version_of` its info in the store."""
    sha256: str = ""
    """Of the copy; empty before it is complete."""
    path: str = ""
    """Of the copy below FETCHED; empty: it is listed, but nothing reads it."""

    @property
    def info(self) -> dict[str, Any]:
        return {"name": self.uri, "size": self.size, "type": "file", "ETag": self.changed}


@dataclass
class FetchedListing:
    """The manifest of a fetched address: what `list_files` answered, written after the last copy."""

    uri: str
    files: list[FetchedFile]
    commit: str = ""
    """`hf://` only: the commit that was fetched."""
    license: str = ""
    """As its page at the Hub states it."""
    fetched: str = ""


def fetched_folder() -> Path | None:
    """Return the folder with copies of remote files, None if this process has none."""
    return Path(os.environ[FETCHED]) if os.environ.get(FETCHED) else None


def fetched_listing(uri: str) -> FetchedListing | None:
    """Return the manifest of a fetched address; of a file of another address, a listing of that file; else None.

    Raises StoreError if a copy is missing or of another revision: to read the store instead could give other bytes.
    """
    folder = fetched_folder()
    if folder is None:
        return None
    listings, files = _manifests(folder)
    listing = listings.get(uri) or (FetchedListing(uri, [files[uri]]) if uri in files else None)
    for file in listing.files if listing else ():
        if file.path and files[file.uri].changed != file.changed:
            raise StoreError(f"{uri}: another address has {file.uri} of another revision; run herd fetch --update")
        if file.path and (not (folder / file.path).is_file() or (folder / file.path).stat().st_size != file.size):
            raise StoreError(
                f"{file.uri}: its fetched copy {folder / file.path} is missing or damaged; run herd fetch again, or "
                f"delete {folder / LISTINGS} to read from the store"
            )
    return listing


def fetched_path(uri: str) -> Path | None:
    """Return the copy of the remote file `uri`, None if it is not fetched."""
    folder = fetched_folder()
    file = _manifests(folder)[1].get(uri) if folder is not None else None
    return folder / file.path if folder is not None and file is not None else None


def fetched_copies() -> list[FetchedFile]:
    """Return all fetched files of this process."""
    folder = fetched_folder()
    return list(_manifests(folder)[1].values()) if folder else []


def fetched_files(uri: str) -> list[Path]:
    """Return the copies of the fetched address `uri`, in the order of its listing; none if it is not fetched."""
    folder, listing = fetched_folder(), fetched_listing(uri)
    return [folder / file.path for file in listing.files if file.path] if folder and listing else []


def _manifests(folder: Path) -> tuple[dict[str, FetchedListing], dict[str, FetchedFile]]:
    """Return the manifests by address, and the copies by the address of the file."""
    try:
        return _read_manifests(folder, (folder / LISTINGS).stat().st_mtime_ns)
    except FileNotFoundError:
        return {}, {}


@lru_cache(4)
def _read_manifests(folder: Path, changed: int) -> tuple[dict[str, FetchedListing], dict[str, FetchedFile]]:
    paths = sorted((folder / LISTINGS).glob("[!.]*.json"))
    listings = sorted(map(read_listing, paths), key=lambda listing: listing.fetched)  # the newest wins
    files = {file.uri: file for listing in listings for file in listing.files if file.path}
    return {listing.uri: listing for listing in listings}, files


def read_listing(path: Path) -> FetchedListing:
    """Return the listing in a manifest."""
    data = json.loads(path.read_bytes())
    files = [FetchedFile(**file) for file in data["files"]]
    return FetchedListing(data["uri"], files, data["commit"], data["license"], data["fetched"])


class _CopyReader:
    """The methods of an fsspec file system that read a file, for addresses of fetched files."""

    def info(self, uri: str) -> dict[str, Any]:
        listing = fetched_listing(uri)
        assert listing is not None
        return listing.files[0].info

    def open(self, uri: str, mode: str = "rb", **_: Any) -> Any:
        return open(os.fspath(fetched_path(uri) or uri), mode)

    def cat_file(self, uri: str, start: int | None = None, end: int | None = None) -> bytes:
        with self.open(uri) as file:
            file.seek(start or 0)
            return bytes(file.read(-1 if end is None else end - (start or 0)))

    def get_file(self, uri: str, path: str) -> None:
        shutil.copyfile(os.fspath(fetched_path(uri) or uri), path)

    def invalidate_cache(self) -> None:
        pass


def version_of(info: dict[str, Any]) -> str:
    """Return the field of a file's `info` that changes with its content: modification time or ETag."""
    return str(info.get("mtime") or info.get("ETag") or info.get("LastModified") or info.get("blob_id") or "")


def source_state(uri: str) -> list[list[object]]:
    """Return URI, size and `version_of` of each file of `uri`."""
    return [[name, info["size"], version_of(info)] for name, info in list_files(uri)]


# Globs in addresses: `*`, `?`, `[ab]`, `**` as a whole name, and alternatives in braces, `*.{csv,tsv}`.

_MAGIC = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def is_glob(path: str) -> bool:
    """Return whether `path` may be a glob."""
    return bool(_MAGIC.search(path))


def alternatives(pattern: str) -> list[str]:
    """Return the patterns without braces that `pattern` stands for, in order; braces without a comma are names."""
    if (braces := _BRACES.search(pattern)) is None:
        return [pattern]
    parts = (f"{pattern[: braces.start()]}{part}{pattern[braces.end() :]}" for part in braces[1].split(","))
    return list(dict.fromkeys(each for part in parts for each in alternatives(part)))


def split_glob(path: str, is_folder: Callable[[str], bool]) -> tuple[str, str]:
    """Return what is above the first wildcard of `path`, with its `/`, and the pattern below; "" without a wildcard.

    A name that `is_folder` confirms is no wildcard: `x [v1]/*.jsonl`.
    """
    for mark in _MAGIC.finditer(path):
        end = path.find("/", mark.end())
        if end < 0 or not is_folder(path[:end]):
            cut = path.rfind("/", 0, mark.start()) + 1
            return path[:cut], path[cut:]
    return path, ""


def compile_glob(root: str, pattern: str) -> tuple[re.Pattern[str], int | None]:
    """Return what matches paths of the literal `root` with `pattern` below it, and how deep; None: at any depth."""
    from fsspec.utils import glob_translate

    each = alternatives(pattern)
    depth = None if "**" in pattern else max(one.count("/") for one in each) + 1
    return re.compile(f"{re.escape(root)}(?:{'|'.join(map(glob_translate, each))})"), depth
