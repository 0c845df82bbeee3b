"""A stand-in for the Hugging Face Hub on loopback: what its file system asks of it, and faults at a chosen request.

It lists trees in pages, resolves files by a redirect to another address, answers ranges, and has blob ids and ETags.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec.config
import pytest

from storage import filesystem

REPOSITORY, TOKEN = "datasets/people/words", "hf_canary"
PAGE = 3
"""Entries of a page of a listing."""


@dataclass
class Hub:
    files: dict[str, bytes] = field(default_factory=dict)
    fault: int | str = ""
    """A status, or "hang", "cut" (half of the body), "short" (half of it, said to be all) or "reset"."""
    first: int = 0
    """The request at which the fault begins, from 1 on; 0: never."""
    times: int = 1
    log: list[str] = field(default_factory=list)
    endpoint: str = ""

    def use(self, fault: int | str = "", first: int = 0, times: int = 1) -> None:
        """Set the fault and forget the log."""
        self.fault, self.first, self.times = fault, first, times
        self.log.clear()


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
        patch.setattr("storage.filesystem.HUB_ANSWER_S", 0.5)
        patch.setattr("storage.filesystem.FIRST_WAIT_S", 0.001)
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
        _send(request, fault, b'{"error": "injected"}', {})
        return
    _send(request, *_content(hub, request), fault=fault)


def _content(hub: Hub, request: Any) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of what a healthy hub answers."""
    split = urlsplit(request.path)
    path, query = unquote(split.path), parse_qs(split.query)
    if path.startswith("/cdn/"):
        return _ranged(hub.files[path.removeprefix("/cdn/")], request.headers.get("Range"))
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return 401, b'{"error": "no token"}', {}
    resolve, tree = f"/{REPOSITORY}/resolve/main/", f"/api/{REPOSITORY}/tree/main"
    if path.startswith(resolve):
        name = path.removeprefix(resolve)
        if name not in hub.files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        place = f"{hub.endpoint}/cdn/{name}?X-Amz-Signature=secret"
        return 302, b"", {"Location": place, "ETag": _blob(hub.files[name]), "X-Repo-Commit": "0" * 40}
    if path.startswith(tree):
        return _tree(hub, path.removeprefix(tree).strip("/"), query)
    if path in (f"/api/{REPOSITORY}", f"/api/{REPOSITORY}/revision/main"):
        identity = REPOSITORY.removeprefix("datasets/")
        return 200, json.dumps({"id": identity, "sha": "0" * 40, "siblings": []}).encode(), {}
    return 404, b'{"error": "no such address"}', {}


def _tree(hub: Hub, folder: str, query: dict[str, list[str]]) -> tuple[int, bytes, dict[str, str]]:
    prefix, deep = f"{folder}/" if folder else "", query.get("recursive") in (["true"], ["True"])
    entries: dict[str, dict[str, Any]] = {}
    for name, data in sorted(hub.files.items()):
        if not name.startswith(prefix):
            continue
        parts = name.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            path = prefix + "/".join(parts[:depth])
            if deep or depth == 1:
                entries[path] = {"type": "directory", "path": path, "oid": "1" * 40, "size": 0}
        if deep or len(parts) == 1:
            entries[name] = {"type": "file", "path": name, "oid": _blob(data), "size": len(data)}
    if folder and not entries:
        return 404, b'{"error": "no such folder"}', {"X-Error-Code": "EntryNotFound"}
    start = int(query.get("cursor", ["0"])[0])
    listed = list(entries.values())
    headers = {}
    if start + PAGE < len(listed):
        place = f"{hub.endpoint}/api/{REPOSITORY}/tree/main/{folder}".rstrip("/")
        headers["Link"] = f'<{place}?recursive={deep}&cursor={start + PAGE}>; rel="next"'
    return 200, json.dumps(listed[start : start + PAGE]).encode(), headers


def _ranged(data: bytes, wanted: str | None) -> tuple[int, bytes, dict[str, str]]:
    if not wanted:
        return 200, data, {"ETag": _blob(data)}
    start, stop = wanted.removeprefix("bytes=").split("-")
    piece = data[int(start) : int(stop) + 1]
    said = f"bytes {start}-{int(start) + len(piece) - 1}/{len(data)}"
    return 206, piece, {"Content-Range": said, "ETag": _blob(data)}


def _send(request: Any, status: int, body: bytes, headers: dict[str, str], fault: str = "") -> None:
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
