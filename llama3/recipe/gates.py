"""Rules that a recipe writes as phrases: a stage's learning rate, promotion gates and the scores that they judge."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.units import _Quantity
from herd.llama3.statistics.significance import Z, normal_pass, usual_margin

_NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)"
_METRIC = re.compile(r"eval(/[a-z0-9_.*-]+)+")
MAX_ITEMS = 10_000_000
"""Largest number of items suggested to the user; beyond it the difference is too close to the allowance."""


@dataclass(frozen=True)
class StageRate(_Quantity):
    """Learning rate in a stage: linear to `end`, or constant (None), from `start` or from the scheduled rate (None).

    A number alone is constant at that rate.
    """

    end: float | None
    start: float | None = None
    example = "linear to 0"

    @classmethod
    def _parse(cls, text: object) -> Self:
        form = rf"linear (?:from {_NUMBER} )?to {_NUMBER}|constant(?: at {_NUMBER})?"
        if (isinstance(text, str) and re.fullmatch(_NUMBER, text)) or type(text) in (int, float):
            text = f"constant at {text}"
        match = re.fullmatch(form, text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"{text!r} is not a learning-rate rule: write 'linear to 0', 'constant', or with a rate of the stage's "
                "own 'linear from 1e-5 to 0', 'constant at 1e-5', or 1e-5 alone"
            )
        start, end, level = (None if number is None else float(number) for number in match.groups())
        return cls(end, level if start is None else start)

    def __str__(self) -> str:
        if self.end is None:
            return "constant" if self.start is None else f"constant at {self.start:g}"
        return f"linear to {self.end:g}" if self.start is None else f"linear from {self.start:g} to {self.end:g}"


@dataclass(frozen=True)
class ScoreChange:
    """A candidate's score against the champion's, as a rule judges it."""

    candidate: float
    champion: float
    lower_is_better: bool
    worse: float
    """How much worse the candidate is, on the samples of both models if they were compared; below 0: better."""
    upper: float | None = None
    """Upper end of the paired 95 % interval of `worse`; None if no samples were compared."""
    p: float = math.nan
    """After Holm's correction over the `family` scores of the rule if it is `by_p`."""
    family: int = 1
    significant: bool = False
    n: int = 0
    items: str = "questions"
    """What `n` counts: documents or questions."""
    remedy: str = ""
    """How to get more of them; empty: there are no more."""


@dataclass(frozen=True)
class GateRule(_Quantity):
    """What a score must satisfy. A new kind is one subclass of `AbsoluteRule` or `RelativeRule`, in `GATE_RULES`."""

    bound: float = 0.0
    example: ClassVar[str] = "no worse than 0.5%"
    syntax: ClassVar[str] = ""
    """As a recipe writes it, a regular expression in which `{}` is the bound."""
    scale: ClassVar[int] = 1
    """Bound in the recipe / `bound`: 100 for percent and points."""
    by_p: ClassVar[bool] = False
    """Whether the p of the paired difference decides, corrected by Holm over the rule's scores."""

    @classmethod
    def _parse(cls, text: object) -> GateRule:
        for rule in GATE_RULES:
            if isinstance(text, str) and (match := re.fullmatch(rule.syntax.format(_NUMBER), text)):
                return rule(float(match[1]) / rule.scale) if match.groups() else rule()
        examples = [repr(rule.example) for rule in GATE_RULES]
        raise ValueError(f"{text!r} is not a rule: write {', '.join(examples[:-1])} or {examples[-1]}")

    def with_bound(self, bound: float) -> GateRule:
        """Return the rule with another bound, as a recipe writes it: in percent or points."""
        return type(self)(bound / self.scale)

    @property
    def kind(self) -> str:
        """The rule without its bound."""
        return self.syntax.partition(" {}")[0]

    def __str__(self) -> str:
        return self.syntax.removesuffix("?").format(f"{self.bound * self.scale:.12g}")


class AbsoluteRule(GateRule):
    """A rule on the candidate's score alone."""

    def holds(self, value: float) -> bool:
        raise NotImplementedError


class RelativeRule(GateRule):
    """A rule on the difference from the champion's score."""

    percent: ClassVar[bool] = False
    """Whether reasons give differences in percent of the champion's score."""

    def allowance(self, champion: float) -> float:
        """Return how much worse than the champion's a score may be."""
        return 0.0

    def threshold(self, champion: float, lower_is_better: bool) -> float:
        """Return the worst value that passes (`better`: the value to beat)."""
        return champion + (self.allowance(champion) if lower_is_better else -self.allowance(champion))

    def judge(self, change: ScoreChange) -> tuple[bool, str]:
        """Return whether `change` passes, and the condition as text."""
        allowance, text = self.allowance(change.champion), f"allowed {str(self).removeprefix(f'{self.kind} ')}"
        if change.upper is None:
            sign = 1 if change.lower_is_better else -1
            return sign * (change.candidate - self.threshold(change.champion, change.lower_is_better)) <= 0, text
        passed = change.upper <= allowance
        if not passed and change.worse < allowance:
            stderr = (change.upper - change.worse) / Z
            text += f", which {change.n} {change.items} cannot show"
            if allowance:
                text += f" (an equal model passes in {normal_pass(allowance, stderr, 0.0):.0%})"
            # an interval narrows with 1 / sqrt(n): say how many items would show that the difference is allowed
            needed = change.n * (stderr * Z / (allowance - change.worse)) ** 2
            if change.remedy and needed <= MAX_ITEMS:
                text += f"; about {math.ceil(needed):,} would"
            remedy, whole = change.remedy, abs(change.champion) if self.percent else 1.0
            if not remedy and (margin := usual_margin(stderr / whole)):
                remedy = f"write {self.with_bound(margin)} for this task, or judge the mean, eval/core"
            text += f"; {remedy}" if remedy else ""
        return passed, text


class Better(RelativeRule):
    example, syntax, percent = "better", "better", True

    def judge(self, change: ScoreChange) -> tuple[bool, str]:
        if change.upper is None:
            return change.worse < 0, "it must be better"
        return change.upper < 0, "it must be better at the 95% bound"


class NoWorseThan(RelativeRule):
    example, syntax, scale, percent = "no worse than 0.5%", "no worse than {}%", 100, True

    def allowance(self, champion: float) -> float:
        return self.bound * abs(champion)


class NoDropOver(RelativeRule):
    example, syntax, scale = "no drop over 5 points", "no drop over {} points?", 100

    def allowance(self, champion: float) -> float:
        return self.bound


class NoSignificantDrop(RelativeRule):
    example, syntax, by_p = "no significant drop", "no significant drop", True

    def judge(self, change: ScoreChange) -> tuple[bool, str]:
        passed = not (change.worse > 0 and change.significant)
        over = f" after Holm over {change.family}" if change.family > 1 else ""
        return passed, f"p {change.p:.2g}{over}: {'no' if passed else 'a'} significant drop"


class AtMost(AbsoluteRule):
    example, syntax = "at most 2.5", "at most {}"

    def holds(self, value: float) -> bool:
        return value <= self.bound


class AtLeast(AbsoluteRule):
    example, syntax = "at least 0.3", "at least {}"

    def holds(self, value: float) -> bool:
        return value >= self.bound


GATE_RULES: tuple[type[GateRule], ...] = (Better, NoWorseThan, NoDropOver, NoSignificantDrop, AtMost, AtLeast)


def _metric(text: str) -> str:
    """Return `text`. Raises ValueError if no evaluation has such a score."""
    if not _METRIC.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a score: names begin with eval/ and have a-z, 0-9, _, . and - between slashes; "
            "write eval/bpb, eval/bpb/math or a pattern such as eval/bpb/*"
        )
    if text == "eval/short-context":
        raise ValueError(f"{text!r} is measured between sequence lengths only; write it under gates: of that stage")
    means, domain = text.split("/")[1], (*text.split("/"), "")[2]
    if means in ("bpb", "bpb_macro") and domain and not any(matches(domain, name) for name in DOMAINS):
        raise ValueError(f"{text!r}: unknown domain; write one of {', '.join(DOMAINS)}")
    return text


Metric = Annotated[str, AfterValidator(_metric)]
"""Name of a score (`eval/bpb/math`) or a pattern; `*` matches any text between two slashes."""


def matches(pattern: str, metric: str) -> bool:
    """Return whether `metric` matches `pattern`."""
    return re.fullmatch("[^/]*".join(map(re.escape, pattern.split("*"))), metric) is not None


def assign_rules(patterns: Iterable[str], metrics: Iterable[str]) -> dict[str, list[str]]:
    """Return pattern -> its metrics, sorted; each metric goes to the most exact pattern.

    A name is more exact than a pattern, then more letters win, then the first. A name always gets itself, also if it is
    not in `metrics`.
    """
    assigned: dict[str, list[str]] = {pattern: [] if "*" in pattern else [pattern] for pattern in patterns}
    for metric in sorted(set(metrics) - assigned.keys()):
        if matching := [pattern for pattern in assigned if "*" in pattern and matches(pattern, metric)]:
            assigned[max(matching, key=lambda pattern: len(pattern.replace("*", "")))].append(metric)
    return assigned


def default_policy() -> dict[str, GateRule]:
    """Return the default rules: better bits per byte, no worse in any domain, no drop in the mean of the tasks."""
    policy = {
        "eval/bpb": "better",
        "eval/bpb/*": "no worse than 1%",
        "eval/core": "no drop over 6 points",
        "eval/*": "no significant drop",
    }
    return {metric: GateRule.parse(rule) for metric, rule in policy.items()}
