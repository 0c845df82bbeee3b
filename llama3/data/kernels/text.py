"""Cleaning of UTF-8 text as bytes: find the texts that need it, and rewrite them. The fast form of `text/normalize.py`.

`scan` only looks: 5 GB/s for ASCII, where it vectorizes, 200 to 400 MB/s for other scripts. `clean` rewrites flagged
texts at about 500 MB/s. `compose` writes the texts flagged UNCOMPOSED in NFC, by the tables of Python's unicodedata,
which itself composes 20 MB/s.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Bytes, Offsets
from herd.llama3.data.kernels.words import code_point

UNCLEAN, UNCOMPOSED, GARBLED, LONG_RUN = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8)
"""Flags of `scan`: `clean` would change the text; NFC may change it; it may have been decoded wrongly; it may have
MOST_MARKS combining marks in a row once it is clean."""
MOST_MARKS = 1000
IS_MARK = np.array([unicodedata.combining(chr(point)) != 0 for point in range(0x1F000)])
"""Whether a code point is a combining mark; none above is."""
_DELETE = np.uint8(127)
_TAB, _NEWLINE, _RETURN, _BLANK = np.uint8(9), np.uint8(10), np.uint8(13), np.uint8(32)
_MOST_NEWLINES = 3
_KEEP, _DROP, _BREAK = 0, 1, 2
_GARBLED_AFTER_C3 = np.zeros(256, np.uint8)
"""Second byte of a letter that comes from a UTF-8 lead byte decoded as Latin-1 or Windows-1252 -> number of non-ASCII
characters that then follow it."""
for _letters, _followers in (("ÂÃÄÅÎÏÐÑ×ØÙ", 1), ("âãäåæçèéð", 2)):
    _GARBLED_AFTER_C3[[ord(_letter) - 0x40 for _letter in _letters]] = _followers
_LOOK = np.uint8(9)


def _leads() -> Bytes:
    """Return for every lead byte the width of its characters if none of them needs a check, else _LOOK."""
    table = np.full(256, _LOOK, np.uint8)
    table[:0x80] = 1
    table[0xC4:0xCC] = table[0xD0:0xD2] = 2
    table[0xE4:0xEA] = table[0xEB:0xEE] = 3
    return table


_LEADS = _leads()


@njit(cache=True, nogil=True)
def scan(data: Bytes, starts: Offsets, stops: Offsets, flags: Bytes) -> None:
    """Write the flags of text i, `data[starts[i] : stops[i]]`, to `flags[i]`.

    Strips newlines at both ends and blanks at the end by moving `starts` and `stops`; most texts need nothing else.
    """
    for i in range(len(starts)):
        start, stop = starts[i], stops[i]
        while stop > start and (data[stop - 1] == _NEWLINE or data[stop - 1] == _BLANK or data[stop - 1] == _TAB):
            stop -= 1
        while start < stop and data[start] == _NEWLINE:
            start += 1
        starts[i], stops[i] = start, stop
        text = data[start:stop]
        plain, unclean = _scan_ascii(text)
        flags[i] = UNCLEAN if unclean else np.uint8(0)
        if not plain:
            flags[i] = np.uint8(flags[i] | _scan_wide(text))


@njit(cache=True, nogil=True)
def clean(data: Bytes, starts: Offsets, stops: Offsets, flags: Bytes, out: Bytes, ends: Offsets) -> None:
    """Write all texts to `out` consecutively, cleaned if flagged; text i ends at `ends[i + 1]`, int64[n + 1].

    `out` needs room for all bytes: cleaning never makes a text longer.
    """
    at = 0
    ends[0] = 0
    for i in range(len(starts)):
        start, stop = starts[i], stops[i]
        if flags[i] & UNCLEAN:
            at = _clean_text(data[start:stop], out, at)
        else:
            out[at : at + stop - start] = data[start:stop]
            at += stop - start
        ends[i + 1] = at


@njit(cache=True, nogil=True)
def _scan_ascii(text: Bytes) -> tuple[bool, bool]:
    """Return whether `text` is ASCII, and whether its ASCII bytes need cleaning."""
    # Plain loops over uint8 without branches, so that they vectorize.
    size, high, bad = len(text), np.uint8(0), np.uint8(0)
    for i in range(size):
        byte = text[i]
        # The wrapped subtraction tests 11 <= byte < 32 in one comparison.
        control = np.uint8(np.uint8(byte - np.uint8(11)) < np.uint8(21)) | np.uint8(byte < _TAB)
        high = np.uint8(high | byte)
        bad = np.uint8(bad | control | np.uint8(byte == np.uint8(127)))
    for i in range(size - 1):
        blank = np.uint8(text[i] == _BLANK) | np.uint8(text[i] == _TAB)
        bad = np.uint8(bad | (blank & np.uint8(text[i + 1] == _NEWLINE)))
    for i in range(size - 3):
        two = np.uint8(text[i] == _NEWLINE) & np.uint8(text[i + 1] == _NEWLINE)
        more = np.uint8(text[i + 2] == _NEWLINE) & np.uint8(text[i + 3] == _NEWLINE)
        bad = np.uint8(bad | (two & more))
    return bool(high < np.uint8(128)), bool(bad != np.uint8(0))


@njit(cache=True, nogil=True)
def _scan_wide(text: Bytes) -> np.uint8:
    """Return the flags of the non-ASCII characters."""
    unclean, uncomposed, garbled, size = False, False, False, len(text)
    at = marks = most = 0
    while at < size:
        kind = _LEADS[text[at]]
        if kind < _LOOK:
            if text[at] >= _BLANK and text[at] != _DELETE:  # `clean` drops controls, which joins the marks around them
                marks = 0
            at += int(kind)
            continue
        width, action = _width(text[at]), _action(text, at, _width(text[at]))
        unclean |= action != _KEEP
        garbled |= _garbled(text, at, size)
        unsure = not _composed(text, at)
        uncomposed |= unsure
        if unsure and _is_mark(text, at):
            marks += 1
            most = max(most, marks)
        elif action == _KEEP:
            marks = 0
        at += width
    flags = (UNCLEAN if unclean else 0) | (UNCOMPOSED if uncomposed else 0) | (GARBLED if garbled else 0)
    return np.uint8(flags | (LONG_RUN if most >= MOST_MARKS else 0))


@njit(cache=True, nogil=True)
def _width(lead: np.uint8) -> int:
    if lead < np.uint8(0xE0):
        return 2
    return 3 if lead < np.uint8(0xF0) else 4


@njit(cache=True, nogil=True)
def _action(text: Bytes, at: int, width: int) -> int:
    """Return the action for the non-ASCII character at `at`: drop controls, turn Unicode line ends into newlines."""
    lead, second = text[at], text[at + 1]
    if width == 2:
        if lead == np.uint8(0xC2) and second < np.uint8(0xA0):
            return _BREAK if second == np.uint8(0x85) else _DROP
        return _KEEP
    if lead == np.uint8(0xE2) and second == np.uint8(0x80):
        third = text[at + 2]
        return _BREAK if third == np.uint8(0xA8) or third == np.uint8(0xA9) else _KEEP
    if lead == np.uint8(0xEF):
        third = text[at + 2]
        mark = second == np.uint8(0xBB) and third == np.uint8(0xBF)
        return _DROP if mark or (second == np.uint8(0xBF) and third >= np.uint8(0xBE)) else _KEEP
    return _KEEP


@njit(cache=True, nogil=True)
def _garbled(text: Bytes, at: int, size: int) -> bool:
    """Return whether the character at `at` is typical of mojibake; coarse, `text/normalize.py` decides."""
    lead, second = text[at], text[at + 1]
    if lead == np.uint8(0xC2):
        return bool(second < np.uint8(0xA0))
    followers = np.int64(_GARBLED_AFTER_C3[second]) if lead == np.uint8(0xC3) else 0
    position = at + 2
    for _ in range(followers):
        if position >= size or text[position] < np.uint8(0x80):
            return False
        position += _width(text[position])
    return bool(followers > 0)


@njit(cache=True, nogil=True)
def _composed(text: Bytes, at: int) -> bool | np.bool_:
    """Return whether NFC surely keeps the character at `at`: it neither changes nor joins the one before it.

    True for Latin, Cyrillic, Chinese and Korean letters and usual punctuation; False if unsure.
    """
    lead, second = text[at], text[at + 1]
    if lead < np.uint8(0xCC) or lead == np.uint8(0xD0) or lead == np.uint8(0xD1):
        return True
    if lead == np.uint8(0xE2):
        return second == np.uint8(0x80) and text[at + 2] >= np.uint8(0x82)
    if lead == np.uint8(0xE3):
        return second == np.uint8(0x81) or second == np.uint8(0x83)
    if lead == np.uint8(0xEA):
        return second >= np.uint8(0xB0)
    return np.uint8(0xE4) <= lead <= np.uint8(0xED)


@njit(cache=True, nogil=True)
def _is_mark(text: Bytes, at: int) -> bool:
    point, _ = code_point(text, at)
    return bool(point < len(IS_MARK) and IS_MARK[point])


@njit(cache=True, nogil=True)
def _clean_text(text: Bytes, out: Bytes, begin: int) -> int:
    """Write the clean form of `text` to `out[begin:]` and return its end."""
    at, end, size, newlines = 0, begin, len(text), 0
    while at < size:
        lead = text[at]
        if _BLANK <= lead < np.uint8(127):
            out[end] = lead
            newlines = newlines if lead == _BLANK else 0
            at, end = at + 1, end + 1
            continue
        action, width = _action_of(text, at, size)
        if action == _BREAK:
            end = _without_blanks(out, begin, end)
            if end > begin and newlines < _MOST_NEWLINES:
                out[end] = _NEWLINE
                end, newlines = end + 1, newlines + 1
        elif action == _KEEP:
            for position in range(at, at + width):
                out[end] = text[position]
                end += 1
            newlines = newlines if width == 1 else 0
        at += width
    end = _without_blanks(out, begin, end)
    while end > begin and out[end - 1] == _NEWLINE:
        end -= 1
    return end


@njit(cache=True, nogil=True)
def _action_of(text: Bytes, at: int, size: int) -> tuple[int, int]:
    """Return the action for the control or non-ASCII character at `at`, and its width in bytes."""
    lead = text[at]
    if lead >= np.uint8(0x80):
        width = _width(lead)
        return _action(text, at, width), width
    if lead == _TAB:
        return _KEEP, 1
    if lead == _RETURN and at + 1 < size and text[at + 1] == _NEWLINE:
        return _BREAK, 2
    return (_BREAK if _NEWLINE <= lead <= _RETURN else _DROP), 1


@njit(cache=True, nogil=True)
def _without_blanks(out: Bytes, begin: int, end: int) -> int:
    while end > begin and (out[end - 1] == _BLANK or out[end - 1] == _TAB):
        end -= 1
    return end


# Composition (NFC; Unicode Standard Annex 15)

_LIMIT = 0x30000
"""No code point from here on composes, decomposes or is a mark."""
_ASIDE = ((0x3400, 0xA000), (0xAC00, 0xD7A4), (0x1F000, 0x2F800))
"""Ranges of code points without a decomposition in a table: Chinese characters and Korean syllables."""
_STARTER, _MARK, _CHANGES = range(3)
"""What NFC does with a code point: nothing ends or begins before it; a mark that only moves; it may change or join."""
_L, _V, _T, _S = 0x1100, 0x1161, 0x11A7, 0xAC00
_CONSONANTS, _VOWELS, _FINALS, _SYLLABLES = 19, 21, 28, 11172
"""First letters of Korean, before the first final one, and the first syllable; how many there are of each."""
_LONGEST = 4
"""Code points of the longest decomposition."""


class NFCTables(NamedTuple):
    """Tables of NFC, by code point below _LIMIT."""

    kinds: Bytes
    classes: Bytes
    """Canonical combining class."""
    parts: NDArray[np.int32]
    """int32[_LIMIT, 2]: first element and length of the decomposition in `points`; length 0: itself."""
    points: NDArray[np.int32]
    columns: NDArray[np.int16]
    """int16[_LIMIT, 2]: row and column of a code point in `pairs`, as the first and as the second; 0: in none."""
    pairs: NDArray[np.int32]
    """What two code points compose to; 0: nothing."""


@cache
def composition() -> NFCTables:
    """Return the tables of this Python's Unicode version; 0.05 s, once."""
    kinds, classes = np.zeros(_LIMIT, np.uint8), np.zeros(_LIMIT, np.uint8)
    parts, points = np.zeros((_LIMIT, 2), np.int32), list[int]()
    columns, pairs = np.zeros((_LIMIT, 2), np.int16), dict[tuple[int, int], int]()
    aside = np.zeros(_LIMIT, np.bool_)
    for low, high in _ASIDE:
        aside[low:high] = True
    for point in np.flatnonzero(~aside).tolist():
        letter = chr(point)
        classes[point] = unicodedata.combining(letter)
        kinds[point] = _MARK if classes[point] else _STARTER
        written = unicodedata.decomposition(letter)
        if written and not written.startswith("<"):
            whole = unicodedata.normalize("NFD", letter)
            parts[point] = len(points), len(whole)
            points += map(ord, whole)
            if unicodedata.normalize("NFC", letter) == letter:
                first, second = (int(half, 16) for half in written.split())
                pairs[first, second] = point
            else:
                kinds[point] = _CHANGES
    seconds = {second: number for number, second in enumerate(sorted({second for _, second in pairs}), 1)}
    firsts = {first: number for number, first in enumerate(sorted({first for first, _ in pairs}), 1)}
    table = np.zeros((len(firsts) + 1, len(seconds) + 1), np.int32)
    for (first, second), point in pairs.items():
        table[firsts[first], seconds[second]] = point
    columns[list(firsts), 0] = list(firsts.values())
    columns[list(seconds), 1] = list(seconds.values())
    kinds[[*seconds, *range(_V, _V + _VOWELS), *range(_T + 1, _T + _FINALS)]] = _CHANGES
    return NFCTables(kinds, classes, parts, np.array(points, np.int32), columns, table)


@njit(cache=True, nogil=True)
def compose(data: Bytes, offsets: Offsets, flags: Bytes, tables: NFCTables, out: Bytes, ends: Offsets) -> int:
    """Write all texts to `out` consecutively, in NFC if flagged UNCOMPOSED; return 1 if that changed any, else 0.

    Text i is data[offsets[i] : offsets[i + 1]] and ends at ends[i + 1]. `out` needs room for three times the bytes of
    flagged texts. Takes linear time if no text has more than MOST_MARKS marks in a row.
    """
    points, classes = np.empty(64, np.int64), np.empty(64, np.uint8)
    at, changed = 0, 0
    ends[0] = 0
    for i in range(len(offsets) - 1):
        text = data[offsets[i] : offsets[i + 1]]
        copied = 0
        if flags[i] & UNCOMPOSED:
            start = begin = position = 0
            size, before, dirty = len(text), 0, False
            while position <= size:
                kind, width, point = _STARTER, 1, 0
                if position < size and text[position] >= np.uint8(0x80):
                    point, width = code_point(text, position)
                    kind = tables.kinds[point] if point < _LIMIT else _STARTER
                if kind == _STARTER:
                    if dirty:  # the characters from `start` belong together
                        at = _copy(text, copied, start, out, at)
                        if _LONGEST * (position - start) > len(points):
                            points = np.empty(2 * _LONGEST * (position - start), np.int64)
                            classes = np.empty(len(points), np.uint8)
                        begin, at = at, _write_composed(text, start, position, tables, points, classes, out, at)
                        changed = changed or _differ(text, start, position, out, begin, at)
                        copied = position
                    start, before, dirty = position, 0, False
                else:
                    own = int(tables.classes[point])
                    dirty |= kind == _CHANGES or own < before
                    before = own
                position += width
                while not dirty and position + 1 < size and (text[position] | text[position + 1]) < np.uint8(0x80):
                    position += 1
        at = _copy(text, copied, len(text), out, at)
        ends[i + 1] = at
    return changed


@njit(cache=True, nogil=True)
def _copy(text: Bytes, start: int, stop: int, out: Bytes, at: int) -> int:
    for position in range(start, stop):
        out[at + position - start] = text[position]
    return at + stop - start


@njit(cache=True, nogil=True)
def _differ(text: Bytes, start: int, stop: int, out: Bytes, begin: int, end: int) -> int:
    if stop - start != end - begin:
        return 1
    for position in range(stop - start):
        if text[start + position] != out[begin + position]:
            return 1
    return 0


@njit(cache=True, nogil=True)
def _write_composed(
    text: Bytes, start: int, stop: int, tables: NFCTables, points: Offsets, classes: Bytes, out: Bytes, end: int
) -> int:
    """Write the characters text[start:stop] in NFC to `out[end:]` and return where they end."""
    count = 0
    while start < stop:
        point, width = code_point(text, start)
        start += width
        first, length = (tables.parts[point, 0], tables.parts[point, 1]) if point < _LIMIT else (0, 0)
        for number in range(max(length, 1)):
            part = np.int64(tables.points[first + number]) if length else point
            own, place = tables.classes[part] if part < _LIMIT else np.uint8(0), count
            while own and place and classes[place - 1] > own:  # marks in the order of their classes
                points[place], classes[place] = points[place - 1], classes[place - 1]
                place -= 1
            points[place], classes[place] = part, own
            count += 1
    starter, last = -1, 0
    for number in range(count):
        point, own = points[number], classes[number]
        if starter >= 0 and (last - 1 == starter or classes[last - 1] < own):
            whole = _pair(points[starter], point, tables)
            if whole:
                points[starter] = whole
                continue
        points[last], classes[last] = point, own
        starter = last if own == 0 else starter
        last += 1
    for number in range(last):
        end = _encode(points[number], out, end)
    return end


@njit(cache=True, nogil=True)
def _pair(first: int, second: int, tables: NFCTables) -> int:
    """Return the code point that two compose to, or 0."""
    if first >= _LIMIT or second >= _LIMIT:
        return 0
    if _V <= second < _V + _VOWELS and _L <= first < _L + _CONSONANTS:
        return _S + ((first - _L) * _VOWELS + second - _V) * _FINALS
    if _T < second < _T + _FINALS and _S <= first < _S + _SYLLABLES and (first - _S) % _FINALS == 0:
        return first + second - _T
    return int(tables.pairs[tables.columns[first, 0], tables.columns[second, 1]])


@njit(cache=True, nogil=True)
def _encode(point: int, out: Bytes, end: int) -> int:
    """Write a code point in UTF-8 and return where it ends."""
    if point < 0x80:
        out[end] = point
        return end + 1
    if point < 0x800:
        out[end], out[end + 1] = 0xC0 | point >> 6, 0x80 | point & 0x3F
        return end + 2
    if point < 0x10000:
        out[end], out[end + 1], out[end + 2] = 0xE0 | point >> 12, 0x80 | point >> 6 & 0x3F, 0x80 | point & 0x3F
        return end + 3
    out[end], out[end + 1] = 0xF0 | point >> 18, 0x80 | point >> 12 & 0x3F
    out[end + 2], out[end + 3] = 0x80 | point >> 6 & 0x3F, 0x80 | point & 0x3F
    return end + 4
