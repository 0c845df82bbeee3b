"""Definition of a word for filters, deduplication, n-gram overlap and word distributions; see `kernels/words.py`.

A word is a run of letters, digits and underscores of any script, without case in ASCII. In scripts without spaces
(Chinese, Japanese, Thai, Lao) each character is a word, except for the statistics of documents (`joined_words`), whose
bounds are made for languages with spaces. The tables are fixed, so that no count changes with a Unicode version.
"""

from __future__ import annotations

import re

ALONE = ((0x0E00, 0x0EFF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
"""Code points that are a word each: Thai and Lao, kana, Chinese characters."""
JOINED = (
    (0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A), (0xAA, 0xAA), (0xB5, 0xB5), (0xBA, 0xBA), (0xC0, 0x0DFF),
    (0x0F00, 0x1FFF), (0x2C00, 0x2FFF), (0x3100, 0x33FF), (0xA000, 0xF8FF), (0xFB00, 0xFEFF), (0xFF10, 0xFFEF),
    (0x10000, 0x10FFFF),
)  # fmt: skip
"""Code points that form words together with their neighbours."""

JOINT = 0x9E3779B1
"""Odd 32-bit factor of the hash of two neighbors by which words of scripts without spaces are cut."""
THAI_LAO = ALONE[0]


_ALONE, _JOINED = (
    "".join(f"{re.escape(chr(low))}-{re.escape(chr(high))}" for low, high in ranges) for ranges in (ALONE, JOINED)
)
WORD = re.compile(f"[{_ALONE}]|[{_JOINED}]+")
BARE_WORD = re.compile(f"[{_ALONE}]|(?!_)[{_JOINED}]+(?<!_)")
"""A word without the underscores at its ends: Markdown writes `_word_` for emphasis. `____` is none."""
_LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}


def split_words(text: str) -> list[str]:
    """Return the words of `text` in order, ASCII letters in lower case."""
    return WORD.findall(text.translate(_LOWER))


def joined_words(text: str) -> list[str]:
    """Return the words of `text` with neighbors in scripts without spaces joined to words of 2 or, in Thai and Lao, 4.

    That is the mean length of a word in a dictionary. A hash of both neighbors decides where a word ends, so that a
    phrase is cut in the same way everywhere.
    """
    joined: list[str] = []
    end, before = -1, 0
    for match in WORD.finditer(text.translate(_LOWER)):
        first = ord(match[0][0])
        first = first if any(low <= first <= high for low, high in ALONE) else 0
        joins = match.start() == end and before and first
        if joins and (before * 31 + first) * JOINT % 2**32 >> 30 >= (1 if THAI_LAO[0] <= first <= THAI_LAO[1] else 2):
            joined[-1] += match[0]
        else:
            joined.append(match[0])
        end, before = match.end(), first
    return joined


# Classes of characters for the statistics of documents, for all scripts

BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
SENTENCE_ENDS = ".!?…‼⁇⁈⁉։؟۔।॥။።፧៕"
"""Characters that end a sentence where a blank follows."""
WIDE_SENTENCE_ENDS = "。．！？｡"
"""Characters of scripts without blanks; they always end a sentence."""
QUOTES = "\"'”’»›」』"
"""Closing quotation marks; a sentence or a line may end with one."""
BRACKETS = ")]}）】"
LIST_MARKS = "-•‣◦▪●"
"""First character of a line of a list. Gopher says "bullet point" only; datatrove takes the first two."""
SPACED_LIST_MARKS = "*·"
"""First character of a line of a list if a blank follows; otherwise `**` is emphasis."""
ELLIPSES = ("...", "…")
PLACEHOLDER = "lorem ipsum"
"""Beginning of the filler text of unfinished pages."""
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Gopher's: two of them occur in nearly every English text of 50 words."""
SHORT_LINE = 30
"""Characters up to which a line is short (FineWeb, arXiv 2406.17557, section 3.4)."""
SENTENCE_WORDS = 3
"""Words that a line needs for its sentences to count (C4, arXiv 1910.10683, section 2.2)."""
