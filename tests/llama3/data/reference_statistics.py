"""The statistics of a document in plain Python: slow, and written in another way than the kernels that it checks."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby

from herd.llama3.data.text.words import (
    ALONE,
    BLANKS,
    BRACKETS,
    ELLIPSES,
    LIST_MARKS,
    PLACEHOLDER,
    QUOTES,
    SENTENCE_ENDS,
    SENTENCE_WORDS,
    SHORT_LINE,
    SPACED_LIST_MARKS,
    STOP_WORDS,
    WIDE_SENTENCE_ENDS,
    WORD,
    joined_words,
    split_words,
)

_LETTER_OR_DIGIT = re.compile(f"(?!_)(?:{WORD.pattern})")
_BETWEEN = "".join(map(re.escape, SENTENCE_ENDS + WIDE_SENTENCE_ENDS + QUOTES + BRACKETS + BLANKS))
_LETTER = re.compile(f"(?![0-9_])(?:{WORD.pattern})")
_GAP = re.compile(f"[{_BETWEEN}]++(?=[^a-z])")
_IS_END = re.compile(
    f"[{re.escape(SENTENCE_ENDS)}][{_BETWEEN}]*[{re.escape(BLANKS)}]|[{re.escape(WIDE_SENTENCE_ENDS)}]", re.DOTALL
)
_LOWER = str.maketrans({chr(upper): chr(upper + 32) for upper in range(0x41, 0x5B)})


def reference_statistics(text: str) -> dict[str, float]:
    """Return the statistics of one text by column."""
    return {
        **_characters(text),
        **_word_statistics(text),
        **_line_statistics(text),
        **_grams(joined_words(text), len(text)),
    }


def _share(part: float, whole: float) -> float:
    return part / max(whole, 1)


def _characters(text: str) -> dict[str, float]:
    symbols = [one for one in text if one not in BLANKS and not _LETTER_OR_DIGIT.match(one)]
    return {
        "chars": len(text),
        "symbol_chars": _share(len(symbols), len(text)),
        "braces": text.count("{") + text.count("}"),
        "placeholder_text": text.translate(_LOWER).count(PLACEHOLDER),
    }


def _word_statistics(text: str) -> dict[str, float]:
    found = joined_words(text)
    between = list(filter(None, re.split(f"[{re.escape(BLANKS)}]+", text)))
    between += [word for word in found if any(low <= ord(word[0]) <= high for low, high in ALONE)]
    return {
        "words": len(found),
        "mean_word": _share(sum(map(len, found)), len(found)),
        "symbols_per_word": _share(max(text.count("#"), sum(map(text.count, ELLIPSES))), len(found)),
        "alphabetic_words": _share(sum(bool(_LETTER.search(one)) for one in between), len(between)),
        "stop_words": len(set(found) & set(STOP_WORDS)),
    }


def _line_statistics(text: str) -> dict[str, float]:
    every = text.split("\n")
    lines = [line for line in every if line.strip(BLANKS)]
    groups = groupby(every, key=lambda line: bool(line.strip(BLANKS)))
    paragraphs = ["\n".join(group) for visible, group in groups if visible]
    stripped = [line.strip(BLANKS) for line in lines]
    repeated, repeated_chars = _repeated([line for line in lines if split_words(line)])
    repeated_paragraphs, repeated_paragraph_chars = _repeated(paragraphs)
    ends = tuple(SENTENCE_ENDS + WIDE_SENTENCE_ENDS)
    return {
        "bullet_lines": _share(sum(map(_bullet, lines)), len(lines)),
        "ellipsis_lines": _share(sum(line.endswith(ELLIPSES) for line in stripped), len(lines)),
        "punctuated_lines": _share(sum(line.endswith(ends) for line in stripped), len(lines)),
        "newlines_per_word": _share(max(len(lines) - 1, 0), len(joined_words(text))),
        "short_lines": _share(sum(len(line) <= SHORT_LINE for line in lines), len(lines)),
        "duplicate_lines": _share(repeated, len(lines)),
        "duplicate_line_chars": _share(repeated_chars, len(text)),
        "duplicate_line_chars_strict": _share(repeated_chars, len(text.replace("\n", ""))),
        "duplicate_paragraphs": _share(repeated_paragraphs, len(paragraphs)),
        "duplicate_paragraph_chars": _share(repeated_paragraph_chars, len(text)),
        "sentences": sum(_sentences(line) for line in stripped if _c4_keeps(line)),
        "sentences_any_line": sum(map(_sentences, stripped)),
    }


def _bullet(line: str) -> bool:
    begin = line.lstrip(BLANKS)
    return begin[0] in LIST_MARKS or (begin[0] in SPACED_LIST_MARKS and begin[1:2] != "" and begin[1] in BLANKS)


def _c4_keeps(line: str) -> bool:
    return line.endswith(tuple(SENTENCE_ENDS + WIDE_SENTENCE_ENDS + QUOTES)) and not line.endswith(ELLIPSES)


def _sentences(line: str) -> int:
    """Return the sentences of a line; 0 if it is too short."""
    if len(split_words(line)) < SENTENCE_WORDS:
        return 0
    return 1 + sum(bool(_IS_END.search(gap)) for gap in _GAP.findall(line))


def _repeated(parts: list[str]) -> tuple[int, int]:
    seen: set[str] = set()
    again = [part for part in parts if part in seen or seen.add(part)]
    return len(again), sum(map(len, again))


def _grams(found: list[str], chars: int) -> dict[str, float]:
    top = {f"top_gram_{size}": _share(_most_frequent(found, size), chars) for size in range(2, 5)}
    return top | {f"duplicate_gram_{size}": _share(_duplicates(found, size), chars) for size in range(5, 11)}


def _most_frequent(found: list[str], size: int) -> int:
    times = Counter(" ".join(found[at : at + size]) for at in range(len(found) - size + 1))
    gram, most = max(times.items(), key=lambda item: item[1], default=("", 0))
    return len(gram) * most if most > 1 else 0


def _duplicates(found: list[str], size: int) -> int:
    seen: set[tuple[str, ...]] = set()
    at = chars = 0
    while at + size <= len(found):
        gram = tuple(found[at : at + size])
        if gram in seen:
            chars += sum(map(len, gram))
            at += size
        else:
            seen.add(gram)
            at += 1
    return chars
