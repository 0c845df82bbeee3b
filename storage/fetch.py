"""Download the files of a remote address into a folder, from which `list_files` and `filesystem_of` then read them.

`prepare` lists an address and pins its revision, `download` gets the files: in parallel, resumed at the byte where a
killed call ended, compared with size and digest as the store states them, renamed when they are right. The manifest of
an address is written after its last file. Files of an earlier revision that did not change are linked, not downloaded.

huggingface_hub lists, authorizes and connects, but its `hf_hub_download` (2.4, issue 4196) is not used: it downloads a
killed file again from byte 0, compares no digest, sleeps 5 times as long as a server asks, and logs signed addresses.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import TypeAdapter

from herd.storage.digests import digest_file
from herd.storage.filesystem import (
    FETCHED,
    HUB_ANSWER_S,
    LISTINGS,
    FetchedFile,
    FetchedListing,
    RedirectRefused,
    StoreError,
    answer_of,
    is_below,
    is_object_store,
    list_remote_files,
    message_of,
    read_listing,
    remote_filesystem,
    seconds_to_wait,
    sync_folder,
    version_of,
    with_retries,
    write_atomic,
)
from herd.storage.processes import parallel_map
from herd.storage.root import Root
from herd.storage.staging import file_lock

if TYPE_CHECKING:
    from huggingface_hub import HfUri

TRIES = 5
"""Requests in a row that bring no byte, or whole downloads with a wrong digest, before a file fails."""
PIECE, CHUNK = 16 << 20, 1 << 20
"""Bytes of a request to an object store, and of a write."""
PARTIAL, PENDING = ".partial", ".pending"
"""Folders of unfinished files, and of listings whose files are not complete."""
LONGEST_WAIT_S = 900.0
"""A server that asks for a longer pause ends the call."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk, quota or file."""
HTML = r"\.x?html?(\.gz)?$"


class FetchRefused(ValueError):
    """An address that cannot be downloaded as it is written, or here; the message has the remedy."""


class _Changed(Exception):
    """The store has another version of a file than it listed."""


@dataclass
class Target(FetchedListing):
    """An address to download: its listing, and what its store states about the files."""

    selected: list[str] = field(default_factory=list)
    """URIs of `files` to download; the others are only listed."""
    revision: str = ""
    """Of the address; empty: `main`."""
    newer_commit: str = ""
    """The commit that the revision names now, if it is another one."""
    folder: str = ""
    """Of the copies, below the folder of all copies."""
    digests: dict[str, str] = field(default_factory=dict)
    """URI -> digest that the store states, after `sha256:`, `git:` or `md5:`."""
    unchanged: dict[str, FetchedFile] = field(default_factory=dict)
    """URI -> the copy of an earlier revision with the same bytes."""

    @property
    def missing(self) -> list[FetchedFile]:
        """Files to download that have no complete copy."""
        selected = set(self.selected)
        return [file for file in self.files if file.uri in selected and not file.sha256]


def use_fetched(root: Root) -> None:
    """Let this process and its children read remote files that are fetched from their copies.

    These are in the folder HERD_FETCHED, by default `fetched` of a local root.
    """
    if root.is_local:
        os.environ.setdefault(FETCHED, str(root.file("fetched")))


def copies_folder(root: Root) -> Path:
    """Return the folder to download to. Raises FetchRefused for a root in an object store without HERD_FETCHED."""
    use_fetched(root)
    if not os.environ.get(FETCHED):
        raise FetchRefused(
            f"root: {root.uri} is in an object store, and copies need a folder; set {FETCHED} to one on a disk that "
            "the machine of `herd run` has too"
        )
    return Path(os.environ[FETCHED]).absolute()


# Listing.


def prepare(
    folder: Path, uri: str, choose: Callable[[list[tuple[str, dict[str, Any]]]], Iterable[str]], update: bool
) -> Target:
    """Return the files of `uri` to download: at the revision that `folder` has, or with `update` as it is now.

    `choose` returns the URIs to download of a listing. Writes nothing. Raises FetchRefused and StoreError.
    """
    complete = _read(folder / LISTINGS / _name(uri))
    known = _read(folder / PENDING / _name(uri)) or complete
    target = known or _list(uri, _pinned(folder, uri)) if not update else _list(uri)
    if target is known and target.commit and uri.startswith("hf://"):
        with suppress(ValueError, OSError):  # a copy needs no Hub
            now = str(_hub_info(uri).sha)
            target.newer_commit = now if now != target.commit else ""
    here = {file.uri for file in target.files if file.sha256}
    target.selected = sorted(here.union(choose([(file.uri, file.info) for file in target.files])))
    earlier = {(file.changed, file.size): file for file in complete.files if file.path} if complete else {}
    above = _hub_root(uri) if target.commit else _folder_above(target)
    for file in target.files:
        file.path = f"{target.folder}/{_safe(file.uri.partition('?')[0][len(above) :].lstrip('/'))}"
        if not _has_size(folder / file.path, file.size):
            file.sha256 = ""
            same = earlier.get((file.changed, file.size))
            if same and (target.commit or same.uri == file.uri) and _has_size(folder / same.path, same.size):
                target.unchanged[file.uri] = same
    return target


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _read(path: Path) -> Target | None:
    """Return the target that an earlier call wrote, None without."""
    return TypeAdapter(Target).validate_json(path.read_bytes()) if path.exists() else None


def _name(uri: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", uri.partition("://")[2])[:80].strip("-.")
    return f"{slug}-{hashlib.sha256(uri.encode()).hexdigest()[:8]}.json"


def _pinned(folder: Path, uri: str) -> str:
    """Return the commit at which `folder` has other files of the repository and revision of `uri`; empty without."""
    if uri.startswith("hf://"):
        with suppress(ValueError):  # not an address of a file at the Hub
            for path in sorted((folder / LISTINGS).glob("[!.]*.json")):
                other = read_listing(path)
                if other.commit and _hub_root(other.uri) == _hub_root(uri):
                    return other.commit
    return ""


def _list(uri: str, commit: str = "") -> Target:
    """Return all files of `uri` as they are now, or at `commit` of the Hub; none is selected yet."""
    if uri.startswith("hf://"):
        target = _list_hub(uri, commit)
    else:
        with _explained(uri):
            pairs = list_remote_files(uri)
        target = Target(uri=uri, files=[])
        for name, info in pairs:
            target.files.append(FetchedFile(uri=name, size=0, changed=""))
            _describe(target, target.files[-1], info)
        state = "\n".join(f"{file.uri} {file.size} {file.changed}" for file in target.files)
        target.folder = hashlib.sha256(state.encode()).hexdigest()[:12]
    if not target.files:
        raise FetchRefused(f"{uri}: matches no file; correct the address")
    if not target.commit:
        scheme, _, path = _folder_above(target).partition("://")
        target.folder = f"{scheme}/{_safe(path)}@{target.folder}"
    return target


def _folder_above(target: Target) -> str:
    """Return the deepest folder that holds all files of `target`, as an address."""
    scheme, _, _ = target.uri.partition("://")
    folders = [file.uri.partition("?")[0].partition("://")[2].rpartition("/")[0] for file in target.files]
    return f"{scheme}://{os.path.commonpath(folders)}"


def _safe(path: str) -> str:
    if not is_below(path):
        raise FetchRefused(f"{path!r} is not a name below a folder; leave the file out with ignore:, or rename it")
    return PurePosixPath(path).as_posix()


def _repository(parsed: HfUri) -> str:
    """Return the path of a repository at the Hub and in `hf://`: `datasets/OWNER/NAME`, `OWNER/NAME` of a model."""
    return parsed.id if parsed.type == "model" else f"{parsed.type}s/{parsed.id}"


def _hub_root(uri: str) -> str:
    """Return the address of the repository of `uri` as its files are named, with the revision if it has one."""
    from huggingface_hub import parse_hf_uri

    parsed, revision = parse_hf_uri(uri), uri.rstrip("/").partition("@")[2]
    if parsed.path_in_repo:
        revision = revision[: -len(parsed.path_in_repo) - 1]
    return f"hf://{_repository(parsed)}{'@' if revision else ''}{revision}"


def _list_hub(uri: str, commit: str) -> Target:
    from huggingface_hub import parse_hf_uri

    info = _hub_info(uri, commit)
    parsed = parse_hf_uri(uri)
    root, pinned = _hub_root(uri), f"hf://{_repository(parsed)}@{info.sha}"
    with _explained(uri):
        pairs = list_remote_files(f"{pinned}/{parsed.path_in_repo}".rstrip("/"))
    license = next((tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")), "")
    target = Target(uri=uri, files=[], commit=info.sha, license=license, revision=parsed.revision or "")
    target.folder = f"hf/{_safe(_repository(parsed))}@{info.sha[:12]}"
    for name, entry in pairs:
        file = FetchedFile(uri=f"{root}/{name[len(pinned) + 1 :]}", size=int(entry["size"]), changed=version_of(entry))
        target.files.append(file)
        lfs = entry.get("lfs")
        target.digests[file.uri] = f"sha256:{lfs.sha256}" if lfs else f"git:{entry['blob_id']}"
    return target


def _hub_info(uri: str, commit: str = "") -> Any:
    """Return the Hub's info of the repository at `commit`, or the revision in `uri`; `sha` is the commit."""
    from huggingface_hub import HfApi, parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        parsed = parse_hf_uri(uri)
    except HfUriError as error:
        raise FetchRefused(f"{uri}: {error}; write hf://datasets/OWNER/NAME@REVISION/PATH") from None
    if parsed.is_bucket:
        raise FetchRefused(f"{uri}: files of a bucket have no revision; name a dataset or a model repository")
    filesystem = remote_filesystem(uri)
    api = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
    ask = partial(
        api.repo_info, parsed.id, repo_type=parsed.type, revision=commit or parsed.revision, timeout=HUB_ANSWER_S
    )
    with _explained(uri):
        return with_retries(uri, ask)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn refusals of a store into FetchRefused with a remedy."""
    try:
        yield
    except OSError as error:
        answer = answer_of(error)
        if uri.startswith("hf://"):
            _refuse_hub(uri, getattr(answer, "status_code", 0), getattr(answer, "headers", {}))
        if isinstance(error, FileNotFoundError):
            raise FetchRefused(f"{uri}: is not in its store; correct the address") from error
        cause = error.__cause__
        if isinstance(cause, PermissionError) or "Forbidden" in str(error):
            raise FetchRefused(f"{uri}: access is refused; check the keys of its store") from error
        if isinstance(cause, ValueError) and "JSON" in type(cause).__name__ + str(cause):
            raise StoreError(_page(uri)) from error
        raise


def _refuse_hub(uri: str, status: int, headers: Any) -> None:
    """Raise FetchRefused if the Hub's answer says that a repeated request cannot succeed."""
    from huggingface_hub import parse_hf_uri

    parsed, code = parse_hf_uri(uri), headers.get("x-error-code", "")
    page = f"{remote_filesystem(uri).endpoint}/{_repository(parsed)}"
    if code == "GatedRepo":
        remedy = "wait until its owner accepts" if status == 403 else "set HF_TOKEN (or run hf auth login)"
        raise FetchRefused(f"{uri}: is gated; accept its terms at {page} and {remedy}")
    if code == "RevisionNotFound":
        raise FetchRefused(
            f"{uri}: the Hub has no revision {parsed.revision or 'main'} (any more); see {page}/commits/main and write "
            "one after @, or take the newest with herd fetch --update"
        )
    if code == "EntryNotFound":
        raise FetchRefused(f"{uri}: the repository has no such file; see {page}/tree/{parsed.revision or 'main'}")
    if status in (401, 403) or code == "RepoNotFound" or status == 404:
        raise FetchRefused(
            f"{uri}: the Hub shows no such repository to you; correct the name, or set HF_TOKEN to a token that may "
            f"read {page}"
        )


def _page(uri: str) -> str:
    return f"{uri}: the server sends an HTML page; open the address in a browser: a login or a proxy answers"


# Downloading.


def missing_bytes(folder: Path, targets: Sequence[Target]) -> int:
    """Return how many bytes are still to be downloaded."""
    missing = 0
    for (target, file), *_ in _groups(folder, targets):
        if file.uri not in target.unchanged and not _has_size(folder / file.path, file.size):
            partial_copy = _partial(folder, file)
            missing += file.size - min(partial_copy.stat().st_size if partial_copy.exists() else 0, file.size)
    return missing


def _groups(folder: Path, targets: Sequence[Target]) -> list[list[tuple[Target, FetchedFile]]]:
    """Return the missing files of `targets`; one that several targets name is a group, to be downloaded once."""
    groups: dict[Path, list[tuple[Target, FetchedFile]]] = {}
    for target in targets:
        for file in target.missing:
            groups.setdefault(_partial(folder, file), []).append((target, file))
    return list(groups.values())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of `folder`, which may not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def check_space(folder: Path, targets: Sequence[Target]) -> None:
    """Raise FetchRefused if the missing files do not fit the disk."""
    free, needed = free_bytes(folder), missing_bytes(folder, targets)
    if needed > free:
        raise FetchRefused(
            f"{folder}: {needed:,} bytes are to be downloaded and {free:,} are free, {needed - free:,} too few; delete "
            f"something, or set {FETCHED} to a folder on a larger disk"
        )


def download(folder: Path, targets: Sequence[Target], jobs: int, progress: Callable[[int], None]) -> None:
    """Download the missing files of `targets` and write their manifests; `progress` gets the bytes as they arrive.

    Complete and partial files stay, so that a repeated call resumes. Raises FetchRefused and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder, "fetch"):
        for target in targets:
            if target.missing:
                write_atomic(folder / PENDING / _name(target.uri), json.dumps(asdict(target)))
        stop = threading.Event()

        def work(group: list[tuple[Target, FetchedFile]]) -> None:
            (target, first), *others = group
            try:
                _fetch(folder, target, first, stop, progress)
                for _, file in others:
                    file.size, file.changed, file.sha256 = first.size, first.changed, first.sha256
                    _link(folder / first.path, folder / file.path)
            except BaseException:
                stop.set()  # the other threads may have hours to go
                raise

        try:
            parallel_map(work, _groups(folder, targets), max(1, jobs))
        finally:
            stop.set()  # after Ctrl-C they would go on
        for target in targets:
            _commit(folder, target)


def _commit(folder: Path, target: Target) -> None:
    """Write the manifest of a complete target."""
    selected = set(target.selected)
    for file in target.files:
        if file.uri not in selected:
            file.path = file.sha256 = ""
    target.unchanged, target.newer_commit = {}, ""
    target.fetched = target.fetched or datetime.now(UTC).isoformat(timespec="seconds")
    write_atomic(folder / LISTINGS / _name(target.uri), json.dumps(asdict(target), indent=1))
    (folder / PENDING / _name(target.uri)).unlink(missing_ok=True)


def _partial(folder: Path, file: FetchedFile) -> Path:
    """Return the unfinished copy of this version of `file`."""
    return folder / PARTIAL / hashlib.sha256(f"{file.uri} {file.size} {file.changed}".encode()).hexdigest()[:32]


def _fetch(
    folder: Path, target: Target, file: FetchedFile, stop: threading.Event, progress: Callable[[int], None]
) -> None:
    """Download, verify and rename one file."""
    copy = folder / file.path
    copy.parent.mkdir(parents=True, exist_ok=True)
    if (same := target.unchanged.get(file.uri)) is not None:
        _link(folder / same.path, copy)
    if _has_size(copy, file.size) and (sha256 := _verified(target, file, copy)):
        file.sha256 = sha256
        return
    (folder / PARTIAL).mkdir(exist_ok=True)
    sha256, wrong = "", 0
    while not sha256:
        path = _partial(folder, file)
        try:
            _complete(target, file, path, stop, progress)
        except _Changed:  # begin again with the version that is there now
            if (wrong := wrong + 1) == TRIES:
                raise StoreError(f"{file.uri}: changed {wrong} times during its download; try again later") from None
            _drop(path, progress)
            _describe(target, file, with_retries(file.uri, lambda: remote_filesystem(file.uri).info(file.uri)))
            continue
        sha256 = _verified(target, file, path)
        if not sha256:
            _drop(path, progress)
            if (wrong := wrong + 1) == TRIES:
                raise StoreError(f"{file.uri}: {wrong} downloads do not have the stated {target.digests[file.uri]}")
    os.replace(path, copy)
    sync_folder(copy.parent)
    file.sha256 = sha256


def _link(existing: Path, copy: Path) -> None:
    """Make `copy` another name of the file `existing`."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.link(existing, copy)


def _drop(path: Path, progress: Callable[[int], None]) -> None:
    if path.exists():
        progress(-path.stat().st_size)
        path.unlink()


def _describe(target: Target, file: FetchedFile, info: dict[str, Any]) -> None:
    """Set size, version and digest of a file that is not at the Hub."""
    if info.get("size") is None:
        raise FetchRefused(f"{file.uri}: its server does not state its size; download it and name the file")
    if info.get("mimetype") == "text/html" and not re.search(HTML, file.uri):
        raise FetchRefused(_page(file.uri))
    file.size, file.changed = int(info["size"]), version_of(info)
    etag = file.changed.strip('"')
    if is_object_store(file.uri) and re.fullmatch("[0-9a-f]{32}", etag):  # a multipart object has another kind of ETag
        target.digests[file.uri] = f"md5:{etag}"


def _verified(target: Target, file: FetchedFile, path: Path) -> str:
    """Return the SHA-256 of a complete download, after a flush to the disk; "" if it is not what the store states."""
    sha256 = digest_file(path, sync=True).sha256
    kind, _, stated = target.digests.get(file.uri, "").partition(":")
    if not kind or kind == "sha256":
        return sha256 if stated in ("", sha256) else ""
    with path.open("rb") as data:
        if kind == "md5":
            actual = hashlib.file_digest(data, partial(hashlib.md5, usedforsecurity=False))
        else:
            actual = hashlib.file_digest(data, partial(hashlib.sha1, b"blob %d\0" % file.size, usedforsecurity=False))
    return sha256 if actual.hexdigest() == stated or (kind == "md5" and _is_encrypted(file.uri)) else ""


def _is_encrypted(uri: str) -> bool:
    """Return whether the store encrypts the object with a key of the user: then its ETag is not its MD5."""
    filesystem = remote_filesystem(uri)
    bucket, key, _ = filesystem.split_path(uri)
    answer = with_retries(uri, lambda: filesystem.call_s3("head_object", Bucket=bucket, Key=key))
    return "aws:kms" in answer.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in answer


def _complete(
    target: Target, file: FetchedFile, path: Path, stop: threading.Event, progress: Callable[[int], None]
) -> None:
    """Append to `path` until it has the size of `file`. Raises _Changed if the store has another version now."""
    tries, by_client = 0, is_object_store(file.uri)
    while not _has_size(path, file.size):
        begin = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as out:
                pieces = _get_object(file, out.tell()) if by_client else _get_http(target.commit, file, out, progress)
                for data in pieces:
                    if stop.is_set():
                        raise InterruptedError(f"{file.uri}: stopped")
                    if out.tell() + len(data) > file.size:
                        raise StoreError(f"the server sends more bytes than the {file.size:,} that its store lists")
                    out.write(data)
                    progress(len(data))
                if file.size and out.tell() <= begin:
                    raise StoreError("the store sends no more bytes")
        except (_Changed, FetchRefused, RedirectRefused, InterruptedError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
            tries = 1 if path.stat().st_size > begin else tries + 1
            wait = seconds_to_wait(error, tries)
            if tries == TRIES or wait > LONGEST_WAIT_S:
                asks = f"; it asks for a pause of {wait:,.0f} s" if wait > 60 else ""
                raise StoreError(f"{file.uri}: {message_of(error)} ({tries} tries){asks}") from error
            stop.wait(wait)
    if by_client and version_of(remote_filesystem(file.uri).info(file.uri)) != file.changed:
        raise _Changed


def _get_object(file: FetchedFile, begin: int) -> Iterator[bytes]:
    """Yield the bytes of an object from `begin` on, a request for each piece."""
    for start in range(begin, file.size, PIECE):
        yield bytes(remote_filesystem(file.uri).cat_file(file.uri, start=start, end=min(file.size, start + PIECE)))


def _get_http(commit: str, file: FetchedFile, out: BinaryIO, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the bytes that follow those in `out`; empty `out` first if the server cannot continue there."""
    from huggingface_hub import get_session, hf_hub_url, parse_hf_uri
    from huggingface_hub.utils._headers import build_hf_headers

    hub = remote_filesystem(file.uri) if file.uri.startswith("hf://") else None
    headers, address, begin = {"Accept-Encoding": "identity"}, file.uri, out.tell()
    if hub:
        parsed = parse_hf_uri(file.uri)
        address = hf_hub_url(
            parsed.id, parsed.path_in_repo, repo_type=parsed.type, revision=commit, endpoint=hub.endpoint
        )
        headers |= build_hf_headers(token=hub.token)
    if begin and (hub or file.changed.startswith('"')):
        headers["Range"] = f"bytes={begin}-"
        if not hub:  # at the Hub a commit never changes, and the store that it leads to has other ETags
            headers["If-Range"] = file.changed
    with get_session().stream("GET", address, headers=headers, timeout=HUB_ANSWER_S) as answer:
        if answer.status_code in (401, 403, 404, 410):
            if hub is None:
                raise FetchRefused(f"{file.uri}: the server answers {answer.status_code}; check address and access")
            if str(answer.url).startswith(hub.endpoint):  # else of a signed address, which may have expired
                _refuse_hub(file.uri, answer.status_code, answer.headers)
        answer.raise_for_status()
        etag = answer.headers.get("etag", "")
        if not hub and file.changed and etag and etag != file.changed:
            raise _Changed
        if answer.headers.get("content-type", "").startswith("text/html") and not re.search(HTML, file.uri):
            raise StoreError(_page(file.uri))
        length = int(answer.headers.get("content-length", -1))
        if answer.status_code == 206:
            content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("content-range", ""))
            start, total = (int(content_range[1]), int(content_range[2])) if content_range else (-1, -1)
            if start != begin:
                raise StoreError(f"the server sends bytes from {start:,}, asked for {begin:,}")
        else:
            total = length
            out.truncate(0)
            out.seek(0)
            progress(-begin)
        if total not in (-1, file.size):
            raise StoreError(f"the server sends {total:,} bytes, its store lists {file.size:,}")
        yield from answer.iter_raw(CHUNK)
