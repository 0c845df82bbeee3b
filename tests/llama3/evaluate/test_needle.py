"""Needles: what is asked, and what models are found to know that are known to read, or not to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llama3.evaluate.needle import CHOICES, DEPTHS, find_needles, questions
from llama3.evaluate.statistics import proportion
from llama3.model.initial import build
from llama3.recipe.schema import Model
from llama3.tokens.tokenizer import Tokenizer, train_tokenizer

TEXTS = [
    f"In the year {year} the river rose. It took the mill, and {year % 7} cows! Who saw it?" for year in range(300)
]
SUFFIX = 24
"""Tokens that the reader below compares: more than a key, less than a sentence."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("\n".join(TEXTS))


@dataclass
class Reader:
    """Expects what followed the last tokens when it saw them before, among the newest `reach` tokens."""

    reach: int = 10**9

    def __call__(self, tokens_BS: Tensor, documents_BS: None, targets_BS: Tensor) -> Tensor:
        nats_BS = torch.zeros(targets_BS.shape)
        for row, place in (targets_BS != -100).nonzero().tolist():
            seen = tokens_BS[row, max(0, place + 1 - self.reach) : place + 1].tolist()
            nats_BS[row, place] = 0.0 if int(targets_BS[row, place]) in self.followers(seen) else 5.0
        return nats_BS

    def followers(self, seen: list[int]) -> set[int]:
        last = seen[-SUFFIX:]
        return {seen[i + SUFFIX] for i in range(len(seen) - SUFFIX) if seen[i : i + SUFFIX] == last}


class Copier(Reader):
    """Gives every number of the text the same likelihood, whatever its key."""

    def followers(self, seen: list[int]) -> set[int]:
        return {after for before, after in pairwise(seen) if before == seen[-1]}


@settings(max_examples=25, deadline=None)
@given(st.integers(320, 900), st.integers(1, 30))
def test_every_question_fills_the_sequence_and_holds_its_needles(
    tokenizer: Tokenizer, pool: list[int], seq: int, count: int
) -> None:
    asked = list(questions(tokenizer, pool, seq, count))
    assert [question.depth for question in asked] == [DEPTHS[number % 11] for number in range(count)]
    for question in asked:
        assert max(len(question.tokens) + len(choice) for choice in question.choices) == seq + 1
        text = tokenizer.decode(question.tokens)
        ask = text[text.rindex("\n") :]
        for place, choice in enumerate(question.choices):
            number = tokenizer.decode(choice)
            assert text.count(f"is{number}.\n") == 1
            assert (f"{ask}{number}." in text) == (place == question.gold)


def test_needles_stand_at_their_depths_and_after_sentences(tokenizer: Tokenizer, pool: list[int]) -> None:
    for question in questions(tokenizer, pool, 4000, 22):
        text = tokenizer.decode(question.tokens)
        needle = text.index(text[text.rindex("\n") :])
        assert needle / text.rindex("\n") == pytest.approx(question.depth / 100, abs=0.1)
        assert question.depth > 0 or needle == 0
        assert needle == 0 or text[:needle].rstrip(" ")[-1] in ".!?\n" or question.depth == 100


def test_the_same_questions_for_every_model_and_others_for_another_length(tokenizer: Tokenizer) -> None:
    first, second = (find_needles(model, tokenizer, TEXTS, 400, 11) for model in (Reader(), Reader(100)))
    assert first.requests == second.requests != find_needles(Reader(), tokenizer, TEXTS, 401, 11).requests


def test_a_reader_finds_all_and_a_short_sighted_one_the_last(tokenizer: Tokenizer) -> None:
    whole = find_needles(Reader(), tokenizer, TEXTS, 700, 33)
    assert whole.by_depth == dict.fromkeys(DEPTHS, (3, 3))
    short = find_needles(Reader(reach=150), tokenizer, TEXTS, 700, 33)
    assert short.by_depth[0] == (0, 3)
    assert short.by_depth[100] == (3, 3)
    assert short.table().startswith("0 %: 0/3, 10 %: 0/3")
    scores = short.scores()
    assert scores["eval/needle"].estimate == proportion(short.found, 33)
    assert scores["eval/needle/depth_100"].value == 1
    assert {score.chance for score in scores.values()} == {1 / CHOICES}


def test_numbers_without_their_keys_are_not_found(tokenizer: Tokenizer) -> None:
    assert find_needles(Copier(), tokenizer, TEXTS, 400, 11).found < 11 / 2


def test_a_model_that_knows_nothing_finds_nothing(tokenizer: Tokenizer) -> None:
    spec = Model(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, max_seq=512, tied_embeddings=True)
    model = build(spec, tokenizer.rows, 0, torch.float32, torch.device("cpu")).eval()
    torch.nn.init.zeros_(model.get_parameter("embedding.weight"))
    assert find_needles(model, tokenizer, TEXTS, 512, 11).found == 0


def test_what_has_no_room_or_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"needle: sequence 128 has no room for 4 sentences and a question, \d+ tokens"
    ):
        find_needles(Reader(), tokenizer, TEXTS, 128, 11)
    with pytest.raises(ValueError, match=r"no held-out text .* raise curate\.held_out"):
        find_needles(Reader(), tokenizer, [], 512, 11)
