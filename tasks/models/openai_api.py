"""OpenAI's API: the bodies of requests, the ids of their prompts, and answers whole or as a stream.

Fields are OpenAI's, with vLLM's `top_k` and `repetition_penalty`; a field whose value would be ignored is an error.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from random import Random
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from herd.llama3.evaluate.generate import GeneratedText, Sampler, TextStream, TokenLikelihood
from herd.llama3.serve.engine import ERROR, BatchEngine, Generation, QueueFull
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.tokenizer import Tokenizer

BODY_BYTES = 8 * 2**20
BODY_S = 60
"""Seconds that a client may take to send its body."""
RETRY_AFTER_S = 1
MOST_TEXTS, MOST_LOGPROBS = 2048, 20
"""Of one request: prompts times `n`, and likeliest tokens beside each token."""
MANY = 32
"""Tokens whose likelihoods are written in another thread."""
MOST_SCORES = 2**22
"""Likelihoods of one answer: of tokens of prompts and texts, and of the likeliest beside each."""
LONG = 2**16
"""Characters of a prompt that is encoded in pieces, and while no other such prompt is."""
LEFT = 499
"""Status of what no client waits for."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **{"best_of": [1], "frequency_penalty": [0], "presence_penalty": [0], "logit_bias": [{}], "suffix": [""]},
    **{"response_format": [{"type": "text"}], "store": [False], "metadata": [{}], "service_tier": ["auto", "default"]},
    **{"tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "modalities": [["text"]]},
    **{"min_p": [0], "min_tokens": [0], "ignore_eos": [False], "stop_token_ids": [[]], "bad_words": [[]]},
    **{"include_stop_str_in_output": [False], "skip_special_tokens": [True], "use_beam_search": [False]},
    **{"spaces_between_special_tokens": [True], "length_penalty": [1], "return_tokens_as_token_ids": [False]},
    **{"add_generation_prompt": [True], "continue_final_message": [False], "chat_template_kwargs": [{}]},
    **{"functions": [[]], "function_call": ["none", "auto"], "priority": [0]},
}
"""Fields of OpenAI's API and vLLM's that are not supported, with the values that ask for nothing; others are errors."""
Parsed = TypeVar("Parsed", bound="SamplingFields")
Prompt = str | list[int]


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


def _prompts(value: object) -> object:
    """Return a list of texts and lists of ids. Raises ValueError for anything else."""
    listed = [value] if isinstance(value, str) or (isinstance(value, list) and _is_ids(value)) else value
    if isinstance(listed, list) and all(isinstance(each, str) or _is_ids(each) for each in listed):
        return listed
    raise ValueError("write a text, a list of token ids, or a list of texts or of lists of ids")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _unless_false(value: object) -> object:
    return None if value is False else value


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
            name: value for name, value in given.items() if value is not None and value not in NEUTRAL.get(name, [])
        }


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: Annotated[list[Prompt], Field(min_length=1), BeforeValidator(_prompts)]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS), BeforeValidator(_unless_false)] = None
    echo: bool = False
    """Whether the answer begins with the prompt."""


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _without_echo(cls, given: Any) -> Any:
        """Leave out the field of /v1/completions where it asks for nothing."""
        echo = isinstance(given, dict) and given.get("echo") is False
        return {name: value for name, value in given.items() if name != "echo"} if echo else given

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs}: needs logprobs; write logprobs true")
        return self


class PromptEncoder:
    """Encodes prompts of a model in other threads than the one that answers requests."""

    def __init__(self, tokenizer: Tokenizer, window: int) -> None:
        self.tokenizer, self.window = tokenizer, window
        self._most_bytes = window * max(map(len, tokenizer.tokens))
        self._long = asyncio.Semaphore(1)

    async def prompts(self, prompts: Sequence[Prompt], client: Client) -> list[list[int]]:
        """Return the ids of each prompt; a text gets the begin token, ids are taken as they are.

        Raises APIError for a prompt that does not fit or an id that the model does not have, and ClientLeft.
        """
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_size([prompt], "prompt")
                ids = await self._text(prompt, client)
                encoded.append(ids if ids and self.tokenizer.begin is None else [self.tokenizer.start, *ids])
            else:
                if wrong := [token for token in prompt if not 0 <= token < self.tokenizer.vocab_size]:
                    message = (
                        f"prompt: the model has no token {wrong[0]}; its ids are below {self.tokenizer.vocab_size}"
                    )
                    raise APIError(400, f"{message}, so encode the prompt with its tokenizer", "prompt")
                encoded.append(prompt)
        return encoded

    async def chat(self, messages: Sequence[ChatMessage], client: Client) -> list[int]:
        """Return the ids of a conversation up to the assistant's next message; errors as `prompts`."""
        contents = [message.content for message in messages]
        self._check_size(contents, "messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        async with self._long if sum(map(len, contents)) > LONG else nullcontext():
            client.check()
            try:
                return await asyncio.to_thread(encode_chat, self.tokenizer, turns, True)
            except ValueError as error:
                raise APIError(400, str(error), "messages") from None

    def _check_size(self, texts: Sequence[str], param: str) -> None:
        """Raise APIError for texts that have too many bytes, however they are encoded."""
        if (size := sum(len(text.encode()) for text in texts)) > self._most_bytes:
            raise self._too_long(f"{param} of {size:,} bytes", param)

    def _too_long(self, what: str, param: str) -> APIError:
        message = f"{what} exceeds the model's {self.window} positions; shorten {param}"
        return APIError(400, message, param, "context_length_exceeded")

    async def _text(self, text: str, client: Client) -> list[int]:
        if len(text) <= LONG:
            client.check()
            return await asyncio.to_thread(self.tokenizer.encode, text)
        ids: list[int] = []
        async with self._long:
            for piece in _pieces_of(text):
                client.check()
                ids += await asyncio.to_thread(self.tokenizer.encode, piece)
                if len(ids) >= self.window:
                    raise self._too_long(f"prompt of more than {len(ids)} tokens", "prompt")
        return ids


def _pieces_of(text: str) -> Iterator[str]:
    """Cut a text where a token ends: before a space that does not follow white space."""
    begin = 0
    while begin < len(text):
        space = re.compile(r"(?<=\S) ").search(text, begin + LONG)
        end = space.start() if space else len(text)
        yield text[begin:end]
        begin = end


class ClientLeft(Exception):
    """Nobody waits for the answer."""


class Client:
    """Whoever waits for an answer; a context manager that notices when they leave."""

    def __init__(self, request: Request) -> None:
        """Begin to watch; the body of the request has been read."""
        self._request = request

    async def __aenter__(self) -> Client:
        self._left = asyncio.ensure_future(self._wait())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._left.cancel()

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def check(self) -> None:
        """Raise ClientLeft if they have left."""
        if self._left.done():
            raise ClientLeft

    async def wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Return when the work is done, and raise what it raises. Raises ClientLeft, and cancels it, if they leave."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._left), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            task.result()
        finally:
            task.cancel()


class LogprobsWriter:
    """Writes the likelihoods of one text in OpenAI's shapes, as they come."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, chat: bool) -> None:
        self._tokenizer, self._generation, self._chat = tokenizer, generation, chat
        self._first = [generation.text.tokens[0]] if generation.echo else []
        self._written = 0
        self._offset, self._characters = 0, codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def many(self) -> bool:
        """Whether so many have come that writing them takes milliseconds."""
        return len(self._generation.likelihoods) - self._written > MANY

    def take(self) -> dict[str, Any] | None:
        """Return those that have come since the last call; None if none are wanted."""
        if self._generation.top is None:
            return None
        begin, self._written = self._written, len(self._generation.likelihoods)
        new = self._generation.likelihoods[begin : self._written]
        if self._chat:
            return {"content": [self._content(each) for each in new], "refusal": None}
        first, self._first = self._first, []
        return {
            "tokens": [*map(self._name, first), *(self._name(each.token) for each in new)],
            "token_logprobs": [*(None for _ in first), *(each.logprob for each in new)],
            "top_logprobs": [*(None for _ in first), *map(self._top, new)],
            "text_offset": [self._move(token) for token in [*first, *(each.token for each in new)]],
        }

    def _name(self, token: int) -> str:
        """Return a name that no other token has: its text, or its bytes if they are no text."""
        text = self._tokenizer.text_of(token)
        if not text:
            return self._tokenizer.names.get(token, f"id:{token}")
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def _top(self, likelihood: TokenLikelihood) -> dict[str, float]:
        """Return the likeliest tokens and the text's own."""
        return {self._name(token): value for token, value in (*likelihood.top, likelihood[:2])}

    def _content(self, likelihood: TokenLikelihood) -> dict[str, Any]:
        own, *top = (
            {"token": self._name(token), "logprob": value, "bytes": self._bytes(token)}
            for token, value in (likelihood[:2], *likelihood.top)
        )
        return {**own, "top_logprobs": top}

    def _bytes(self, token: int) -> list[int] | None:
        return list(self._tokenizer.text_of(token)) or None

    def _move(self, token: int) -> int:
        """Return where in the text the token begins; special ones have no text."""
        begin = self._offset
        self._offset += len(self._characters.decode(self._tokenizer.text_of(token)))
        return begin


async def parse(request: Request, kind: type[Parsed]) -> Parsed:
    """Return the body. Raises APIError for one that is not JSON, too large, or has a wrong field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(415, f"content type {content_type!r}: send application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES:
                    raise APIError(413, f"the body has more than {BODY_BYTES:,} bytes; shorten it")
    except TimeoutError:
        raise APIError(408, f"the body did not arrive within {BODY_S} s; send it again") from None
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
    elif first["type"] == "value_error" and not where:
        message = str(first["ctx"]["error"])
        param = message.partition(" ")[0]
    else:
        value = repr(first["input"])
        reason = first["msg"].removeprefix("Value error, ")
        message = f"{param or 'the body'} {value if len(value) <= 80 else value[:80] + '...'}: {reason}"
    raise APIError(400, message, param)


def check_count(prompts: int, sampling: SamplingFields, param: str) -> None:
    """Raise APIError for too many texts."""
    if (count := prompts * sampling.n) > MOST_TEXTS:
        which = "n" if sampling.n > prompts else param
        raise APIError(400, f"{which}: {count} texts exceed the {MOST_TEXTS} of a request; ask for fewer", which)


async def answer(
    client: Client, model: str, engine: BatchEngine, sampling: SamplingFields, prompts: Sequence[list[int]], param: str
) -> Response:
    """Decode `n` texts after each prompt and return them whole or as a stream. Raises APIError before any is begun."""
    chat = isinstance(sampling, ChatRequest)
    tokenizer, longest = engine.tokenizer, max(map(len, prompts))
    new = sampling.max_completion_tokens if isinstance(sampling, ChatRequest) else None
    if (new := sampling.max_tokens if new is None else new) is None:
        new = max(1, engine.window - longest) if chat else 16
    if longest + new > engine.window:
        which = param if longest + min(1, new) > engine.window else "max_tokens"
        remedy = f"shorten {which}" if which == param else f"write max_tokens {engine.window - longest} or less"
        message = f"{param} of {longest} tokens and max_tokens {new} exceed the model's {engine.window} positions"
        raise APIError(400, f"{message}; {remedy}", which, "context_length_exceeded")
    top, echo = None, isinstance(sampling, CompletionRequest) and sampling.echo
    if isinstance(sampling, CompletionRequest):
        top = sampling.logprobs
    elif isinstance(sampling, ChatRequest) and sampling.logprobs:
        top = sampling.top_logprobs
    shown = sampling.n * sum((len(prompt) if echo else 0) + new for prompt in prompts)
    if top is not None and shown * (1 + top) > MOST_SCORES:
        message = f"logprobs {top}: {shown:,} tokens x {1 + top} likelihoods exceed the {MOST_SCORES:,} of an answer"
        raise APIError(400, f"{message}; send fewer prompts at once, or lower logprobs, max_tokens or n", "logprobs")
    specials = (tokenizer.turn_end,) if chat else ()
    settings = (sampling.temperature, sampling.top_p, max(0, sampling.top_k), sampling.repetition_penalty)
    sampler = Sampler.for_tokenizer(tokenizer, *settings, specials)
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
        generations.append(Generation(text, sampler, delivery(index), top, echo))
    shown_prompts = await asyncio.to_thread(lambda: [tokenizer.decode(ids) if echo else "" for ids in prompts])
    before = [text for text in shown_prompts for _ in range(sampling.n)]
    try:
        engine.submit(generations)
    except QueueFull as error:
        raise APIError(429, str(error), code="rate_limit_exceeded") from None
    texts = _pieces(len(generations), pieces)
    writers = [LogprobsWriter(tokenizer, each, chat) for each in generations]
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }

    def usage() -> dict[str, int]:
        read = sum(map(len, prompts))
        written = sum(len(each.text.tokens) for each in generations) - sampling.n * read
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def choice(index: int) -> dict[str, Any]:
        written = before[index] + "".join(generations[index].text.written)
        body = {"message": {"role": "assistant", "content": written}} if chat else {"text": written}
        reason = generations[index].text.finish_reason
        return {"index": index, **body, "logprobs": writers[index].take(), "finish_reason": reason}

    if sampling.stream:
        options = sampling.stream_options or StreamOptions()
        events = _events(head, texts, before, writers, chat, usage if options.include_usage else None)
        return EventStream(events, engine, generations)
    try:
        await client.wait_for(_finished(texts))
    finally:
        for generation in generations:
            engine.cancel(generation)
    # in another thread: those of long prompts take seconds
    choices = await asyncio.to_thread(lambda: [choice(index) for index in range(len(generations))])
    body = await asyncio.to_thread(orjson.dumps, {**head, "choices": choices, "usage": usage()})
    return Response(body, media_type="application/json")


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


async def _events(
    head: Mapping[str, Any],
    texts: AsyncIterator[tuple[int, str, str]],
    before: Sequence[str],
    writers: Sequence[LogprobsWriter],
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
        for index in range(len(writers)):
            yield event([choice(index, "", "", role="assistant")])
    unsent = dict(enumerate(before))
    try:
        async for index, piece, reason in texts:
            new = choice(index, unsent.pop(index, "") + piece, reason)
            if writers[index].many:  # of a prompt
                yield await asyncio.to_thread(lambda: event([{**new, "logprobs": writers[index].take()}]))  # noqa: B023
            else:
                yield event([{**new, "logprobs": writers[index].take()}])
    except APIError as error:
        yield _event(error.body())
        return
    if usage:
        yield event([], usage=usage())
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
