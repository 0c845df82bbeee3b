"""What a word is, for every count that depends on it: filters, near-duplicates, n-gram overlap, word distributions.

A word is a run of letters, digits and underscores. Every letter beyond ASCII counts (a rule like [a-z0-9] would delete
all scripts but one); punctuation and symbols beyond ASCII do not. Scripts written without spaces (Chinese, Japanese,
Thai, Lao) give one word per character, otherwise a whole sentence would be one word. Letters are compared without case
in ASCII only: a fixed table beats one that grows with each Unicode version. This is the plain definition;
`kernels/words.py` is the fast one, and a property test holds the two together.

Statistics of documents take longer words in those scripts (`joined_words`): their bounds are made for languages with
spaces, where five words are some 25 characters.
"""

from __future__ import annotations

import re

ALONE = ((0x0E00, 0x0EFF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
"""Code points each of which is a word: Thai and Lao, kana, Chinese characters."""
JOINED = (
    (0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A), (0xAA, 0xAA), (0xB5, 0xB5), (0xBA, 0xBA), (0xC0, 0x0DFF),
    (0x0F00, 0x1FFF), (0x2C00, 0x2FFF), (0x3100, 0x33FF), (0xA000, 0xF8FF), (0xFB00, 0xFEFF), (0xFF10, 0xFFEF),
    (0x10000, 0x10FFFF),
)  # fmt: skip
"""Code points that form words together with their neighbours."""

JOINT = 0x9E3779B1
"""Odd 32-bit factor of the hash of two neighbors by which words of scripts without spaces are cut."""
THAI_LAO = ALONE[0]


def _range(bounds: tuple[int, int]) -> str:
    return f"{re.escape(chr(bounds[0]))}-{re.escape(chr(bounds[1]))}"


WORD = re.compile(f"[{''.join(map(_range, ALONE))}]|[{''.join(map(_range, JOINED))}]+")
_LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}


def words(text: str) -> list[str]:
    """Return the words of `text` in order, ASCII letters in lower case."""
    return WORD.findall(text.translate(_LOWER))


def joined_words(text: str) -> list[str]:
    """Return the words of `text` with neighbors in scripts without spaces joined to words of 2 or, in Thai and Lao, 4.

    That is their mean length, as a dictionary would cut. A hash of both neighbors decides where a word ends, so the
    same phrase is cut in the same way wherever it stands.
    """
    found: list[str] = []
    end = -1
    for match in WORD.finditer(text.translate(_LOWER)):
        word = match[0]
        if match.start() == end and _alone(found[-1][-1]) and _alone(word[0]) and not _cut(found[-1][-1], word[0]):
            found[-1] += word
        else:
            found.append(word)
        end = match.end()
    return found


def _alone(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in ALONE)


def _cut(left: str, right: str) -> bool:
    mixed = (ord(left) * 31 + ord(right)) * JOINT % 2**32
    return mixed >> 30 < (1 if THAI_LAO[0] <= ord(right) <= THAI_LAO[1] else 2)


# Classes of characters that the statistics of documents tell apart, for all scripts: blanks, sentence ends, quotes.
#
# Fixed tables, as in `words.py`: what a document counts as must not change with a Unicode version. What is a letter
# or a digit is told there.

BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
SENTENCE_ENDS = ".!?…‼⁇⁈⁉։؟۔।॥။።፧៕"
"""Characters that end a sentence where a blank follows."""
WIDE_SENTENCE_ENDS = "。．！？｡"
"""Characters of scripts without blanks, that end a sentence whatever follows."""
QUOTES = "\"'”’»›」』"
"""Closing quotation marks; a sentence or a line may end with one."""
BRACKETS = ")]}）】"
LIST_MARKS = "-•‣◦▪●"
"""What a line of a list begins with; Gopher's rule says "bullet point" only, datatrove takes the first two."""
SPACED_LIST_MARKS = "*·"
"""These begin a line of a list where a blank follows; else `**` is emphasis."""
ELLIPSES = ("...", "…")
PLACEHOLDER = "lorem ipsum"
"""Beginning of the printer's filler text, which stands on pages that nobody finished."""
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Gopher's: two of them occur in nearly every English text of 50 words."""
SHORT_LINE = 30
"""Characters up to which a line is short (FineWeb, arXiv 2406.17557, section 3.4)."""
SENTENCE_WORDS = 3
"""Words that a line needs for its sentences to count (C4, arXiv 1910.10683, section 2.2)."""
