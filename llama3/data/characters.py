"""Classes of characters that the statistics of documents tell apart, for all scripts: blanks, sentence ends, quotes.

Fixed tables, as in `words.py`: what a document counts as must not change with a Unicode version. What is a letter or a
digit is told there.
"""

from __future__ import annotations

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
