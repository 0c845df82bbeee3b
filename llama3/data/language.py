"""Which language a text is written in: by its script where that decides, else by resiliparse's character profiles.

The profiles know 101 languages at about 200 MB/s per core and need no file beside the library, but Latin words and code
inside a Japanese or Hindi page pull them to English: there, scripts are counted first and only languages written in the
prevailing one are asked for. A fastText model would know 176 languages and be surer of short texts. Code is not
asked about at all: its identifiers are English whatever its comments are.
"""

from __future__ import annotations

import re

from resiliparse.parse.lang import detect_fast

UNDETERMINED = "und"
"""ISO 639-2 code for a language that nobody could tell."""
_SAMPLE = 8_000
"""Characters looked at, taken from the middle: headers and licences at the start are English in any language."""
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
_COUNTERS = tuple((re.compile(f"[{letters}]"), languages) for letters, languages in _SCRIPTS)
_LETTER = re.compile(r"[^\W\d_]")
_PREVAILS = 0.2
"""Share of the letters from which a script decides; low, since one Chinese sign stands for several Latin letters."""
_TIE = 1.05
_NEVER = 10**9
_KANA = 0.02
"""Share from which kana decides: a fifth of Japanese text can be kanji and code around few kana."""


def detect(text: str) -> str:
    """Return the two-letter language of `text`, or `und`."""
    start = max(0, (len(text) - _SAMPLE) // 2)
    sample = text[start : start + _SAMPLE]
    languages = () if sample.isascii() else _written_with(sample)
    if len(languages) == 1:
        return languages[0]
    if languages:
        return _most_likely(re.sub(r"[\x00-\x7f]+", " ", sample), languages)
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


def _written_with(text: str) -> tuple[str, ...]:
    """Return the languages of the script that prevails in `text`; none for Latin and scripts not listed."""
    letters = len(_LETTER.findall(text)) or 1
    for counter, languages in _COUNTERS:
        share = len(counter.findall(text)) / letters
        if share >= (_KANA if languages == ("ja",) else _PREVAILS):
            return languages
    return ()
