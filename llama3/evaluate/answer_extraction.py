"""Extract the answer from generated text and compare it with the gold answers.

A task gives regular expressions: `GenerationSettings.extract` finds the answer (the last match, because a model that
reasons ends with its answer), `ignore` removes what does not matter ("$1,000." is 1000). Answers are compared as text:
"0.5" is not "1/2".
"""

from __future__ import annotations

from collections.abc import Iterable

import regex

from herd.llama3.evaluate.generation_settings import GenerationSettings

SECONDS = 5.0
"""Processor time of one expression on one text; `re` has no such limit, and some expressions take years."""


class RegexTimeout(ValueError):
    """A regular expression takes longer than SECONDS on a text."""


def replace_matches(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    """Return `text` with the matches of `pattern` replaced, the first `count` of them (0: all), as `re.sub` does.

    Raises RegexTimeout, and `regex.error` if the pattern is invalid.
    """
    try:
        return str(regex.sub(pattern, replacement, text, count=count, timeout=SECONDS))
    except TimeoutError:
        raise RegexTimeout(_too_slow(pattern)) from None


def extract_answer(text: str, writing: GenerationSettings) -> str | None:
    """Return the first group of the last match of the first expression that matches; None if none matches.

    Without expressions the answer is the whole text. Raises RegexTimeout.
    """
    if not writing.extract:
        return text
    for pattern in writing.extract:
        try:
            hits = list(regex.finditer(pattern, text, timeout=SECONDS))
        except TimeoutError:
            raise RegexTimeout(f"writing.extract {_too_slow(pattern)}") from None
        groups = [match.group(1) for match in hits if match.group(1) is not None]
        if groups:
            return str(groups[-1])
    return None


def _too_slow(pattern: str) -> str:
    return f"{pattern!r} takes more than {SECONDS:g} s of processor time; write one without nested repetitions"


def is_correct(text: str, gold: Iterable[str], writing: GenerationSettings) -> bool:
    """Return whether the answer extracted from `text` equals one of `gold`, after `clean_answer` on both sides."""
    answer = extract_answer(text, writing)
    return answer is not None and clean_answer(answer, writing) in {clean_answer(right, writing) for right in gold}


def clean_answer(text: str, writing: GenerationSettings) -> str:
    """Return `text` without surrounding white space and without the matches of `writing.ignore`, in order."""
    text = text.strip()
    for pattern in writing.ignore:
        text = replace_matches(text, pattern, "").strip()
    return text
