"""Needles: what is asked, and what models are found to know that are known to read, or not to."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from herd.llama3.evaluate.needle import (
    CHOICES,
    DEPTHS,
    KINDS,
    Kind,
    chance,
    concat_tokens,
    context_lengths,
    find_needles,
    make_haystacks,
    score_key,
    scores_by_length,
)
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.statistics.estimates import proportion
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer

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
        nll_BS = torch.zeros(targets_BS.shape)
        for row, place in (targets_BS != -100).nonzero().tolist():
            seen = tokens_BS[row, max(0, place + 1 - self.reach) : place + 1].tolist()
            nll_BS[row, place] = 0.0 if int(targets_BS[row, place]) in self.followers(seen) else 5.0
        return nll_BS

    def followers(self, seen: list[int]) -> set[int]:
        last = seen[-SUFFIX:]
        return {seen[i + SUFFIX] for i in range(len(seen) - SUFFIX) if seen[i : i + SUFFIX] == last}


class Copier(Reader):
    """Gives every number of the text the same likelihood, whatever its key."""

    def followers(self, seen: list[int]) -> set[int]:
        return {after for before, after in pairwise(seen) if before == seen[-1]}


@dataclass
class Oracle:
    """Reads text as a person does: knows which number of which key stands in it, and what was given already."""

    tokenizer: Tokenizer

    def __call__(self, tokens_BS: Tensor, documents_BS: None, targets_BS: Tensor) -> Tensor:
        nll_BS = torch.zeros(targets_BS.shape)
        for row in range(len(tokens_BS)):
            scored = (targets_BS[row] != -100).nonzero().flatten().tolist()
            before = self.tokenizer.decode(tokens_BS[row, : scored[0] + 1].tolist())
            answer = self.tokenizer.decode(targets_BS[row, scored].tolist())
            nll_BS[row, scored] = 0.0 if answer.strip() in self.answers(before) else 5.0
        return nll_BS

    def answers(self, text: str) -> set[str]:
        *_, key = re.findall(r"secret numbers? of the (\w+ \w+) is", text)
        given = re.findall(r"is (\d{6}), another is$", text)
        return set(re.findall(rf"of the {key} is (\d{{6}})\.\n", text)) - set(given)


def asked_tokens(seq_len: int, coder: Tokenizer, pool: list[int], count: int, kind: Kind) -> list[int]:
    return [
        max(len(tokens) for tokens, _ in question.sequences)
        for question in make_haystacks(coder, pool, seq_len, count, kind)
    ]


@given(st.integers(320, 900), st.integers(1, 30))
def test_every_question_fills_the_sequence_and_holds_its_needles(
    tokenizer: Tokenizer, pool: list[int], seq_len: int, count: int
) -> None:
    asked = list(make_haystacks(tokenizer, pool, seq_len, count))
    assert [question.depth for question in asked] == [DEPTHS[number % 11] for number in range(count)]
    for question in asked:
        (ask,) = question.asks
        assert max(len(tokens) for tokens, _ in question.sequences) == seq_len + 1
        text, line = tokenizer.decode(question.tokens), tokenizer.decode(ask.tokens)
        for place, choice in enumerate(ask.choices):
            number = tokenizer.decode(choice)
            assert text.count(f"is{number}.\n") == 1
            assert (f"{line}{number}." in text) == (place == ask.gold)


@given(st.sampled_from(KINDS), st.integers(512, 900), st.integers(1, 12))
def test_each_task_hides_and_asks_what_it_says(
    tokenizer: Tokenizer, pool: list[int], kind: Kind, seq_len: int, count: int
) -> None:
    oracle = Oracle(tokenizer)
    assert asked_tokens(seq_len, tokenizer, pool, count, kind) == [seq_len + 1] * count
    for question in make_haystacks(tokenizer, pool, seq_len, count, kind):
        text = tokenizer.decode(question.tokens)
        assert len(re.findall(r"secret number", text)) == (1 if kind == "single" else CHOICES)
        assert len(question.asks) == (CHOICES if kind == "multi-query" else 1)
        for ask in question.asks:
            right = oracle.answers(text + tokenizer.decode(ask.tokens))
            assert right == {tokenizer.decode(ask.choices[ask.gold]).strip()}
            assert len({len(choice) for choice in ask.choices}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [258, 315])
def test_needles_stand_at_their_depths_and_after_sentences_whatever_the_tokenizer(kind: Kind, vocabulary: int) -> None:
    tokenizer = train_tokenizer(TEXTS, vocabulary)
    for question in make_haystacks(tokenizer, concat_tokens(tokenizer, TEXTS, 16000), 8000, 22, kind):
        ask, text = question.asks[0], tokenizer.decode(question.tokens)
        number = tokenizer.decode(ask.choices[ask.gold])
        needle = text.rindex("\n", 0, text.index(f"is{number}."))
        assert needle / len(text) == pytest.approx(question.depth / 100, abs=0.05)
        assert question.depth > 0 or needle == 0
        assert needle == 0 or text[:needle].rstrip(" ")[-1] in ".!?\n" or question.depth == 100


def test_the_same_questions_for_every_model_and_others_for_another_length(tokenizer: Tokenizer) -> None:
    first, second = (find_needles(model, tokenizer, TEXTS, [400], 11) for model in (Reader(), Reader(100)))
    assert first.requests == second.requests != find_needles(Reader(), tokenizer, TEXTS, [401], 11).requests


def test_a_reader_finds_all_and_a_short_sighted_one_the_last(tokenizer: Tokenizer) -> None:
    whole = find_needles(Reader(), tokenizer, TEXTS, [700], 33)
    assert {depth: whole.share(depth=depth) for depth in DEPTHS} == dict.fromkeys(DEPTHS, (3, 3))
    short = find_needles(Reader(reach=150), tokenizer, TEXTS, [700], 33)
    assert short.share(depth=0) == (0, 3)
    assert short.share(depth=100) == (3, 3)
    scores = short.scores()
    assert scores["eval/needle"].estimate == proportion(*short.share())
    assert scores["eval/needle/depth_100"].value == 1
    assert {score.chance for score in scores.values()} == {1 / CHOICES}
    assert scores_by_length(scores) == {}
    assert set(scores) == {"eval/needle", *(f"eval/needle/depth_{depth:03}" for depth in DEPTHS)}


def test_an_oracle_finds_all_of_every_task_at_every_length_and_depth(tokenizer: Tokenizer) -> None:
    lengths = context_lengths(1500)
    assert lengths == (512, 1024)
    scores = find_needles(Oracle(tokenizer), tokenizer, TEXTS, lengths, 11, kinds=KINDS).scores()
    assert {score.value for score in scores.values()} == {1.0}
    cells = {f"eval/needle/length_{length:06}/depth_{depth:03}" for length in lengths for depth in DEPTHS}
    kinds = {key for kind in KINDS for key in (score_key(kind), *(f"{score_key(kind)}/length_{n:06}" for n in lengths))}
    assert set(scores) == cells | kinds | {f"eval/needle/depth_{depth:03}" for depth in DEPTHS}
    rows = scores_by_length(scores)
    assert list(rows) == list(lengths)
    assert all(list(row) == list(DEPTHS) for row in rows.values())
    assert rows[1024][50] is scores["eval/needle/length_001024/depth_050"]
    assert all(re.fullmatch(r"[a-z0-9/_-]+", key) for key in scores)
    assert scores["eval/needle/multi-query"].chance == 1 / 256
    assert scores["eval/needle/length_001024"].n == 11
    assert scores["eval/needle/length_001024/depth_100"].low == pytest.approx(proportion(1, 1).low)


def test_to_copy_any_number_is_enough_for_a_single_needle_only(tokenizer: Tokenizer) -> None:
    found = find_needles(Copier(), tokenizer, TEXTS, [600], 11, kinds=KINDS)
    assert found.share("single") == (11, 11)
    assert all(found.share(kind)[0] < 11 / 2 for kind in KINDS if kind != "single")


@pytest.mark.slow
def test_a_random_model_is_at_chance(tokenizer: Tokenizer) -> None:
    count = 44
    config = Model(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, max_seq_len=512)
    model = build_model(config, tokenizer.vocab_size, 0, torch.float32, torch.device("cpu")).eval()
    found = find_needles(model, tokenizer, TEXTS, [512], count, kinds=KINDS)
    for kind in KINDS:
        guessed, asked = found.share(kind)
        p = chance(kind)
        assert asked == count
        assert abs(guessed - p * count) <= 4 * math.sqrt(p * (1 - p) * count)


def test_a_model_that_knows_nothing_finds_nothing(tokenizer: Tokenizer) -> None:
    config = Model(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, max_seq_len=512, tied_embeddings=True)
    model = build_model(config, tokenizer.vocab_size, 0, torch.float32, torch.device("cpu")).eval()
    torch.nn.init.zeros_(model.get_parameter("embedding.weight"))
    assert find_needles(model, tokenizer, TEXTS, [512], 11).share() == (0, 11)


def test_samples_are_the_questions_by_name_and_add_up_to_the_scores(tokenizer: Tokenizer) -> None:
    first, second = (find_needles(model, tokenizer, TEXTS, [512, 600], 11) for model in (Reader(), Reader(200)))
    assert [item.id for item in first.samples()] == [item.id for item in second.samples()]
    assert len({item.id for item in first.samples()}) == 22
    found = sum(item.numerator for item in second.samples())
    assert found / 22 == second.scores()["eval/needle"].value < 1
    assert {item.group for item in first.samples()} == {"length_000512", "length_000600"}


def test_what_has_no_room_or_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"needle: sequence 128 has no room for 4 sentences and a question, \d+ tokens"
    ):
        find_needles(Reader(), tokenizer, TEXTS, [128], 11)
    with pytest.raises(ValueError, match=r"no held-out text .* raise curate\.validation_fraction"):
        find_needles(Reader(), tokenizer, [], [512], 11)
    assert context_lengths(511) == ()
