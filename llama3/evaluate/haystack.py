"""Haystacks: text as long as a window with sentences hidden in it, and what is asked about them.

A haystack is held-out text; the sentences give six-digit numbers to keys of two words. Every question is answered by
choosing one of four numbers. The tasks follow RULER (arXiv 2404.06654, section 3), with choices instead of generated
text; the generator and its sentences are our own:

    single       one sentence; the other three numbers stand nowhere. To copy any number is enough.
    multi-key    four sentences, four keys; the numbers of all are the choices.
    multi-value  two keys with two numbers each; one number of a key is given and its other one asked for.
    multi-query  multi-key, asked for all four keys in a row, earlier answers given; right if all four are.

What is asked about lies at a given depth; everything else lies anywhere. Pieces are encoded by themselves and joined as
tokens, so a sequence is as long as asked to the token, and depth is a share of the haystack's tokens whatever the
tokenizer is. What this gives up: numbers as answers only; RULER's tracing and aggregation tasks are not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Literal, Protocol, get_args

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


class Coder(Protocol):
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
class Question:
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


def questions(coder: Coder, pool: Sequence[int], seq: int, count: int, kind: Kind = "multi-key") -> Iterator[Question]:
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
        yield Question(depth, (coder.begin, *_hide(coder, text, needles, places)), asks)


def pool_of(coder: Coder, texts: Iterable[str], enough: int) -> list[int]:
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


def _joined(coder: Coder, pieces: Iterable[str]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in coder.encode(piece))


def _numbers(coder: Coder, dice: Random) -> list[str]:
    """Return different six-digit numbers of equally many tokens, so that none is likelier by its length."""
    by_size: dict[int, list[str]] = {}
    for value in dice.sample(range(100_000, 1_000_000), 100 * CHOICES):
        same = by_size.setdefault(len(coder.encode(f" {value}")), [])
        same.append(f" {value}")
        if len(same) == CHOICES:
            return same
    raise AssertionError("six digits make few different numbers of tokens")


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
