"""The statistics that quality rules bound, from the bytes of each document: one scan of its lines, one of its words.

Definitions follow Gopher (arXiv 2112.11446, appendix A.1.1), C4 (arXiv 1910.10683, section 2.2) and FineWeb (arXiv
2406.17557, section 3.4); `Statistic` lists the differences. Memory follows the longest document of a call: 10 bytes per
byte of prose, at most 24.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from herd.llama3.data.kernels.lines import (
    BLANK,
    END,
    NEWLINE,
    QUOTE,
    WIDE_END,
    LineScan,
    ends_with_ellipsis,
    is_bullet,
    scan_line,
    traits_at,
)
from herd.llama3.data.kernels.words import (
    BY_ITSELF,
    CLASSES,
    NONE,
    code_point,
    find_words,
    join_words,
    mix64,
    word_hash,
)
from herd.llama3.data.text.words import BLANKS, SENTENCE_WORDS, SHORT_LINE, STOP_WORDS


class Statistic(IntEnum):
    """Rows of the array that `measure` fills, in the order in which the rules are tried.

    Lines end at a newline; blank lines are left out of every count. A paragraph is a run of lines between blank lines.
    Words are those of `joined_words`. A letter is any word character except ASCII digits and the underscore. Lengths
    are in characters (code points). A share of nothing is 0.

    datatrove takes words from a tokenizer that returns punctuation as words and keeps case. Here n-grams reach across
    punctuation, and an n-gram that occurs once is not the most frequent one. `alphabetic_words` counts what is between
    blanks (2.3.7 is one word) and each word of a script without spaces. Lines without a letter or digit, such as code
    fences, repeat nothing. FineWeb's texts have no blank lines, so these do not count in `newlines_per_word`. `braces`
    and `placeholder_text` are counted in the whole text, as in C4's paper, not only in kept lines. `sentences` are
    counted in lines that C4 keeps, `sentences_any_line` in lines that FineWeb's form of C4 keeps, by punctuation: an
    abbreviation before a capital counts as an end.
    """

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
    SENTENCES_ANY_LINE = 27
    BRACES = 28
    PLACEHOLDER_TEXT = 29


class Tally(IntEnum):
    """Elements of the array that `tally_lines` fills; `scan_line` counts the first four."""

    NUMBER_SIGNS = 0
    ELLIPSES = 1
    BRACES = 2
    PLACEHOLDERS = 3
    CHARS = 4
    SYMBOLS = 5
    NEWLINES = 6
    LINES = 7
    BULLETS = 8
    ELLIPSIS_LINES = 9
    PUNCTUATED = 10
    SHORT = 11
    SENTENCES = 12
    REPEATED_LINES = 13
    REPEATED_LINE_CHARS = 14
    PARAGRAPHS = 15
    REPEATED_PARAGRAPHS = 16
    REPEATED_PARAGRAPH_CHARS = 17
    SENTENCES_ANY_LINE = 18


Positions = NDArray[np.int32]
"""Numbers of words in a document; a document of 2^32 bytes has at most 2^31 words."""
SHORTEST, LONGEST_TOP, LONGEST = 2, 4, 10
"""Words per n-gram: the most frequent n-gram is measured up to LONGEST_TOP, repetition above it."""
_EMPTY = np.int32(-1)
_NO_LINES = np.uint64(0x9E3779B97F4A7C15)
"""Hash of a paragraph before its first line; with it, a paragraph of one line has another hash than that line."""
_NONE = -1
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
    first, times, positions = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    tally, grams = np.empty(_TALLIES, np.int64), np.empty(LONGEST + 1, np.int64)
    for document in range(len(offsets) - 1):
        start, stop, row = offsets[document], offsets[document + 1], out[:, document]
        words = find_words(data, start, stop, starts, stops, hashes)
        words = join_words(data, words, starts, stops, hashes)
        row[Statistic.WORDS] = words
        tally_lines(data, start, stop, tally)
        _fill(tally, words, row)
        _measure_words(data, words, starts, stops, hashes, before, row)
        unspaced = 0  # words of scripts without spaces
        for word in range(words):
            if data[starts[word]] >= np.uint8(0xE0):
                point, _ = code_point(data, starts[word])
                unspaced += point < len(CLASSES) and CLASSES[point] == BY_ITSELF
        row[Statistic.ALPHABETIC_WORDS] = _alphabetic(data, start, stop, unspaced)
        repetition(words, hashes, before, first, times, positions, grams)
        for size in range(SHORTEST, LONGEST + 1):
            row[Statistic.TOP_GRAM_2 + size - SHORTEST] = _share(grams[size], row[Statistic.CHARS])


@njit(cache=True, nogil=True)
def _share(part: float, whole: float) -> float:
    return part / max(whole, 1)


@njit(cache=True, nogil=True)
def _measure_words(
    data: Bytes, count: int, starts: Offsets, stops: Offsets, hashes: Hashes, before: Offsets, row: Any
) -> None:
    """Fill the statistics of single words; set `before` to the characters in the words before each word."""
    stop_words = 0
    before[0] = 0
    for word in range(count):
        chars = 0
        for at in range(starts[word], stops[word]):
            chars += data[at] & np.uint8(0xC0) != np.uint8(0x80)  # not a continuation byte
        before[word + 1] = before[word] + chars
        if stops[word] - starts[word] <= _LONGEST_STOP_WORD:
            for position in range(len(_STOP_HASHES)):
                if hashes[word] == _STOP_HASHES[position]:
                    stop_words |= 1 << position
                    break
    row[Statistic.MEAN_WORD] = _share(before[count], count)
    distinct = 0
    for position in range(len(_STOP_HASHES)):
        distinct += stop_words >> position & 1
    row[Statistic.STOP_WORDS] = distinct


@njit(cache=True, nogil=True)
def _alphabetic(data: Bytes, start: int, stop: int, unspaced: int) -> float:
    """Return the share of tokens with a letter: runs between blanks, and `unspaced` words, which all have one."""
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
def _fill(tally: Offsets, words: int, row: Any) -> None:
    """Fill the statistics that depend on counts over lines."""
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
    row[Statistic.SENTENCES_ANY_LINE] = tally[Tally.SENTENCES_ANY_LINE]
    row[Statistic.BRACES] = tally[Tally.BRACES]
    row[Statistic.PLACEHOLDER_TEXT] = tally[Tally.PLACEHOLDERS]


@njit(cache=True, nogil=True)
def tally_lines(data: Bytes, start: int, stop: int, tally: Offsets) -> None:
    """Fill `tally`, int64[len(Tally)], for the document `data[start:stop]`."""
    table = _empty_table(data, start, stop)
    tally[:] = 0
    at, paragraph, chars = start, _NO_LINES, _NONE
    while at < stop:
        line = scan_line(data, at, stop, tally)
        tally[Tally.CHARS] += line.chars
        tally[Tally.SYMBOLS] += line.symbols
        if line.first < line.end:
            _add_line(data, line, table, tally)
            paragraph, chars = mix64(paragraph ^ line.hash), chars + line.chars + 1
        elif chars != _NONE:
            _add_paragraph(paragraph, chars, table, tally)
            paragraph, chars = _NO_LINES, _NONE
        if line.end < stop:
            tally[Tally.CHARS] += 1
            tally[Tally.NEWLINES] += 1
        at = line.end + 1
    if chars != _NONE:
        _add_paragraph(paragraph, chars, table, tally)


@njit(cache=True, nogil=True)
def _add_line(data: Bytes, line: LineScan, table: Hashes, tally: Offsets) -> None:
    """Count a non-blank line."""
    ellipsis = ends_with_ellipsis(data, line)
    end = traits_at(data, line.last)
    tally[Tally.LINES] += 1
    tally[Tally.BULLETS] += is_bullet(data, line)
    tally[Tally.ELLIPSIS_LINES] += ellipsis
    tally[Tally.PUNCTUATED] += end & (END | WIDE_END) != 0
    tally[Tally.SHORT] += line.chars <= SHORT_LINE
    if line.words >= SENTENCE_WORDS:
        tally[Tally.SENTENCES_ANY_LINE] += line.inner_ends + 1
        if end & (END | WIDE_END | QUOTE) != 0 and not ellipsis:
            tally[Tally.SENTENCES] += line.inner_ends + 1
    if line.words and _seen(table, line.hash):  # code fences and brackets repeat in every page with code
        tally[Tally.REPEATED_LINES] += 1
        tally[Tally.REPEATED_LINE_CHARS] += line.chars


@njit(cache=True, nogil=True)
def _add_paragraph(hash_: np.uint64, chars: int, table: Hashes, tally: Offsets) -> None:
    tally[Tally.PARAGRAPHS] += 1
    if _seen(table, hash_):
        tally[Tally.REPEATED_PARAGRAPHS] += 1
        tally[Tally.REPEATED_PARAGRAPH_CHARS] += chars


@njit(cache=True, nogil=True)
def _empty_table(data: Bytes, start: int, stop: int) -> Hashes:
    """Return a hash table with room for the lines and paragraphs of a document, equal or distinct."""
    lines = 1
    for at in range(start, stop):
        lines += data[at] == NEWLINE
    slots = 4
    while slots < 4 * lines:
        slots *= 2
    return np.zeros(slots, np.uint64)


@njit(cache=True, nogil=True)
def _seen(table: Hashes, hash_: np.uint64) -> bool:
    """Insert `hash_` into `table` and return whether it was there already; a free slot is 0."""
    last = np.uint64(len(table) - 1)
    key = max(hash_, np.uint64(1))
    slot = key & last
    while table[slot] != 0:
        if table[slot] == key:
            return True
        slot = (slot + np.uint64(1)) & last
    table[slot] = key
    return False


@njit(cache=True, nogil=True)
def repetition(
    count: int, keys: Hashes, before: Offsets, first: Positions, times: Positions, positions: Positions, chars: Offsets
) -> None:
    """Write the characters of repeated n-grams of `count` words to `chars[n]`, n from 2 to 10, int64[11].

    n <= 4: characters of the most frequent n-gram (ties: the first in the text) with blanks between its words, times
    its occurrences; 0 if none occurs twice. n >= 5: characters without blanks of n-grams that occurred earlier, read
    from the left, each word counted once (Gopher, arXiv 2112.11446, appendix A.1.1, table A1).

    `keys`: hash of each word, overwritten. `before`: characters in the words before each word, int64[count + 1].
    `first`, `times`, `positions`: scratch for `count` elements.
    """
    # An n-gram is the pair of its first and last (n-1)-gram, so each length is counted from the one before, and only
    # where both occur more than once: in prose few positions are left after pairs of words. The number of an n-gram is
    # its first position, and two of them make an exact 64-bit key, so only hashes of single words can collide. Linear
    # time.
    chars[:] = 0
    for position in range(count):
        positions[position] = position
    left = _group(positions, count, keys, first, times)
    for size in range(SHORTEST, LONGEST + 1):
        left = _lengthened(positions, left, keys, first)
        left = _group(positions, left, keys, first, times)
        if size <= LONGEST_TOP:
            chars[size] = _most_frequent(positions, left, first, times, before, size)
        else:
            chars[size] = _repeated(positions, left, first, times, before, size)


@njit(cache=True, nogil=True)
def _lengthened(positions: Positions, count: int, keys: Hashes, first: Positions) -> int:
    """Keep the positions where two repeated n-grams overlap as one longer n-gram, set its key, return their number."""
    left = 0
    for at in range(count - 1):
        position = positions[at]
        if positions[at + 1] == position + 1:
            keys[position] = np.uint64(first[position]) << np.uint64(32) | np.uint64(first[position + 1])
            positions[left] = position
            left += 1
    return left


@njit(cache=True, nogil=True)
def _group(positions: Positions, count: int, keys: Hashes, first: Positions, times: Positions) -> int:
    """Set `first` and `times` of all positions by key, keep those that occur twice, return their number.

    `times[f]` is the number of occurrences of the n-gram whose first position is f.
    """
    slots = 1
    while slots < 2 * count:
        slots *= 2
    table = np.full(slots, _EMPTY, np.int32)
    last = np.uint64(slots - 1)
    for at in range(count):
        position = positions[at]
        slot = mix64(keys[position]) & last
        while table[slot] != _EMPTY and keys[table[slot]] != keys[position]:
            slot = (slot + np.uint64(1)) & last
        if table[slot] == _EMPTY:
            table[slot] = position
            times[position] = 0
        first[position] = table[slot]
        times[table[slot]] += 1
    left = 0
    for at in range(count):
        position = positions[at]
        if times[first[position]] > 1:
            positions[left] = position
            left += 1
    return left


@njit(cache=True, nogil=True)
def _most_frequent(
    positions: Positions, count: int, first: Positions, times: Positions, before: Offsets, size: int
) -> np.int64:
    most, chars = np.int64(0), np.int64(0)
    for at in range(count):
        position = positions[at]
        if first[position] == position and times[position] > most:
            most = np.int64(times[position])
            chars = before[position + size] - before[position] + size - 1
    return most * chars


@njit(cache=True, nogil=True)
def _repeated(
    positions: Positions, count: int, first: Positions, times: Positions, before: Offsets, size: int
) -> np.int64:
    """Return the characters of repetitions; `times` is set to 0 for n-grams seen.

    Positions inside a repetition are skipped and do not count as seen.
    """
    chars, free = np.int64(0), np.int64(0)
    for at in range(count):
        position = positions[at]
        if position < free:
            continue
        if times[first[position]] == 0:
            chars += before[position + size] - before[position]
            free = np.int64(position) + size
        else:
            times[first[position]] = 0
    return chars
