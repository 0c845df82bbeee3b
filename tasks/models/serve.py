"""Serve one model over HTTP as OpenAI's API does: completions, chat completions, models, and a page for people.

All requests share one `BatchEngine`; who finds batch and queue full gets status 429. Requests need a token, and bodies
must be JSON by their content type: a browser asks before it sends such a body for another web page. A client has
HEAD_S for the head of a request, BODY_S for its body, and STALL_S to take what is sent to it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from herd.llama3.recipe.units import tokens
from herd.llama3.serve.engine import BatchEngine
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer
from herd.storage.processes import in_background
from herd.storage.root import Root
from herd.storage.secrets import PAGE_KEY, kept_secret
from herd.tasks.html import render
from herd.tasks.models.card import make_card
from herd.tasks.models.lookup import load_runner, model_folder
from herd.tasks.models.openai_api import (
    LEFT,
    APIError,
    ChatRequest,
    Client,
    ClientLeft,
    CompletionRequest,
    PromptEncoder,
    answer,
    check_count,
    parse,
)
from herd.tasks.promotion.log import current_aliases, read_log

NO_TEMPLATE = (
    "is a base model and has no chat template; fine-tune it in a stage with `kind: sft`, or send the text to "
    "/v1/completions"
)
TOKEN = "HERD_SERVE_TOKEN"
HEAD_S = 20
"""For the head of a request from the first byte that may be one of it, and for what follows an answered request."""
STALL_S = 60
"""For what is sent to a client until its machine acknowledges it."""
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
SHUTDOWN_S = 5
"""Time for requests in progress after Ctrl-C."""
WATCH_S = 0.5
"""Between two looks at the processes of a split model."""
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Served:
    """What a server needs to know of its model."""

    name: str
    """The id by which requests name it."""
    engine: BatchEngine
    chat: bool
    """Whether the model has a chat template."""
    token: str = field(repr=False)
    """What a request must send: as bearer token, as password, or as the cookie that a link with it sets."""


def serve(
    root: Root,
    name: str,
    host: str,
    port: int,
    token: str,
    max_batch: int,
    queue: int,
    ready: Callable[[str, str, int], None],
    tp: int | None = None,
    pp: int | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    threads: int = 0,
) -> None:
    """Serve the model `name` (see `model_folder`) until SIGINT or SIGTERM.

    Requests must send `token`, by default one that the root keeps. `ready` gets the address, the token and the number
    of the model's processes once it is loaded: see `load_runner`. Port 0 takes a free one. Raises ValueError, before
    the model is loaded, for an address that cannot be bound, and InferenceFailed if a process of the model dies.
    """
    check_access(host, token)
    token = token or kept_secret(root.local / PAGE_KEY)
    folder = model_folder(root, name)
    with bind(host, port) as listener, load_runner(folder, tp, pp, dtype, threads) as runner:
        engine = BatchEngine(runner, Tokenizer.load(folder), max_batch, queue)
        served = Served(name, engine, (folder / TEMPLATE_FILE).is_file(), token)
        try:
            app = create_app(served, render_page(served, root, folder))
            server = uvicorn.Server(config := server_config(app))

            def watch(stop: threading.Event) -> None:
                while not stop.wait(WATCH_S):
                    server.should_exit = server.should_exit or runner.failure() is not None

            listener.listen(config.backlog)  # uvicorn would do it later than `ready` says that it is served
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{listener.getsockname()[1]}/", token, runner.processes)
            with in_background(watch) if runner.processes > 1 else nullcontext():
                server.run([listener])
            if failure := runner.failure():
                raise failure
        finally:
            engine.stop()


def server_config(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of a server of `app` that slow and odd clients do not harm."""
    return uvicorn.Config(
        _refuse_odd(app),
        http=_BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


class _BoundedProtocol(H11Protocol):
    """HTTP of a connection that is closed if no request is in progress and none arrives within HEAD_S.

    uvicorn has no such limit for a new connection, and bytes that make no request end its limit for an old one.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._deadline is not None:
            self._deadline.cancel()

    def _set_deadline(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)


def _refuse_odd(app: ASGIApp) -> ASGIApp:
    """Return `app` without requests that a proxy may read in another way, or that another web page has sent."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := _oddity(scope["headers"])):
            await refusal.response()(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _oddity(headers: list[tuple[bytes, bytes]]) -> APIError | None:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    if "content-length" in values and "transfer-encoding" in values:
        return APIError(400, "Content-Length and Transfer-Encoding: a request has one of them; send only one")
    host = ", ".join(values.get("host", []))
    if not HOST.fullmatch(host):
        return APIError(400, f"Host {host[:80]!r}: is not the name of a machine; send the name and port of this server")
    for origin in values.get("origin", []):
        if urlsplit(origin).netloc.lower() != host.lower():
            message = f"Origin {origin[:80]!r}: is not {host!r}; a page of another server cannot use this one, and a "
            return APIError(403, message + "proxy in front of it must pass on Host")
    return None


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises ValueError if the address is in use or not this machine's."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # asyncio sets it only on sockets that it made; without it a token waits up to 40 ms for the last one's receipt
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; of the connections too, also if their client reads nothing
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_S * 1000)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: cannot be bound ({error}); give others") from None
    return listener


def render_page(served: Served, root: Root, folder: Path) -> str:
    """Return the page of a model with its card, as HTML that loads nothing."""
    with tempfile.TemporaryDirectory() as temporary:  # for the card's curve
        dtype = str(served.engine.runner.dtype).removeprefix("torch.")
        card = make_card(root, served.name, folder, Path(temporary), "herd", dtype, "")
    checkpoint = card.digests.get("checkpoint", "")
    log = read_log(root, card.name) if checkpoint else ()
    aliases = [alias for alias, label in current_aliases(log).items() if label == checkpoint]
    facts = {"card": card, "checkpoint": checkpoint, "aliases": aliases}
    return render("serve.html", {"tokens": tokens}, served=served, **facts)


def check_access(host: str, token: str) -> None:
    """Raise ValueError for an unusable token or address."""
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise ValueError(f"--token (or {TOKEN}): must be ASCII without blanks; give another")
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"--host {host}: is not an IP address; write 127.0.0.1 or one of this machine's") from None


def create_app(served: Served, page: str) -> FastAPI:
    """Return the HTTP application, with `page` at its root; the caller stops its engine."""
    engine = served.engine
    encoder = PromptEncoder(engine.tokenizer, engine.window)

    def check_token(request: Request) -> None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        given = value if scheme.lower() == "bearer" else request.cookies.get(cookie_of(request), "")
        if scheme.lower() == "basic":  # of a browser
            with suppress(binascii.Error):
                given = base64.b64decode(value, validate=True).decode("latin-1").partition(":")[2]
        if not secrets.compare_digest(given.encode("latin-1"), served.token.encode()):
            message = "the token is missing or wrong; send it in the header `Authorization: Bearer TOKEN`, or open the "
            message += "link that `herd serve` prints"
            raise APIError(401, message, code="invalid_api_key")

    app = FastAPI(title="herd", docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(dependencies=[Depends(check_token)])

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(ClientLeft)
    async def client_left(request: Request, error: ClientLeft) -> Response:
        return Response(status_code=LEFT)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        return APIError(error.status_code, f"{request.method} {path}: {error.detail}").response()

    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> JSONResponse:
        return APIError(500, "the server failed; its log has the reason").response()

    @app.get("/health")
    async def health() -> JSONResponse:
        facts = {"running": engine.running, "waiting": engine.waiting}
        return JSONResponse({"status": "ok" if engine.alive else "stopped", **facts}, 200 if engine.alive else 503)

    @app.get("/")
    async def show_page(request: Request, key: str = "") -> Response:
        if secrets.compare_digest(key.encode(), served.token.encode()):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie_of(request), key, httponly=True, samesite="lax")
            return answer
        check_token(request)
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    model = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "herd"}
    model |= {"max_model_len": engine.window}

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return model

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        sampling = await parse(request, CompletionRequest)
        _check_model(served, sampling.model)
        check_count(len(sampling.prompt), sampling, "prompt")
        async with Client(request) as client:
            prompts = await encoder.prompts(sampling.prompt, client)
            return await answer(client, served.name, engine, sampling, prompts, "prompt")

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        sampling = await parse(request, ChatRequest)
        _check_model(served, sampling.model)
        if not served.chat:
            raise APIError(400, f"{served.name} {NO_TEMPLATE}", "messages", "no_chat_template")
        check_count(1, sampling, "messages")
        async with Client(request) as client:
            prompt = await encoder.chat(sampling.messages, client)
            return await answer(client, served.name, engine, sampling, [prompt], "messages")

    app.include_router(api)
    return app


def cookie_of(request: Request) -> str:
    """Return the name of the cookie with the token: a browser sends those of all ports of a host."""
    return f"herd-serve-{request.url.port or 0}"


def _check_model(served: Served, name: str) -> None:
    if name != served.name:
        raise APIError(404, f"model {name!r}: is not served here; use {served.name!r}", "model", "model_not_found")
