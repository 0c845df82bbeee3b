"""Likelihoods over OpenAI's API: those of the evaluator, in OpenAI's shapes; and prompts too long to be encoded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from herd.llama3.evaluate.scoring import encode_requests, score_sequences
from herd.llama3.evaluate.task import Request as Question
from herd.llama3.tokens.adversarial_strings import random_strings
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.tasks.models import openai_api
from herd.tasks.models.openai_api import NEUTRAL, APIError, Client, ClientLeft, PromptEncoder
from herd.tasks.models.serve import Served
from tests.llama3.evaluate.test_generate_batch import TOKENIZER
from tests.tasks.models.conftest import KEY
from tests.tasks.models.test_serve import CHAT, NAME, complete

LETTERS = "ab 1é"


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", f"/v1/{path}", json={"model": NAME, "stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]


def test_the_likelihood_of_a_prompt_is_the_evaluator_s(served: Served, http: httpx.Client) -> None:
    """As text and as ids, alone and together, with a token after it and without."""
    model = served.engine.runner.model
    questions = [
        Question("task", str(number), 0, "Where is it? " * number, answer, 0)
        for number, answer in enumerate(["at é", "x", "ab"])
    ]
    sequences = encode_requests(TOKENIZER, questions)
    due = score_sequences(model, sequences, model.config.max_seq_len)
    for new in (0, 1):
        for prompts in ([ids for ids, _ in sequences], [each.context + each.continuation for each in questions]):
            one_by_one = [
                complete(http, prompt, logprobs=1, echo=True, max_tokens=new, temperature=0) for prompt in prompts
            ]
            together = complete(http, prompts, logprobs=1, echo=True, max_tokens=new, temperature=0)
            for answers in ([body["choices"][0] for body in one_by_one], together["choices"]):
                for choice, (ids, start), likelihood, question in zip(answers, sequences, due, questions, strict=True):
                    found = choice["logprobs"]
                    assert {len(column) for column in found.values()} == {len(ids) + new}
                    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
                    nats = -sum(found["token_logprobs"][start : len(ids)])
                    assert nats == pytest.approx(likelihood.nll, abs=1e-5)
                    assert choice["text"].startswith(question.context + question.continuation)
                    assert choice["finish_reason"] == "length"
            assert together["usage"] == {
                "prompt_tokens": sum(len(ids) for ids, _ in sequences),
                "completion_tokens": 3 * new,
                "total_tokens": sum(len(ids) for ids, _ in sequences) + 3 * new,
            }


def test_likeliest_tokens_have_their_names_and_the_text_s_own_is_among_them(http: httpx.Client) -> None:
    (choice,) = complete(http, "aé", logprobs=3, echo=True, max_tokens=5, temperature=1.5, seed=1)["choices"]
    found = choice["logprobs"]
    assert found["tokens"][:4] == ["<|begin_of_text|>", "a", r"bytes:\xc3", r"bytes:\xa9"]
    assert found["text_offset"][:5] == [0, 0, 1, 1, 2]
    for name, own, top in list(zip(*list(found.values())[:3], strict=True))[1:]:
        assert 3 <= len(top) <= 4
        assert top[name] == own
        assert sorted(top.values(), reverse=True)[:3] == list(top.values())[:3]
    (plain,) = complete(http, "aé", logprobs=0, max_tokens=5, temperature=1.5, seed=1)["choices"]
    assert plain["logprobs"]["tokens"] == found["tokens"][4:]
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(found["token_logprobs"][4:], abs=1e-5)
    assert [list(top) for top in plain["logprobs"]["top_logprobs"]] == [[name] for name in plain["logprobs"]["tokens"]]
    assert choice["text"] == "aé" + plain["text"]
    assert complete(http, "aé", echo=True, max_tokens=0)["choices"][0] == {
        "index": 0, "text": "aé", "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert complete(http, max_tokens=0)["choices"][0]["text"] == ""


def test_a_stream_has_the_likelihoods_of_the_whole(http: httpx.Client) -> None:
    body = {"prompt": "The", "logprobs": 2, "echo": True, "max_tokens": 20, "seed": 3}
    (whole,) = complete(http, **body)["choices"]
    chunks = stream(http, "completions", body)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert len(chunks) > 5
    for column, values in whole["logprobs"].items():
        joined = [value for chunk in chunks for value in chunk["logprobs"][column]]
        if column == "token_logprobs":
            assert joined[1:] == pytest.approx(values[1:], abs=1e-5)
        elif column != "top_logprobs":
            assert joined == values
    assert [chunk["text"] for chunk in stream(http, "completions", {**body, "max_tokens": 0})] == ["The"]


def test_a_chat_has_likelihoods(served: Served, http: httpx.Client) -> None:
    body = {"model": NAME, "messages": CHAT, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    found = choice["logprobs"]["content"]
    ids = encode_chat(TOKENIZER, CHAT, True)
    written = [TOKENIZER.specials[each["token"]] if each["bytes"] is None else each["bytes"][0] for each in found]
    model = served.engine.runner.model
    (due,) = score_sequences(model, [([*ids, *written], len(ids))], model.config.max_seq_len)
    assert -sum(each["logprob"] for each in found) == pytest.approx(due.nll, abs=1e-5)
    for each in found:
        assert len(each["top_logprobs"]) == 2
        assert sorted(each["top_logprobs"][0]) == ["bytes", "logprob", "token"]
        assert each["top_logprobs"][0]["logprob"] >= each["top_logprobs"][1]["logprob"]
    chunks = stream(http, "chat/completions", body)
    assert [each["token"] for chunk in chunks[1:] for each in chunk["logprobs"]["content"]] == [
        e["token"] for e in found
    ]
    only = {**body, "top_logprobs": None}
    (choice,) = http.post("/v1/chat/completions", json=only).json()["choices"]
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[]] * 6


def test_the_official_client_reads_likelihoods(http: httpx.Client) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0)
    scored = client.completions.create(model=NAME, prompt=[[5, 6, 7]], max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs is not None
    assert len(scored.choices[0].logprobs.token_logprobs) == 3
    answer = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=1  # type: ignore[arg-type]
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert all(len(each.top_logprobs) == 1 for each in answer.choices[0].logprobs.content)


def test_two_hundred_prompts_of_ids_are_one_request(served: Served, http: httpx.Client) -> None:
    prompts = [[number % 256, (7 * number) % 256, 9] for number in range(200)]
    body = complete(http, prompts, logprobs=1, echo=True, max_tokens=1, temperature=0)
    model = served.engine.runner.model
    due = score_sequences(model, [(ids, 1) for ids in prompts], model.config.max_seq_len)
    found = [-sum(choice["logprobs"]["token_logprobs"][1:3]) for choice in body["choices"]]
    assert found == pytest.approx([each.nll for each in due], abs=1e-5)


def test_fields_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    neutral = [(field, value) for field, values in NEUTRAL.items() for value in values]
    for field, value in [*neutral, ("logprobs", False), ("echo", False), ("user", "me"), ("stop", None), ("n", None)]:
        assert complete(http, max_tokens=1, **{field: value})["choices"]
        body = {"model": NAME, "messages": CHAT, "max_tokens": 1, field: value}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


class Waiting(Client):
    """A client that leaves after some looks at it."""

    def __init__(self, looks: int) -> None:
        super().__init__(Request({"type": "http"}))
        self.looks = looks

    def check(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise ClientLeft


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_pieces_of_a_text_have_its_tokens(seed: int, size: int) -> None:
    words = [*random_strings(3, seed), "a  b\n c\u0085 d\x1c e'll don't  ", LETTERS * 3]
    tokenizer = Tokenizer([*TOKENIZER.base, b" a", b"  ", b"ab", b"'l"])
    for text in words:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openai_api, "LONG", size)
            pieces = list(openai_api._pieces_of(text))
        assert "".join(pieces) == text
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_prompt_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of too many bytes not at all, one of too many tokens not to its end, and none for a client who left."""
    tokenizer, encoded = Tokenizer([*TOKENIZER.base, b"a" * 100]), list[int]()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    encoder = PromptEncoder(tokenizer, window=90_000)
    messages = [openai_api.ChatMessage(role="user", content="é" * 4_600_000)]
    for work in (
        encoder.prompts(["é" * 4_600_000], Waiting(99)),
        encoder.prompts([[1], "1 " * 4_600_000], Waiting(99)),
        encoder.chat(messages, Waiting(99)),
    ):
        with pytest.raises(APIError, match=r"of 9,200,000 bytes exceeds the model's 90000 positions; shorten"):
            asyncio.run(work)
    assert encoded == []
    with pytest.raises(APIError, match=r"prompt of more than 131\d\d\d tokens exceeds") as caught:
        asyncio.run(encoder.prompts(["1 " * 4_000_000], Waiting(99)))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")
    assert len(encoded) == 2
    with pytest.raises(ClientLeft):
        asyncio.run(encoder.prompts(["1 " * 40_000, "1 " * 40_000, "1"], Waiting(3)))
    assert len(encoded) == 5
    (ids,) = asyncio.run(encoder.prompts(["1 " * 40_000], Waiting(99)))
    assert ids == [tokenizer.begin, *encode(tokenizer, "1 " * 40_000)]


def test_short_prompts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, encode = PromptEncoder(TOKENIZER, window=10**7), Tokenizer.encode
    begun, most, now = list[str](), [0], [0]

    def slow(self: Tokenizer, text: str) -> list[int]:
        import time

        begun.append(text[:1])
        now[0] += len(text) > 1
        most[0] = max(most[0], now[0])
        time.sleep(0.05 * (len(text) > 1))
        now[0] -= len(text) > 1
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def crowd() -> None:
        long = [asyncio.create_task(encoder.prompts(["x" * 70_000], Waiting(9))) for _ in range(40)]
        await asyncio.sleep(0.01)
        await encoder.prompts(["a"], Waiting(9))
        assert not all(each.done() for each in long)
        await asyncio.gather(*long)

    asyncio.run(crowd())
    assert begun.index("a") < 5
    assert most == [1]
