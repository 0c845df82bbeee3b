"""Answers become samples and samples scores, whatever the kind."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.evaluate.requests import document_requests
from herd.llama3.evaluate.scores import Sample, group_mean, pass_at, samples, score_samples
from herd.llama3.evaluate.scoring import score_requests
from herd.llama3.evaluate.task import Likelihood, Prompt, Request, Task
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer

TEXTS = ["plain text, of 27 characters", "été 日本 \U0001f600 " * 9, "a", "word " * 300]


class Uniform:
    """A model that gives each of `rows` tokens the same probability."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, tokens_BS: Tensor, documents_BS: None, targets_BS: Tensor) -> Tensor:
        return (targets_BS != -100).double() * math.log(self.vocab_size)


class Bytes:
    """The tokenizer whose tokens are the 256 bytes."""

    begin = start = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@given(st.lists(st.text(min_size=1, max_size=80), min_size=1, max_size=5), st.integers(4, 64))
def test_bytes_that_are_all_equally_likely_cost_eight_bits_each(texts: list[str], window: int) -> None:
    documents = [ValidationDocument(str(place), "code", text) for place, text in enumerate(texts)]
    task = Task("eval/bpb/code", "rolling", tuple(document_requests("eval/bpb/code", documents)))
    found = score_samples(task, samples(task, score_requests(Uniform(256), Bytes(), task.requests, window)))
    assert found.value == pytest.approx(8, rel=1e-14)


def test_two_tokenizers_are_compared_on_the_same_bytes() -> None:
    """The value is log2(rows) x tokens / bytes for any tokenizer: the bytes are those of the text."""
    documents = [ValidationDocument(str(place), "code", text) for place, text in enumerate(TEXTS)]
    requests = document_requests("eval/bpb/code", documents)
    task = Task("eval/bpb/code", "rolling", tuple(requests))
    sizes = [len(text.encode()) for text in TEXTS]
    small, large = Tokenizer([bytes([n]) for n in range(256)]), train_tokenizer(TEXTS, 270)
    for coder in (small, large):
        items = samples(task, score_requests(Uniform(coder.vocab_size), coder, requests, 64))
        assert [item.denominator for item in items] == sizes
        tokens = sum(len(coder.encode(text)) for text in TEXTS)
        assert score_samples(task, items).value == pytest.approx(math.log2(coder.vocab_size) * tokens / sum(sizes))
    assert len(large.encode(TEXTS[3])) < len(small.encode(TEXTS[3]))


def question(*choices: str, gold: int = 0) -> tuple[Request, ...]:
    return tuple(Request("t", "q", place, "context", f" {choice}", gold) for place, choice in enumerate(choices))


@pytest.mark.parametrize(
    ("normalize", "picked"), [("bytes", 2), ("characters", 1), ("tokens", 0), ("none", 3)]
)  # fmt: skip
def test_what_divides_the_nats_decides(normalize: str, picked: int) -> None:
    """Choices of 2, 5, 4 x 3 and 1 characters: each rule picks another one."""
    task = Task("t", "choice", question("ab", "abcde", "日日日日", "a"), normalize=normalize)  # type: ignore[arg-type]
    likelihoods = [Likelihood(9.0, 9), Likelihood(5.1, 2), Likelihood(8.0, 4), Likelihood(5.0, 1)]
    (sample,) = samples(task, likelihoods)
    assert sample.picked == picked


def test_a_sample_has_all_that_is_known_of_its_question() -> None:
    requests = tuple(
        Request("t", name, place, "c", f" {place}", 1, f"group {name}") for name in "ab" for place in range(2)
    )
    task = Task("t", "choice", requests, clusters={"a": "passage 7"})
    first, second = samples(task, [Likelihood(3.0, 4), Likelihood(2.0, 5), Likelihood(1.0, 6), Likelihood(9.0, 7)])
    assert first == Sample("t", "a", 1.0, 1.0, 9, 1, 1, "group a", "passage 7")
    assert second == Sample("t", "b", 0.0, 1.0, 13, 0, 1, "group b", "")


def test_a_cloze_is_right_if_every_token_is_the_likeliest() -> None:
    requests = tuple(Request("t", name, 0, "c", " w", 0, "g") for name in "abc")
    task = Task("t", "cloze", requests, version=3, shots=2)
    items = samples(task, [Likelihood(1.0, 1, True), Likelihood(0.1, 1, False), Likelihood(1.0, 1, True)])
    assert [item.numerator for item in items] == [1.0, 0.0, 1.0]
    found = score_samples(task, items)
    assert (found.value, found.chance, found.shots, found.version) == (pytest.approx(2 / 3), 0.0, 2, 3)
    with pytest.raises(AssertionError, match="was not asked whether"):
        samples(task, [Likelihood(1.0, 1)] * 3)


def answered(groups: dict[str, list[float]]) -> list[Sample]:
    return [
        Sample("t", f"{group}{place}", value, 1.0, 0, None, None, group)
        for group, values in groups.items()
        for place, value in enumerate(values)
    ]


def test_the_mean_of_groups_weighs_each_group_alike() -> None:
    items = answered({"large": [1.0] * 30 + [0.0] * 10, "small": [0.0, 1.0, 0.0, 0.0]})
    found = group_mean(items)
    assert found.value == pytest.approx((0.75 + 0.25) / 2)
    spreads = [0.75 * 0.25 * 40 / 39 / 40, 0.25 * 0.75 * 4 / 3 / 4]
    assert found.stderr == pytest.approx(math.sqrt(sum(spreads)) / 2)
    task = Task("t", "choice", question("a", "b"), average="groups")
    assert score_samples(task, items).value == found.value
    assert score_samples(Task("t", "choice", question("a", "b")), items).value == pytest.approx(31 / 44)


def test_groups_without_any_spread_still_have_an_interval() -> None:
    found = group_mean(answered({"a": [1.0] * 5, "b": [1.0] * 5}))
    assert (found.value, found.stderr, found.high) == (1.0, 0.0, 1.0)
    assert 0.6 < found.low < 0.9


def test_settings_that_are_newer_than_a_digest_change_it_only_if_they_are_set() -> None:
    writing = [GenerationSettings(), GenerationSettings(top_k=9), GenerationSettings(repetition_penalty=1.1)]
    prompts = (Prompt("eval/t", "1", "a", ("b",)),)
    digests = [Task("eval/t", "generate", prompts=prompts, writing=each).digest for each in writing]
    assert digests[0] == "0d8a0327efbfbf04a0c0b80293d2f4732ed9e33d7c822521fe76013e9ee6bcd2", "of before there were any"
    assert len(set(digests)) == 3


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(answers: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, answers)), data.draw(st.integers(1, answers))
    draws = list(itertools.combinations(range(answers), k))
    assert pass_at(k, right, answers) == pytest.approx(sum(min(draw) < right for draw in draws) / len(draws))


@pytest.mark.parametrize(("k", "right", "answers"), [(2, 0, 1), (0, 0, 1), (1, 2, 1), (1, -1, 1)])
def test_pass_at_k_of_nonsense_is_refused(k: int, right: int, answers: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at(k, right, answers)


def test_shares_of_several_answers_have_an_interval_within_0_and_1() -> None:
    task = Task("t", "generate", writing=GenerationSettings(samples=4, temperature=0.5))
    found = score_samples(task, answered({"": [1.0, 0.75, 1.0, 1.0]}))
    assert found.value == pytest.approx(0.9375)
    assert found.high == 1.0
    assert found.low < 0.9375


def test_written_tasks_have_no_likelihoods() -> None:
    with pytest.raises(ValueError, match="is answered in writing"):
        samples(Task("t", "code"), [])
