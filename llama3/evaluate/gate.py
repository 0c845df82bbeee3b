"""The promotion gate: may a candidate model replace the champion, and why; one row per rule and score.

A pure function of rules (`herd.llama3.recipe.gates`), scores and paired differences, all kept as `Evidence`, so that a
stored decision can be replayed. Paired bits per byte separate close checkpoints; accuracies do not, so they only veto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from herd.llama3.recipe.gates import AbsoluteRule, GateRule, RelativeRule, ScoreChange, assign_rules
from herd.llama3.statistics.significance import DOCUMENTS, LEVEL, Difference, Number, holm

INTEGRITY = "integrity/finite"
MORE_QUESTIONS = {
    "eval/arithmetic": "raise evaluate.questions",
    "eval/continuation": "raise evaluate.documents and evaluate.questions",
}
"""Scores whose questions are made, and how to get more. A published set has no more than it has."""


class GateScore(Protocol):
    """What the gate reads of a score."""

    @property
    def value(self) -> float: ...
    @property
    def better(self) -> str: ...
    @property
    def requests(self) -> str: ...
    @property
    def n(self) -> int: ...


Table = Mapping[str, GateScore]
Differences = Mapping[str, Difference]


class CheckUnfinished(RuntimeError):
    """A check could not finish because of the machine: it says nothing about the model."""


class UnjudgedScore(ValueError):
    """A score that a rule judges has questions that were not judged."""


class Check(BaseModel):
    """The result of a check of the candidate: digests, reload, logits, contamination, serving."""

    model_config = ConfigDict(frozen=True)

    metric: str
    """`integrity/digests`, `serving/smoke`, ..."""
    passed: bool
    reason: str
    rule: str = "must hold"
    checked: bool = True
    """False: there was nothing to check."""


class MeasuredScore(BaseModel):
    """The fields of a score that a decision reads."""

    model_config = ConfigDict(frozen=True)

    value: Number
    better: Literal["lower", "higher"]
    requests: str
    """First 12 characters of the digest of the requests."""
    n: int = 0
    """Documents or questions that the model answered."""


class GateRow(BaseModel):
    """The verdict on one rule and score."""

    model_config = ConfigDict(frozen=True)

    metric: str
    rule: str
    candidate: float | None = None
    """None if the score is missing or not finite (JSON has no NaN); the reason says which."""
    champion: float | None = None
    threshold: float | None = None
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
    def without_champion(self) -> bool:
        """Whether a rule that compares passed because there is no champion yet."""
        return self.passed and not self.is_check and self.champion is None and self.threshold is None

    @property
    def is_check(self) -> bool:
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
    def from_scores(
        cls,
        rules: Mapping[str, GateRule],
        candidate: Table,
        champion: Table | None,
        differences: Differences | None = None,
        checks: Sequence[Check] = (),
    ) -> Evidence:
        """Return the evidence from full scores, with only the fields that a decision reads.

        Raises UnjudgedScore, naming each score, if a rule judges a score with unjudged questions: the machine had no
        time for them, which says nothing about the model.
        """
        lines = []
        for role, scores in (("candidate", candidate), ("champion", champion or {})):
            for key in sorted({key for keys in assign_rules(rules, scores).values() for key in keys} & scores.keys()):
                if count := getattr(scores[key], "unjudged", 0):
                    lines.append(
                        f"{key} of the {role}: {count} questions were not judged (answers.parquet says why); evaluate "
                        "again where programs get processor time: herd rerun RUN --from evaluate"
                    )
        if lines:
            raise UnjudgedScore("\n".join(lines))

        def measured(table: Table) -> dict[str, MeasuredScore]:
            return {
                key: MeasuredScore.model_validate(
                    {"value": score.value, "better": score.better, "requests": score.requests[:12], "n": score.n}
                )
                for key, score in table.items()
            }

        return cls(
            rules=dict(rules),
            candidate=measured(candidate),
            champion=None if champion is None else measured(champion),
            differences=None if differences is None else dict(differences),
            checks=tuple(checks),
        )

    def same_requests(self, other: Evidence) -> bool:
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

    Rows: the checks, integrity (there are scores and all are finite), then the rules in their order, a pattern as one
    row for each score of either side that no more exact rule judges. Relative rules judge the 95 % bound, or the p, of
    `differences` (`compare`); without differences the values decide. They pass if there is no champion, or if both
    models give the same numbers on every document. Absolute rules always apply. A missing score fails its rule.
    """
    broken = [f"{key} is {score.value}" for key, score in sorted(candidate.items()) if not math.isfinite(score.value)]
    if not candidate:
        reason = "the candidate has no scores; evaluate it first"
    else:
        reason = f"not finite: {', '.join(broken)}" if broken else f"all {len(candidate)} scores are finite"
    finite = bool(candidate) and not broken
    integrity = Check(metric=INTEGRITY, passed=finite, reason=reason, rule="every score finite")
    rows = [GateRow(**check.model_dump()) for check in (*checks, integrity)]
    for pattern, metrics in assign_rules(rules, candidate.keys() | (champion or {}).keys()).items():
        rule = rules[pattern]
        if not metrics and not assign_rules([pattern], candidate)[pattern]:
            known = ", ".join(sorted(candidate)) or "none"
            reason = f"{pattern} matches none of the candidate's scores ({known})"
            rows.append(GateRow(metric=pattern, rule=str(rule), passed=False, reason=reason))
        # the scores of one rule are the family of Holm's correction
        ps = {metric: pair.p for metric in metrics if differences and (pair := differences.get(metric))}
        if rule.by_p:
            ps = holm(ps)
        rows += [_judge(metric, rule, candidate, champion, differences, ps) for metric in metrics]
    return Decision(accepted=all(row.passed for row in rows), rows=tuple(rows))


def _judge(
    metric: str,
    rule: GateRule,
    candidate: Table,
    champion: Table | None,
    differences: Differences | None,
    ps: Mapping[str, float],
) -> GateRow:
    """Judge one score by one rule: the first case that applies decides. `ps` are the p of all scores of the rule."""
    score, best = candidate.get(metric), champion.get(metric) if champion is not None else None
    difference = differences.get(metric) if differences and champion is not None else None
    threshold: float | None = None
    if score is None or not math.isfinite(score.value):
        passed, reason = False, _unusable(metric, score, "candidate", candidate)
    elif isinstance(rule, AbsoluteRule):
        passed, threshold = rule.holds(score.value), rule.bound
        reason = f"{metric} {number(score.value)} is {'' if passed else 'not '}{rule}"
    elif champion is None:
        passed, reason = True, f"{metric} is {number(score.value)}; no champion yet"
    elif best is None or not math.isfinite(best.value):
        passed, reason = False, _unusable(metric, best, "champion", champion)
    else:
        assert isinstance(rule, RelativeRule)
        threshold = None if rule.by_p else rule.threshold(best.value, score.better == "lower")
        passed, reason = _compare(metric, rule, score, best, differences, ps)

    numbers = {"candidate": score.value if score else None, "champion": best.value if best else None}
    if difference is not None:
        numbers |= {"difference": difference.value, "low": difference.low, "high": difference.high}
        numbers["p"] = ps.get(metric)
    finite = {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
    values = {"metric": metric, "rule": str(rule), "passed": passed, "reason": reason, "threshold": threshold}
    return GateRow.model_validate({**values, **finite})


def _unusable(metric: str, score: GateScore | None, role: str, scores: Table) -> str:
    """Return why the `score` of the model in this `role` cannot be judged: it is missing or not finite."""
    if score is not None:
        return f"{metric} of the {role} is {score.value}"
    known = ", ".join(sorted(scores)) or "none"
    return f"{metric} is not among the {role}'s scores ({known}); evaluate it with this recipe"


def _compare(
    metric: str,
    rule: RelativeRule,
    score: GateScore,
    best: GateScore,
    differences: Differences | None,
    ps: Mapping[str, float],
) -> tuple[bool, str]:
    """Judge `score` against the champion's, `best`; return whether it passes, and the reason."""
    lower, text = score.better == "lower", f"{metric} {number(score.value)}"

    # No samples: the values decide.
    if differences is None:
        if rule.by_p:
            return False, f"{metric}: whether a drop is significant needs the samples of both models"
        worse = score.value - best.value if lower else best.value - score.value
        passed, condition = rule.judge(ScoreChange(score.value, best.value, lower, worse))
        note = " (the champion was scored on other requests)" if score.requests != best.requests else ""
        return passed, f"{text} {_change(rule, best.value, worse)}; {condition}{note}"
    if (difference := differences.get(metric)) is None:
        return False, f"{metric}: candidate and champion were not asked the same; evaluate both with this recipe"

    # Identical: both give the same numbers on every document, so they are the same model, and nothing would change.
    widths = [item.high - item.low for item in differences.values() if item.method == DOCUMENTS]
    identical = 0 in widths and not any(width > 0 for width in widths)
    if identical and not any(d.value for d in differences.values()):
        return True, f"{text} is the champion's own: equal on every document"

    # Paired: the 95 % bound, or the p, of the difference on the same samples decides.
    worse, _, upper = difference.worse
    n, p = difference.n, ps.get(metric, math.nan)
    items, remedy = "questions", MORE_QUESTIONS.get(metric, "")
    if difference.method == DOCUMENTS:
        items, remedy = "documents", "raise evaluate.documents or curate.validation_fraction"
    answered = max(score.n, best.n)
    both = f"{n:,} of {answered:,} {items}" if n < answered else f"{n:,} {items}"
    if difference.clusters > 1:
        both += f" in {difference.clusters:,} clusters, design effect {difference.design:.1f}"
    elif difference.clusters == 1:
        both += " of one source, as if independent"
    reason = f"{text} {_change(rule, best.value, worse, difference, both)}"
    if not math.isfinite(upper) or not math.isfinite(p):
        return False, f"{reason}; {n} {items} are too few for a 95% interval; {remedy or 'ask more of them'}"
    change = ScoreChange(score.value, best.value, lower, worse, upper, p, len(ps), p < LEVEL, n, items, remedy)
    passed, condition = rule.judge(change)
    return passed, f"{reason}; {condition}"


def _change(
    rule: RelativeRule, champion: float, worse: float, difference: Difference | None = None, both: str = ""
) -> str:
    """Return the distance from the champion as text, in percent of its score if the rule is.

    With a `difference` also its interval, and how many documents or questions `both` models answered.
    """
    whole = abs(champion) if rule.percent else 0.0
    unit, scale = ("%", 100 / whole) if whole else ("", 1.0)
    better = worse < 0
    distance = f"is {abs(worse) * scale:.3g}{unit} {'better' if better else 'worse'} than" if worse else "equals"
    text = f"{distance} champion {number(champion)}"
    if difference is None or not math.isfinite(difference.low + difference.high):
        return text
    _, low, high = difference.worse
    low, high = (-high, -low) if better else (low, high)
    return f"{text} (95% {low * scale + 0.0:.2g}{unit} to {high * scale + 0.0:.2g}{unit}, {both})"


def number(value: float, digits: int = 4) -> str:
    """Return a value with `digits` significant digits, zeros at the end included; a large one as a whole number."""
    value = round(value, 12) + 0.0  # a mean of zeros may be 1e-17
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}".removesuffix(".")
