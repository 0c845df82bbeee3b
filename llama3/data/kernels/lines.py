"""Kernels over the lines of texts: line hashes, which lines to remove, removal, and one scan of a line for statistics.

Lines are equal if they are equal without blanks at both ends and ignoring ASCII case. Digits and punctuation count,
unlike in ccNet, where `x = 3` and `x = 7` would be one line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from herd.llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from herd.llama3.data.kernels.ngrams import Flags, Positions, Table, gram_key, gram_weight, key_index, roll
from herd.llama3.data.kernels.words import CLASSES, NONE, WITH_OTHERS, code_point, find_words, mix64
from herd.llama3.data.text import words

KEEP, COPY, REPEAT = 0, 1, 2
"""Marks of a line; lines with COPY or REPEAT are removed."""
CONTINUES, BOUND = np.uint8(1), np.uint8(2)
"""Flags of a line, of `paragraphs.line_flags`: it continues the paragraph of the line before; it is part of a table, a
fenced block or a pair."""
Rule = tuple[int, int, int]
"""Words per n-gram; numerator and denominator of the largest share of repeated words."""
_NEWLINE, _SPACE = np.uint8(10), np.uint8(32)
_CONTINUES, _LEAD = np.uint8(0x80), np.uint8(0xC0)
_SEED, _FACTOR = np.uint64(0x9AE16A3B2F90404F), np.uint64(0x9E3779B97F4A7C15)
_HIGH = np.uint64(0x8080808080808080)
_FROM_A, _AFTER_Z = np.uint64(0x3F3F3F3F3F3F3F3F), np.uint64(0x2525252525252525)
"""Added to seven-bit bytes, these set the high bit of bytes >= `A`, and of bytes > `Z`."""
BLANK, END, WIDE_END, QUOTE, BRACKET, LIST_MARK, COUNTED, SPACED_MARK = (1 << bit for bit in range(8))
"""Traits of a character; COUNTED: it may add to `counts`."""
NUMBER_SIGN, ELLIPSIS, BRACE, PLACEHOLDER = range(4)
"""Elements of `counts`; these characters are rare in a text."""
NEWLINE, DOT, UNDERSCORE = np.uint8(0x0A), 0x2E, 0x5F
_SPACE_BYTE = np.uint8(0x20)
_NUMBER_SIGN, _OPENING, _CLOSING, _ELLIPSIS = 0x23, 0x7B, 0x7D, 0x2026
_BETWEEN = BLANK | END | WIDE_END | QUOTE | BRACKET
"""Traits of characters allowed between two sentences."""
_AFTER_END, _BEFORE_NEXT = 1, 2
"""States of `pending` after a sentence end: before and after the blank that must follow it."""
_PLANE = len(CLASSES)


def _traits() -> Bytes:
    table = np.zeros(_PLANE, np.uint8)
    for trait, members in (
        (BLANK, words.BLANKS),
        (END, words.SENTENCE_ENDS),
        (WIDE_END, words.WIDE_SENTENCE_ENDS),
        (QUOTE, words.QUOTES),
        (BRACKET, words.BRACKETS),
        (LIST_MARK, words.LIST_MARKS),
        (SPACED_MARK, words.SPACED_LIST_MARKS),
        (COUNTED, "#{}.…"),
    ):
        table[[ord(member) for member in members]] |= np.uint8(trait)
    return table


TRAITS = _traits()
_PLAIN = np.array([byte < 0x80 and chr(byte).isalnum() for byte in range(256)])
_PLACEHOLDER = np.frombuffer(words.PLACEHOLDER.encode(), np.uint8).copy()
_PLACEHOLDER_BLANK = words.PLACEHOLDER.index(" ")
_FNV_SEED = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)


@njit(cache=True, nogil=True)
def _lower_block(data: Bytes, at: int, width: int) -> np.uint64:
    """Return up to eight bytes as one integer, with ASCII letters in lower case."""
    block = np.uint64(0)
    for position in range(width):
        block |= np.uint64(data[at + position]) << np.uint64(8 * position)
    seven = block & ~_HIGH
    upper = (seven + _FROM_A) & ~(seven + _AFTER_Z) & ~block & _HIGH
    return np.uint64(block | upper >> np.uint64(2))


@njit(cache=True, nogil=True)
def bytes_hash(data: Bytes, start: int, stop: int) -> np.uint64:
    """Return the hash of `data[start:stop]`, ignoring ASCII case; never 0."""
    # Our own hash, because hashes go into files. 500 MB/s on one core by eight bytes at a time; by single bytes, 350.
    state, at = _SEED ^ np.uint64(stop - start), start
    while at + 8 <= stop:
        state = (state ^ _lower_block(data, at, 8)) * _FACTOR
        state ^= state >> np.uint64(32)
        at += 8
    if at < stop:
        state = (state ^ _lower_block(data, at, stop - at)) * _FACTOR
    value = mix64(state)
    return value if value != 0 else np.uint64(1)


@njit(cache=True, nogil=True)
def line_end(data: Bytes, at: int, stop: int) -> int:
    """Return the position of the next newline at or after `at`, or `stop`."""
    while at < stop and data[at] != _NEWLINE:
        at += 1
    return at


@njit(cache=True, nogil=True)
def strip_blanks(data: Bytes, start: int, stop: int) -> tuple[int, int]:
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
def count_newlines(data: Bytes, offsets: Offsets) -> int:
    """Return the number of newlines in all texts."""
    count = 0
    for at in range(offsets[0], offsets[-1]):
        count += data[at] == _NEWLINE
    return count


@njit(cache=True, nogil=True)
def hash_lines(data: Bytes, offsets: Offsets, flags: Flags, min_chars: int, hashes: Hashes, ends: Offsets) -> None:
    """Write the hash of every line, and where in `hashes` the lines of each text end.

    `flags` are those of `line_flags`. A paragraph of several lines has its hash at the first one. The others, lines
    shorter than `min_chars` and lines that are bound to others get 0: without them the rest would be broken.
    """
    count = paragraph = 0
    for text in range(len(offsets) - 1):
        at, stop = offsets[text], offsets[text + 1]
        while at <= stop:
            end = line_end(data, at, stop)
            first, last = strip_blanks(data, at, end)
            if flags[count] & CONTINUES:
                hashes[count] = np.uint64(0)
                if hashes[paragraph] != 0:
                    hashes[paragraph] = mix64(hashes[paragraph] ^ bytes_hash(data, first, last)) | np.uint64(1)
            else:
                kept = flags[count] & BOUND or _shorter(data, first, last, min_chars)
                hashes[count] = np.uint64(0) if kept else bytes_hash(data, first, last)
                paragraph = count
            count, at = count + 1, end + 1
        ends[text + 1] = count


@njit(cache=True, nogil=True)
def hash_strings(data: Bytes, offsets: Offsets, hashes: Hashes) -> None:
    """Write the hash of every text as a whole."""
    for text in range(len(offsets) - 1):
        hashes[text] = bytes_hash(data, offsets[text], offsets[text + 1])


@njit(cache=True, nogil=True)
def line_keys(lines: Hashes, offsets: Offsets, groups: Hashes, keys: Hashes, texts: Offsets) -> int:
    """Write the key and the text index of every line that has a hash, and return their number.

    A key is the hash of a line and the group of its document.
    """
    count = 0
    for text in range(len(groups)):
        for position in range(offsets[text], offsets[text + 1]):
            if lines[position] != 0:
                keys[count], texts[count] = mix64(lines[position] ^ groups[text]), text
                count += 1
    return count


@njit(cache=True, nogil=True)
def repeated_words(hashes: Hashes, words: int, gram: int, slots: Positions, grams: Hashes, cover: Flags) -> int:
    """Return how many of a line's words are in a `gram`-gram that occurs more than once in the line.

    `slots` is zeroed before and after; its size is a power of two above twice the words. `grams` and `cover` have room
    for all words.
    """
    count = words - gram + 1
    if count < 2:
        return 0
    state, top, last = np.uint64(0), gram_weight(gram), np.uint64(len(slots) - 1)
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
    slots[:] = 0
    until, covered = 0, 0
    for at in range(words):
        if at < count and cover[at]:
            until = at + gram
        covered += at < until
    return int(covered)


@njit(cache=True, nogil=True)
def mark_copies(lines: Hashes, offsets: Offsets, groups: Hashes, bad: Table, marks: Flags) -> None:
    """Mark every line whose key is in `bad`."""
    slots, where, filters = bad
    for text in range(len(groups)):
        for position in range(offsets[text], offsets[text + 1]):
            if lines[position] != 0 and key_index(slots, where, filters, mix64(lines[position] ^ groups[text])) >= 0:
                marks[position] = COPY


@njit(cache=True, nogil=True)
def mark_repeats(data: Bytes, offsets: Offsets, flags: Flags, rule: Rule, marks: Flags) -> None:
    """Mark every line whose share of `repeated_words` exceeds the rule, but for those that belong to others."""
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
            alone = flags[line] == 0 and (end == stop or flags[line + 1] & CONTINUES == 0)
            if alone and marks[line] == KEEP and _repeats(data, at, end, rule, spans, grams, cover, slots):
                marks[line] = REPEAT
            line, at = line + 1, end + 1


@njit(cache=True, nogil=True)
def mark_continued(flags: Flags, marks: Flags) -> None:
    """Mark the lines that continue a marked one."""
    for line in range(1, len(flags)):
        if flags[line] & CONTINUES:
            marks[line] = marks[line - 1]


@njit(cache=True, nogil=True)
def write_unmarked(data: Bytes, offsets: Offsets, marks: Flags, lines: Offsets, out: Bytes, ends: Offsets) -> int:
    """Write the texts without their marked lines, and where each ends in `out`; return the number of bytes.

    The marks of text i are marks[lines[i] : lines[i + 1]].
    """
    at = 0
    for text in range(len(offsets) - 1):
        removed = 0
        for line in range(lines[text], lines[text + 1]):
            removed += marks[line] != KEEP
        if removed:
            at = _join(data, offsets[text], offsets[text + 1], marks[lines[text] : lines[text + 1]], out, at)
        else:
            at = _append(data, offsets[text], offsets[text + 1], out, at)
        ends[text + 1] = at
    return at


@njit(cache=True, nogil=True)
def removed_spans(data: Bytes, offsets: Offsets, marks: Flags, lines: Offsets, spans: Offsets, inside: Offsets) -> int:
    """Write where the marked lines are, and how many per text were cut out of a block; return the number of spans.

    A span, int64[4], is a text, the first of its characters and the one after the last, and the mark, of lines that
    follow each other; `spans` has room for each marked line. `inside` counts the lines with an unmarked one before and
    after them and no blank line in between.
    """
    count = 0
    for text in range(len(offsets) - 1):
        first, last = lines[text], lines[text + 1]
        inside[text] = 0
        if not (marks[first:last] != KEEP).any():
            continue
        at, char, before, pending, mark_before = offsets[text], 0, False, 0, KEEP
        for mark in marks[first:last]:
            end = line_end(data, at, offsets[text + 1])
            start, stop = strip_blanks(data, at, end)
            begin = char
            for position in range(at, end):
                char += (data[position] & _LEAD) != _CONTINUES
            if mark != KEEP:
                if mark != mark_before:
                    spans[count, 0], spans[count, 1], spans[count, 3] = text, begin, mark
                    count += 1
                spans[count - 1, 2] = char
                pending += before
            elif start == stop:
                before, pending = False, 0
            else:
                inside[text] += pending
                before, pending = True, 0
            at, char, mark_before = end + 1, char + 1, mark
    return count


@njit(cache=True, nogil=True)
def _power_above(least: int) -> int:
    power = 1
    while power <= least:
        power *= 2
    return power


@njit(cache=True, nogil=True)
def _repeats(
    data: Bytes, start: int, stop: int, rule: Rule, spans: Offsets, grams: Hashes, cover: Flags, slots: Positions
) -> bool:
    """Return whether the share of `repeated_words` of a line exceeds the rule."""
    gram, numerator, denominator = rule
    if stop - start < 2 * gram + 1:  # too few bytes for gram + 1 words
        return False
    words = find_words(data, start, stop, spans[0], spans[1], grams[0])
    size = _power_above(2 * words)
    covered = repeated_words(grams[0], words, gram, slots[:size], grams[1], cover)
    return bool(covered * denominator > numerator * words)


@njit(cache=True, nogil=True)
def _append(data: Bytes, start: int, stop: int, out: Bytes, at: int) -> int:
    for position in range(stop - start):  # a slice takes 3 s longer to compile
        out[at + position] = data[start + position]
    return at + stop - start


@njit(cache=True, nogil=True)
def _join(data: Bytes, start: int, stop: int, marks: Flags, out: Bytes, at: int) -> int:
    """Write the unmarked lines of a text, joined by newlines, and return where they end.

    A removed paragraph leaves no gap: blank lines after a removed line are removed too if a blank line or nothing
    precedes it, and at the end of the text also those before it.
    """
    solid, gap, blank_before, empty = at, False, True, True
    for mark in marks:
        end = line_end(data, start, stop)
        first, last = strip_blanks(data, start, end)
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


class LineScan(NamedTuple):
    """Result of a scan of a line."""

    end: int
    """Byte after the last one, excluding the newline."""
    hash: int
    """Compared within a document only."""
    chars: int
    symbols: int
    """Characters that are neither letters, digits nor blanks."""
    words: int
    inner_ends: int
    """Sentence ends that are followed by another sentence in this line."""
    first: int
    """Position of the first non-blank character; `end` if the line is blank."""
    last: int
    """Position of the last non-blank character."""


@njit(cache=True, nogil=True)
def scan_line(data: Bytes, start: int, stop: int, counts: Offsets) -> LineScan:
    """Scan the line of `data[start:stop]` that begins at `start`, and add its rare characters to `counts`.

    ASCII words and the blanks between them, most of a text, take a fast path. Some 200 MB/s on one core.
    """
    # `pending`: what was read since the last sentence end. A character moves it so; quotes and brackets keep it.
    #
    #                 . ! ?                 blank                  next sentence: inner_ends + 1
    #   0 (no end) ----------> _AFTER_END ----------> _BEFORE_NEXT ------------------------------> 0
    #       ^                       |                      |
    #       +--- any other ---------+                      +--- a lower-case ASCII letter -------> 0   ("e.g. this")
    #
    #   A wide end (of Chinese: no blank follows it) leads from each state to _BEFORE_NEXT.
    #
    # `inside`: the character before belongs to a word; a word is counted at its first character. `dots`: dots in a row,
    # every third of which is an ellipsis.
    at, state = start, _FNV_SEED
    chars = symbols = words = inner_ends = pending = dots = 0
    inside = False
    while at < stop and data[at] != NEWLINE:
        byte = data[at]
        if _PLAIN[byte]:
            begin, words = at, words + (not inside)
            inner_ends += pending == _BEFORE_NEXT and not np.uint8(0x61) <= byte <= np.uint8(0x7A)  # not lower-case
            while at < stop and _PLAIN[data[at]]:
                state = (state ^ np.uint64(data[at])) * _PRIME
                at += 1
            chars, inside, pending, dots = chars + at - begin, True, 0, 0
            continue
        if byte == _SPACE_BYTE:
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
            if point == _NUMBER_SIGN:
                counts[NUMBER_SIGN] += 1
            elif point == _ELLIPSIS or (point == DOT and dots % 3 == 0):
                counts[ELLIPSIS] += 1
            elif point in (_OPENING, _CLOSING):
                counts[BRACE] += 1
        symbols += (kind == NONE and traits & BLANK == 0) or point == UNDERSCORE
        inner_ends += pending == _BEFORE_NEXT and traits & _BETWEEN == 0
        if traits & WIDE_END:
            pending = _BEFORE_NEXT
        elif traits & END:
            pending = max(pending, _AFTER_END)
        elif traits & BLANK:
            pending = _BEFORE_NEXT if pending else 0
        elif traits & _BETWEEN == 0:
            pending = 0
        for position in range(at, at + width):
            state = (state ^ np.uint64(data[position])) * _PRIME
        at, chars = at + width, chars + 1
    first, last = _visible(data, start, at)
    return LineScan(at, mix64(state), chars, symbols, words, inner_ends, first, last)


@njit(cache=True, nogil=True)
def _class_and_traits(point: int) -> tuple[int, int]:
    if point >= _PLANE:
        return WITH_OTHERS, 0
    kind: Any = np.int64(CLASSES[point])
    traits: Any = np.int64(TRAITS[point])
    return kind, traits


@njit(cache=True, nogil=True)
def _visible(data: Bytes, start: int, end: int) -> tuple[int, int]:
    """Return where the first and the last non-blank character start; (end, end) for a blank line."""
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
def _is_placeholder(data: Bytes, at: int, start: int, stop: int) -> bool:
    """Return whether the placeholder text, in any case, has its blank at `at` in a line that begins at `start`."""
    begin = at - _PLACEHOLDER_BLANK
    if begin < start or begin + len(_PLACEHOLDER) > stop:
        return False
    for position in range(len(_PLACEHOLDER)):
        byte = data[begin + position]
        if byte != _PLACEHOLDER[position] and (
            byte | np.uint8(0x20) != _PLACEHOLDER[position] or byte < np.uint8(0x41)
        ):
            return False
    return True


@njit(cache=True, nogil=True)
def traits_at(data: Bytes, at: int) -> int:
    """Return the traits of the character that starts at `at`."""
    point, _ = code_point(data, at)
    traits: int = _class_and_traits(point)[1]
    return traits


@njit(cache=True, nogil=True)
def is_bullet(data: Bytes, line: LineScan) -> bool:
    """Return whether the non-blank `line` begins with a list mark."""
    point, width = code_point(data, line.first)
    traits = _class_and_traits(point)[1]
    after = line.first + width
    spaced = traits & SPACED_MARK != 0 and after < line.end and traits_at(data, after) & BLANK != 0
    return bool(traits & LIST_MARK != 0 or spaced)


@njit(cache=True, nogil=True)
def ends_with_ellipsis(data: Bytes, line: LineScan) -> bool:
    """Return whether the last non-blank character of `line` is an ellipsis or the third of three dots."""
    point, _ = code_point(data, line.last)
    dots = point == DOT and line.last - 2 >= line.first
    ellipsis: bool = point == _ELLIPSIS or (dots and data[line.last - 1] == DOT and data[line.last - 2] == DOT)
    return ellipsis
