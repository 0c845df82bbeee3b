"""What of a written answer counts, and whether it is right.

A model does not only answer: it explains, and writes a number as "$1,000." or "1000". A task says with regular
expressions what is taken from the text (`Writing.extract`) and what does not matter in it (`Writing.ignore`). The last
match counts, because a model that reasons ends with its answer. What this gives up: answers are compared as text, so
"0.5" is not "1/2".
"""

from __future__ import annotations

from collections.abc import Iterable

import regex

from llama3.evaluate.sampling import check_sampling
from llama3.evaluate.task import Writing

SECONDS = 5.0
"""Processor time of one expression on one text. `re` has no such limit, and some expressions take years."""


class TooSlow(ValueError):
    """A regular expression that takes longer than SECONDS on a text."""


def replaced(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    """Return `text` with what matches `pattern` replaced, the first `count` times (0: always), as `re.sub` does.

    Raises TooSlow, and `regex.error` where the pattern is not a regular expression.
    """
    try:
        return str(regex.sub(pattern, replacement, text, count=count, timeout=SECONDS))
    except TimeoutError:
        raise TooSlow(_too_slow(pattern)) from None


def _too_slow(pattern: str) -> str:
    return f"{pattern!r} takes more than {SECONDS:g} s of processor time; write one without nested repetitions"


def extracted(text: str, writing: Writing) -> str | None:
    """Return the first group of the last match of the first expression that matches; None if none does.

    Without expressions the whole text counts. Raises TooSlow.
    """
    if not writing.extract:
        return text
    for pattern in writing.extract:
        try:
            matched = list(regex.finditer(pattern, text, timeout=SECONDS))
        except TimeoutError:
            raise TooSlow(f"writing.extract {_too_slow(pattern)}") from None
        found = [match.group(1) for match in matched if match.group(1) is not None]
        if found:
            return str(found[-1])
    return None


def matches(text: str, gold: Iterable[str], writing: Writing) -> bool:
    """Return whether what counts of the answer `text` equals one of `gold`, after `cleaned` on both sides."""
    answer = extracted(text, writing)
    return answer is not None and cleaned(answer, writing) in {cleaned(right, writing) for right in gold}


def cleaned(text: str, writing: Writing) -> str:
    """Return `text` without white space around it and without what `writing.ignore` matches, in order."""
    text = text.strip()
    for pattern in writing.ignore:
        text = replaced(text, pattern, "").strip()
    return text


def check_writing(writing: Writing) -> None:
    """Raise ValueError, naming field and value, for settings that cannot be followed."""
    check_sampling(writing.temperature, writing.top_p)
    for name, least in (("max_tokens", 1), ("samples", 1)):
        if getattr(writing, name) < least:
            raise ValueError(f"writing.{name} {getattr(writing, name)} must be at least {least}")
    if writing.seconds <= 0:
        raise ValueError(f"writing.seconds {writing.seconds} must be above 0")
    if writing.samples > 1 and writing.temperature == 0:
        raise ValueError(
            f"writing.samples {writing.samples} at temperature 0 would be equal; raise writing.temperature or take 1"
        )
    if "" in writing.until:
        raise ValueError("writing.until has an empty text, at which every answer ends; take it out")
    _compiled("ignore", writing.ignore)
    for pattern in _compiled("extract", writing.extract):
        if not pattern.groups:
            raise ValueError(f"writing.extract {pattern.pattern!r} has no group; put what counts into brackets: (...)")


def _compiled(name: str, patterns: tuple[str, ...]) -> list[regex.Pattern[str]]:
    made = []
    for pattern in patterns:
        try:
            made.append(regex.compile(pattern))
        except regex.error as error:
            raise ValueError(f"writing.{name} {pattern!r} is not a regular expression ({error}); correct it") from error
    return made
