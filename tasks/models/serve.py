"""Serve one model over HTTP as OpenAI's API does: completions, chat completions, models, and a page for people.

Fields are OpenAI's, with vLLM's `top_k` and `repetition_penalty`; a field whose value would be ignored is an error. All
requests share one `BatchEngine`; who finds batch and queue full gets status 429. Bodies must be JSON by their content
type and, without a token, the host a name of this machine, so that no other web page can use the server.
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import orjson
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from herd.llama3.evaluate.generate import GeneratedText, Sampler, TextStream
from herd.llama3.recipe.units import tokens
from herd.llama3.serve.engine import ERROR, BatchEngine, Generation, QueueFull
from herd.llama3.tokens.chat import END_OF_TURN, TEMPLATE_FILE, encode_chat, special_id
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.processes import in_background
from herd.storage.root import Root
from herd.tasks.html import render
from herd.tasks.models.card import make_card
from herd.tasks.models.lookup import load_runner, model_folder
from herd.tasks.promotion.log import current_aliases, read_log

NO_TEMPLATE = (
    "is a base model and has no chat template; fine-tune it in a stage with `kind: sft`, or send the text to "
    "/v1/completions"
)
TOKEN = "HERD_SERVE_TOKEN"
BODY_BYTES = 8 * 2**20
RETRY_AFTER_S = 1
SHUTDOWN_S = 5
"""Time for requests in progress after Ctrl-C."""
WATCH_S = 0.5
"""Between two looks at the processes of a split model."""
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NEUTRAL: Mapping[str, Any] = {
    **{"best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "suffix": ""},
    **{"logprobs": False, "top_logprobs": 0, "tools": [], "response_format": {"type": "text"}, "store": False},
}
"""Fields that are not supported, with the value that asks for nothing; another one is an error."""
Parsed = TypeVar("Parsed", bound="SamplingFields")


class APIError(Exception):
    """An error in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        headers = {}
        if self.status == 401:
            headers = {"WWW-Authenticate": 'Basic realm="herd"'}  # has a browser ask for the token as a password
        if self.status == 429:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse(self.body(), self.status, headers)

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _joined(value: object) -> object:
    """Return the text of OpenAI's list of content parts; anything else as it is."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        texts = [part.get("text") for part in value]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else value
    return value


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    role: str
    content: Annotated[str, BeforeValidator(_joined)]
    name: str | None = None


class SamplingFields(BaseModel):
    """What both kinds of request have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    """0 and -1: off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    n: int = Field(default=1, ge=1)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16), BeforeValidator(_listed)
    ] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        """Leave out null, which OpenAI's clients send for the default, and fields that ask for nothing."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and not (name in NEUTRAL and value == NEUTRAL[name])
        }


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: Annotated[list[str], Field(min_length=1), BeforeValidator(_listed)]


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class Served:
    """What a server needs to know of its model."""

    name: str
    """The id by which requests name it."""
    engine: BatchEngine
    chat: bool
    """Whether the model has a chat template."""
    token: str = field(default="", repr=False)
    """What a request must send as bearer token or password; empty: nothing."""


def serve(
    root: Root,
    name: str,
    host: str,
    port: int,
    token: str,
    max_batch: int,
    queue: int,
    ready: Callable[[str, int], None],
    tp: int | None = None,
    pp: int | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    threads: int = 0,
) -> None:
    """Serve the model `name` (see `model_folder`) until SIGINT or SIGTERM.

    `ready` gets its address and the number of its processes once it is loaded: see `load_runner`. Port 0 takes a free
    one. Raises ValueError, before the model is loaded, for an address that cannot be bound, or that other machines
    reach without a token; and InferenceFailed if a process of the model dies.
    """
    check_access(host, token)
    folder = model_folder(root, name)
    with bind(host, port) as listener, load_runner(folder, tp, pp, dtype, threads) as runner:
        engine = BatchEngine(runner, Tokenizer.load(folder), max_batch, queue)
        served = Served(name, engine, (folder / TEMPLATE_FILE).is_file(), token)
        try:
            app = create_app(served, render_page(served, root, folder))
            config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S)
            server = uvicorn.Server(config)

            def watch(stop: threading.Event) -> None:
                while not stop.wait(WATCH_S):
                    server.should_exit = server.should_exit or runner.failure() is not None

            listener.listen(config.backlog)  # uvicorn would do it later than `ready` says that it is served
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{listener.getsockname()[1]}/", runner.processes)
            with in_background(watch) if runner.processes > 1 else nullcontext():
                server.run([listener])
            if failure := runner.failure():
                raise failure
        finally:
            engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises ValueError if the address is in use or not this machine's."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # asyncio sets it only on sockets that it made; without it a token waits up to 40 ms for the last one's receipt
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    """Raise ValueError for an unusable token, or for a host beyond loopback without one."""
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise ValueError(f"--token (or {TOKEN}): must be ASCII without blanks; give another")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ValueError(f"--host {host}: is not an IP address; write 127.0.0.1 or one of this machine's") from None
    if not loopback and not token:
        raise ValueError(f"--host {host}: other machines reach it; set {TOKEN} (or --token), or use 127.0.0.1")


def create_app(served: Served, page: str) -> FastAPI:
    """Return the HTTP application, with `page` at its root; the caller stops its engine."""
    engine = served.engine

    def check_host(request: Request) -> None:
        host = request.headers.get("host", "")
        with suppress(ValueError):
            address = urlsplit(f"//{host}").hostname or ""
            if served.token or address == "localhost" or ipaddress.ip_address(address).is_loopback:
                return
        # another name that its owner leads to this machine (DNS rebinding)
        raise APIError(421, f"host {host!r}: is not a name of this server; use 127.0.0.1 or localhost")

    def check_token(request: Request) -> None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        given = value if scheme.lower() == "bearer" else ""
        if scheme.lower() == "basic":  # of a browser
            with suppress(binascii.Error):
                given = base64.b64decode(value, validate=True).decode("latin-1").partition(":")[2]
        if served.token and not secrets.compare_digest(given.encode("latin-1"), served.token.encode()):
            message = "the token is missing or wrong; send it in the header `Authorization: Bearer TOKEN`"
            raise APIError(401, message, code="invalid_api_key")

    app = FastAPI(title="herd", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check_host)])
    api = APIRouter(dependencies=[Depends(check_token)])

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response()

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

    @api.get("/")
    async def show_page() -> HTMLResponse:
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
        sampling = await _parse(request, CompletionRequest)
        _check_model(served, sampling.model)
        begin = engine.tokenizer.begin
        prompts = [[begin, *await asyncio.to_thread(engine.tokenizer.encode, text)] for text in sampling.prompt]
        return await _answer(request, served, sampling, prompts, "prompt")

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        sampling = await _parse(request, ChatRequest)
        _check_model(served, sampling.model)
        if not served.chat:
            raise APIError(400, f"{served.name} {NO_TEMPLATE}", "messages", "no_chat_template")
        messages = [{"role": message.role, "content": message.content} for message in sampling.messages]
        try:
            prompt = await asyncio.to_thread(encode_chat, engine.tokenizer, messages, True)
        except ValueError as error:
            raise APIError(400, str(error), "messages") from None
        return await _answer(request, served, sampling, [prompt], "messages")

    app.include_router(api)
    return app


def _check_model(served: Served, name: str) -> None:
    if name != served.name:
        raise APIError(404, f"model {name!r}: is not served here; use {served.name!r}", "model", "model_not_found")


async def _parse(request: Request, kind: type[Parsed]) -> Parsed:
    """Return the body. Raises APIError for one that is not JSON, too large, or has a wrong field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(415, f"content type {content_type!r}: send application/json")
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES:
                raise APIError(413, f"the body has more than {BODY_BYTES:,} bytes; shorten it")
    except ClientDisconnect:
        raise APIError(400, "the client left before the end of its body") from None
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"]]
    param = ".".join(where) or None
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    elif first["type"] == "extra_forbidden":
        message = f"{param}: is not supported here; leave it out"
    elif first["type"] == "missing":
        message = f"{param}: is missing"
    else:
        value = repr(first["input"])
        message = f"{param or 'the body'} {value if len(value) <= 80 else value[:80] + '...'}: {first['msg']}"
    raise APIError(400, message, param)


async def _answer(
    request: Request, served: Served, sampling: SamplingFields, prompts: Sequence[list[int]], field: str
) -> Response:
    """Decode `n` texts after each prompt and return them whole or as a stream. Raises APIError before any is begun."""
    engine, chat = served.engine, isinstance(sampling, ChatRequest)
    tokenizer, longest = engine.tokenizer, max(map(len, prompts))
    new = sampling.max_completion_tokens if isinstance(sampling, ChatRequest) else None
    new = new or sampling.max_tokens or (max(1, engine.window - longest) if chat else 16)
    if longest + new > engine.window:
        param = field if longest >= engine.window else "max_tokens"
        remedy = f"shorten {field}" if param == field else f"write max_tokens {engine.window - longest} or less"
        message = f"{field} of {longest} tokens and max_tokens {new} exceed the model's {engine.window} positions"
        raise APIError(400, f"{message}; {remedy}", param, "context_length_exceeded")
    most = engine.max_batch + engine.queue
    count = len(prompts) * sampling.n
    if count > most:
        raise APIError(400, f"n {sampling.n}: {count} texts exceed the {most} of batch and queue; ask for fewer", "n")
    specials = (special_id(tokenizer, END_OF_TURN),) if chat else ()
    settings = (sampling.temperature, sampling.top_p, max(0, sampling.top_k), sampling.repetition_penalty)
    sampler = Sampler(len(tokenizer.base), tokenizer.end, *settings, specials)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str, str]]()

    def delivery(index: int) -> Callable[[str, str], None]:
        def deliver(piece: str, reason: str) -> None:
            if reason or (piece and sampling.stream):
                with suppress(RuntimeError):  # the loop has ended, and so has the server
                    loop.call_soon_threadsafe(pieces.put_nowait, (index, piece, reason))

        return deliver

    generations = []
    for index, prompt in enumerate(prompt for prompt in prompts for _ in range(sampling.n)):
        dice = Random(f"{seed}/{index}" if index else str(seed))  # the first text is that of `herd generate`
        text = GeneratedText(tokenizer, list(prompt), new, dice, TextStream(sampling.stop))
        generations.append(Generation(text, sampler, delivery(index)))
    try:
        engine.submit(generations)
    except QueueFull as error:
        raise APIError(429, str(error), code="rate_limit_exceeded") from None
    texts = _pieces(count, pieces)
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": served.name,
    }

    def usage() -> dict[str, int]:
        read = sum(map(len, prompts))
        written = sum(len(each.text.tokens) for each in generations) - sampling.n * read
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    if sampling.stream:
        options = sampling.stream_options or StreamOptions()
        events = _events(head, texts, count, chat, usage if options.include_usage else None)
        return EventStream(events, engine, generations)
    whole = asyncio.ensure_future(_finished(texts))
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return Response(status_code=499)  # the client is gone
        whole.result()
    finally:
        whole.cancel()
        left.cancel()
        for generation in generations:
            engine.cancel(generation)
    choices = []
    for index, generation in enumerate(generations):
        written = "".join(generation.text.written)
        answer = {"message": {"role": "assistant", "content": written}} if chat else {"text": written}
        choices.append({"index": index, **answer, "logprobs": None, "finish_reason": generation.text.finish_reason})
    return JSONResponse({**head, "choices": choices, "usage": usage()})


class EventStream(StreamingResponse):
    """Server-sent events; what is unfinished when it ends or the client leaves is canceled."""

    def __init__(self, events: AsyncIterator[bytes], engine: BatchEngine, generations: Sequence[Generation]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._engine, self._generations = engine, generations

    async def __call__(self, *words: Any) -> None:
        try:
            await super().__call__(*words)
        finally:  # also if the client leaves before the first event, when a generator's own `finally` would not run
            for generation in self._generations:
                self._engine.cancel(generation)


async def _pieces(count: int, pieces: asyncio.Queue[tuple[int, str, str]]) -> AsyncIterator[tuple[int, str, str]]:
    """Yield index, text and finish reason as they come, until all `count` texts are finished."""
    while count:
        index, piece, reason = await pieces.get()
        if reason == ERROR:
            raise APIError(500, "the text could not be finished; the server's log has the reason")
        count -= bool(reason)
        yield index, piece, reason


async def _finished(texts: AsyncIterator[tuple[int, str, str]]) -> None:
    async for _ in texts:
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    head: Mapping[str, Any],
    texts: AsyncIterator[tuple[int, str, str]],
    count: int,
    chat: bool,
    usage: Callable[[], dict[str, int]] | None,
) -> AsyncIterator[bytes]:
    """Yield server-sent events: a chunk per piece, the usage if the client asks for it, and `[DONE]`."""
    head = {**head, "object": "chat.completion.chunk"} if chat else head

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event({**head, "choices": choices, **more})

    def choice(index: int, piece: str, reason: str, **delta: str) -> dict[str, Any]:
        if piece or delta:
            delta["content"] = piece
        text: dict[str, Any] = {"delta": delta} if chat else {"text": piece}
        return {"index": index, **text, "logprobs": None, "finish_reason": reason or None}

    if chat:
        for index in range(count):
            yield event([choice(index, "", "", role="assistant")])
    try:
        async for index, piece, reason in texts:
            yield event([choice(index, piece, reason)])
    except APIError as error:
        yield _event(error.body())
        return
    if usage:
        yield event([], usage=usage())
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
