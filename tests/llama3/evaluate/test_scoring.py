"""Likelihoods against a plain computation, one token at a time, and against models whose likelihood is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate import scoring
from herd.llama3.evaluate.scoring import (
    BUDGETS,
    BatchLimits,
    Scorable,
    encode_requests,
    score_requests,
    score_sequences,
)
from herd.llama3.evaluate.task import Likelihood, Request
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.llama3.evaluate.packing_samples import questions

SPEC = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=64, tied_embeddings=True)
TEXT = "The sun rises. The sun sets. Pi is 3.14159, naïve cafés serve 日本 tea; the rest is silence. " * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], 290)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    """Random weights, enlarged so that every token's likelihood depends on all that stands before it."""
    made = build_model(SPEC, tokenizer.vocab_size, 3, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return made.eval()


@torch.inference_mode()
def nll_of(model: Transformer, context: list[int], token: int) -> float:
    logits_V = model(torch.tensor([context]), None)[0, -1].double()
    return float(logits_V.logsumexp(0) - logits_V[token])


def plain(model: Transformer, tokens: list[int], start: int) -> float:
    return math.fsum(nll_of(model, tokens[:place], tokens[place]) for place in range(start, len(tokens)))


def request(context: str, continuation: str) -> Request:
    return Request("eval/x", "id", 0, context, continuation, 0)


def test_batched_likelihoods_equal_one_by_one(model: Transformer, tokenizer: Tokenizer) -> None:
    pairs = [("The sun", " rises."), ("", "Pi"), ("naïve cafés", " serve 日本 tea"), ("The", " sun sets. The sun")] * 5
    found = score_requests(model, tokenizer, [request(*pair) for pair in pairs], SPEC.max_seq_len)
    for (context, continuation), likelihood in zip(pairs, found, strict=True):
        before, scored = tokenizer.encode(context), tokenizer.encode(continuation)
        tokens = [tokenizer.begin, *before, *scored]
        assert likelihood.tokens == len(scored)
        assert likelihood.nll == pytest.approx(plain(model, tokens, 1 + len(before)), rel=1e-5)


def test_chain_rule_over_a_split_between_tokens(model: Transformer, tokenizer: Tokenizer) -> None:
    whole, first, second = score_requests(
        model,
        tokenizer,
        [request("", "The sun rises. The"), request("", "The sun"), request("The sun", " rises. The")],
        SPEC.max_seq_len,
    )
    assert whole.nll == pytest.approx(first.nll + second.nll, rel=1e-5)
    assert whole.tokens == first.tokens + second.tokens


def test_a_token_across_the_boundary_counts_in_full(model: Transformer, tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("The sun")
    assert tokenizer.encode("The s") != whole[: len(tokenizer.encode("The s"))], "the boundary must fall inside a token"
    (likelihood,) = score_requests(model, tokenizer, [request("The s", "un")], SPEC.max_seq_len)
    shared = tokenizer.encode("The")
    assert likelihood.tokens == len(whole) - len(shared)
    assert likelihood.nll == pytest.approx(plain(model, [tokenizer.begin, *whole], 1 + len(shared)), rel=1e-5)


def test_results_do_not_depend_on_the_batch(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(TEXT[:cut], TEXT[cut : cut + 20]) for cut in range(0, 120, 7)]
    together = score_requests(model, tokenizer, requests, SPEC.max_seq_len)
    shuffled = score_requests(model, tokenizer, requests[::-1], SPEC.max_seq_len)[::-1]
    monkeypatch.setitem(BUDGETS, "cpu", BatchLimits(1, 1))
    alone = score_requests(model, tokenizer, requests, SPEC.max_seq_len)
    for other in (shuffled, alone):
        assert [item.tokens for item in other] == [item.tokens for item in together]
        assert [item.nll for item in other] == pytest.approx([item.nll for item in together], rel=1e-5)


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
        expected += nll_of(model, tokens[begin:place], tokens[place])
    assert likelihood.nll == pytest.approx(expected, rel=1e-5)


def test_long_contexts_keep_what_stands_next_to_the_continuation(model: Transformer, tokenizer: Tokenizer) -> None:
    window = 16
    (likelihood,) = score_requests(model, tokenizer, [request(TEXT[:-1], " silence")], window)
    tokens = [tokenizer.begin, *tokenizer.encode(TEXT[:-1]), *tokenizer.encode(" silence")]
    scored = len(tokenizer.encode(" silence"))
    last = tokens[-1 - window :]
    assert likelihood.nll == pytest.approx(plain(model, last, len(last) - scored), rel=1e-5)


def test_a_uniform_model_scores_log_of_its_rows(tokenizer: Tokenizer) -> None:
    uniform = build_model(SPEC, tokenizer.vocab_size, 0, torch.float32, torch.device("cpu"))
    torch.nn.init.zeros_(uniform.embedding.weight)
    (likelihood,) = score_requests(uniform, tokenizer, [request("", TEXT)], SPEC.max_seq_len)
    bits = likelihood.nll / math.log(2)
    tokens, size = len(tokenizer.encode(TEXT)), len(TEXT.encode())
    assert bits / size == pytest.approx(math.log2(tokenizer.vocab_size) * tokens / size, rel=1e-6)


def test_sequences_with_nothing_to_score_cost_nothing(model: Transformer) -> None:
    assert score_sequences(model, [([1, 2, 3], 3)], 8) == [Likelihood(0.0, 0)]


def test_an_empty_continuation_is_refused(model: Transformer, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="eval/x: question id has an empty choice 0"):
        score_requests(model, tokenizer, [request("The sun", "")], SPEC.max_seq_len)


def shots(count: int, questions: int) -> list[Request]:
    """Questions after one beginning, with letters, whole answers or two beginnings of one ending to choose from."""
    examples = "".join(f"Q: {n}? A: {n * 7 % 10}\n" for n in range(count))
    asked = []
    for n in range(questions):
        letters = [(f"{examples}Q: {n}, {n * n}? A:", f" {letter}") for letter in "ABCD"]
        answers = [(f"{examples}What is {n}? It is", f" {word * (1 + n % 3)}.") for word in ("red", "blue", "a sun")]
        begins = [(f"{examples}The {word} rose {n} times", " in the end.") for word in ("sun", "moon")]
        for pairs in (letters, answers, begins):
            asked += [Request("eval/x", f"{n}{pairs[0][1]}", i, *pair, 0) for i, pair in enumerate(pairs)]
    return asked


@pytest.fixture
def long_model(tokenizer: Tokenizer) -> Transformer:
    made = build_model(
        SPEC.model_copy(update={"max_seq_len": 512}), tokenizer.vocab_size, 5, torch.float64, torch.device("cpu")
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return made.eval()


@pytest.mark.parametrize("examples", [0, 5])
@pytest.mark.parametrize("budget", [BatchLimits(256, 1024), BatchLimits(2048, 16384)])
def test_shared_beginnings_change_nothing_but_the_work(
    long_model: Transformer, tokenizer: Tokenizer, examples: int, budget: BatchLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUDGETS, "cpu", budget)
    asked = shots(examples, 6)
    read: list[int] = []
    long_model.register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
    alone = score_requests(long_model, tokenizer, asked, 512, greedy={"eval/x"}, share=False)
    whole = sum(read)
    found = score_requests(long_model, tokenizer, asked, 512, greedy={"eval/x"})
    assert sum(read) - whole < (0.3 if examples else 0.8) * whole
    assert [item.tokens for item in found] == [item.tokens for item in alone]
    assert [item.nll for item in found] == pytest.approx([item.nll for item in alone], rel=1e-10)
    assert [item.greedy for item in found] == [item.greedy for item in alone]
    float32 = score_requests(long_model.float(), tokenizer, asked, 512)
    assert [item.nll for item in float32] == pytest.approx([item.nll for item in alone], rel=1e-5)


def test_results_are_the_same_bits_in_any_order(long_model: Transformer, tokenizer: Tokenizer) -> None:
    asked = shots(5, 6)
    found = score_requests(long_model.float(), tokenizer, asked, 512)
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = score_requests(long_model, tokenizer, [asked[place] for place in order], 512)
    assert shuffled == [found[place] for place in order]


def test_greedy_says_whether_every_token_is_the_likeliest(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS", tokenizer.vocab_size)  # one place at a time
    start = [tokenizer.begin, *tokenizer.encode("The sun")]
    tokens = list(start)
    with torch.inference_mode():
        for _ in range(3):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 256]
    found = score_sequences(model, [(tokens, len(start)), (other, len(start)), (tokens, 2)], 64, greedy=[0, 1])
    assert [item.greedy for item in found] == [True, False, None]
    assert [item.tokens for item in found] == [3, 3, len(tokens) - 2]


def test_a_question_longer_than_a_row_is_read_once_all_the_same(long_model: Transformer, tokenizer: Tokenizer) -> None:
    haystack = [tokenizer.begin, *tokenizer.encode(TEXT * 20)][:1500]
    asked = [([*haystack, 65 + n, 70, n], len(haystack)) for n in range(4)]
    read: list[int] = []
    hook = long_model.register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
    found = score_sequences(long_model, asked, 2000)
    hook.remove()
    assert sum(read) == len(haystack) - 1 + 4 * 3
    alone = score_sequences(long_model, asked, 2000, share=False)
    assert [item.nll for item in found] == pytest.approx([item.nll for item in alone], rel=1e-10)


@given(st.text("ab .\n\t\u00a07é日", max_size=20), st.text("ab .\n\t\u00a07é日", max_size=20))
def test_what_is_encoded_apart_is_what_is_encoded_together(tokenizer: Tokenizer, context: str, rest: str) -> None:
    asked = [request(context, f" {rest}"), request(f"{context}.", f" {rest}"), request(context, f"{rest}a")]
    for one, (tokens, start) in zip(asked, encode_requests(tokenizer, asked), strict=True):
        before, whole = tokenizer.encode(one.context), tokenizer.encode(one.context + one.continuation)
        assert tokens == [tokenizer.begin, *whole]
        assert tokens[1:start] == before[: start - 1]
        assert start - 1 == len(before) or tokens[start] != before[start - 1]


@pytest.fixture(scope="module")
def numbers() -> Transformer:
    """A model of numbers, each a token, in fp64."""
    return build_model(SPEC.model_copy(update={"max_seq_len": 512}), 4096, 5, torch.float64, torch.device("cpu")).eval()


@given(questions(), st.sampled_from([16, 64, 512]), st.sampled_from([64, 512]))
def test_whatever_is_shared_scores_as_if_read_alone(
    numbers: Transformer, asked: list[Scorable], window: int, positions: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, "cpu", BatchLimits(positions, 4 * positions))
        found = score_sequences(numbers, asked, window)
    alone = score_sequences(numbers, asked, window, share=False)
    assert [item.tokens for item in found] == [item.tokens for item in alone]
    assert [item.nll for item in found] == pytest.approx([item.nll for item in alone], rel=1e-10)
