"""OpenAI's API for one model: its answers, its errors, and clients that leave or come in crowds."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from typer.testing import CliRunner

from herd.flows.cli.main import app as cli
from herd.llama3.evaluate.generate import IncrementalDecoder, ModelRunner, generate
from herd.llama3.model.files import save_model
from herd.llama3.recipe.sections import Model
from herd.llama3.serve.engine import BatchEngine, Generation
from herd.llama3.tokens.chat import encode_chat
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.storage.secrets import PAGE_KEY
from herd.tasks.models.openai_api import BODY_BYTES
from herd.tasks.models.serve import STALL_S, Served, bind, create_app, render_page, serve, server_config
from tests.llama3.evaluate.test_generate import favour
from tests.llama3.evaluate.test_generate_batch import TOKENIZER, made
from tests.llama3.serve.test_engine import await_idle
from tests.tasks.models.conftest import KEY

WINDOW = 20_000
CONFIG = Model(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, max_seq_len=WINDOW, tied_embeddings=False)
NAME = "tiny@champion"
"""As in the tutorial."""
EOT = 256 + 9
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <|eot_id|> "}]


@contextmanager
def serving(served: Served, page: str = "") -> Iterator[str]:
    """Serve in a thread of this process; yield the address."""
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        server = uvicorn.Server(server_config(create_app(served, page)))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def client_of(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=60, headers={"Authorization": f"Bearer {KEY}"})


def complete(http: httpx.Client, prompt: Any = "The", **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": NAME, "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_a_completion_is_the_text_of_herd_generate(served: Served, http: httpx.Client) -> None:
    model = served.engine.runner.model
    body = complete(http, temperature=0)
    text = generate(model, TOKENIZER, "The", 16)
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}
    settings = {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2, "seed": 7}
    due = generate(model, TOKENIZER, "The", 30, **settings)  # type: ignore[arg-type]
    assert complete(http, max_tokens=30, **settings)["choices"][0]["text"] == due
    assert due != generate(model, TOKENIZER, "The", 30, 1.3, 0.9, 7)
    assert complete(http, max_tokens=30)["choices"] != complete(http, max_tokens=30)["choices"], "seeds are random"


def test_a_stop_text_ends_it(served: Served, http: httpx.Client) -> None:
    whole = generate(served.engine.runner.model, TOKENIZER, "The", 30)
    for stop in (whole[5:7], ["never", whole[5:7]]):
        body = complete(http, temperature=0, max_tokens=30, stop=stop)
        assert body["choices"][0]["text"] == whole[: whole.index(whole[5:7])]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] < 30


def test_several_prompts_and_choices_are_one_answer(http: httpx.Client) -> None:
    body = complete(http, ["The", "A"], n=3, seed=1, max_tokens=9)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert len(set(texts)) == 6
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 54, "total_tokens": 60}
    assert complete(http, ["The", "A"], n=3, seed=1, max_tokens=9)["choices"] == body["choices"]


def test_a_stream_is_the_answer_in_pieces(http: httpx.Client) -> None:
    fields = {"model": NAME, "prompt": "The", "max_tokens": 20, "seed": 3, "n": 2}
    whole = complete(http, max_tokens=20, seed=3, n=2)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json={**fields, **options}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == whole["choices"][index]["text"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own) > 5


def test_no_piece_waits_for_the_receipt_of_the_last() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_official_client_reads_it(served: Served, http: httpx.Client) -> None:
    import openai  # a CPU second that only one worker needs to spend

    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0)
    assert [(model.id, model.owned_by) for model in client.models.list()] == [(NAME, "herd")]
    assert client.models.retrieve(NAME).id == NAME
    text = generate(served.engine.runner.model, TOKENIZER, "The", 12)
    whole = client.completions.create(model=NAME, prompt="The", max_tokens=12, temperature=0)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "length")
    assert whole.usage is not None
    assert whole.usage.total_tokens == 16
    pieces = client.completions.create(model=NAME, prompt="The", max_tokens=12, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text
    extra = {"top_k": 1, "repetition_penalty": 1.0}
    sampled = client.completions.create(model=NAME, prompt="The", max_tokens=12, temperature=1.5, extra_body=extra)
    assert sampled.choices[0].text == text
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    chunks = client.chat.completions.create(  # type: ignore[call-overload]
        model=NAME, messages=CHAT, max_completion_tokens=12, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="The")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="The", max_tokens=WINDOW)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_a_chat_is_encoded_with_the_template_and_ends_at_its_end(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": NAME, "messages": CHAT, "max_tokens": 12, "temperature": 0}
    prompt = encode_chat(TOKENIZER, CHAT, True)
    assert prompt.count(EOT) == 2, "the text <|eot_id|> of the user is text"
    answer = http.post("/v1/chat/completions", json=body).json()
    tokens, decoder = list(prompt), IncrementalDecoder(served.engine.runner.model, 500)
    with torch.inference_mode():
        for _ in range(12):
            logits_V = decoder.read(tokens)[0]
            tokens.append(max([*range(256), TOKENIZER.end, EOT], key=logits_V.tolist().__getitem__))
    text = TOKENIZER.decode(tokens[len(prompt) :])
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    content = [{"type": "text", "text": text} for text in (" Hi ", "<|eot_id|>")]
    parts = {**body, "messages": [CHAT[0], {"role": "user", "content": content}]}
    assert http.post("/v1/chat/completions", json=parts).json()["choices"] == answer["choices"]


def test_the_end_of_a_turn_ends_a_chat_but_no_completion() -> None:
    model = made(CONFIG)
    favour(model, EOT)
    favour(model, ord("x"), 5e3)
    engine = BatchEngine(model, TOKENIZER)
    with serving(Served("m", engine, chat=True, token=KEY)) as address, client_of(address) as http:
        body = {"model": "m", "max_tokens": 5}
        (chat,) = http.post("/v1/chat/completions", json={**body, "messages": CHAT}).json()["choices"]
        (plain,) = http.post("/v1/completions", json={**body, "prompt": "a"}).json()["choices"]
    assert (chat["message"]["content"], chat["finish_reason"]) == ("", "stop")
    assert (plain["text"], plain["finish_reason"]) == ("xxxxx", "length")
    engine.stop()


def test_a_base_model_does_not_chat(served: Served) -> None:
    with serving(replace(served, chat=False)) as address, client_of(address) as http:
        answer = http.post("/v1/chat/completions", json={"model": NAME, "messages": CHAT})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "is a base model and has no chat template" in message
    assert "kind: sft" in message
    assert "/v1/completions" in message


PLAIN = {"model": NAME, "prompt": "a"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("completions", b"{", 400, None, "the body is not JSON"),
        ("completions", b"[]", 400, None, "the body []: Input should be"),
        ("completions", b'{"model": "tiny@champion", "prompt": "\\ud800"}', 400, None, "the body is not JSON"),
        ("completions", b'{"model": "tiny@champion", "prompt": "a", "temperature": NaN}', 400, "temperature", "finite"),
        pytest.param(
            "completions", b" " * (BODY_BYTES + 1), 413, None, "more than 8,388,608 bytes", id="completions-too-long"
        ),
        ("completions", {"prompt": "a"}, 400, "model", "model: is missing"),
        ("completions", {"model": NAME}, 400, "prompt", "prompt: is missing"),
        ("completions", {**PLAIN, "model": "gpt-4"}, 404, "model", "model 'gpt-4': is not served here; use 'tiny@ch"),
        ("completions", {**PLAIN, "prompt": [1, "a"]}, 400, "prompt", "prompt [1, 'a']: write a text, a list of"),
        ("completions", {**PLAIN, "prompt": [[]]}, 400, "prompt", "prompt [[]]: write a text, a list of token ids"),
        ("completions", {**PLAIN, "prompt": [[True]]}, 400, "prompt", "prompt [[True]]: write a text"),
        ("completions", {**PLAIN, "prompt": [1, 512]}, 400, "prompt", "has no token 512; its ids are below 512"),
        ("completions", {**PLAIN, "prompt": [[1], [-1]]}, 400, "prompt", "has no token -1; its ids are below 512"),
        ("completions", {**PLAIN, "prompt": [9] * (WINDOW + 1)}, 400, "prompt", "positions; shorten prompt"),
        ("completions", {**PLAIN, "prompt": ["a"] * 2049}, 400, "prompt", "2049 texts exceed the 2048 of a request"),
        ("completions", {**PLAIN, "prompt": []}, 400, "prompt", "at least 1 item"),
        ("completions", {**PLAIN, "prompt": "a" * WINDOW}, 400, "prompt", "the model's 20000 positions; shorten"),
        ("completions", {**PLAIN, "max_tokens": WINDOW - 1}, 400, "max_tokens", "write max_tokens 19998 or less"),
        ("completions", {**PLAIN, "max_tokens": -1}, 400, "max_tokens", "max_tokens -1: Input should be greater"),
        ("completions", {**PLAIN, "max_tokens": "9"}, 400, "max_tokens", "max_tokens '9': Input should be a valid int"),
        ("completions", {**PLAIN, "temperature": -1}, 400, "temperature", "temperature -1: Input should be greater"),
        ("completions", {**PLAIN, "top_p": 0}, 400, "top_p", "top_p 0: Input should be greater than 0"),
        ("completions", {**PLAIN, "top_k": 1.5}, 400, "top_k", "top_k 1.5: Input should be a valid integer"),
        ("completions", {**PLAIN, "repetition_penalty": 0}, 400, "repetition_penalty", "greater than 0"),
        ("completions", {**PLAIN, "stop": [""]}, 400, "stop.0", "at least 1 character"),
        ("completions", {**PLAIN, "stop": ["a"] * 17}, 400, "stop", "at most 16 items"),
        ("completions", {**PLAIN, "seed": "x"}, 400, "seed", "seed 'x': Input should be a valid integer"),
        ("completions", {**PLAIN, "stream": "yes"}, 400, "stream", "valid boolean"),
        ("completions", {**PLAIN, "n": 2049}, 400, "n", "n: 2049 texts exceed the 2048 of a request"),
        ("completions", {**PLAIN, "echo": 1}, 400, "echo", "echo 1: Input should be a valid boolean"),
        ("completions", {**PLAIN, "logprobs": 21}, 400, "logprobs", "logprobs 21: Input should be less than or"),
        ("completions", {**PLAIN, "logprobs": True}, 400, "logprobs", "logprobs True: Input should be a valid integer"),
        (
            "completions", {**PLAIN, "prompt": [9] * 1000, "n": 2000, "echo": True, "logprobs": 20, "max_tokens": 0},
            400, "logprobs", "2,000,000 tokens x 21 likelihoods exceed the 4,194,304 of an answer; send fewer prompts",
        ),
        ("completions", {**PLAIN, "min_p": 0.1}, 400, "min_p", "min_p: is not supported here; leave it out"),
        ("completions", {**PLAIN, "prompt_logprobs": 1}, 400, "prompt_logprobs", "is not supported here"),
        ("chat/completions", {"model": NAME, "messages": CHAT, "echo": True}, 400, "echo", "is not supported here"),
        ("chat/completions", {"model": NAME, "messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs", "needs log"),
        (
            "chat/completions", {"model": NAME, "messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400,
            "top_logprobs", "less than or equal to 20",
        ),
        ("chat/completions", {"model": NAME, "messages": []}, 400, "messages", "at least 1 item"),
        ("chat/completions", {"model": NAME, "messages": "hi"}, 400, "messages", "valid array"),
        (
            "chat/completions", {"model": NAME, "messages": [{"role": "tool", "content": "a"}]}, 400, "messages",
            "messages.0.role: 'tool' is unknown",
        ),
        (
            "chat/completions", {"model": NAME, "messages": [{"role": "user", "content": 5}]}, 400,
            "messages.0.content", "messages.0.content 5: Input should be a valid string",
        ),
        (
            "chat/completions",
            {"model": NAME, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400, "messages.0.content", "Input should be a valid string",
        ),
        ("embeddings", PLAIN, 404, None, "POST /v1/embeddings: Not Found"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_requests_are_named_in_openai_s_shape(
    http: httpx.Client, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert message in error["message"]
    assert sorted(error) == ["code", "message", "param", "type"]


def test_a_form_of_another_site_is_refused(http: httpx.Client) -> None:
    """A browser sends these without a question."""
    answer = http.post("/v1/completions", content=json.dumps(PLAIN), headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        415, "content type 'text/plain': send application/json",
    )  # fmt: skip


def test_a_link_signs_a_browser_in(served: Served) -> None:
    with serving(served, "page") as address, httpx.Client(base_url=address) as http:
        assert http.get("/", params={"key": f"{KEY}x"}).status_code == 401
        assert http.get("/", params={"key": ""}).status_code == 401
        answer = http.get("/", params={"key": KEY})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=lax"} <= set(answer.headers["set-cookie"].split("; "))
        assert http.get("/").text == "page"
        assert complete(http, max_tokens=1)["choices"]
        port = address.rpartition(":")[2]
        assert [*http.cookies] == [f"herd-serve-{port}"], "two servers of a host do not sign each other's pages out"


def test_a_token_is_wanted_everywhere_but_for_health(served: Served) -> None:
    token = "s3cret"
    with serving(replace(served, token=token), "page") as address, httpx.Client(base_url=address) as http:
        assert http.get("/health", headers={"Host": "model.example"}).json()["status"] == "ok"
        basic = base64.b64encode(f"anybody:{token}".encode()).decode()
        for path in ("/", "/v1/models"):
            for given in ("", "Bearer", "Bearer s3cre", f"Bearer {token}x", "Bearer \xe9", f"Basic {token}", token):
                answer = http.get(path, headers={"Authorization": given.encode("latin-1")} if given else {})
                assert answer.status_code == 401, given
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["WWW-Authenticate"].startswith("Basic")
            for given in (f"Bearer {token}", f"Basic {basic}"):
                assert http.get(path, headers={"Authorization": given}).status_code == 200
        assert http.post("/v1/completions", json=PLAIN).status_code == 401
        import openai

        client = openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0)
        assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong").models.list()


@pytest.mark.slow
def test_a_crowd_is_served_or_told_to_come_again(served: Served, http: httpx.Client) -> None:
    """200 clients at once, one batch of 4 and a queue of 8; each text is what it would be alone."""
    due = generate(served.engine.runner.model, TOKENIZER, "crowd", 20)
    body = {"model": NAME, "prompt": "crowd", "max_tokens": 20, "temperature": 0}
    start = threading.Barrier(200)

    with httpx.Client(base_url=http.base_url, timeout=60, limits=httpx.Limits(max_connections=200)) as crowd:

        def ask(number: int) -> httpx.Response:
            start.wait(60)
            return crowd.post("/v1/completions", json={**body, "stream": number % 2 == 0})

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 12
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        elif answer.headers["content-type"] == "application/json":
            assert answer.json()["choices"][0]["text"] == due
        else:
            chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and line != "data: [DONE]"]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == due
    await_idle(served.engine)
    assert http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_takes_its_text_along(
    served: Served, http: httpx.Client, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, submit = list[Generation](), served.engine.submit
    monkeypatch.setattr(served.engine, "submit", lambda texts: (asked.extend(texts), submit(texts)))
    body = json.dumps({**PLAIN, "max_tokens": WINDOW - 10, "temperature": 0, "n": 2, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as client:
        client.sendall(head.encode() + body)
        deadline = time.monotonic() + 30
        while served.engine.running < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if stream:
            assert b"200 OK" in client.recv(1000)
    await_idle(served.engine)
    assert [(each.canceled, each.text.finish_reason) for each in asked] == [(True, "")] * 2


def head_of(body: bytes, *lines: str) -> bytes:
    """Return the head of a request for a completion."""
    usual = [f"Authorization: Bearer {KEY}", "Content-Type: application/json", "Connection: close"]
    names = {line.partition(":")[0] for line in lines}
    usual += [f"Content-Length: {len(body)}"] if not names & {"Content-Length", "Transfer-Encoding"} else []
    usual += ["Host: localhost"] if "Host" not in names else []
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *usual, *lines, "", ""]).encode()


def reply_of(client: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    client.settimeout(30)
    reply = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(4096):
            reply += piece
    return reply


ODD: dict[str, tuple[list[str], int, str]] = {
    "two_lengths": (["Content-Length: 5", "Transfer-Encoding: chunked"], 400, "send only one"),
    "userinfo": (["Host: evil.example@127.0.0.1"], 400, "is not the name of a machine"),
    "no_host": (["Host: "], 400, "is not the name of a machine"),
    "path_in_host": (["Host: localhost/v1"], 400, "is not the name of a machine"),
    "foreign_origin": (["Origin: https://evil.example"], 403, "a page of another server cannot use this one"),
    "other_port": (["Host: localhost:1", "Origin: http://localhost:2"], 403, "must pass on Host"),
    "sandboxed_page": (["Origin: null"], 403, "a page of another server cannot use this one"),
    "own_page": (["Host: [::1]:80", "Origin: http://[::1]:80"], 200, "text_completion"),
    "proxy": (["Host: llm.example", "Origin: https://LLM.example"], 200, "text_completion"),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_requests_and_those_of_other_pages_are_refused(http: httpx.Client, odd: str) -> None:
    lines, status, message = ODD[odd]
    body = json.dumps({**PLAIN, "max_tokens": 1}).encode()
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if odd == "two_lengths" else body
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as client:
        client.sendall(head_of(body, *lines) + sent)
        reply = reply_of(client).decode()
    assert reply.startswith(f"HTTP/1.1 {status} ")
    assert message in reply


DAWDLERS = {
    "nothing": b"",
    "half_a_head": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX",
    "half_a_body": head_of(b"x" * 99) + b'{"model"',
    "body_of_a_refused": head_of(b"x" * 99, "Host: @") + b"x",
    "half_a_second_head": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /h",
}


@pytest.mark.parametrize("kind", DAWDLERS)
def test_who_dawdles_is_cut_off(served: Served, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends a byte now and then."""
    monkeypatch.setattr("herd.tasks.models.serve.HEAD_S", 0.5)
    monkeypatch.setattr("herd.tasks.models.openai_api.BODY_S", 0.5)
    with serving(served) as address, client_of(address) as http:
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as client:
            client.sendall(DAWDLERS[kind])
            over, begun = threading.Event(), time.monotonic()

            def drip() -> None:
                while not over.wait(0.1) and DAWDLERS[kind]:
                    with suppress(OSError):
                        client.send(b"a")

            with ThreadPoolExecutor(1) as pool:
                pool.submit(drip)
                reply = reply_of(client)
                over.set()
        assert time.monotonic() - begun < 20
        assert (b"HTTP/1.1 408 " in reply) == (kind == "half_a_body")
        assert complete(http)["choices"]


def test_a_connection_whose_client_reads_nothing_is_ended_by_the_system() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STALL_S * 1000


def test_a_letter_is_answered_at_once_beside_clients_that_dawdle_or_leave(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 clients: a quarter each sends half a head, half a body, leaves at once, or leaves a stream."""
    place = (http.base_url.host, http.base_url.port or 0)
    body = json.dumps({**PLAIN, "max_tokens": 1000, "stream": True}).encode()
    clients = [socket.create_connection(place) for _ in range(100)]
    for number, client in enumerate(clients):
        whole = head_of(body) + body
        client.sendall(whole[: (60, len(whole) - 9, len(whole), len(whole))[number % 4]])
    for client in clients[2::4]:
        client.close()
    for client in clients[3::4]:
        client.recv(100)
        client.close()
    await_idle(served.engine)
    steps = 0

    def counted(*words: Any) -> Any:
        nonlocal steps
        steps += 1
        return decode(*words)

    decode = ModelRunner.decode
    monkeypatch.setattr(ModelRunner, "decode", counted)
    assert complete(http, "a", max_tokens=1)["choices"]
    assert steps <= 2
    for client in clients:
        client.close()


def test_an_error_of_the_engine_is_an_answer(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*words: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "decode", broken)
        answer = http.post("/v1/completions", json=PLAIN)
        stream = http.post("/v1/completions", json={**PLAIN, "stream": True})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert json.loads(stream.text.strip().split("\n\n")[-1][6:])["error"]["type"] == "server_error"
    assert complete(http)["choices"]


def test_the_tutorial_s_program_and_requests_are_answered_as_printed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model of the same window, of one-byte tokens."""
    page = (checkout / "docs/tutorials/talk-to-your-model.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    requests = re.findall(r"\$ curl -s localhost:8000(\S+).*?-d '(.*?)'\n    (.*?)\n", page, re.DOTALL)
    engine = BatchEngine(made(CONFIG.model_copy(update={"max_seq_len": 128})), TOKENIZER)
    with serving(Served(NAME, engine, chat=False, token=KEY)) as address, client_of(address) as http:
        (tmp_path / "herd-data").mkdir()
        (tmp_path / "herd-data" / PAGE_KEY).write_text(f"{KEY}\n")
        monkeypatch.chdir(tmp_path)
        exec(program.replace("http://127.0.0.1:8000", address), {})
        for path, body, printed in requests:
            answer = http.post(path, content=body, headers={"Content-Type": "application/json"}).json()
            assert answer == json.loads(printed.replace("of 3 tokens", "of 4 tokens").replace("125", "124"))
    engine.stop()
    assert len(requests) == 2
    due = generate(engine.runner.model, TOKENIZER, "Question: What is", 20, 0.8, 1.0, 1)
    assert capsys.readouterr().out.endswith(f"\n{due}")


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, CONFIG, TOKENIZER.vocab_size, made(CONFIG).state_dict())
    TOKENIZER.save(path)
    return path


def test_the_address_takes_connections_as_soon_as_it_is_said(folder: Path, tmp_path: Path) -> None:
    class Connected(Exception):
        pass

    def ready(address: str, key: str, _: int) -> None:
        host, port = address.removeprefix("http://").rstrip("/").split(":")
        socket.create_connection((host, int(port)), 5).close()
        raise Connected

    with pytest.raises(Connected):
        serve(Root.parse(tmp_path), str(folder), "127.0.0.1", 0, "", 4, 4, ready)


def test_herd_serve_serves_until_ctrl_c(folder: Path, tmp_path: Path) -> None:
    address, answers = f"http://127.0.0.1:{free_port()}/", list[Any]()

    def ask() -> None:
        for _ in range(600):
            with suppress(httpx.ConnectError, FileNotFoundError):
                body = {"model": str(folder), "prompt": "The", "temperature": 0}
                with httpx.Client(base_url=address, timeout=60, follow_redirects=True) as http:
                    answers.append(http.get("", params={"key": (tmp_path / PAGE_KEY).read_text().strip()}).text)
                    answers.append(http.post("v1/completions", json=body).json())
                break
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=ask)
    client.start()
    words = ["serve", str(folder), "--port", address.rpartition(":")[2][:-1], "--root", str(tmp_path)]
    result = CliRunner().invoke(cli, words)
    client.join()
    kept = tmp_path / PAGE_KEY
    said = [f"{folder} is served; Ctrl-C stops it", f"page     {address}", f"API      {address}v1"]
    assert (result.exit_code, result.output.splitlines()) == (
        0, ["loading the model", *said, f"api_key  the text of {kept}"],
    )  # fmt: skip
    assert kept.stat().st_mode & 0o777 == 0o600
    assert answers[0].startswith("<!doctype html>")
    assert answers[1]["choices"][0]["text"] == generate(made(CONFIG), TOKENIZER, "The", 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "example.com"], "--host example.com: is not an IP address"),
        (["--token", "a b"], "--token (or HERD_SERVE_TOKEN): must be ASCII without blanks"),
        (["--port", "{taken}"], "cannot be bound"),
        (["--max-batch", "0"], "--max-batch"),
    ],
)
def test_what_cannot_be_served_is_refused(folder: Path, options: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        words = [option.replace("{taken}", str(taken.getsockname()[1])) for option in options]
        result = CliRunner().invoke(cli, ["serve", str(folder), *words])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_model_that_there_is_not_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", "moon@champion", "--root", str(tmp_path)])
    assert result.exit_code == 2
    assert "model moon@champion: no version holds that alias" in " ".join(result.output.split())


def test_the_page_loads_nothing(served: Served, folder: Path, tmp_path: Path) -> None:
    page = render_page(replace(served, name="</script><b>"), Root.parse(tmp_path), folder)
    assert "</script><b>" not in page
    assert not [word for word in ("http://", "https://", "src=", "@import", "url(") if word in page]
    with serving(served, page) as address, client_of(address) as http:
        answer = http.get("/")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert f"{WINDOW:,} tokens" in answer.text
