"""Deterministic test strings for fast tokenizers.

Fast tokenizers scan machine words by hand instead of using the regular expression, so their bugs are in tables of
letters, digits and blanks, at the ends of words and buffers, and after apostrophes. Every code point outside the large
uniform blocks appears beside digits, letters and line ends; the other strings are random sequences of such characters.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator
from random import Random

from herd.llama3.tokens.vocabulary import special_tokens

SEED = 20_240_731
COUNT = 30_000
"""Number of random strings, besides the strings with every code point."""
UNIFORM = (
    range(0x3402, 0x9FFE), range(0xAC02, 0xD7A2), range(0xD800, 0xE000), range(0xE002, 0xF8FE),
    range(0x17002, 0x18CD4), range(0x20002, 0xE0000), range(0xE0200, sys.maxunicode - 1),
)  # fmt: skip
"""Blocks of one kind of character (and the surrogates), of which only every 97th is used."""
STEP = 97
SPECIALS = special_tokens()
BLANKS = " \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u2028\u2029\u202f\u205f\u3000"
INVISIBLE = "\0\x01\x08\x1b\x7f\xad\u180e\u200b\u200c\u200d\u2060\u2066\ufeff\ufe0f\ufffd\uffff\U000e0001\U000e0061"
MARKS = "\u0300\u0301\u0345\u0489\u0591\u0651\u093c\u093f\u0940\u0e31\u0eb1\u20e3\u302a\u3099\U0001d165\U0001e8d0"
NUMBERS = "0123456789²½Ⅷ①٣۴०९๕〇㊿６\U0001d7d8\U00010107\U0001f101"
LETTERS = "aAzZeEßſKİıǅʰªºµéЖяجऄกあ漢가ﬁＡ\U00010400\U0001d49c\U0001e900\U00020000"
SYMBOLS = "'’`\"!?.,;:-_=#@&*+/\\|<>()[]{}~^$%€…—。、“”«»👩👍🏽🇩🇪❤"
CONTRACTED = (
    "s", "S", "ſ", "t", "T", "re", "RE", "rE", "ve", "VE", "m", "M", "ll", "LL", "lL", "d", "D", "K", "'s", "\u017fs",
)  # fmt: skip
WORDS = (
    "the", "The", "don", "they'Ve", "we", "I", "IT'", "hello", "привет", "γειά", "עולם", "नमस्ते", "こんにちは", "東京都",
    "Größe", "naïve", "x1", "3x", "don’t", "Re\u0301",
)  # fmt: skip
CLASSES = (BLANKS, INVISIBLE, MARKS, NUMBERS, LETTERS, SYMBOLS)
EVERYTHING = "".join(CLASSES)


def adversarial_strings(count: int = COUNT) -> Iterator[str]:
    """Yield the empty string, strings with every code point, and `count` random strings."""
    yield ""
    # All code points between the uniform blocks, and every 97th inside them. Assigned and unassigned code points are in
    # separate strings, because an encoder may treat them differently.
    starts = [0, *(block.stop for block in UNIFORM)]
    stops = [*(block.start for block in UNIFORM), sys.maxunicode + 1]
    ranges = [*map(range, starts, stops), *(block[::STEP] for block in UNIFORM)]
    points = [point for points in ranges for point in points if not 0xD800 <= point <= 0xDFFF]
    points.sort(key=lambda point: unicodedata.category(chr(point)) == "Cn")
    for start in range(0, len(points), 32):
        characters = map(chr, points[start : start + 32])
        yield "".join(f"{character}123{character}the {character}\n \n" for character in characters)
    yield from random_strings(count)


def random_strings(count: int, seed: int = SEED) -> Iterator[str]:
    """Yield `count` strings, cycling through KINDS; equal arguments give equal strings."""
    random = Random(seed)
    for number in range(count):
        yield KINDS[number % len(KINDS)](random)


def _any_plane(random: Random) -> str:
    points = (random.randrange(0x110000) >> random.choice((0, 0, 4, 8, 12)) for _ in range(random.randrange(12)))
    return "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


def _mixed(random: Random) -> str:
    return "".join(random.choices(EVERYTHING, k=random.randrange(1, 20)))


def _two_classes(random: Random) -> str:
    return "".join(random.choices(random.choice(CLASSES) + random.choice(CLASSES), k=random.randrange(1, 12)))


def _contraction(random: Random) -> str:
    parts = (random.choice(("", " ", *WORDS)), random.choice("''''’ʼ"), random.choice(CONTRACTED))
    return "".join(parts) + random.choice(("", " ", "a", "1", "'", "\n", "\u0301"))


def _blank_runs(random: Random) -> str:
    few = [*random.sample(BLANKS, k=random.randrange(1, 4)), " "]
    run = "".join(random.choices(few, k=random.choice((1, 2, 3, 7, 15, 16, 17, 33, 64, 200))))
    before, after = (
        random.choice(("", random.choice(WORDS))),
        random.choice(("", "\r", "\n", "!", random.choice(WORDS))),
    )
    return before + run + after


def _numbers(random: Random) -> str:
    digits = random.choice(("0123456789", NUMBERS))
    return random.choice(("", " ", "-", "a", "\n")) + "".join(random.choices(digits, k=random.randrange(1, 24)))


def _lines(random: Random) -> str:
    return "".join(random.choices(("\r", "\n", "\r\n", "\n\r", " \n", "\n ", "\t", "!", ";", "a", "\u2028"), k=9))


def _damaged(random: Random) -> str:
    data = bytearray("".join(random.choices(WORDS, k=3)).encode() + "漢👍é".encode())
    for _ in range(random.randrange(1, 5)):
        data[random.randrange(len(data))] = random.randrange(256)
    return data.decode("utf-8", "replace")


def _special(random: Random) -> str:
    name = random.choice(SPECIALS)
    return random.choice((name, f"a{name}{name}", f" {name}\n", name[:-1], name[1:], name.upper(), f"{name[:4]} |>"))


def _at_a_boundary(random: Random) -> str:
    """Return a plain run that ends with an unusual character, near the edges of 16, 32 and 64 byte registers."""
    plain = random.choice(("a", "ab ", "word ", "é", "1", " ", "!", "漢")) * random.randrange(70)
    return plain + random.choice(EVERYTHING) + random.choice(("", "s", " x", "\n", "12"))


def _sentence(random: Random) -> str:
    return "".join(random.choice(WORDS) + random.choice((" ", " ", ", ", "\n", *SYMBOLS)) for _ in range(6))


KINDS: tuple[Callable[[Random], str], ...] = (
    _any_plane, _mixed, _two_classes, _contraction, _blank_runs, _numbers, _lines, _damaged, _special, _at_a_boundary,
    _sentence,
)  # fmt: skip
