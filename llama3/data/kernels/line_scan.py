"""One pass over the characters of a line: its length, hash, words, symbols and sentences, and how it begins and ends.

The hash serves comparisons within a document only. Some 200 MB/s on one core.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from llama3.data import characters
from llama3.data.kernels.arrow import Bytes, Offsets
from llama3.data.kernels.words import CLASSES, NONE, WITH_OTHERS, code_point, mixed

BLANK, END, WIDE_END, QUOTE, BRACKET, LIST_MARK, COUNTED, SPACED_MARK = (1 << bit for bit in range(8))
"""Traits of a character; COUNTED: `_count` looks at it."""
NUMBER_SIGN, ELLIPSIS, BRACE, PLACEHOLDER = range(4)
"""Elements of `counts`, which are rare in a text."""
NEWLINE, DOT, UNDERSCORE = np.uint8(0x0A), 0x2E, 0x5F
_SPACE = np.uint8(0x20)
_NUMBER_SIGN, _OPENING, _CLOSING, _ELLIPSIS = 0x23, 0x7B, 0x7D, 0x2026
_BETWEEN = BLANK | END | WIDE_END | QUOTE | BRACKET
"""Traits of characters that may stand between two sentences."""
_AFTER_END, _BEFORE_NEXT = 1, 2
_PLANE = len(CLASSES)


def _traits() -> Bytes:
    table = np.zeros(_PLANE, np.uint8)
    for trait, members in (
        (BLANK, characters.BLANKS),
        (END, characters.SENTENCE_ENDS),
        (WIDE_END, characters.WIDE_SENTENCE_ENDS),
        (QUOTE, characters.QUOTES),
        (BRACKET, characters.BRACKETS),
        (LIST_MARK, characters.LIST_MARKS),
        (SPACED_MARK, characters.SPACED_LIST_MARKS),
        (COUNTED, "#{}.…"),
    ):
        table[[ord(member) for member in members]] |= np.uint8(trait)
    return table


TRAITS = _traits()
_PLAIN = np.array([byte < 0x80 and chr(byte).isalnum() for byte in range(256)])
_PLACEHOLDER = np.frombuffer(characters.PLACEHOLDER.encode(), np.uint8).copy()
_PLACEHOLDER_BLANK = characters.PLACEHOLDER.index(" ")
_SEED = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)


class Line(NamedTuple):
    """What a pass over a line finds."""

    end: int
    """Byte after the last one, without the line end."""
    hash: int
    chars: int
    symbols: int
    """Characters that are neither letters, digits nor blanks."""
    words: int
    inner_ends: int
    """Ends of sentences that another one follows in this line."""
    first: int
    """Byte at which the first character stands that is not blank; `end` if the line is blank."""
    last: int
    """Byte at which the last one stands that is not blank."""


@njit(cache=True, nogil=True)
def scan_line(data: Bytes, start: int, stop: int, counts: Offsets) -> Line:
    """Read the line of `data[start:stop]` that begins at `start`, and add to `counts` what is rare.

    ASCII words and the blanks between them, most of a text, take a short path.
    """
    at, state = start, _SEED
    chars = symbols = words = inner_ends = pending = dots = 0
    inside = False
    while at < stop and data[at] != NEWLINE:
        byte = data[at]
        if _PLAIN[byte]:
            begin, words = at, words + (not inside)
            inner_ends += pending == _BEFORE_NEXT and not _is_lower(byte)
            while at < stop and _PLAIN[data[at]]:
                state = (state ^ np.uint64(data[at])) * _PRIME
                at += 1
            chars, inside, pending, dots = chars + at - begin, True, 0, 0
            continue
        if byte == _SPACE:
            counts[PLACEHOLDER] += _is_placeholder(data, at, start, stop)
            state = (state ^ np.uint64(byte)) * _PRIME
            at, chars, inside, pending, dots = at + 1, chars + 1, False, _BEFORE_NEXT if pending else 0, 0
            continue
        point, width = code_point(data, at)
        kind, traits = _class_and_traits(point)
        words += kind != NONE and not (inside and kind == WITH_OTHERS)
        inside = kind == WITH_OTHERS
        dots = dots + 1 if point == DOT else 0
        if traits & COUNTED:
            _count(point, dots, counts)
        symbols += (kind == NONE and traits & BLANK == 0) or point == UNDERSCORE
        inner_ends += pending == _BEFORE_NEXT and traits & _BETWEEN == 0
        pending = _pending(pending, traits)
        for place in range(at, at + width):
            state = (state ^ np.uint64(data[place])) * _PRIME
        at, chars = at + width, chars + 1
    first, last = _visible(data, start, at)
    return Line(at, mixed(state), chars, symbols, words, inner_ends, first, last)


@njit(cache=True, nogil=True)
def _class_and_traits(point: int) -> tuple[int, int]:
    if point >= _PLANE:
        return WITH_OTHERS, 0
    kind: Any = np.int64(CLASSES[point])
    traits: Any = np.int64(TRAITS[point])
    return kind, traits


@njit(cache=True, nogil=True)
def _visible(data: Bytes, start: int, end: int) -> tuple[int, int]:
    """Return where the first and the last character start that are not blank; (end, end) in a blank line."""
    first = start
    while first < end:
        point, width = code_point(data, first)
        if _class_and_traits(point)[1] & BLANK == 0:
            break
        first += width
    last = end
    while last > first:
        last -= 1
        if data[last] & np.uint8(0xC0) != np.uint8(0x80) and traits_at(data, last) & BLANK == 0:
            break
    return first, last


@njit(cache=True, nogil=True)
def _count(point: int, dots: int, counts: Offsets) -> None:
    if point == _NUMBER_SIGN:
        counts[NUMBER_SIGN] += 1
    elif point == _ELLIPSIS or (point == DOT and dots % 3 == 0):
        counts[ELLIPSIS] += 1
    elif point in (_OPENING, _CLOSING):
        counts[BRACE] += 1


@njit(cache=True, nogil=True)
def _is_placeholder(data: Bytes, at: int, start: int, stop: int) -> bool:
    """Return whether the filler text, in whatever case, has its blank at byte `at` of a line that begins at `start`."""
    begin = at - _PLACEHOLDER_BLANK
    if begin < start or begin + len(_PLACEHOLDER) > stop:
        return False
    for place in range(len(_PLACEHOLDER)):
        byte = data[begin + place]
        if byte != _PLACEHOLDER[place] and (byte | np.uint8(0x20) != _PLACEHOLDER[place] or byte < np.uint8(0x41)):
            return False
    return True


@njit(cache=True, nogil=True)
def _is_lower(byte: np.uint8) -> bool:
    lower: Any = np.uint8(0x61) <= byte <= np.uint8(0x7A)
    return bool(lower)


@njit(cache=True, nogil=True)
def _pending(pending: int, traits: int) -> int:
    """Return how far the end of a sentence has come after a character."""
    if traits & WIDE_END:
        return _BEFORE_NEXT
    if traits & END:
        return max(pending, _AFTER_END)
    if traits & BLANK:
        return _BEFORE_NEXT if pending else 0
    return pending if traits & _BETWEEN else 0


@njit(cache=True, nogil=True)
def traits_at(data: Bytes, at: int) -> int:
    """Return the traits of the character that starts at byte `at`."""
    point, _ = code_point(data, at)
    traits: int = _class_and_traits(point)[1]
    return traits


@njit(cache=True, nogil=True)
def is_bullet(data: Bytes, line: Line) -> bool:
    """Return whether `line`, which is not blank, begins with a list mark."""
    point, width = code_point(data, line.first)
    traits = _class_and_traits(point)[1]
    after = line.first + width
    spaced = traits & SPACED_MARK != 0 and after < line.end and traits_at(data, after) & BLANK != 0
    return bool(traits & LIST_MARK != 0 or spaced)


@njit(cache=True, nogil=True)
def ends_with_ellipsis(data: Bytes, line: Line) -> bool:
    """Return whether the last character of `line` that is not blank is an ellipsis, or the third of three dots."""
    point, _ = code_point(data, line.last)
    dots = point == DOT and line.last - 2 >= line.first
    ellipsis: bool = point == _ELLIPSIS or (dots and data[line.last - 1] == DOT and data[line.last - 2] == DOT)
    return ellipsis
