"""How a model generates its answers, and the checks of these settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import regex


@dataclass(frozen=True)
class GenerationSettings:
    """How a model generates its answers, and how they are compared."""

    max_tokens: int = 256
    until: tuple[str, ...] = ()
    """Stop texts, which are not part of the answer. The end token always ends it."""
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    """Answers to each prompt; the score is the mean over them, or pass@k."""
    extract: tuple[str, ...] = ()
    """Regular expressions, tried in order on an answer; the first group of the last match is compared."""
    ignore: tuple[str, ...] = ()
    """Regular expressions whose matches are removed from answer and gold before they are compared."""
    seconds: float = 5.0
    """Processor time of one program."""
    k: int = 1
    """A question is solved if one of `k` answers is right (pass@k); more `samples` than `k` narrow the estimate."""
    top_k: int = 0
    repetition_penalty: float = 1.0
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def check_sampling(temperature: float, top_p: float, top_k: int = 0, repetition_penalty: float = 1.0) -> None:
    """Raise ValueError, naming field and value, for settings that no token can be drawn with."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {temperature} must be 0 or more; 0 takes the likeliest token")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be in (0, 1]; 1 draws from all tokens")
    if top_k < 0:
        raise ValueError(f"top_k {top_k} must be 0 or more; 0 draws from all tokens")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty {repetition_penalty} must be above 0; 1 changes nothing")


def check_generation_settings(writing: GenerationSettings) -> None:
    """Raise ValueError, naming field and value, for invalid settings."""
    check_sampling(writing.temperature, writing.top_p, writing.top_k, writing.repetition_penalty)
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
    for name, patterns in (("ignore", writing.ignore), ("extract", writing.extract)):
        for pattern in patterns:
            try:
                groups = regex.compile(pattern).groups
            except regex.error as error:
                raise ValueError(
                    f"writing.{name} {pattern!r} is not a regular expression ({error}); correct it"
                ) from error
            if name == "extract" and not groups:
                raise ValueError(f"writing.extract {pattern!r} has no group; put what counts into brackets: (...)")
