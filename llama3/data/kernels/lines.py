"""Lines of texts: their hashes, which of them go, and the texts without those.

Two lines are one if they are equal without blanks at both ends and without the case of ASCII letters. Hashes go into
files, so they are ours: eight bytes at a time, about 500 MB/s on one core (a byte at a time: 350).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from llama3.data.kernels.grams import Flags, Places, Table, gram_key, place_of, roll, top_of
from llama3.data.kernels.words import find_words, mixed

KEEP, COPY, REPEAT = 0, 1, 2
"""Marks of a line; COPY and REPEAT go."""
Rule = tuple[int, int, int]
"""Words per n-gram, numerator and denominator of the largest share of repeated words."""
_NEWLINE, _SPACE, _BACKTICK, _TILDE = np.uint8(10), np.uint8(32), np.uint8(0x60), np.uint8(0x7E)
_CONTINUES, _LEAD = np.uint8(0x80), np.uint8(0xC0)
_SEED, _FACTOR = np.uint64(0x9AE16A3B2F90404F), np.uint64(0x9E3779B97F4A7C15)
_HIGH = np.uint64(0x8080808080808080)
_FROM_A, _AFTER_Z = np.uint64(0x3F3F3F3F3F3F3F3F), np.uint64(0x2525252525252525)
"""Added to seven-bit bytes, these set the high bit of those from `A` on, and of those after `Z`."""


@njit(cache=True, nogil=True)
def _lower(block: np.uint64) -> np.uint64:
    """Return eight bytes with ASCII letters in lower case."""
    seven = block & ~_HIGH
    upper = (seven + _FROM_A) & ~(seven + _AFTER_Z) & ~block & _HIGH
    return np.uint64(block | upper >> np.uint64(2))


@njit(cache=True, nogil=True)
def _block(data: Bytes, at: int, width: int) -> np.uint64:
    block = np.uint64(0)
    for place in range(width):
        block |= np.uint64(data[at + place]) << np.uint64(8 * place)
    lowered: np.uint64 = _lower(block)
    return lowered


@njit(cache=True, nogil=True)
def bytes_hash(data: Bytes, start: int, stop: int) -> np.uint64:
    """Return the hash of `data[start:stop]`, whatever the case of its ASCII letters; never 0."""
    state, at = _SEED ^ np.uint64(stop - start), start
    while at + 8 <= stop:
        state = (state ^ _block(data, at, 8)) * _FACTOR
        state ^= state >> np.uint64(32)
        at += 8
    if at < stop:
        state = (state ^ _block(data, at, stop - at)) * _FACTOR
    value = mixed(state)
    return value if value != 0 else np.uint64(1)


@njit(cache=True, nogil=True)
def line_end(data: Bytes, at: int, stop: int) -> int:
    """Return the place of the next newline from `at` on, or `stop`."""
    while at < stop and data[at] != _NEWLINE:
        at += 1
    return at


@njit(cache=True, nogil=True)
def bare(data: Bytes, start: int, stop: int) -> tuple[int, int]:
    """Return (start, stop) of a line without the blanks (bytes up to U+0020) at both ends."""
    while start < stop and data[start] <= _SPACE:
        start += 1
    while stop > start and data[stop - 1] <= _SPACE:
        stop -= 1
    return start, stop


@njit(cache=True, nogil=True)
def _shorter(data: Bytes, start: int, stop: int, chars: int) -> bool:
    """Return whether there are fewer than `chars` characters."""
    if stop - start >= 4 * chars:  # no character has more than four bytes
        return False
    for at in range(start, stop):
        chars -= (data[at] & _LEAD) != _CONTINUES
    return chars > 0


@njit(cache=True, nogil=True)
def _is_fence(data: Bytes, start: int, stop: int) -> bool:
    """Return whether a line begins with three backticks or tildes."""
    if stop - start < 3 or data[start] not in (_BACKTICK, _TILDE):
        return False
    return bool(data[start] == data[start + 1] == data[start + 2])


@njit(cache=True, nogil=True)
def count_newlines(data: Bytes, offsets: Offsets) -> int:
    """Return how many newlines the texts have together."""
    count = 0
    for at in range(offsets[0], offsets[-1]):
        count += data[at] == _NEWLINE
    return count


@njit(cache=True, nogil=True)
def hash_lines(data: Bytes, offsets: Offsets, min_chars: int, hashes: Hashes, ends: Offsets) -> None:
    """Write the hash of every line and where in `hashes` each text's lines end.

    It is 0 for those shorter than `min_chars`, and for fences of code: to open one and not close it breaks the text.
    """
    count = 0
    for text in range(len(offsets) - 1):
        at, stop = offsets[text], offsets[text + 1]
        while at <= stop:
            end = line_end(data, at, stop)
            first, last = bare(data, at, end)
            stays = _is_fence(data, first, last) or _shorter(data, first, last, min_chars)
            hashes[count] = np.uint64(0) if stays else bytes_hash(data, first, last)
            count, at = count + 1, end + 1
        ends[text + 1] = count


@njit(cache=True, nogil=True)
def hash_strings(data: Bytes, offsets: Offsets, hashes: Hashes) -> None:
    """Write the hash of every text as a whole."""
    for text in range(len(offsets) - 1):
        hashes[text] = bytes_hash(data, offsets[text], offsets[text + 1])


@njit(cache=True, nogil=True)
def line_keys(lines: Hashes, offsets: Offsets, groups: Hashes, keys: Hashes, texts: Offsets) -> int:
    """Write the key of every line that has a hash, the text it stands in, and return how many there are.

    A key is the hash of a line among the documents of one group.
    """
    count = 0
    for text in range(len(groups)):
        for place in range(offsets[text], offsets[text + 1]):
            if lines[place] != 0:
                keys[count], texts[count] = mixed(lines[place] ^ groups[text]), text
                count += 1
    return count


@njit(cache=True, nogil=True)
def repeated_words(hashes: Hashes, words: int, gram: int, slots: Places, grams: Hashes, cover: Flags) -> int:
    """Return how many of a line's words lie in a `gram`-gram that the line holds more than once.

    `slots` is zeroed, a power of two above twice the words, and is left zeroed; `grams` and `cover` have room for all
    words.
    """
    count = words - gram + 1
    if count < 2:
        return 0
    state, top, last = np.uint64(0), top_of(gram), np.uint64(len(slots) - 1)
    cover[:words] = 0
    for at in range(words):
        state = roll(state, hashes, at, gram, top)
        if at < gram - 1:
            continue
        first = at - gram + 1
        grams[first] = gram_key(state, gram)
        slot = grams[first] & last
        while slots[slot] != 0 and grams[slots[slot] - 1] != grams[first]:
            slot = (slot + np.uint64(1)) & last
        if slots[slot] == 0:
            slots[slot] = first + 1
        else:
            cover[first] = cover[slots[slot] - 1] = 1
    covered: int = _covered(grams, count, words, gram, slots, cover)
    return covered


@njit(cache=True, nogil=True)
def _covered(grams: Hashes, count: int, words: int, gram: int, slots: Places, cover: Flags) -> int:
    """Return the number of words inside grams marked in `cover`, and zero the slots."""
    slots[:] = 0
    until = 0
    covered = 0
    for at in range(words):
        if at < count and cover[at]:
            until = at + gram
        covered += at < until
    return int(covered)


@njit(cache=True, nogil=True)
def mark_copies(lines: Hashes, offsets: Offsets, groups: Hashes, bad: Table, marks: Flags) -> None:
    """Set the mark of every line whose key is in `bad`."""
    slots, where, filters = bad
    for text in range(len(groups)):
        for place in range(offsets[text], offsets[text + 1]):
            if lines[place] != 0 and place_of(slots, where, filters, mixed(lines[place] ^ groups[text])) >= 0:
                marks[place] = COPY


@njit(cache=True, nogil=True)
def mark_repeats(data: Bytes, offsets: Offsets, rule: Rule, marks: Flags) -> None:
    """Set the mark of every line of which more than the allowed share repeats itself: see `repeated_words`."""
    room = 1
    for text in range(len(offsets) - 1):
        room = max(room, offsets[text + 1] - offsets[text])
    spans, grams, cover = np.empty((2, room), np.int64), np.empty((2, room), np.uint64), np.empty(room, np.uint8)
    slots = np.zeros(_power_above(2 * room), np.int32)
    line = 0
    for text in range(len(offsets) - 1):
        at, stop = offsets[text], offsets[text + 1]
        while at <= stop:
            end = line_end(data, at, stop)
            if marks[line] == KEEP and _repeats(data, at, end, rule, spans, grams, cover, slots):
                marks[line] = REPEAT
            line, at = line + 1, end + 1


@njit(cache=True, nogil=True)
def strip(data: Bytes, offsets: Offsets, marks: Flags, lines: Offsets, out: Bytes, ends: Offsets) -> int:
    """Write the texts without their marked lines, and where each ends in `out`; return how many bytes there are.

    The marks of text i are marks[lines[i] : lines[i + 1]].
    """
    at = 0
    for text in range(len(offsets) - 1):
        gone = 0
        for line in range(lines[text], lines[text + 1]):
            gone += marks[line] != KEEP
        if gone:
            at = _join(data, offsets[text], offsets[text + 1], marks[lines[text] : lines[text + 1]], out, at)
        else:
            at = _append(data, offsets[text], offsets[text + 1], out, at)
        ends[text + 1] = at
    return at


@njit(cache=True, nogil=True)
def _power_above(least: int) -> int:
    power = 1
    while power <= least:
        power *= 2
    return power


@njit(cache=True, nogil=True)
def _repeats(
    data: Bytes, start: int, stop: int, rule: Rule, spans: Offsets, grams: Hashes, cover: Flags, slots: Places
) -> bool:
    """Return whether more than the allowed share of a line's words lies in n-grams that it holds more than once."""
    gram, numerator, denominator = rule
    if stop - start < 2 * gram + 1:  # too few bytes for gram + 1 words
        return False
    words = find_words(data, start, stop, spans[0], spans[1], grams[0])
    size = _power_above(2 * words)
    covered = repeated_words(grams[0], words, gram, slots[:size], grams[1], cover)
    return bool(covered * denominator > numerator * words)


@njit(cache=True, nogil=True)
def _append(data: Bytes, start: int, stop: int, out: Bytes, at: int) -> int:
    for place in range(stop - start):  # a slice takes 3 s longer to compile
        out[at + place] = data[start + place]
    return at + stop - start


@njit(cache=True, nogil=True)
def _join(data: Bytes, start: int, stop: int, marks: Flags, out: Bytes, at: int) -> int:
    """Write the unmarked lines of a text, joined by newlines, and return where they end.

    Blank lines after a removed line go with it where a blank line or nothing stands before it, and at the end of the
    text those before it go too: a paragraph that goes leaves no hole.
    """
    solid, gap, blank_before, empty = at, False, True, True
    for mark in marks:
        end = line_end(data, start, stop)
        first, last = bare(data, start, end)
        blank = first == last
        if mark != KEEP:
            gap = True
        elif not (blank and gap and blank_before):
            if not empty:
                out[at] = _NEWLINE
                at += 1
            at = _append(data, start, end, out, at)
            empty, blank_before = False, blank
            if not blank:
                gap, solid = False, at
        start = end + 1
    return solid if gap else at
