"""Needle in a haystack: does a model find, in a text as long as its window, the sentences it is asked about?

A grid of length x depth for each task of `haystack`. The gate of a long-context stage asks for one length, an
evaluation for powers of two up to the window; both call `find_needles`. A model answers by giving the right number a
higher likelihood than the other three: it need not be prompted to answer, chance is known, and the scorer of all other
evaluations does it. It reads a haystack once for all its choices where that saves work (`packing`): 55 needles at
131,072 tokens are 7M tokens, not 29M.

Scores. `eval/needle` is the share found by multi-key, over all lengths and depths; `eval/needle/depth_050` at one
depth; with several lengths also `eval/needle/length_004096` and `eval/needle/length_004096/depth_050`. The other tasks
are `eval/needle/single` and so on, and `eval/needle/single/length_004096`. Intervals are Wilson's. What this gives up:
questions of one length share text, and intervals count them as independent.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from llama3.evaluate.haystack import CHOICES, Coder, Kind, Question, pool_of, questions
from llama3.evaluate.likelihood import Likelihood
from llama3.evaluate.samples import Sample
from llama3.evaluate.scores import Score, Scores
from llama3.evaluate.statistics import proportion

if TYPE_CHECKING:  # a report draws a grid without torch
    from llama3.evaluate.ranks import Ranks
    from llama3.evaluate.scoring import LanguageModel

KEY = "eval/needle"
MAIN: Kind = "multi-key"
"""The task that `eval/needle` and the gate mean."""
SHORTEST = 512
"""Shortest length of a grid: four sentences and their questions leave no text in less."""
POSITIONS = 2**20
"""Positions given to the scorer at once; it batches them."""

_CELL = re.compile(rf"{KEY}/length_(\d{{6,}})/depth_(\d{{3}})")


@dataclass(frozen=True)
class Answer:
    """How a model did on one haystack."""

    kind: Kind
    length: int
    depth: int
    number: int
    """Of the haystacks of its kind and length."""
    found: bool
    tokens: int
    """Tokens scored, over all choices."""


@dataclass(frozen=True)
class Retrieval:
    """What a model found, over a grid of lengths and depths."""

    answers: tuple[Answer, ...]
    requests: str
    """Digest of everything asked."""
    text_tokens: int
    """Tokens of different text that the longest haystacks were made of; fewer than their length means that text
    repeats in each."""

    def share(self, kind: Kind = MAIN, length: int | None = None, depth: int | None = None) -> tuple[int, int]:
        """Return (found, asked) of a task, at one length or depth or at all."""
        chosen = [
            answer.found
            for answer in self.answers
            if answer.kind == kind and length in (None, answer.length) and depth in (None, answer.depth)
        ]
        return sum(chosen), len(chosen)

    def scores(self) -> dict[str, Score]:
        """Return the scores that the module's text names, by key."""
        return {
            key: Score.of(key, proportion(found, asked), "accuracy", "higher", self.requests, chance(kind))
            for key, kind, (found, asked) in self._counts()
        }

    def samples(self) -> list[Sample]:
        """Return one sample for each haystack, so that two models can be compared on the same ones."""
        return [
            Sample(
                key=key_of(answer.kind),
                id=f"{answer.kind}/{answer.length}/{answer.number}",
                numerator=float(answer.found),
                denominator=1.0,
                tokens=answer.tokens,
                picked=None,
                gold=None,
                group=_length(answer.length),
            )
            for answer in self.answers
        ]

    def _counts(self) -> Iterator[tuple[str, Kind, tuple[int, int]]]:
        lengths = sorted({answer.length for answer in self.answers})
        depths = sorted({answer.depth for answer in self.answers})
        for kind in dict.fromkeys(answer.kind for answer in self.answers):
            yield key_of(kind), kind, self.share(kind)
            for length in lengths if len(lengths) > 1 else []:
                yield f"{key_of(kind)}/{_length(length)}", kind, self.share(kind, length)
        if any(answer.kind == MAIN for answer in self.answers):
            yield from ((f"{KEY}/{_depth(depth)}", MAIN, self.share(MAIN, None, depth)) for depth in depths)
            for length in lengths if len(lengths) > 1 else []:
                for depth in depths:
                    yield f"{KEY}/{_length(length)}/{_depth(depth)}", MAIN, self.share(MAIN, length, depth)


def key_of(kind: Kind) -> str:
    """Return the key of a task's score."""
    return KEY if kind == MAIN else f"{KEY}/{kind}"


def chance(kind: Kind) -> float:
    """Return what guessing finds, each number by itself."""
    return math.pow(CHOICES, -CHOICES if kind == "multi-query" else -1)


def grid(scores: Scores) -> dict[int, dict[int, Score]]:
    """Return length -> depth in percent -> score of `eval/needle`, both ascending; empty where there are no lengths."""
    rows: dict[int, dict[int, Score]] = {}
    for key in sorted(scores):
        if cell := _CELL.fullmatch(key):
            rows.setdefault(int(cell[1]), {})[int(cell[2])] = scores[key]
    return rows


def lengths_up_to(window: int) -> tuple[int, ...]:
    """Return the powers of two from 512 up to `window`; none where it is shorter."""
    return tuple(2**power for power in range(SHORTEST.bit_length() - 1, window.bit_length()))


def find_needles(
    model: LanguageModel,
    coder: Coder,
    texts: Sequence[str],
    lengths: Sequence[int],
    count: int,
    device: str = "cpu",
    kinds: Sequence[Kind] = (MAIN,),
    ranks: Ranks | None = None,
) -> Retrieval:
    """Return what `model` finds in haystacks of `lengths` positions made of `texts`, `count` for each kind and length.

    Depths take turns, so fewer than 11 leave the deepest out. Equal arguments ask the same questions of any model.
    With `ranks`, several processes call this with the same arguments, share the work and return the same. Raises
    ValueError as `questions` does.
    """
    answers: list[Answer] = []
    requests = hashlib.sha256()
    most = 0
    for length in lengths:
        pool = pool_of(coder, texts, 2 * length)
        most = max(most, len(pool))
        for kind in kinds:
            asked = questions(coder, pool, length, count, kind)
            for number, (question, scored) in enumerate(_scored(model, asked, length, device, ranks)):
                found, tokens = _found(question, scored), sum(likelihood.tokens for likelihood in scored)
                answers.append(Answer(kind, length, question.depth, number, found, tokens))
                requests.update(_bytes(question))
    return Retrieval(tuple(answers), requests.hexdigest(), most)


def _scored(
    model: LanguageModel, asked: Iterator[Question], length: int, device: str, ranks: Ranks | None
) -> Iterator[tuple[Question, list[Likelihood]]]:
    """Yield each question with the likelihoods of its sequences; some questions are scored at once."""
    from llama3.evaluate.scoring import score_sequences

    for first in asked:
        more = max(1, POSITIONS // (length * CHOICES * len(first.asks))) - 1
        some = [first, *islice(asked, more)]
        sequences = [question.sequences for question in some]
        together = [one for group in sequences for one in group]
        flat = iter(score_sequences(model, together, length, device, ranks=ranks))
        for question, group in zip(some, sequences, strict=True):
            yield question, list(islice(flat, len(group)))


def _found(question: Question, scored: Sequence[Likelihood]) -> bool:
    """Return whether the likeliest number of every ask is the right one."""
    nats = iter([likelihood.nats for likelihood in scored])
    return all(_first_by(list(islice(nats, len(ask.choices)))) == ask.gold for ask in question.asks)


def _first_by(nats: list[float]) -> int | None:
    """Return the index of the smallest number; None where there is no such one (a model that knows nothing: ties)."""
    least = min(nats)
    return nats.index(least) if math.isfinite(least) and nats.count(least) == 1 else None


def _bytes(question: Question) -> bytes:
    gold = [ask.gold for ask in question.asks]
    tokens = [token for sequence, _ in question.sequences for token in sequence]
    return array("q", [question.depth, *gold, *tokens]).tobytes()


def _length(length: int) -> str:
    return f"length_{length:06}"


def _depth(depth: int) -> str:
    return f"depth_{depth:03}"
