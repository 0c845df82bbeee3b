"""Needle in a haystack: does a model find, in a text as long as its window, the one sentence it is asked about?

A haystack is held-out text of exactly the sequence length. Four sentences of one form are hidden in it, each giving
another number to another key; the question repeats one sentence up to its number, and the model must give this number a
higher likelihood than the other three. All four stand in the text, so a model that merely copies numbers is right one
time in four (the multi-key task of RULER, arXiv 2404.06654, with choices instead of generated text). The sentence
asked about lies at depths of 0 to 100 %; the others lie anywhere.

Likelihoods instead of greedy text: the model need not be prompted to answer, chance is known, and the scorer of all
other evaluations does it. What this gives up: the haystack is read once for each choice, so n needles cost 4 n forward
passes of the full length (55 at 131,072: 29M tokens). Pieces are encoded by themselves and joined as tokens, so that a
sequence is as long as asked to the token.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from random import Random
from typing import Protocol

from llama3.evaluate.scores import Score
from llama3.evaluate.scoring import LanguageModel, score_sequences
from llama3.evaluate.statistics import proportion

CHOICES = 4
"""Sentences hidden in each haystack; one is asked about, the numbers of all are the choices."""
DEPTHS = tuple(range(0, 101, 10))
"""Where the sentence asked about stands, in percent of the haystack before it."""
LONGEST_SEARCH = 64
"""Tokens before a place in which the end of a sentence is looked for."""
KEY = "eval/needle"
KEYS = [
    f"{colour} {thing}"
    for colour in ("amber", "cedar", "copper", "crimson", "dusty", "golden", "hollow", "ivory", "marble", "velvet")
    for thing in ("anchor", "basket", "bridge", "candle", "feather", "kettle", "lantern", "mirror", "saddle", "whistle")
]


class Coder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def begin(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class Question:
    """One haystack and what is asked about it."""

    depth: int
    """Percent of the haystack before the sentence asked about."""
    tokens: tuple[int, ...]
    """Begin token, haystack with its needles, and the question up to the number."""
    choices: tuple[tuple[int, ...], ...]
    """Tokens of the numbers."""
    gold: int


@dataclass(frozen=True)
class Retrieval:
    """How many needles a model found."""

    seq: int
    by_depth: dict[int, tuple[int, int]]
    """Depth in percent -> (found, asked)."""
    requests: str
    """Digest of everything asked."""
    text_tokens: int
    """Tokens of different text that the haystacks were made of; less than `seq` means that text repeats in each."""

    @property
    def found(self) -> int:
        return sum(found for found, _ in self.by_depth.values())

    @property
    def asked(self) -> int:
        return sum(asked for _, asked in self.by_depth.values())

    def scores(self) -> dict[str, Score]:
        """Return `eval/needle`, the share found at any depth, and `eval/needle/depth_050` and so on."""
        counts = {KEY: (self.found, self.asked)}
        counts |= {f"{KEY}/depth_{depth:03}": pair for depth, pair in self.by_depth.items()}
        return {
            key: Score.of(key, proportion(found, asked), "accuracy", "higher", self.requests, 1 / CHOICES)
            for key, (found, asked) in counts.items()
        }

    def table(self) -> str:
        """Return `0 %: 5/5, 10 %: 4/5, ...`."""
        return ", ".join(f"{depth} %: {found}/{asked}" for depth, (found, asked) in self.by_depth.items())


def find_needles(
    model: LanguageModel, coder: Coder, texts: Iterable[str], seq: int, count: int, device: str = "cpu"
) -> Retrieval:
    """Return how many of `count` needles `model` finds in haystacks of `seq` positions made of `texts`.

    Depths take turns. Equal arguments ask the same questions of any model. Raises ValueError as `questions` does.
    """
    counts = {depth: [0, 0] for depth in DEPTHS[:count]}
    pool = _pool(coder, texts, 2 * seq)
    requests = hashlib.sha256()
    for question in questions(coder, pool, seq, count):
        asked = [([*question.tokens, *choice], len(question.tokens)) for choice in question.choices]
        nats = [likelihood.nats for likelihood in score_sequences(model, asked, seq, device)]
        counts[question.depth][0] += _first_by(nats) == question.gold
        counts[question.depth][1] += 1
        requests.update(array("q", [question.depth, question.gold, *chain(*(tokens for tokens, _ in asked))]).tobytes())
    by_depth = {depth: (found, asked_at) for depth, (found, asked_at) in counts.items()}
    return Retrieval(seq, by_depth, requests.hexdigest(), len(pool))


def _first_by(nats: list[float]) -> int | None:
    """Return the index of the smallest number; None where there is no such one (a model that knows nothing: ties)."""
    least = min(nats)
    return nats.index(least) if math.isfinite(least) and nats.count(least) == 1 else None


def questions(coder: Coder, pool: Sequence[int], seq: int, count: int) -> Iterator[Question]:
    """Yield `count` questions whose sequence, with its number, fills `seq` positions; `pool` is tokens of text.

    Raises ValueError if there is no text or `seq` has no room for needles and question.
    """
    if not pool:
        raise ValueError("needle: there is no held-out text to hide a sentence in; raise curate.held_out")
    for number in range(count):
        dice = Random(f"{seq}/{number}")
        keys = dice.sample(KEYS, CHOICES)
        values = _numbers(coder, dice)
        gold = dice.randrange(CHOICES)
        needles = [coder.encode(f"{_opening(key)}{value}.\n") for key, value in zip(keys, values, strict=True)]
        ask = coder.encode(_opening(keys[gold]))
        choices = [tuple(coder.encode(value)) for value in values]
        room = seq - len(ask) - max(map(len, choices)) - sum(map(len, needles))
        if room < 1:
            raise ValueError(
                f"needle: sequence {seq} has no room for {CHOICES} sentences and a question, {seq - room} tokens; "
                "take the gate off stages as short as this"
            )
        start = number * len(pool) // count
        text = list(islice(cycle(pool), start, start + room))
        depth = DEPTHS[number % len(DEPTHS)]
        places = [dice.randint(0, room) for _ in range(CHOICES)]
        places[gold] = depth * room // 100
        yield Question(depth, (coder.begin, *_hide(coder, text, needles, places), *ask), tuple(choices), gold)


def _numbers(coder: Coder, dice: Random) -> list[str]:
    """Return different six-digit numbers of equally many tokens, so that none is likelier by its length."""
    by_size: dict[int, list[str]] = {}
    for value in dice.sample(range(100_000, 1_000_000), 100 * CHOICES):
        same = by_size.setdefault(len(coder.encode(f" {value}")), [])
        same.append(f" {value}")
        if len(same) == CHOICES:
            return same
    raise AssertionError("six digits make few different numbers of tokens")


def _opening(key: str) -> str:
    return f"\nThe secret number of the {key} is"


def _pool(coder: Coder, texts: Iterable[str], enough: int) -> list[int]:
    """Return the tokens of the first `texts`, an empty line between them, until there are `enough`."""
    pool: list[int] = []
    for text in texts:
        pool += coder.encode(f"{text.rstrip()}\n\n")
        if len(pool) >= enough:
            break
    return pool


def _hide(coder: Coder, text: list[int], needles: Sequence[list[int]], places: Sequence[int]) -> list[int]:
    """Return `text` with each needle put in at its place, or shortly before it where a sentence ends there.

    The very beginning and end are kept: depth 0 and 100 mean what they say.
    """
    hidden = list(text)
    order = sorted(zip(places, needles, strict=True), key=lambda item: item[0], reverse=True)
    for place, needle in order:
        at = _sentence_end(coder, text, place)
        hidden[at:at] = needle
    return hidden


def _sentence_end(coder: Coder, text: Sequence[int], place: int) -> int:
    if place in (0, len(text)):
        return place
    for at in range(place, max(0, place - LONGEST_SEARCH), -1):
        if coder.decode([text[at - 1]]).rstrip(" ").endswith((".", "!", "?", "\n")):
            return at
    return place
