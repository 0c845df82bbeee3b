"""Which language a text is written in: by its script where that decides, else by resiliparse's character profiles.

The profiles know 101 languages and need no file beside the library, but Latin words and code inside a Japanese or
Hindi page pull them to English: there, scripts are counted first and only languages written in the prevailing one are
asked for. About 20 us a text, so it is asked only where neither source nor record names a language, and of a sample.
Limits: on texts of a few hundred characters one in five is wrong, among neighbours (Spanish and Catalan, Danish and
Norwegian) more; a fastText model would know 176 languages and be surer of those. Code is not asked about at all: its
identifiers are English whatever its comments are.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray
from resiliparse.parse.lang import detect_fast

UNDETERMINED = "und"
"""ISO 639-2 code for a language that nobody could tell."""
_SAMPLES, _SAMPLE = 3, 700
"""Pieces of a text that are looked at, and characters in each; four times as many changed one answer in a thousand."""
_MERGED = {"nb": "no", "nn": "no", "iw": "he", "in": "id"}
_SCRIPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("\u3040-\u30ff", ("ja",)),
    ("\uac00-\ud7a3\u1100-\u11ff", ("ko",)),
    ("\u3400-\u9fff", ("zh",)),
    ("\u0e00-\u0e7f", ("th",)),
    ("\u0370-\u03ff\u1f00-\u1fff", ("el",)),
    ("\u0590-\u05ff", ("he", "yi")),
    ("\u0600-\u06ff\u0750-\u077f", ("ar", "fa", "ur", "ps", "sd", "ug")),
    ("\u0900-\u097f", ("hi", "mr", "ne", "sa")),
    ("\u0980-\u09ff", ("bn", "as")),
    ("\u0400-\u052f", ("ru", "uk", "be", "bg", "sr", "mk", "kk", "ky", "tg", "mn", "tt", "ba", "cv", "ce")),
)
"""Ranges of letters, and the languages written with them, the most spoken first; Japanese before Chinese, as it uses
both."""
_LETTER = len(_SCRIPTS)
"""Class of a letter of any other script; above it: no letter."""
_PREVAILS = 0.2
"""Share of the letters from which a script decides; low, since one Chinese sign stands for several Latin letters."""
_TIE = 1.05
_NEVER = 10**9
_KANA = 0.02
"""Share from which kana decides: a fifth of Japanese text can be kanji and code around few kana."""


def detect(text: str) -> str:
    """Return the two-letter language of `text`, or `und`."""
    sample = _sample(text)
    languages = () if sample.isascii() else _written_with(sample)
    if len(languages) == 1:
        return languages[0]
    if languages:
        return _most_likely(re.sub(r"[\x00-\x7f]+", " ", sample), languages)
    if not any(map(str.isalpha, sample)):
        return UNDETERMINED
    code, _ = detect_fast(sample)
    return UNDETERMINED if code == "unknown" else str(code)


def primary(tag: str) -> str:
    """Return the language of a tag or locale: `pt` for `pt_BR.UTF-8` or `pt-BR`; `und` for an empty one."""
    code = tag.replace("-", "_").split("_")[0].split(".")[0].split("@")[0].lower()
    return _MERGED.get(code, code) or UNDETERMINED


def _most_likely(text: str, languages: tuple[str, ...]) -> str:
    """Return the first of `languages` whose profile is about as near as the nearest: short texts often tie."""
    found = detect_fast(text, cutoff=10_000, n_results=len(languages), langs=languages)
    ranks = dict(found) if isinstance(found, list) else {}
    nearest = min(ranks.values(), default=_NEVER)
    return next(language for language in languages if ranks.get(language, _NEVER) <= nearest * _TIE)


def _sample(text: str) -> str:
    """Return pieces of `text` from its inside: headers and licences at the start are English in any language."""
    if len(text) <= _SAMPLES * _SAMPLE:
        return text
    steps = [len(text) * place // (_SAMPLES + 1) for place in range(1, _SAMPLES + 1)]
    return "\n".join(text[step - _SAMPLE // 2 : step + _SAMPLE // 2] for step in steps)


def _written_with(text: str) -> tuple[str, ...]:
    """Return the languages of the script that prevails in `text`; none for Latin and scripts not listed."""
    points = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16)
    counts = np.bincount(_classes()[points], minlength=_LETTER + 2).tolist()
    letters = sum(counts[: _LETTER + 1]) or 1
    for (_, languages), count in zip(_SCRIPTS, counts, strict=False):
        if count / letters >= (_KANA if languages == ("ja",) else _PREVAILS):
            return languages
    return ()


@cache
def _classes() -> NDArray[np.uint8]:
    """Return for every code point below 2^16 the script that it belongs to, _LETTER, or more for what is no letter."""
    table = np.full(1 << 16, _LETTER + 1, np.uint8)
    table[[point for point in range(1 << 16) if chr(point).isalpha()]] = _LETTER
    for number, (letters, _) in enumerate(_SCRIPTS):
        for low, high in re.findall("(.)-(.)", letters):
            table[ord(low) : ord(high) + 1] = number
    return table
