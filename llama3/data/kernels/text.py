"""Cleaning of UTF-8 text as bytes: find the texts that need it, and rewrite them. The fast form of `text/normalize.py`.

`scan` only looks: 5 GB/s for ASCII, where it vectorizes, 200 to 400 MB/s for other scripts. `clean` rewrites flagged
texts at about 500 MB/s. Neither composes characters (NFC): `scan` flags the texts where it may matter, and Python's
Unicode tables decide.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numba import njit

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
