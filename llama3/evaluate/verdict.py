"""What one rule says of one score: passed or not, the number to meet, and a sentence with every number in it.

With a paired difference a rule is judged by its 95 % interval or its p; without one (the gates between sequence
lengths) by the values alone. What cannot be judged fails, and the sentence says what to do about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llama3.evaluate.significance import DOCUMENTS, LEVEL, Difference
from llama3.recipe.rules import GateRule

MOST = 10_000_000
"""Items beyond which no number is named: the difference is too near to what is allowed."""


class Judged(Protocol):
    """What the gate reads of a score."""

    @property
    def value(self) -> float: ...
    @property
    def better(self) -> str: ...
    @property
    def requests(self) -> str: ...


class Verdict(NamedTuple):
    passed: bool
    reason: str
    threshold: float | None = None
    """The worst value that passes (`better`: the value to beat), or None where the rule has none."""


@dataclass(frozen=True)
class Case:
    """One rule and all that is known of the score that it judges."""

    metric: str
    rule: GateRule
    candidate: Judged
    champion: Judged
    difference: Difference | None = None
    p: float | None = None
    """After Holm's correction over the `family` scores of the rule."""
    family: int = 1

    @property
    def worse(self) -> float:
        """How much worse the candidate is; below 0 it is better."""
        if self.difference is not None:
            return self.difference.worse[0]
        change = self.candidate.value - self.champion.value
        return change if self.candidate.better == "lower" else -change

    @property
    def threshold(self) -> float | None:
        if self.rule.kind == "no significant drop":
            return None
        return self.champion.value + (self.allowance if self.candidate.better == "lower" else -self.allowance)

    @property
    def allowance(self) -> float:
        """How much worse than the champion's a score may be."""
        match self.rule.kind:
            case "no worse than":
                return self.rule.bound * abs(self.champion.value)
            case "no drop over":
                return self.rule.bound
            case _:
                return 0.0


def absolute(metric: str, rule: GateRule, value: float) -> Verdict:
    """Judge `at most` and `at least`."""
    passed = value <= rule.bound if rule.kind == "at most" else value >= rule.bound
    return Verdict(passed, f"{metric} {number(value)} is {'' if passed else 'not '}{rule}", rule.bound)


def by_values(case: Case) -> Verdict:
    """Judge a rule against the champion's value, without knowing what is noise."""
    threshold = case.threshold
    match case.rule.kind:
        case "better":
            passed, allowed = case.worse < 0, "it must be better"
        case "no worse than" | "no drop over":
            assert threshold is not None
            sign = 1 if case.candidate.better == "lower" else -1
            passed, allowed = sign * (case.candidate.value - threshold) <= 0, f"allowed {_allowance(case.rule)}"
        case "no significant drop":
            return Verdict(False, f"{case.metric}: whether a drop is significant needs the samples of both models")
        case _:
            raise _unknown(case)
    other = case.candidate.requests != case.champion.requests
    note = " (the champion was scored on other requests)" if other else ""
    return Verdict(passed, f"{case.metric} {number(case.candidate.value)} {_change(case)}; {allowed}{note}", threshold)


def by_difference(case: Case) -> Verdict:
    """Judge a rule against the champion by the paired difference: its 95 % bound, or its p."""
    assert case.difference is not None
    upper = case.difference.worse[2]
    said = f"{case.metric} {number(case.candidate.value)} {_change(case)}"
    if not math.isfinite(upper) or case.p is None or not math.isfinite(case.p):
        few = f"{case.difference.n} {_items(case)} are too few for a 95% interval; {_more(case)}"
        return Verdict(False, f"{said}; {few}", case.threshold)
    match case.rule.kind:
        case "better":
            passed, allowed = upper < 0, "it must be better at the 95% bound"
        case "no worse than" | "no drop over":
            passed, allowed = upper <= case.allowance, f"allowed {_allowance(case.rule)}"
            if not passed and case.worse < case.allowance:
                allowed += f", which {case.difference.n} {_items(case)} cannot show; {_needed(case, upper)}"
        case "no significant drop":
            passed = not (case.worse > 0 and case.p < LEVEL)
            over = f" after Holm over {case.family}" if case.family > 1 else ""
            allowed = f"p {case.p:.2g}{over}: {'no' if passed else 'a'} significant drop"
        case _:
            raise _unknown(case)
    return Verdict(passed, f"{said}; {allowed}", case.threshold)


def number(value: float) -> str:
    return f"{round(value, 12) + 0.0:.4g}"  # a mean of zeros may be 1e-17


def _allowance(rule: GateRule) -> str:
    return f"{rule.bound * 100:.12g}{' points' if rule.kind == 'no drop over' else '%'}"


def _change(case: Case) -> str:
    """Say how far from the champion a score is: in percent of it where the rule speaks of percent and it has one."""
    absolute = case.rule.kind in ("no significant drop", "no drop over")
    whole = 0.0 if absolute else abs(case.champion.value)
    unit = "%" if whole else ""
    scale = 100 / whole if whole else 1.0
    better = case.worse < 0
    word = f"is {abs(case.worse) * scale:.3g}{unit} {'better' if better else 'worse'} than"
    text = f"{word if case.worse else 'equals'} champion {number(case.champion.value)}"
    if case.difference is None or not math.isfinite(case.difference.low + case.difference.high):
        return text
    _, low, high = case.difference.worse
    low, high = (-high, -low) if better else (low, high)
    return f"{text} (95% {low * scale + 0.0:.2g}{unit} to {high * scale + 0.0:.2g}{unit})"


def _items(case: Case) -> str:
    assert case.difference is not None
    return "documents" if case.difference.method == DOCUMENTS else "questions"


def _more(case: Case) -> str:
    return "raise evaluate.questions" if _items(case) == "questions" else "raise evaluate.documents or curate.held_out"


def _needed(case: Case, upper: float) -> str:
    """Say how many items would show that the same difference is allowed: an interval narrows with 1 / sqrt(n)."""
    assert case.difference is not None
    half, room, n = upper - case.worse, case.allowance - case.worse, case.difference.n
    if half >= room * math.sqrt(MOST / n):
        return _more(case)
    return f"about {math.ceil(n * (half / room) ** 2):,} would; {_more(case)}"


def _unknown(case: Case) -> ValueError:
    return ValueError(
        f"rule {case.rule.kind!r} of {case.metric} is none of better, no worse than, no drop over, "
        "no significant drop, at most, at least"
    )
