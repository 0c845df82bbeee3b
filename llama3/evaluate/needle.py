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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from llama3.evaluate.scores import Likelihood, Sample, Score, Scores
from llama3.evaluate.statistics import proportion

if TYPE_CHECKING:
    from llama3.evaluate.distributed import Ranks
    from llama3.evaluate.scoring import LanguageModel


# Haystacks: text as long as a window with sentences hidden in it, and what is asked about them.
#
# A haystack is held-out text; the sentences give six-digit numbers to keys of two words. Every question is answered
# by choosing one of four numbers. The tasks follow RULER (arXiv 2404.06654, section 3), with choices instead of
# generated text; the generator and its sentences are our own:
#
# single one sentence; the other three numbers stand nowhere. To copy any number is enough. multi-key four
# sentences, four keys; the numbers of all are the choices. multi-value two keys with two numbers each; one number
# of a key is given and its other one asked for. multi-query multi-key, asked for all four keys in a row, earlier
# answers given; right if all four are.
#
# What is asked about lies at a given depth; everything else lies anywhere. Pieces are encoded by themselves and
# joined as tokens, so a sequence is as long as asked to the token, and depth is a share of the haystack's tokens
# whatever the tokenizer is. What this gives up: numbers as answers only; RULER's tracing and aggregation tasks are
# not here.

Kind = Literal["single", "multi-key", "multi-value", "multi-query"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHOICES = 4
"""Numbers to choose from."""
DEPTHS = tuple(range(0, 101, 10))
"""Where the sentence asked about stands, in percent of the haystack before it."""
LONGEST_SEARCH = 64
"""Tokens before a place in which the end of a sentence is looked for."""
KEYS = [
    f"{colour} {thing}"
    for colour in ("amber", "cedar", "copper", "crimson", "dusty", "golden", "hollow", "ivory", "marble", "velvet")
    for thing in ("anchor", "basket", "bridge", "candle", "feather", "kettle", "lantern", "mirror", "saddle", "whistle")
]


class HaystackTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def begin(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class Ask:
    """One choice to make after a haystack."""

    tokens: tuple[int, ...]
    """The question up to the number, with the answers given before it."""
    choices: tuple[tuple[int, ...], ...]
    """Tokens of the numbers."""
    gold: int


@dataclass(frozen=True)
class NeedleQuestion:
    """One haystack and what is asked about it: right if every choice is."""

    depth: int
    """Percent of the haystack before the sentence asked about, the first of several."""
    tokens: tuple[int, ...]
    """Begin token and the haystack with its needles."""
    asks: tuple[Ask, ...]

    @property
    def sequences(self) -> list[tuple[list[int], int]]:
        """Return (tokens, start) of every choice, those of one ask together: tokens[start:] are its number."""
        return [
            ([*self.tokens, *ask.tokens, *choice], len(self.tokens) + len(ask.tokens))
            for ask in self.asks
            for choice in ask.choices
        ]


@dataclass(frozen=True)
class _Plan:
    """What is hidden and asked, as text."""

    needles: list[str]
    asked: int
    """Place in `needles` of the one that lies at the depth."""
    asks: list[tuple[list[str], int]]
    """(pieces of text up to the number, place of its number)."""


def questions(
    coder: HaystackTokenizer, pool: Sequence[int], seq: int, count: int, kind: Kind = "multi-key"
) -> Iterator[NeedleQuestion]:
    """Yield `count` questions whose longest sequence, with its number, fills `seq` positions; `pool` is tokens of text.

    Depths take turns. Equal arguments give equal questions. Raises ValueError if there is no text or `seq` has no room
    for needles and question.
    """
    if not pool:
        raise ValueError("needle: there is no held-out text to hide a sentence in; raise curate.held_out")
    for number in range(count):
        dice = Random(f"{seq}/{number}" if kind == "multi-key" else f"{kind}/{seq}/{number}")
        keys = dice.sample(KEYS, CHOICES)
        values = _numbers(coder, dice)
        plan = _plan(kind, keys, values, dice.randrange(CHOICES), dice)
        needles = [coder.encode(needle) for needle in plan.needles]
        choices = tuple(tuple(coder.encode(value)) for value in values)
        asks = tuple(Ask(_joined(coder, pieces), choices, gold) for pieces, gold in plan.asks)
        room = seq - max(len(ask.tokens) for ask in asks) - max(map(len, choices)) - sum(map(len, needles))
        if room < 1:
            raise ValueError(
                f"needle: sequence {seq} has no room for {len(needles)} sentences and a question, {seq - room} tokens; "
                "take the gate off stages, and the task off lengths, as short as this"
            )
        start = number * len(pool) // count
        text = list(islice(cycle(pool), start, start + room))
        depth = DEPTHS[number % len(DEPTHS)]
        places = [dice.randint(0, room) for _ in needles]
        places[plan.asked] = depth * room // 100
        yield NeedleQuestion(depth, (coder.begin, *_hide(coder, text, needles, places)), asks)


def pool_of(coder: HaystackTokenizer, texts: Iterable[str], enough: int) -> list[int]:
    """Return the tokens of the first `texts`, an empty line between them, until there are `enough`."""
    pool: list[int] = []
    for text in texts:
        pool += coder.encode(f"{text.rstrip()}\n\n")
        if len(pool) >= enough:
            break
    return pool


def _plan(kind: Kind, keys: Sequence[str], values: Sequence[str], gold: int, dice: Random) -> _Plan:
    needles = [f"{_opening(key)}{value}.\n" for key, value in zip(keys, values, strict=True)]
    match kind:
        case "single":
            return _Plan([needles[gold]], 0, [([_opening(keys[gold])], gold)])
        case "multi-key":
            return _Plan(needles, gold, [([_opening(keys[gold])], gold)])
        case "multi-value":
            openings = [f"\nOne of the secret numbers of the {keys[place // 2]} is" for place in range(CHOICES)]
            pieces = [openings[gold], values[gold ^ 1], ", another is"]
            hidden = [f"{opening}{value}.\n" for opening, value in zip(openings, values, strict=True)]
            return _Plan(hidden, gold, [(pieces, gold)])
        case "multi-query":
            order = [gold, *dice.sample([place for place in range(CHOICES) if place != gold], CHOICES - 1)]
            asks: list[tuple[list[str], int]] = []
            before: list[str] = []
            for place in order:
                asks.append(([*before, _opening(keys[place])], place))
                before += [_opening(keys[place]), values[place], "."]
            return _Plan(needles, gold, asks)
        case _:
            raise ValueError(f"needle: task {kind!r} is none of {', '.join(KINDS)}")


def _opening(key: str) -> str:
    return f"\nThe secret number of the {key} is"


def _joined(coder: HaystackTokenizer, pieces: Iterable[str]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in coder.encode(piece))


def _numbers(coder: HaystackTokenizer, dice: Random) -> list[str]:
    """Return different six-digit numbers of equally many tokens, so that none is likelier by its length."""
    by_size: dict[int, list[str]] = {}
    for value in dice.sample(range(100_000, 1_000_000), 100 * CHOICES):
        same = by_size.setdefault(len(coder.encode(f" {value}")), [])
        same.append(f" {value}")
        if len(same) == CHOICES:
            return same
    raise AssertionError("six digits make few different numbers of tokens")


def _hide(coder: HaystackTokenizer, text: list[int], needles: Sequence[list[int]], places: Sequence[int]) -> list[int]:
    """Return `text` with each needle put in at its place, or shortly before it where a sentence ends there.

    The very beginning and end are kept: depth 0 and 100 mean what they say.
    """
    hidden = list(text)
    order = sorted(zip(places, needles, strict=True), key=lambda item: item[0], reverse=True)
    for place, needle in order:
        at = _sentence_end(coder, text, place)
        hidden[at:at] = needle
    return hidden


def _sentence_end(coder: HaystackTokenizer, text: Sequence[int], place: int) -> int:
    if place in (0, len(text)):
        return place
    for at in range(place, max(0, place - LONGEST_SEARCH), -1):
        if coder.decode([text[at - 1]]).rstrip(" ").endswith((".", "!", "?", "\n")):
            return at
    return place


KEY = "eval/needle"
MAIN: Kind = "multi-key"
"""The task that `eval/needle` and the gate mean."""
SHORTEST = 512
"""Shortest length of a grid: four sentences and their questions leave no text in less."""
POSITIONS = 2**20
"""Positions given to the scorer at once; it batches them."""

_CELL = re.compile(rf"{KEY}/length_(\d{{6,}})/depth_(\d{{3}})")


@dataclass(frozen=True)
class NeedleResult:
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

    answers: tuple[NeedleResult, ...]
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
    coder: HaystackTokenizer,
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
    answers: list[NeedleResult] = []
    requests = hashlib.sha256()
    most = 0
    for length in lengths:
        pool = pool_of(coder, texts, 2 * length)
        most = max(most, len(pool))
        for kind in kinds:
            asked = questions(coder, pool, length, count, kind)
            for number, (question, scored) in enumerate(_scored(model, asked, length, device, ranks)):
                found, tokens = _found(question, scored), sum(likelihood.tokens for likelihood in scored)
                answers.append(NeedleResult(kind, length, question.depth, number, found, tokens))
                requests.update(_bytes(question))
    return Retrieval(tuple(answers), requests.hexdigest(), most)


def _scored(
    model: LanguageModel, asked: Iterator[NeedleQuestion], length: int, device: str, ranks: Ranks | None
) -> Iterator[tuple[NeedleQuestion, list[Likelihood]]]:
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


def _found(question: NeedleQuestion, scored: Sequence[Likelihood]) -> bool:
    """Return whether the likeliest number of every ask is the right one."""
    nats = iter([likelihood.nats for likelihood in scored])
    return all(_first_by(list(islice(nats, len(ask.choices)))) == ask.gold for ask in question.asks)


def _first_by(nats: list[float]) -> int | None:
    """Return the index of the smallest number; None where there is no such one (a model that knows nothing: ties)."""
    least = min(nats)
    return nats.index(least) if math.isfinite(least) and nats.count(least) == 1 else None


def _bytes(question: NeedleQuestion) -> bytes:
    gold = [ask.gold for ask in question.asks]
    tokens = [token for sequence, _ in question.sequences for token in sequence]
    return array("q", [question.depth, *gold, *tokens]).tobytes()


def _length(length: int) -> str:
    return f"length_{length:06}"


def _depth(depth: int) -> str:
    return f"depth_{depth:03}"
