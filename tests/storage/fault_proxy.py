"""A proxy before an object store that does what networks and stores do on bad days, by rules, and counts it.

A rule says which requests it is for (method, path, query), how many of them it lets pass and to how many it happens.
`rule.done` proves that the fault happened; `proxy.log` has every request. It runs in a thread with an event loop.
Requests pass as they were signed (Host header and raw path), bodies are held whole in memory: up to some 100 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, web
from yarl import URL

Fault = Literal[
    "slow-down",  # 503 SlowDown
    "unavailable",  # 503 ServiceUnavailable
    "denied",  # 403 AccessDenied
    "expired",  # 400 ExpiredToken
    "too-many",  # 429 TooManyRequests
    "error",  # 500 InternalError
    "error-in-200",  # 200 with an <Error> body; the server never saw the request
    "reset",  # connection reset; the server never saw the request
    "drop-reply",  # the server did it; connection reset instead of the reply
    "reset-in-body",  # reset after half of the body
    "truncate",  # body ends after half of it, connection closed in order
    "flip",  # one bit of the body is another
    "flip-sent",  # one bit of what the client sent is another
    "no-size",  # the reply to a HEAD has lost its length
    "size-0",  # the reply to a HEAD says 0 bytes
    "hang",  # never answered
    "delay",  # answered `seconds` later
    "kill",  # SIGKILL to `pid` before the server sees the request
]
_CODES = {
    "slow-down": (503, "SlowDown"),
    "unavailable": (503, "ServiceUnavailable"),
    "error": (500, "InternalError"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "too-many": (429, "TooManyRequests"),
}
_NOT_FORWARDED = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "te", "upgrade"}


@dataclass
class Rule:
    """To which requests what happens; `times` None: for ever."""

    fault: Fault
    method: str = ""
    path: str = ""
    query: str = ""
    skip: int = 0
    times: int | None = 1
    seconds: float = 0.0
    pid: int = 0
    seen: int = 0
    done: int = 0

    def applies(self, request: web.BaseRequest) -> bool:
        """Return whether the fault happens to `request`, and count it."""
        path, _, query = request.raw_path.partition("?")
        if self.method and request.method not in self.method.split("|"):
            return False
        if not re.search(self.path, path) or not re.search(self.query, query):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.done >= self.times):
            return False
        self.done += 1
        return True


@dataclass
class FaultProxy:
    """Passes requests on to `target`, except those that a rule is for; the first rule that applies counts."""

    target: str
    uri: str
    """A bucket of the server."""
    rules: list[Rule] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """Each request as `PUT /bucket/key?query`, in the order of arrival, with the fault that happened to it."""
    endpoint: str = ""
    _session: ClientSession | None = None

    def use(self, *rules: Rule) -> tuple[Rule, ...]:
        """Replace all rules and forget the log."""
        self.log.clear()
        self.rules[:] = rules
        return rules

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        rule = next((rule for rule in self.rules if rule.applies(request)), None)
        fault = rule.fault if rule else ""
        self.log.append(f"{request.method} {request.raw_path} {fault}".rstrip())
        if "Expect" in request.headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # botocore waits for this before it sends
        sent = await request.content.read()
        if rule is None:
            return await self._forward(request, sent)
        if fault in _CODES or fault == "error-in-200":
            return _error(fault)
        if fault in ("reset", "kill"):
            if fault == "kill":
                os.kill(rule.pid, signal.SIGKILL)
            return _reset(request)
        if fault == "hang":
            await asyncio.sleep(3600)
        await asyncio.sleep(rule.seconds)
        reply = await self._forward(request, _flipped(sent) if fault == "flip-sent" else sent)
        return await _spoiled(request, reply, fault)

    async def _forward(self, request: web.BaseRequest, sent: bytes) -> web.Response:
        """Return the server's reply to the request as the client signed it."""
        assert self._session is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED]
        url = URL(self.target + request.raw_path, encoded=True)
        send = self._session.request(request.method, url, headers=headers, data=sent or None, allow_redirects=False)
        async with send as reply:
            body = await reply.read()
            response = web.Response(status=reply.status, reason=reply.reason, body=body)
            dropped = _NOT_FORWARDED - ({"content-length"} if request.method == "HEAD" else set())
            for name, value in reply.headers.items():
                if name.lower() not in dropped:
                    response.headers[name] = value
            return response

    async def _serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
        async with ClientSession(
            skip_auto_headers=skipped,
            auto_decompress=False,
            timeout=ClientTimeout(total=None),
            cookie_jar=DummyCookieJar(),
        ) as self._session:
            runner = web.ServerRunner(web.Server(self.handle, access_log=None), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.endpoint = "http://{}:{}".format(*runner.addresses[0][:2])
            started.set()
            await stop.wait()
            await runner.cleanup()


@contextlib.contextmanager
def fault_proxy(target: str, uri: str = "") -> Iterator[FaultProxy]:
    """Yield a proxy before the server at `target`, without rules."""
    proxy, started, stop = FaultProxy(target, uri), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy._serve(started, stop)), daemon=True)
    thread.start()
    assert started.wait(10), "the proxy does not start"
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def _error(fault: str) -> web.Response:
    status, code = _CODES.get(fault, (200, "InternalError"))
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    return web.Response(status=status, text=text, content_type="application/xml")


def _reset(request: web.BaseRequest) -> web.Response:
    """End the connection with RST, which is what a crashed peer's kernel sends."""
    transport = request.transport
    if transport is not None:
        held = transport.get_extra_info("socket")
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response()


async def _spoiled(request: web.BaseRequest, reply: web.Response, fault: str) -> web.StreamResponse:
    """Return the reply with what `fault` does to it."""
    body = reply.body
    assert isinstance(body, bytes)
    if fault == "drop-reply":
        return _reset(request)
    if fault == "flip":
        reply.body = _flipped(body)
    if fault == "no-size":
        del reply.headers["Content-Length"]
    if fault == "size-0":
        reply.headers["Content-Length"] = "0"
    if fault not in ("truncate", "reset-in-body"):
        return reply
    half = web.StreamResponse(status=reply.status, headers=reply.headers)
    half.content_length = len(body)
    await half.prepare(request)
    await half.write(body[: len(body) // 2])
    if fault == "reset-in-body":
        await asyncio.sleep(0.05)  # what was written leaves first
        _reset(request)
    elif request.transport is not None:
        request.transport.close()
    return half


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body
