"""Small phrases in a recipe that stand for a rule: a stage's learning rate, a promotion gate and what it judges."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from llama3.recipe.base import DOMAINS
from llama3.recipe.units import _Quantity

_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)"
_METRIC = re.compile(r"eval(/[a-z0-9_.*-]+)+")


@dataclass(frozen=True)
class StageRate(_Quantity):
    """Learning rate inside a stage: linear from where it stands to `end`, or held where it stands."""

    end: float | None
    example = "linear to 0"

    @classmethod
    def parse(cls, text: object) -> StageRate:
        if isinstance(text, StageRate):
            return text
        match = re.fullmatch(rf"linear to {_NUMBER}", text) if isinstance(text, str) else None
        if text == "constant":
            return cls(None)
        if match is None:
            raise ValueError(f"{text!r} is not a learning-rate rule: write 'linear to 0' or 'constant'")
        return cls(float(match[1]))

    def __str__(self) -> str:
        return "constant" if self.end is None else f"linear to {self.end:g}"


@dataclass(frozen=True)
class GateRule(_Quantity):
    """What a candidate's metric must satisfy; all but `at most` and `at least` compare it with the champion's."""

    kind: str
    bound: float = 0.0
    example = "no worse than 0.5%"

    @classmethod
    def parse(cls, text: object) -> GateRule:
        if isinstance(text, GateRule):
            return text
        words = text if isinstance(text, str) else ""
        if words in ("better", "no significant drop"):
            return cls(words)
        if match := re.fullmatch(rf"no worse than {_NUMBER}%", words):
            return cls("no worse than", float(match[1]) / 100)
        if match := re.fullmatch(rf"no drop over {_NUMBER} points?", words):
            return cls("no drop over", float(match[1]) / 100)
        if match := re.fullmatch(rf"(at most|at least) {_NUMBER}", words):
            return cls(match[1], float(match[2]))
        raise ValueError(
            f"{text!r} is not a rule: write 'better', 'no worse than 0.5%', 'no drop over 5 points', "
            "'no significant drop', 'at most 2.5' or 'at least 0.3'"
        )

    def __str__(self) -> str:
        if self.kind in ("better", "no significant drop"):
            return self.kind
        if self.kind == "no drop over":
            return f"{self.kind} {self.bound * 100:.12g} points"
        percent = self.kind == "no worse than"
        return f"{self.kind} {self.bound * 100:.12g}%" if percent else f"{self.kind} {self.bound:.12g}"


def _metric(text: str) -> str:
    """Return the name of a score, or a pattern of names. Raises ValueError if no evaluation ever has such a score."""
    if not _METRIC.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a score: names begin with eval/ and have a-z, 0-9, _, . and - between slashes; "
            "write eval/bpb, eval/bpb/math or a pattern such as eval/bpb/*"
        )
    if text == "eval/short-context":
        raise ValueError(f"{text!r} is measured between sequence lengths only; write it under advance: of that stage")
    means, domain = text.split("/")[1], (*text.split("/"), "")[2]
    if means in ("bpb", "bpb_macro") and domain and not any(matches(domain, name) for name in DOMAINS):
        raise ValueError(f"{text!r} is no domain's bits per byte; the domains are {', '.join(DOMAINS)}")
    return text


Metric = Annotated[str, AfterValidator(_metric)]
"""Name of a score (`eval/bpb/math`), or a pattern in which `*` stands for anything between two slashes."""


def matches(pattern: str, metric: str) -> bool:
    """Return whether `metric` is `pattern`, or one of the names that it stands for."""
    return re.fullmatch("[^/]*".join(map(re.escape, pattern.split("*"))), metric) is not None


def assign(patterns: Iterable[str], metrics: Iterable[str]) -> dict[str, list[str]]:
    """Return pattern -> the metrics that it is to judge, sorted: each goes to the most exact pattern that matches it.

    A name is more exact than any pattern, then the one with more letters, then the first. A name without `*` judges
    itself though it is not among `metrics`.
    """
    found: dict[str, list[str]] = {pattern: [] if "*" in pattern else [pattern] for pattern in patterns}
    for metric in sorted(set(metrics) - found.keys()):
        if fitting := [pattern for pattern in found if "*" in pattern and matches(pattern, metric)]:
            found[max(fitting, key=lambda pattern: len(pattern.replace("*", "")))].append(metric)
    return found


def default_policy() -> dict[str, GateRule]:
    """Return the rules of a recipe that gives none: better overall, no domain given up for it, no task lost."""
    policy = {"eval/bpb": "better", "eval/bpb/*": "no worse than 0.5%", "eval/*": "no drop over 5 points"}
    return {metric: GateRule.parse(rule) for metric, rule in policy.items()}
