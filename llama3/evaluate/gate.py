"""The promotion gate: may a candidate model replace the champion, and why; one row per rule and score.

A pure function of rules, scores and paired differences, all kept as `Evidence`, so that a stored decision can be
replayed. A missing or non-finite score fails its rule by name. Bits per byte can decide because paired they separate
close checkpoints; accuracies cannot, so they only veto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from llama3.evaluate.significance import DOCUMENTS, LEVEL, Difference, Number, holm
from llama3.recipe.gates import GateRule, assign

INTEGRITY = "integrity/finite"
COMPARING = ("better", "no worse than", "no drop over", "no significant drop")
"""Rules that compare with the champion; the others are `at most` and `at least`."""
MOST = 10_000_000
"""Largest number of items suggested to the user; beyond it the difference is too close to the allowance."""


class GateScore(Protocol):
    """What the gate reads of a score."""

    @property
    def value(self) -> float: ...
    @property
    def better(self) -> str: ...
    @property
    def requests(self) -> str: ...


Table = Mapping[str, GateScore]
Differences = Mapping[str, Difference]


class Unfinished(RuntimeError):
    """A check could not finish because of the machine: it says nothing about the model."""


class NotJudged(ValueError):
    """A score that a rule judges has questions that were not judged."""


class Check(BaseModel):
    """A fact about the candidate that was established before: digests, reload, logits, contamination, serving."""

    model_config = ConfigDict(frozen=True)

    metric: str
    """`integrity/digests`, `serving/smoke`, ..."""
    passed: bool
    reason: str
    rule: str = "must hold"
    checked: bool = True
    """False: there was nothing to check."""


class MeasuredScore(BaseModel):
    """What a decision reads of a score."""

    model_config = ConfigDict(frozen=True)

    value: Number
    better: Literal["lower", "higher"]
    requests: str
    """First 12 characters of the digest of the requests."""


class GateRow(BaseModel):
    """The verdict on one rule and score."""

    model_config = ConfigDict(frozen=True)

    metric: str
    rule: str
    candidate: float | None
    """None if the score is missing or not finite (JSON has no NaN); the reason says which."""
    champion: float | None
    threshold: float | None
    """The worst value that passes (`better`: the value to beat), or None if there was nothing to compare with."""
    passed: bool
    reason: str
    difference: float | None = None
    """Candidate minus champion on the samples that both have; None if not compared."""
    low: float | None = None
    """Lower end of its paired 95 % interval."""
    high: float | None = None
    p: float | None = None
    """Two-sided; for `no significant drop` after Holm's correction over the scores of the rule."""
    checked: bool = True
    """False if there was nothing to check; `passed` is then true and means only that nothing failed."""

    @property
    def verdict(self) -> str:
        """`pass`, `fail` or `not checked`."""
        return ("pass" if self.passed else "fail") if self.checked else "not checked"

    @property
    def uncompared(self) -> bool:
        """Whether a rule that compares passed because there is no champion yet."""
        return self.passed and not self.is_fact and self.champion is None and self.threshold is None

    @property
    def is_fact(self) -> bool:
        """Whether the row is a check or a person's decision instead of a rule about a score."""
        return not self.metric.startswith("eval/")


class Decision(BaseModel):
    """The verdict on a candidate: accepted if every row passed. `model_dump_json` and back is exact."""

    model_config = ConfigDict(frozen=True)

    accepted: bool
    rows: tuple[GateRow, ...]

    @property
    def refusals(self) -> list[str]:
        """The reasons of the rows that failed."""
        return [row.reason for row in self.rows if not row.passed]


class Evidence(BaseModel):
    """All inputs of a decision. Survives JSON exactly, so `decide()` replays a stored decision."""

    model_config = ConfigDict(frozen=True)

    rules: dict[str, GateRule]
    candidate: dict[str, MeasuredScore]
    champion: dict[str, MeasuredScore] | None = None
    differences: dict[str, Difference] | None = None
    checks: tuple[Check, ...] = ()
    used: int = 0
    """Earlier decisions of the model family on the same held-out texts and questions."""

    @classmethod
    def of(
        cls,
        rules: Mapping[str, GateRule],
        candidate: Table,
        champion: Table | None,
        differences: Differences | None = None,
        checks: Sequence[Check] = (),
    ) -> Evidence:
        """Return the evidence from full scores, keeping only what a decision reads.

        Raises NotJudged, naming each score, if a rule judges a score with unjudged questions: a machine without time
        for them is no reason to refuse or to accept a model.
        """
        lines = []
        for role, scores in (("candidate", candidate), ("champion", champion or {})):
            for key in sorted({key for keys in assign(rules, scores).values() for key in keys} & scores.keys()):
                if count := getattr(scores[key], "unjudged", 0):
                    lines.append(
                        f"{key} of the {role}: {count} questions were not judged (answers.parquet says why); evaluate "
                        "again where programs get processor time: herd rerun RUN --from evaluate"
                    )
        if lines:
            raise NotJudged("\n".join(lines))

        def measured(table: Table) -> dict[str, MeasuredScore]:
            scores = {
                key: {"value": score.value, "better": score.better, "requests": score.requests[:12]}
                for key, score in table.items()
            }
            return {key: MeasuredScore.model_validate(score) for key, score in scores.items()}

        return cls(
            rules=dict(rules),
            candidate=measured(candidate),
            champion=None if champion is None else measured(champion),
            differences=None if differences is None else dict(differences),
            checks=tuple(checks),
        )

    def asked_alike(self, other: Evidence) -> bool:
        """Return whether a score of both was measured on the same texts or questions."""
        return any(
            (theirs := other.candidate.get(key)) is not None and theirs.requests == ours.requests
            for key, ours in self.candidate.items()
        )

    def decide(self) -> Decision:
        return decide(self.rules, self.candidate, self.champion, self.differences, self.checks)


def decide(
    rules: Mapping[str, GateRule],
    candidate: Table,
    champion: Table | None,
    differences: Differences | None = None,
    checks: Sequence[Check] = (),
) -> Decision:
    """Judge `candidate` by `rules` (score or pattern -> rule) against `champion`, None before the first promotion.

    Rows: the checks, integrity (there are scores and every one is finite), then the rules in their order, a pattern as
    one row for each score of either side that no more exact rule judges. With `differences` (`compare`), `better` asks
    that the 95 % bound of the worsening is below 0, `no worse than` that it is within the allowance (a share of the
    champion's magnitude), `no drop over` that it is within so many hundredths, and `no significant drop` that no drop
    has p < 0.05 after Holm over the rule's scores; without differences the values decide. All four pass if there is
    no champion, or if both models give the same numbers on every document; `at most` and `at least` always apply.
    """
    broken = [f"{key} is {score.value}" for key, score in sorted(candidate.items()) if not math.isfinite(score.value)]
    if not candidate:
        reason = "the candidate has no scores; evaluate it first"
    else:
        reason = f"not finite: {', '.join(broken)}" if broken else f"all {len(candidate)} scores are finite"
    finite = bool(candidate) and not broken
    integrity = Check(metric=INTEGRITY, passed=finite, reason=reason, rule="every score finite")
    rows = [
        GateRow(**check.model_dump(), candidate=None, champion=None, threshold=None) for check in (*checks, integrity)
    ]
    for pattern, metrics in assign(rules, candidate.keys() | (champion or {}).keys()).items():
        rule = rules[pattern]
        if not metrics and not assign([pattern], candidate)[pattern]:
            known = ", ".join(sorted(candidate)) or "none"
            missing = RuleVerdict(False, f"{pattern} matches none of the candidate's scores ({known})")
            rows.append(_row(pattern, rule, None, None, missing))
        # the scores of one rule are the family of Holm's correction
        ps = {metric: pair.p for metric in metrics if differences and (pair := differences.get(metric))}
        if rule.kind == "no significant drop":
            ps = holm(ps)
        for metric in metrics:
            verdict = _verdict(metric, rule, candidate, champion, differences, ps)
            ours, theirs = candidate.get(metric), champion.get(metric) if champion is not None else None
            difference = differences.get(metric) if differences and champion is not None else None
            rows.append(_row(metric, rule, ours, theirs, verdict, difference, ps.get(metric)))
    return Decision(accepted=all(row.passed for row in rows), rows=tuple(rows))


def _row(
    metric: str,
    rule: GateRule,
    candidate: GateScore | None,
    champion: GateScore | None,
    verdict: RuleVerdict,
    difference: Difference | None = None,
    p: float | None = None,
) -> GateRow:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return GateRow(
        metric=metric,
        rule=str(rule),
        candidate=finite(candidate.value if candidate else None),
        champion=finite(champion.value if champion else None),
        threshold=verdict.threshold,
        passed=verdict.passed,
        reason=verdict.reason,
        difference=finite(difference.value if difference else None),
        low=finite(difference.low if difference else None),
        high=finite(difference.high if difference else None),
        p=finite(p if difference else None),
    )


# One rule judges one score: passed or not, the number to meet, and a sentence with every number in it.


class RuleVerdict(NamedTuple):
    passed: bool
    reason: str
    threshold: float | None = None
    """The worst value that passes (`better`: the value to beat), or None if the rule has none."""


@dataclass(frozen=True)
class RuleInput:
    """One rule and everything known about the score that it judges."""

    metric: str
    rule: GateRule
    candidate: GateScore
    champion: GateScore
    difference: Difference | None = None
    p: float | None = None
    """After Holm's correction over the `family` scores of the rule."""
    family: int = 1

    @property
    def worse(self) -> float:
        """How much worse the candidate is; negative if it is better."""
        if self.difference is not None:
            return self.difference.worse[0]
        change = self.candidate.value - self.champion.value
        return change if self.candidate.better == "lower" else -change

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

    @property
    def threshold(self) -> float | None:
        if self.rule.kind == "no significant drop":
            return None
        return self.champion.value + (self.allowance if self.candidate.better == "lower" else -self.allowance)

    @property
    def allowed(self) -> str:
        """The allowance as text."""
        return f"allowed {self.rule.bound * 100:.12g}{' points' if self.rule.kind == 'no drop over' else '%'}"

    @property
    def change(self) -> str:
        """The distance from the champion as text, in percent of it for the rules that speak of percent."""
        in_points = self.rule.kind in ("no significant drop", "no drop over")
        whole = 0.0 if in_points else abs(self.champion.value)
        unit, scale = ("%", 100 / whole) if whole else ("", 1.0)
        better = self.worse < 0
        word = f"is {abs(self.worse) * scale:.3g}{unit} {'better' if better else 'worse'} than"
        text = f"{word if self.worse else 'equals'} champion {number(self.champion.value)}"
        if self.difference is None or not math.isfinite(self.difference.low + self.difference.high):
            return text
        _, low, high = self.difference.worse
        low, high = (-high, -low) if better else (low, high)
        return f"{text} (95% {low * scale + 0.0:.2g}{unit} to {high * scale + 0.0:.2g}{unit})"


def _verdict(
    metric: str,
    rule: GateRule,
    candidate: Table,
    champion: Table | None,
    differences: Differences | None,
    ps: Mapping[str, float],
) -> RuleVerdict:
    """Judge one score by one rule; `ps` are the p of all scores of the rule."""

    def unusable(score: GateScore | None, role: str, table: Table) -> RuleVerdict:
        if score is not None:
            return RuleVerdict(False, f"{metric} of the {role} is {score.value}")
        known = ", ".join(sorted(table)) or "none"
        return RuleVerdict(False, f"{metric} is not among the {role}'s scores ({known}); evaluate it with this recipe")

    score = candidate.get(metric)
    if score is None or not math.isfinite(score.value):
        return unusable(score, "candidate", candidate)
    if rule.kind in ("at most", "at least"):
        passed = score.value <= rule.bound if rule.kind == "at most" else score.value >= rule.bound
        return RuleVerdict(passed, f"{metric} {number(score.value)} is {'' if passed else 'not '}{rule}", rule.bound)
    if rule.kind not in COMPARING:
        raise ValueError(f"rule {rule.kind!r} of {metric} is none of {', '.join(COMPARING)}, at most, at least")
    if champion is None:
        return RuleVerdict(True, f"{metric} is {number(score.value)}; no champion yet")
    champion_score = champion.get(metric)
    if champion_score is None or not math.isfinite(champion_score.value):
        return unusable(champion_score, "champion", champion)
    difference = differences.get(metric) if differences else None
    case = RuleInput(metric, rule, score, champion_score, difference, ps.get(metric), len(ps))
    if differences is None:
        return by_values(case)
    if case.difference is None:
        why = f"{metric}: candidate and champion were not asked the same; evaluate both with this recipe"
        return RuleVerdict(False, why, case.threshold)
    # both models give the same numbers on every document: they are the same model, and nothing would change
    widths = [item.high - item.low for item in differences.values() if item.method == DOCUMENTS]
    identical = 0 in widths and not any(width > 0 for width in widths)
    if identical and not any(d.value for d in differences.values()):
        same = f"{metric} {number(score.value)} is the champion's own: equal on every document"
        return RuleVerdict(True, same, case.threshold)
    return by_difference(case)


def by_values(case: RuleInput) -> RuleVerdict:
    """Judge a rule against the champion's value, without an estimate of the noise."""
    threshold = case.threshold
    match case.rule.kind:
        case "better":
            passed, allowed = case.worse < 0, "it must be better"
        case "no worse than" | "no drop over":
            assert threshold is not None
            sign = 1 if case.candidate.better == "lower" else -1
            passed, allowed = sign * (case.candidate.value - threshold) <= 0, case.allowed
        case _:  # no significant drop
            return RuleVerdict(False, f"{case.metric}: whether a drop is significant needs the samples of both models")
    other = case.candidate.requests != case.champion.requests
    note = " (the champion was scored on other requests)" if other else ""
    return RuleVerdict(
        passed, f"{case.metric} {number(case.candidate.value)} {case.change}; {allowed}{note}", threshold
    )


def by_difference(case: RuleInput) -> RuleVerdict:
    """Judge a rule against the champion by the paired difference: its 95 % bound, or its p."""
    assert case.difference is not None
    upper, n = case.difference.worse[2], case.difference.n
    items = "documents" if case.difference.method == DOCUMENTS else "questions"
    remedy = "raise evaluate.questions" if items == "questions" else "raise evaluate.documents or curate.held_out"
    score = f"{case.metric} {number(case.candidate.value)} {case.change}"
    if not math.isfinite(upper) or case.p is None or not math.isfinite(case.p):
        return RuleVerdict(False, f"{score}; {n} {items} are too few for a 95% interval; {remedy}", case.threshold)
    match case.rule.kind:
        case "better":
            passed, allowed = upper < 0, "it must be better at the 95% bound"
        case "no worse than" | "no drop over":
            passed, allowed = upper <= case.allowance, case.allowed
            if not passed and case.worse < case.allowance:
                # an interval narrows with 1 / sqrt(n): say how many items would show that the difference is allowed
                half, room = upper - case.worse, case.allowance - case.worse
                if half < room * math.sqrt(MOST / n):
                    remedy = f"about {math.ceil(n * (half / room) ** 2):,} would; {remedy}"
                allowed += f", which {n} {items} cannot show; {remedy}"
        case _:  # no significant drop
            passed = not (case.worse > 0 and case.p < LEVEL)
            over = f" after Holm over {case.family}" if case.family > 1 else ""
            allowed = f"p {case.p:.2g}{over}: {'no' if passed else 'a'} significant drop"
    return RuleVerdict(passed, f"{score}; {allowed}", case.threshold)


def number(value: float) -> str:
    return f"{round(value, 12) + 0.0:.4g}"  # a mean of zeros may be 1e-17
