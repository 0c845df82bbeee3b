"""Counts over the lines and paragraphs of a document: lengths, repetitions, list marks, punctuation, sentences.

Lines and paragraphs are compared by 64-bit hashes in one table of open addressing, so that a million equal lines cost
what a million different ones do.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit

from llama3.data.characters import SENTENCE_WORDS, SHORT_LINE
from llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from llama3.data.kernels.line_scan import (
    END,
    NEWLINE,
    QUOTE,
    WIDE_END,
    Line,
    ends_with_ellipsis,
    is_bullet,
    scan_line,
    traits_at,
)  # fmt: skip
from llama3.data.kernels.words import mixed


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
def _add_line(data: Bytes, line: Line, table: Hashes, tally: Offsets) -> None:
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
