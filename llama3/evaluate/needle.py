"""Needle in a haystack: does a model find, in a text as long as its window, the sentences it is asked about?

A haystack is held-out text; the needles are sentences that give six-digit numbers to keys of two words. The model
answers by giving the right number a higher likelihood than three others, so it need not follow a prompt and chance is
known. The tasks follow RULER (arXiv 2404.06654, section 3), with choices instead of generated text and our own
sentences; RULER's tracing and aggregation tasks are missing.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from herd.llama3.evaluate.scores import Sample, Score, Scores
from herd.llama3.evaluate.task import Likelihood
from herd.llama3.statistics.estimates import proportion

if TYPE_CHECKING:
    from herd.llama3.evaluate.distributed import EvalRanks
    from herd.llama3.evaluate.scoring import LanguageModel

# single: one sentence; the other three numbers appear nowhere, so copying any number is enough.
# multi-key: four sentences, four keys; the numbers of all are the choices.
# multi-value: two keys with two numbers each; one number of a key is given and its other one is asked for.
# multi-query: multi-key, asked for all four keys in a row with earlier answers given; right if all four are.
Kind = Literal["single", "multi-key", "multi-value", "multi-query"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KEY = "eval/needle"
MAIN: Kind = "multi-key"
"""The task of the score `eval/needle` and of the gate."""
CHOICES = 4
"""Numbers to choose from."""
DEPTHS = tuple(range(0, 101, 10))
"""Where the sentence asked about is hidden, in percent of the haystack before it."""
LONGEST_SEARCH = 64
"""Tokens before a position in which the end of a sentence is looked for."""
SHORTEST = 512
"""Shortest length of a grid: in less, four sentences and their questions leave no room for text."""
POSITIONS = 2**20
"""Positions given to the scorer at once; it batches them."""
KEYS = [
    f"{color} {thing}"
    for color in ("amber", "cedar", "copper", "crimson", "dusty", "golden", "hollow", "ivory", "marble", "velvet")
    for thing in ("anchor", "basket", "bridge", "candle", "feather", "kettle", "lantern", "mirror", "saddle", "whistle")
]
_CELL = re.compile(rf"{KEY}/length_(\d{{6,}})/depth_(\d{{3}})")


@dataclass(frozen=True)
class NeedleResult:
    """The result of one haystack."""

    kind: Kind
    length: int
    depth: int
    number: int
    """Of the haystack among those of its kind and length."""
    found: bool
    tokens: int
    """Tokens scored, over all choices."""


@dataclass(frozen=True)
class NeedleScores:
    """The results over a grid of lengths and depths."""

    answers: tuple[NeedleResult, ...]
    requests: str
    """Digest of all questions."""
    text_tokens: int
    """Tokens of distinct text in the longest haystacks; if fewer than their length, the text repeats."""

    def share(self, kind: Kind = MAIN, length: int | None = None, depth: int | None = None) -> tuple[int, int]:
        """Return (found, asked) of a task, at one length or depth or over all."""
        chosen = [
            answer.found
            for answer in self.answers
            if answer.kind == kind and length in (None, answer.length) and depth in (None, answer.depth)
        ]
        return sum(chosen), len(chosen)

    def scores(self) -> dict[str, Score]:
        """Return the scores by key, with Wilson intervals (which count questions that share text as independent).

        `eval/needle` is the share found by multi-key, over all lengths and depths; `eval/needle/depth_050` at one
        depth; with several lengths also `eval/needle/length_004096` and `eval/needle/length_004096/depth_050`. The
        other tasks are `eval/needle/single` and so on, and `eval/needle/single/length_004096`.
        """
        depths = sorted({answer.depth for answer in self.answers})
        lengths = sorted({answer.length for answer in self.answers})
        lengths = lengths if len(lengths) > 1 else []
        cells: list[tuple[str, Kind, int | None, int | None]] = []
        for kind in dict.fromkeys(answer.kind for answer in self.answers):
            cells.append((score_key(kind), kind, None, None))
            cells += [(f"{score_key(kind)}/length_{length:06}", kind, length, None) for length in lengths]
        if any(answer.kind == MAIN for answer in self.answers):
            cells += [(f"{KEY}/depth_{depth:03}", MAIN, None, depth) for depth in depths]
            cells += [(f"{KEY}/length_{n:06}/depth_{depth:03}", MAIN, n, depth) for n in lengths for depth in depths]
        return {
            key: Score.from_estimate(
                key, proportion(*self.share(kind, length, depth)), "accuracy", "higher", self.requests, chance(kind)
            )
            for key, kind, length, depth in cells
        }

    def samples(self) -> list[Sample]:
        """Return one sample per haystack, so that two models can be compared on the same ones."""
        return [
            Sample(
                key=score_key(answer.kind),
                id=f"{answer.kind}/{answer.length}/{answer.number}",
                numerator=float(answer.found),
                denominator=1.0,
                tokens=answer.tokens,
                picked=None,
                gold=None,
                group=f"length_{answer.length:06}",
            )
            for answer in self.answers
        ]


def score_key(kind: Kind) -> str:
    """Return the key of a task's score."""
    return KEY if kind == MAIN else f"{KEY}/{kind}"


def chance(kind: Kind) -> float:
    """Return the score of guessing each number independently."""
    return math.pow(CHOICES, -CHOICES if kind == "multi-query" else -1)


def scores_by_length(scores: Scores) -> dict[int, dict[int, Score]]:
    """Return length -> depth in percent -> score of `eval/needle`, both ascending; empty without scores by length."""
    cells: dict[int, dict[int, Score]] = {}
    for key in sorted(scores):
        if match := _CELL.fullmatch(key):
            cells.setdefault(int(match[1]), {})[int(match[2])] = scores[key]
    return cells


def context_lengths(window: int) -> tuple[int, ...]:
    """Return the powers of two from 512 up to `window`; none for a shorter window."""
    return tuple(2**power for power in range(SHORTEST.bit_length() - 1, window.bit_length()))


def find_needles(
    model: LanguageModel,
    coder: HaystackTokenizer,
    texts: Sequence[str],
    lengths: Sequence[int],
    count: int,
    device: str = "cpu",
    kinds: Sequence[Kind] = (MAIN,),
    ranks: EvalRanks | None = None,
) -> NeedleScores:
    """Ask `model` about `count` haystacks of each kind and of each of `lengths` positions, made of `texts`.

    Depths take turns, so fewer than 11 haystacks leave the deepest out. Equal arguments ask the same questions of any
    model. With `ranks`, several processes call this with the same arguments, share the work and return the same.
    Raises ValueError as `make_haystacks` does.
    """
    from herd.llama3.evaluate.scoring import score_sequences  # imports torch

    answers: list[NeedleResult] = []
    requests = hashlib.sha256()
    text_tokens = 0
    for length in lengths:
        pool = concat_tokens(coder, texts, 2 * length)
        text_tokens = max(text_tokens, len(pool))
        for kind in kinds:
            questions, number = make_haystacks(coder, pool, length, count, kind), 0
            for first in questions:
                # The scorer reads a haystack once for all of its choices: 55 needles at 131,072 tokens are 7M tokens,
                # not 29M.
                more = max(1, POSITIONS // (length * CHOICES * len(first.asks))) - 1
                batch = [first, *islice(questions, more)]
                sequences = [sequence for question in batch for sequence in question.sequences]
                likelihoods = iter(score_sequences(model, sequences, length, device, ranks=ranks))
                for question in batch:
                    found, tokens = _score_question(question, likelihoods)
                    answers.append(NeedleResult(kind, length, question.depth, number, found, tokens))
                    gold = [ask.gold for ask in question.asks]
                    read = [token for sequence, _ in question.sequences for token in sequence]
                    requests.update(array("q", [question.depth, *gold, *read]).tobytes())
                    number += 1
    return NeedleScores(tuple(answers), requests.hexdigest(), text_tokens)


def _score_question(question: Haystack, likelihoods: Iterator[Likelihood]) -> tuple[bool, int]:
    """Return whether the likeliest number of every ask is the right one, and the tokens scored."""
    found, tokens = True, 0
    for ask in question.asks:
        scored = list(islice(likelihoods, len(ask.choices)))
        tokens += sum(likelihood.tokens for likelihood in scored)
        nll = [likelihood.nll for likelihood in scored]
        least = min(nll)
        # a tie (a model that knows nothing) and a value that is not finite are wrong
        found &= math.isfinite(least) and nll.count(least) == 1 and nll.index(least) == ask.gold
    return found, tokens


class HaystackTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def start(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class ChoiceRequest:
    """One choice to make after a haystack."""

    tokens: tuple[int, ...]
    """The question up to the number, preceded by earlier questions with their answers."""
    choices: tuple[tuple[int, ...], ...]
    """Tokens of the numbers."""
    gold: int


@dataclass(frozen=True)
class Haystack:
    """One haystack and its questions: right if every choice is."""

    depth: int
    """Percent of the haystack before the sentence asked about, the first of several."""
    tokens: tuple[int, ...]
    """Begin token and the haystack with its needles."""
    asks: tuple[ChoiceRequest, ...]

    @property
    def sequences(self) -> list[tuple[list[int], int]]:
        """Return (tokens, start) of every choice, ask by ask; tokens[start:] are its number."""
        return [
            ([*self.tokens, *ask.tokens, *choice], len(self.tokens) + len(ask.tokens))
            for ask in self.asks
            for choice in ask.choices
        ]


def concat_tokens(coder: HaystackTokenizer, texts: Iterable[str], enough: int) -> list[int]:
    """Return the tokens of the first `texts`, an empty line between them, until there are `enough`."""
    pool: list[int] = []
    for text in texts:
        pool += coder.encode(f"{text.rstrip()}\n\n")
        if len(pool) >= enough:
            break
    return pool


def make_haystacks(
    coder: HaystackTokenizer, pool: Sequence[int], seq_len: int, count: int, kind: Kind = "multi-key"
) -> Iterator[Haystack]:
    """Yield `count` questions whose longest sequence, with its number, fills `seq_len` positions; `pool` is tokens of
    text.

    Depths take turns. Equal arguments give equal questions. Raises ValueError if there is no text or `seq_len` has no
    room for needles and question.
    """
    if not pool:
        raise ValueError("needle: there is no held-out text to hide a sentence in; raise curate.validation_fraction")
    for number in range(count):
        dice = Random(f"{seq_len}/{number}" if kind == "multi-key" else f"{kind}/{seq_len}/{number}")
        keys = dice.sample(KEYS, CHOICES)
        values = _numbers(coder, dice)
        plan = _plan(kind, keys, values, dice.randrange(CHOICES), dice)
        # Each piece of text is encoded alone and joined as tokens: a sequence has exactly `seq_len` tokens, and depth
        # is a share of the haystack's tokens, with any tokenizer.
        needles = [coder.encode(needle) for needle in plan.needles]
        choices = tuple(tuple(coder.encode(value)) for value in values)
        asks = tuple(
            ChoiceRequest(tuple(token for piece in pieces for token in coder.encode(piece)), choices, gold)
            for pieces, gold in plan.asks
        )
        room = seq_len - max(len(ask.tokens) for ask in asks) - max(map(len, choices)) - sum(map(len, needles))
        if room < 1:
            raise ValueError(
                f"needle: sequence {seq_len} has no room for {len(needles)} sentences and a question, {seq_len - room} "
                "tokens; take the gate off stages, and the task off lengths, as short as this"
            )
        start = number * len(pool) // count
        text = list(islice(cycle(pool), start, start + room))
        depth = DEPTHS[number % len(DEPTHS)]
        positions = [dice.randint(0, room) for _ in needles]
        positions[plan.asked] = depth * room // 100
        haystack = list(text)
        for position, needle in sorted(zip(positions, needles, strict=True), key=lambda item: item[0], reverse=True):
            at = _sentence_end(coder, text, position)
            haystack[at:at] = needle
        yield Haystack(depth, (coder.start, *haystack), asks)


def _numbers(coder: HaystackTokenizer, dice: Random) -> list[str]:
    """Return different six-digit numbers with the same number of tokens, so that none is likelier by its length."""
    by_size: dict[int, list[str]] = {}
    for value in dice.sample(range(100_000, 1_000_000), 100 * CHOICES):
        same = by_size.setdefault(len(coder.encode(f" {value}")), [])
        same.append(f" {value}")
        if len(same) == CHOICES:
            return same
    raise AssertionError("six digits have few different numbers of tokens")


@dataclass(frozen=True)
class _HaystackText:
    """What is hidden and asked, as text."""

    needles: list[str]
    asked: int
    """Index in `needles` of the sentence at the depth."""
    asks: list[tuple[list[str], int]]
    """(pieces of text up to the number, index of its number)."""


def _plan(kind: Kind, keys: Sequence[str], values: Sequence[str], gold: int, dice: Random) -> _HaystackText:
    openings = [f"\nThe secret number of the {key} is" for key in keys]
    needles = [f"{opening}{value}.\n" for opening, value in zip(openings, values, strict=True)]
    match kind:
        case "single":
            return _HaystackText([needles[gold]], 0, [([openings[gold]], gold)])
        case "multi-key":
            return _HaystackText(needles, gold, [([openings[gold]], gold)])
        case "multi-value":
            openings = [f"\nOne of the secret numbers of the {keys[index // 2]} is" for index in range(CHOICES)]
            pieces = [openings[gold], values[gold ^ 1], ", another is"]
            hidden = [f"{opening}{value}.\n" for opening, value in zip(openings, values, strict=True)]
            return _HaystackText(hidden, gold, [(pieces, gold)])
        case "multi-query":
            order = [gold, *dice.sample([index for index in range(CHOICES) if index != gold], CHOICES - 1)]
            asks: list[tuple[list[str], int]] = []
            before: list[str] = []
            for index in order:
                asks.append(([*before, openings[index]], index))
                before += [openings[index], values[index], "."]
            return _HaystackText(needles, gold, asks)
        case _:
            raise ValueError(f"needle: task {kind!r} is none of {', '.join(KINDS)}")


def _sentence_end(coder: HaystackTokenizer, text: Sequence[int], position: int) -> int:
    """Return `position`, or the end of a sentence shortly before it; the very beginning and end stay as they are."""
    if position in (0, len(text)):
        return position
    for at in range(position, max(0, position - LONGEST_SEARCH), -1):
        if coder.decode([text[at - 1]]).rstrip(" ").endswith((".", "!", "?", "\n")):
            return at
    return position
