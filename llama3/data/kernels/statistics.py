"""The statistics that quality rules bound, from the bytes of each document: one scan of its lines, one of its words.

The definitions are told in `llama3/data/statistics.py`. Memory follows the longest document of a call: 10 bytes for
each byte of prose, 24 where every second byte is a word.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit

from llama3.data.characters import BLANKS, STOP_WORDS
from llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from llama3.data.kernels.line_scan import BLANK, traits_at
from llama3.data.kernels.line_statistics import Tally, tally_lines
from llama3.data.kernels.repetition import LONGEST, SHORTEST, repetition
from llama3.data.kernels.words import BY_ITSELF, CLASSES, NONE, code_point, find_words, join_words, word_hash


class Statistic(IntEnum):
    """Rows of the array that `measure` fills, in the order in which the rules are tried."""

    CHARS = 0
    SYMBOL_CHARS = 1
    WORDS = 2
    MEAN_WORD = 3
    SYMBOLS_PER_WORD = 4
    BULLET_LINES = 5
    ELLIPSIS_LINES = 6
    ALPHABETIC_WORDS = 7
    STOP_WORDS = 8
    DUPLICATE_LINES = 9
    DUPLICATE_PARAGRAPHS = 10
    DUPLICATE_LINE_CHARS = 11
    DUPLICATE_PARAGRAPH_CHARS = 12
    TOP_GRAM_2 = 13
    TOP_GRAM_3 = 14
    TOP_GRAM_4 = 15
    DUPLICATE_GRAM_5 = 16
    DUPLICATE_GRAM_6 = 17
    DUPLICATE_GRAM_7 = 18
    DUPLICATE_GRAM_8 = 19
    DUPLICATE_GRAM_9 = 20
    DUPLICATE_GRAM_10 = 21
    PUNCTUATED_LINES = 22
    SHORT_LINES = 23
    DUPLICATE_LINE_CHARS_STRICT = 24
    NEWLINES_PER_WORD = 25
    SENTENCES = 26
    BRACES = 27
    PLACEHOLDER_TEXT = 28


_STOP_HASHES = np.array([word_hash(word) for word in STOP_WORDS], np.uint64)
_LONGEST_STOP_WORD = max(map(len, STOP_WORDS))
_TALLIES = len(Tally)
_BLANK, _SIGN, _LETTER = 0, 1, 2
_ASCII = np.array([_BLANK if chr(byte) in BLANKS else _LETTER if chr(byte).isalpha() else _SIGN for byte in range(128)])


@njit(cache=True, nogil=True)
def measure(data: Bytes, offsets: Offsets, out: Any) -> None:
    """Fill `out`, float64[len(Statistic), documents], for the documents `data[offsets[i] : offsets[i + 1]]`."""
    longest = 0
    for document in range(len(offsets) - 1):
        longest = max(longest, offsets[document + 1] - offsets[document])
    room = (longest + 1) // 2
    starts, stops, before = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room + 1, np.int64)
    hashes = np.empty(room, np.uint64)
    first, times, places = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    tally, grams = np.empty(_TALLIES, np.int64), np.empty(LONGEST + 1, np.int64)
    for document in range(len(offsets) - 1):
        start, stop, row = offsets[document], offsets[document + 1], out[:, document]
        words = find_words(data, start, stop, starts, stops, hashes)
        words = join_words(data, words, starts, stops, hashes)
        row[Statistic.WORDS] = words
        tally_lines(data, start, stop, tally)
        _fill(tally, words, row)
        _measure_words(data, words, starts, stops, hashes, before, row)
        row[Statistic.ALPHABETIC_WORDS] = _alphabetic(data, start, stop, _unspaced(data, words, starts))
        repetition(words, hashes, before, first, times, places, grams)
        for size in range(SHORTEST, LONGEST + 1):
            row[Statistic.TOP_GRAM_2 + size - SHORTEST] = _share(grams[size], row[Statistic.CHARS])


@njit(cache=True, nogil=True)
def _share(part: float, whole: float) -> float:
    return part / max(whole, 1)


@njit(cache=True, nogil=True)
def _measure_words(
    data: Bytes, count: int, starts: Offsets, stops: Offsets, hashes: Hashes, before: Offsets, row: Any
) -> None:
    """Fill the statistics of single words, and `before` with the characters in the words before each."""
    stop_words = 0
    before[0] = 0
    for word in range(count):
        before[word + 1] = before[word] + _chars(data, starts[word], stops[word])
        if stops[word] - starts[word] <= _LONGEST_STOP_WORD:
            stop_words |= _stop_word(hashes[word])
    row[Statistic.MEAN_WORD] = _share(before[count], count)
    distinct = 0
    for place in range(len(_STOP_HASHES)):
        distinct += stop_words >> place & 1
    row[Statistic.STOP_WORDS] = distinct


@njit(cache=True, nogil=True)
def _chars(data: Bytes, start: int, stop: int) -> int:
    chars = 0
    for place in range(start, stop):
        chars += data[place] & np.uint8(0xC0) != np.uint8(0x80)
    return chars


@njit(cache=True, nogil=True)
def _unspaced(data: Bytes, count: int, starts: Offsets) -> int:
    """Return how many of the words are of a script without spaces."""
    found = 0
    for word in range(count):
        if data[starts[word]] >= np.uint8(0xE0):
            point, _ = code_point(data, starts[word])
            found += point < len(CLASSES) and CLASSES[point] == BY_ITSELF
    return found


@njit(cache=True, nogil=True)
def _alphabetic(data: Bytes, start: int, stop: int, unspaced: int) -> float:
    """Return the share with a letter of what stands between blanks and of the `unspaced` words, which all have one."""
    every, with_letter, inside, letter, at = unspaced, unspaced, False, False, start
    while at < stop:
        kind, width = _ASCII[data[at] & np.uint8(0x7F)], 1
        if data[at] >= np.uint8(0x80):
            point, width = code_point(data, at)
            kind = _BLANK if traits_at(data, at) & BLANK != 0 else _LETTER
            if point < len(CLASSES) and CLASSES[point] == NONE and kind == _LETTER:
                kind = _SIGN
        if kind == _BLANK:
            every, with_letter = every + inside, with_letter + letter
            inside = letter = False
        else:
            inside, letter = True, letter or kind == _LETTER
        at += width
    return float(_share(with_letter + letter, every + inside))


@njit(cache=True, nogil=True)
def _stop_word(hash_: np.uint64) -> int:
    """Return a bit for the stop word with this hash; 0 if there is none."""
    for place in range(len(_STOP_HASHES)):
        if hash_ == _STOP_HASHES[place]:
            return 1 << place
    return 0


@njit(cache=True, nogil=True)
def _fill(tally: Offsets, words: int, row: Any) -> None:
    """Fill the statistics that follow from counts over lines."""
    chars, lines, paragraphs = tally[Tally.CHARS], tally[Tally.LINES], tally[Tally.PARAGRAPHS]
    row[Statistic.CHARS] = chars
    row[Statistic.SYMBOL_CHARS] = _share(tally[Tally.SYMBOLS], chars)
    row[Statistic.SYMBOLS_PER_WORD] = _share(max(tally[Tally.NUMBER_SIGNS], tally[Tally.ELLIPSES]), words)
    row[Statistic.BULLET_LINES] = _share(tally[Tally.BULLETS], lines)
    row[Statistic.ELLIPSIS_LINES] = _share(tally[Tally.ELLIPSIS_LINES], lines)
    row[Statistic.DUPLICATE_LINES] = _share(tally[Tally.REPEATED_LINES], lines)
    row[Statistic.DUPLICATE_PARAGRAPHS] = _share(tally[Tally.REPEATED_PARAGRAPHS], paragraphs)
    row[Statistic.DUPLICATE_LINE_CHARS] = _share(tally[Tally.REPEATED_LINE_CHARS], chars)
    row[Statistic.DUPLICATE_PARAGRAPH_CHARS] = _share(tally[Tally.REPEATED_PARAGRAPH_CHARS], chars)
    row[Statistic.PUNCTUATED_LINES] = _share(tally[Tally.PUNCTUATED], lines)
    row[Statistic.SHORT_LINES] = _share(tally[Tally.SHORT], lines)
    no_newlines = chars - tally[Tally.NEWLINES]
    row[Statistic.DUPLICATE_LINE_CHARS_STRICT] = _share(tally[Tally.REPEATED_LINE_CHARS], no_newlines)
    row[Statistic.NEWLINES_PER_WORD] = _share(max(lines - 1, 0), words)
    row[Statistic.SENTENCES] = tally[Tally.SENTENCES]
    row[Statistic.BRACES] = tally[Tally.BRACES]
    row[Statistic.PLACEHOLDER_TEXT] = tally[Tally.PLACEHOLDERS]
