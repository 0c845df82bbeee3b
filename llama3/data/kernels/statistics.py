"""The statistics that quality rules bound, from the bytes of each document: one scan of its lines, one of its words.

The definitions are told in `llama3/data/filters.py`. Memory follows the longest document of a call: 10 bytes for
each byte of prose, 24 where every second byte is a word.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from llama3.data.kernels.lines import (  # fmt: skip
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
from llama3.data.kernels.words import BY_ITSELF, CLASSES, NONE, code_point, find_words, join_words, mixed, word_hash
from llama3.data.text.words import BLANKS, SENTENCE_WORDS, SHORT_LINE, STOP_WORDS

# Counts over the lines and paragraphs of a document: lengths, repetitions, list marks, punctuation, sentences.
#
# Lines and paragraphs are compared by 64-bit hashes in one table of open addressing, so that a million equal lines
# cost what a million different ones do.


class Tally(IntEnum):
    """Elements of the array that `tally_lines` fills; the first four are those that `scan_line` counts."""

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


_NO_LINES = np.uint64(0x9E3779B97F4A7C15)
"""Hash of a paragraph before its first line; it keeps a paragraph of one line apart from that line."""
_NONE = -1


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
            paragraph, chars = mixed(paragraph ^ line.hash), chars + line.chars + 1
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
    """Count a line that is not blank."""
    ellipsis = ends_with_ellipsis(data, line)
    end = traits_at(data, line.last)
    tally[Tally.LINES] += 1
    tally[Tally.BULLETS] += is_bullet(data, line)
    tally[Tally.ELLIPSIS_LINES] += ellipsis
    tally[Tally.PUNCTUATED] += end & (END | WIDE_END) != 0
    tally[Tally.SHORT] += line.chars <= SHORT_LINE
    if end & (END | WIDE_END | QUOTE) != 0 and not ellipsis and line.words >= SENTENCE_WORDS:
        tally[Tally.SENTENCES] += line.inner_ends + 1
    if line.words and _seen(table, line.hash):  # fences and brackets repeat in every page with code
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
    """Return a hash table with room for the lines and the paragraphs of a document."""
    lines = 1
    for at in range(start, stop):
        lines += data[at] == NEWLINE
    slots = 4
    while slots < 4 * lines:
        slots *= 2
    return np.zeros(slots, np.uint64)


@njit(cache=True, nogil=True)
def _seen(table: Hashes, hash_: np.uint64) -> bool:
    """Return whether `hash_` is in `table`, and put it there; a free slot holds 0."""
    last = np.uint64(len(table) - 1)
    key = max(hash_, np.uint64(1))
    slot = key & last
    while table[slot] != 0:
        if table[slot] == key:
            return True
        slot = (slot + np.uint64(1)) & last
    table[slot] = key
    return False


# Repeated n-grams of words: how much text the most frequent one covers, and how much text repeats what stood
# before.
#
# An n-gram is the pair of the two (n-1)-grams that it begins and ends with, so each length is counted from the one
# before and only where both halves occur more than once: in prose few positions are left after the pairs of words.
# An n-gram carries the place of its first occurrence as its number; two such numbers make an exact 64-bit key, so
# that beyond the hashes of single words no collision is possible. Time is linear in the words whatever the text is.
#
# Source: Gopher, arXiv 2112.11446, appendix A.1.1 ("repetition removal") and table A1.

Places = NDArray[np.int32]
"""Numbers of words in a document; a document of 2^32 bytes has at most 2^31 words."""
SHORTEST, LONGEST_TOP, LONGEST = 2, 4, 10
"""Words in an n-gram: the most frequent one is looked for up to LONGEST_TOP, repetitions are added up from there."""
_EMPTY = np.int32(-1)


@njit(cache=True, nogil=True)
def repetition(
    count: int, keys: Hashes, before: Offsets, first: Places, times: Places, places: Places, found: Offsets
) -> None:
    """Add up the characters of repeated n-grams of `count` words; `found[n]` for n from 2 to 10, int64[11].

    n up to 4: characters of the most frequent n-gram (of several, the first in the text), blanks between its words
    counted, times its occurrences; 0 if none occurs twice. n from 5: characters, blanks not counted, of n-grams that
    began earlier too, read from the left, each word counted once.

    `keys`: hash of each word, overwritten. `before`: characters in the words before each word, int64[count + 1].
    `first`, `times`, `places`: scratch for `count` elements.
    """
    found[:] = 0
    for place in range(count):
        places[place] = place
    left = _group(places, count, keys, first, times)
    for size in range(SHORTEST, LONGEST + 1):
        left = _lengthened(places, left, keys, first)
        left = _group(places, left, keys, first, times)
        if size <= LONGEST_TOP:
            found[size] = _most_frequent(places, left, first, times, before, size)
        else:
            found[size] = _repeated(places, left, first, times, before, size)


@njit(cache=True, nogil=True)
def _lengthened(places: Places, count: int, keys: Hashes, first: Places) -> int:
    """Keep the places where two repeated n-grams follow each other, set the key of the longer one, return how many."""
    left = 0
    for at in range(count - 1):
        place = places[at]
        if places[at + 1] == place + 1:
            keys[place] = np.uint64(first[place]) << np.uint64(32) | np.uint64(first[place + 1])
            places[left] = place
            left += 1
    return left


@njit(cache=True, nogil=True)
def _group(places: Places, count: int, keys: Hashes, first: Places, times: Places) -> int:
    """Set `first` and `times` of all places with equal keys, keep those that occur twice, return how many.

    `times[f]` holds the occurrences of the n-gram that is first at f.
    """
    slots = 1
    while slots < 2 * count:
        slots *= 2
    table = np.full(slots, _EMPTY, np.int32)
    last = np.uint64(slots - 1)
    for at in range(count):
        place = places[at]
        slot = mixed(keys[place]) & last
        while table[slot] != _EMPTY and keys[table[slot]] != keys[place]:
            slot = (slot + np.uint64(1)) & last
        if table[slot] == _EMPTY:
            table[slot] = place
            times[place] = 0
        first[place] = table[slot]
        times[table[slot]] += 1
    left = 0
    for at in range(count):
        place = places[at]
        if times[first[place]] > 1:
            places[left] = place
            left += 1
    return left


@njit(cache=True, nogil=True)
def _most_frequent(places: Places, count: int, first: Places, times: Places, before: Offsets, size: int) -> np.int64:
    most, chars = np.int64(0), np.int64(0)
    for at in range(count):
        place = places[at]
        if first[place] == place and times[place] > most:
            most = np.int64(times[place])
            chars = before[place + size] - before[place] + size - 1
    return most * chars


@njit(cache=True, nogil=True)
def _repeated(places: Places, count: int, first: Places, times: Places, before: Offsets, size: int) -> np.int64:
    """Return the characters of repetitions, skipping all words of each; `times` marks the n-grams seen, with 0.

    A place within a repetition is skipped and does not count as seen.
    """
    chars, free = np.int64(0), np.int64(0)
    for at in range(count):
        place = places[at]
        if place < free:
            continue
        if times[first[place]] == 0:
            chars += before[place + size] - before[place]
            free = np.int64(place) + size
        else:
            times[first[place]] = 0
    return chars


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
