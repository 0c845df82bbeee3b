"""A stand-in for the Hugging Face Hub on loopback: what its file system asks of it, and faults at a chosen request.

It lists trees in pages, resolves files by a redirect to another address, answers ranges, has blob ids, SHA-256 of large
files and ETags, a commit for each state of a repository, gated repositories and licenses.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec.config
import pytest

from herd.storage import filesystem

REPOSITORY, MODEL, TOKEN = "datasets/people/words", "people/weights", "hf_canary"
PAGE = 3
"""Entries of a page of a listing."""
LARGE = (".parquet", ".safetensors")
"""Files in LFS, which have a SHA-256 in the listing."""
LOGIN = b"<!DOCTYPE html><title>Log in</title>"


@dataclass
class Hub:
    repositories: dict[str, dict[str, bytes]] = field(default_factory=lambda: {REPOSITORY: {}, MODEL: {}})
    """Name -> files of its branch main."""
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> files; a commit that is deleted here is gone."""
    gated: bool = False
    """Files are for those who have accepted terms, which TOKEN's owner has not."""
    open: bool = False
    """No token is needed."""
    fault: int | str = ""
    """A status, or "hang", "cut" (half of the body), "short" (half of it, said to be all), "reset", "html" (a login
    page), "longer" (a byte more than listed), or "flip" (one wrong byte)."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of an answer with a status as fault."""
    first: int = 0
    """The request at which the fault begins, from 1 on; 0: never."""
    times: int = 1
    log: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    """The header Range of each request that has one."""
    endpoint: str = ""
    at_request: Callable[[int], None] = lambda number: None
    """Called before each answer."""

    @property
    def files(self) -> dict[str, bytes]:
        return self.repositories[REPOSITORY]

    @files.setter
    def files(self, files: dict[str, bytes]) -> None:
        self.repositories[REPOSITORY] = files

    def commit(self, repository: str = REPOSITORY) -> str:
        """Return the commit of the branch main as it is now."""
        files = self.repositories[repository]
        state = repr([(name, _blob(data)) for name, data in sorted(files.items())])
        commit = hashlib.sha1(f"{repository} {state}".encode()).hexdigest()
        self.history.setdefault(commit, dict(files))
        return commit

    def use(self, fault: int | str = "", first: int = 0, times: int = 1) -> None:
        """Set the fault and forget the log."""
        self.fault, self.first, self.times = fault, first, times
        self.log.clear()
        self.ranges.clear()


@contextmanager
def stand_in_hub() -> Iterator[Hub]:
    """Yield a hub that `hf://` addresses lead to, with clients that wait milliseconds where they wait seconds."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm, wbufsize = True, 1 << 20  # else 40 ms pass between head and body

        def do_GET(self) -> None:
            _answer(hub, self)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = dict(fsspec.config.conf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 1000))
        )
        patch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
        patch.setattr("herd.storage.filesystem.HUB_ANSWER_S", 0.5)
        patch.setattr("herd.storage.filesystem.FIRST_WAIT_S", 0.001)
        fsspec.config.conf["hf"] = {"endpoint": hub.endpoint, "token": TOKEN, "skip_instance_cache": True}
        filesystem._filesystem.cache_clear()
        try:
            yield hub
        finally:
            fsspec.config.conf.clear()
            fsspec.config.conf.update(before)
            filesystem._filesystem.cache_clear()
            server.shutdown()
            server.server_close()


def _answer(hub: Hub, request: Any) -> None:
    length = int(request.headers.get("Content-Length") or 0)
    request.rfile.read(length)
    hub.log.append(f"{request.command} {request.path}")
    number = len(hub.log)
    hub.ranges += request.headers.get_all("Range", [])
    hub.at_request(number)
    fault = hub.fault if hub.first and hub.first <= number < hub.first + hub.times else ""
    if fault == "hang":
        time.sleep(1.5)
        request.close_connection = True
        return
    if fault == "reset":
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.connection.close()
        request.close_connection = True
        return
    if isinstance(fault, int):
        _send(request, fault, b'{"error": "injected"}', hub.headers)
        return
    if fault == "html":
        _send(request, 200, LOGIN, {"Content-Type": "text/html; charset=utf-8"})
        return
    _send(request, *_content(hub, request), fault=fault)


def _content(hub: Hub, request: Any) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of what a healthy hub answers."""
    split = urlsplit(request.path)
    path, query = unquote(split.path), parse_qs(split.query)
    if path.startswith("/cdn/"):
        if request.headers.get("Authorization"):  # a store refuses two logins, and must not see a token of the Hub
            return 400, b"", {}
        commit, _, name = path.removeprefix("/cdn/").partition("/")
        return _ranged(hub.history[commit][name], request.headers.get("Range"))
    if not hub.open and request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return 401, b'{"error": "no token"}', {"X-Error-Code": "GatedRepo"} if hub.gated else {}
    for repository in hub.repositories:
        api = f"/api/{repository}" if repository.startswith("datasets/") else f"/api/models/{repository}"
        for start, answer in ((f"/{repository}/resolve/", _resolve), (f"{api}/tree/", _tree)):
            if path.startswith(start):
                revision, _, below = path.removeprefix(start).partition("/")
                commit = hub.commit(repository) if revision == "main" else revision
                if commit not in hub.history:
                    return 404, b'{"error": "no such revision"}', {"X-Error-Code": "RevisionNotFound"}
                return answer(hub, repository, commit, below.strip("/"), query)
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(f"{api}/revision/") if path != api else "main"
            commit = hub.commit(repository) if revision == "main" else revision
            if commit not in hub.history:
                return 404, b'{"error": "no such revision"}', {"X-Error-Code": "RevisionNotFound"}
            facts = {"id": repository.removeprefix("datasets/"), "sha": commit, "siblings": []}
            return 200, json.dumps({**facts, "tags": ["license:odc-by"], "gated": hub.gated}).encode(), {}
    return 404, b'{"error": "no such address"}', {"X-Error-Code": "RepoNotFound"}


Reply = tuple[int, bytes, dict[str, str]]


def _resolve(hub: Hub, repository: str, commit: str, name: str, query: dict[str, list[str]]) -> Reply:
    data = hub.history[commit].get(name)
    if data is None:
        return 404, b"", {"X-Error-Code": "EntryNotFound"}
    if hub.gated:
        return 403, b'{"error": "ask for access"}', {"X-Error-Code": "GatedRepo"}
    url = f"{hub.endpoint.replace('127.0.0.1', 'localhost')}/cdn/{commit}/{name}?X-Amz-Signature=secret"
    return 302, b"", {"Location": url, "ETag": _blob(data), "X-Linked-Size": str(len(data)), "X-Repo-Commit": commit}


def _tree(hub: Hub, repository: str, commit: str, folder: str, query: dict[str, list[str]]) -> Reply:
    prefix, deep = f"{folder}/" if folder else "", query.get("recursive") in (["true"], ["True"])
    entries: dict[str, dict[str, Any]] = {}
    for name, data in sorted(hub.history[commit].items()):
        if not name.startswith(prefix):
            continue
        parts = name.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            path = prefix + "/".join(parts[:depth])
            if deep or depth == 1:
                entries[path] = {"type": "directory", "path": path, "oid": "1" * 40, "size": 0}
        if deep or len(parts) == 1:
            entries[name] = {"type": "file", "path": name, "oid": _blob(data), "size": len(data)}
            if name.endswith(LARGE):
                large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                entries[name]["lfs"] = large
    if folder and not entries:
        return 404, b'{"error": "no such folder"}', {"X-Error-Code": "EntryNotFound"}
    start = int(query.get("cursor", ["0"])[0])
    listed = list(entries.values())
    headers = {}
    if start + PAGE < len(listed):
        api = repository if repository.startswith("datasets/") else f"models/{repository}"
        url = f"{hub.endpoint}/api/{api}/tree/{commit}/{folder}".rstrip("/")
        headers["Link"] = f'<{url}?recursive={deep}&cursor={start + PAGE}>; rel="next"'
    return 200, json.dumps(listed[start : start + PAGE]).encode(), headers


def _ranged(data: bytes, range_header: str | None) -> tuple[int, bytes, dict[str, str]]:
    if not range_header:
        return 200, data, {"ETag": _blob(data)}
    start, stop = range_header.removeprefix("bytes=").split("-")
    if int(start) >= len(data):
        return 416, b"", {"Content-Range": f"bytes */{len(data)}"}
    piece = data[int(start) : int(stop) + 1 if stop else None]
    content_range = f"bytes {start}-{int(start) + len(piece) - 1}/{len(data)}"
    return 206, piece, {"Content-Range": content_range, "ETag": _blob(data)}


def _send(request: Any, status: int, body: bytes, headers: dict[str, str], fault: str = "") -> None:
    if fault == "longer" and body:
        body += b"\n"
    if fault == "flip" and body:
        body = body[:-1] + bytes([body[-1] ^ 1])
    sent = body[: len(body) // 2] if fault in ("cut", "short") else body
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(sent) if fault == "short" else len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(sent)
    if fault == "cut":
        request.close_connection = True


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
