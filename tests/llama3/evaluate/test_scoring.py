"""Likelihoods against a plain computation, one token at a time, and against models whose likelihood is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama3.evaluate.scoring import POSITIONS, Likelihood, score_requests, score_sequences, windows
from llama3.evaluate.task import Request
from llama3.model.initial import build
from llama3.model.transformer import Transformer
from llama3.recipe.schema import Model
from llama3.tokens.tokenizer import Tokenizer, train_tokenizer

SPEC = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq=64, tied_embeddings=True)
TEXT = "The sun rises. The sun sets. Pi is 3.14159, naïve cafés serve 日本 tea; the rest is silence. " * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], 290)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    """Random weights, enlarged so that every token's likelihood depends on all that stands before it."""
    made = build(SPEC, tokenizer.rows, 3, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return made.eval()


@torch.inference_mode()
def nats_of(model: Transformer, context: list[int], token: int) -> float:
    logits_V = model(torch.tensor([context]), None)[0, -1].double()
    return float(logits_V.logsumexp(0) - logits_V[token])


def plain(model: Transformer, tokens: list[int], start: int) -> float:
    return math.fsum(nats_of(model, tokens[:place], tokens[place]) for place in range(start, len(tokens)))


def request(context: str, continuation: str) -> Request:
    return Request("eval/x", "id", 0, context, continuation, 0)


def test_batched_likelihoods_equal_one_by_one(model: Transformer, tokenizer: Tokenizer) -> None:
    pairs = [("The sun", " rises."), ("", "Pi"), ("naïve cafés", " serve 日本 tea"), ("The", " sun sets. The sun")] * 5
    found = score_requests(model, tokenizer, [request(*pair) for pair in pairs], SPEC.max_seq)
    for (context, continuation), likelihood in zip(pairs, found, strict=True):
        before, scored = tokenizer.encode(context), tokenizer.encode(continuation)
        tokens = [tokenizer.begin, *before, *scored]
        assert likelihood.tokens == len(scored)
        assert likelihood.nats == pytest.approx(plain(model, tokens, 1 + len(before)), rel=1e-5)


def test_chain_rule_over_a_split_between_tokens(model: Transformer, tokenizer: Tokenizer) -> None:
    whole, first, second = score_requests(
        model,
        tokenizer,
        [request("", "The sun rises. The"), request("", "The sun"), request("The sun", " rises. The")],
        SPEC.max_seq,
    )
    assert whole.nats == pytest.approx(first.nats + second.nats, rel=1e-5)
    assert whole.tokens == first.tokens + second.tokens


def test_a_token_across_the_boundary_counts_in_full(model: Transformer, tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("The sun")
    assert tokenizer.encode("The s") != whole[: len(tokenizer.encode("The s"))], "the boundary must fall inside a token"
    (likelihood,) = score_requests(model, tokenizer, [request("The s", "un")], SPEC.max_seq)
    shared = tokenizer.encode("The")
    assert likelihood.tokens == len(whole) - len(shared)
    assert likelihood.nats == pytest.approx(plain(model, [tokenizer.begin, *whole], 1 + len(shared)), rel=1e-5)


def test_results_do_not_depend_on_the_batch(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(TEXT[:cut], TEXT[cut : cut + 20]) for cut in range(0, 120, 7)]
    together = score_requests(model, tokenizer, requests, SPEC.max_seq)
    shuffled = score_requests(model, tokenizer, requests[::-1], SPEC.max_seq)[::-1]
    monkeypatch.setitem(POSITIONS, "cpu", 1)
    alone = score_requests(model, tokenizer, requests, SPEC.max_seq)
    for other in (shuffled, alone):
        assert [item.tokens for item in other] == [item.tokens for item in together]
        assert [item.nats for item in other] == pytest.approx([item.nats for item in together], rel=1e-5)


def test_long_documents_roll_by_half_windows(model: Transformer, tokenizer: Tokenizer) -> None:
    """Token t is scored given tokens from a multiple of the stride on: at least half a window of them."""
    window, stride = 16, 8
    (likelihood,) = score_requests(model, tokenizer, [request("", TEXT)], window)
    tokens = [tokenizer.begin, *tokenizer.encode(TEXT)]
    assert likelihood.tokens == len(tokens) - 1 > 5 * window
    expected = 0.0
    for place in range(1, len(tokens)):
        begin = 0 if place <= window else ((place - window - 1) // stride + 1) * stride
        assert place <= window or place - begin > window // 2
        expected += nats_of(model, tokens[begin:place], tokens[place])
    assert likelihood.nats == pytest.approx(expected, rel=1e-5)


def test_long_contexts_keep_what_stands_next_to_the_continuation(model: Transformer, tokenizer: Tokenizer) -> None:
    window = 16
    (likelihood,) = score_requests(model, tokenizer, [request(TEXT[:-1], " silence")], window)
    tokens = [tokenizer.begin, *tokenizer.encode(TEXT[:-1]), *tokenizer.encode(" silence")]
    scored = len(tokenizer.encode(" silence"))
    last = tokens[-1 - window :]
    assert likelihood.nats == pytest.approx(plain(model, last, len(last) - scored), rel=1e-5)


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_windows_score_every_token_once_with_enough_context(length: int, window: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, length - 1))
    spans = list(windows(range(length), start, window))
    scored = [token for span in spans for token in range(span.scored, span.end + 1)]
    assert scored == list(range(start, length))
    for span in spans:
        assert 0 <= span.begin < span.scored <= span.end
        assert span.end - span.begin <= window
        assert span.begin == 0 or span.scored - span.begin >= window / 2
    if length <= window + 1:
        assert len(spans) == 1


def test_windows_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="window 1 must be at least 2"):
        list(windows([1, 2, 3], 1, 1))
    with pytest.raises(ValueError, match="start 0 at least 1"):
        list(windows([1, 2, 3], 0, 4))


def test_a_uniform_model_scores_log_of_its_rows(tokenizer: Tokenizer) -> None:
    uniform = build(SPEC, tokenizer.rows, 0, torch.float32, torch.device("cpu"))
    torch.nn.init.zeros_(uniform.embedding.weight)
    (likelihood,) = score_requests(uniform, tokenizer, [request("", TEXT)], SPEC.max_seq)
    bits = likelihood.nats / math.log(2)
    tokens, size = len(tokenizer.encode(TEXT)), len(TEXT.encode())
    assert bits / size == pytest.approx(math.log2(tokenizer.rows) * tokens / size, rel=1e-6)


def test_sequences_with_nothing_to_score_cost_nothing(model: Transformer) -> None:
    assert score_sequences(model, [([1, 2, 3], 3)], 8) == [Likelihood(0.0, 0)]


def test_an_empty_continuation_is_refused(model: Transformer, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="eval/x: question id has an empty choice 0"):
        score_requests(model, tokenizer, [request("The sun", "")], SPEC.max_seq)
