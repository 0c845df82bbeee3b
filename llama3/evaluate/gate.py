"""The promotion gate: whether a candidate model may take over, and why, one row per rule and score.

A pure function of rules, scores and paired differences: no clock, no file, no registry. All of it is kept as
`Evidence`, so a stored decision is replayed from its document alone. Bits per byte can decide because paired they
separate close checkpoints; accuracies cannot, so they may only veto. What cannot be judged is refused: a missing or
non-finite score fails its rule by name and is never read as equal. What this gives up: a candidate that is better by
less than its documents can show waits for more documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from llama3.evaluate.significance import DOCUMENTS, LEVEL, Difference, Number, holm
from llama3.recipe.gates import GateRule, assign

# What one rule says of one score: passed or not, the number to meet, and a sentence with every number in it.
#
# With a paired difference a rule is judged by its 95 % interval or its p; without one (the gates between sequence
# lengths) by the values alone. What cannot be judged fails, and the sentence says what to do about it.

MOST = 10_000_000
"""Items beyond which no number is named: the difference is too near to what is allowed."""


class GateScore(Protocol):
    """What the gate reads of a score."""

    @property
    def value(self) -> float: ...
    @property
    def better(self) -> str: ...
    @property
    def requests(self) -> str: ...


class RuleVerdict(NamedTuple):
    passed: bool
    reason: str
    threshold: float | None = None
    """The worst value that passes (`better`: the value to beat), or None where the rule has none."""


@dataclass(frozen=True)
class RuleInput:
    """One rule and all that is known of the score that it judges."""

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


def absolute(metric: str, rule: GateRule, value: float) -> RuleVerdict:
    """Judge `at most` and `at least`."""
    passed = value <= rule.bound if rule.kind == "at most" else value >= rule.bound
    return RuleVerdict(passed, f"{metric} {number(value)} is {'' if passed else 'not '}{rule}", rule.bound)


def by_values(case: RuleInput) -> RuleVerdict:
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
            return RuleVerdict(False, f"{case.metric}: whether a drop is significant needs the samples of both models")
        case _:
            raise _unknown(case)
    other = case.candidate.requests != case.champion.requests
    note = " (the champion was scored on other requests)" if other else ""
    return RuleVerdict(
        passed, f"{case.metric} {number(case.candidate.value)} {_change(case)}; {allowed}{note}", threshold
    )


def by_difference(case: RuleInput) -> RuleVerdict:
    """Judge a rule against the champion by the paired difference: its 95 % bound, or its p."""
    assert case.difference is not None
    upper = case.difference.worse[2]
    said = f"{case.metric} {number(case.candidate.value)} {_change(case)}"
    if not math.isfinite(upper) or case.p is None or not math.isfinite(case.p):
        few = f"{case.difference.n} {_items(case)} are too few for a 95% interval; {_more(case)}"
        return RuleVerdict(False, f"{said}; {few}", case.threshold)
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
    return RuleVerdict(passed, f"{said}; {allowed}", case.threshold)


def number(value: float) -> str:
    return f"{round(value, 12) + 0.0:.4g}"  # a mean of zeros may be 1e-17


def _allowance(rule: GateRule) -> str:
    return f"{rule.bound * 100:.12g}{' points' if rule.kind == 'no drop over' else '%'}"


def _change(case: RuleInput) -> str:
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


def _items(case: RuleInput) -> str:
    assert case.difference is not None
    return "documents" if case.difference.method == DOCUMENTS else "questions"


def _more(case: RuleInput) -> str:
    return "raise evaluate.questions" if _items(case) == "questions" else "raise evaluate.documents or curate.held_out"


def _needed(case: RuleInput, upper: float) -> str:
    """Say how many items would show that the same difference is allowed: an interval narrows with 1 / sqrt(n)."""
    assert case.difference is not None
    half, room, n = upper - case.worse, case.allowance - case.worse, case.difference.n
    if half >= room * math.sqrt(MOST / n):
        return _more(case)
    return f"about {math.ceil(n * (half / room) ** 2):,} would; {_more(case)}"


def _unknown(case: RuleInput) -> ValueError:
    return ValueError(
        f"rule {case.rule.kind!r} of {case.metric} is none of better, no worse than, no drop over, "
        "no significant drop, at most, at least"
    )


INTEGRITY = "integrity/finite"
Table = Mapping[str, GateScore]
Differences = Mapping[str, Difference]


class Unfinished(RuntimeError):
    """A check did not come to its end because of the machine: nothing is known of the model."""


class GateRow(BaseModel):
    """The verdict on one rule and score."""

    model_config = ConfigDict(frozen=True)

    metric: str
    rule: str
    candidate: float | None
    """None where the score is missing or not finite (JSON has no NaN); the reason says which."""
    champion: float | None
    threshold: float | None
    """The worst value that passes (`better`: the value to beat), or None where there was nothing to compare with."""
    passed: bool
    reason: str
    difference: float | None = None
    """Candidate minus champion on the samples that both have; None where it was not compared."""
    low: float | None = None
    """Ends of its paired 95 % interval."""
    high: float | None = None
    p: float | None = None
    """Two-sided; of `no significant drop` after Holm's correction over the scores of the rule."""
    checked: bool = True
    """False where there was nothing to check, which neither passes nor refuses: `passed` then only refuses nothing."""

    @property
    def verdict(self) -> str:
        """`pass`, `fail` or `not checked`."""
        return ("pass" if self.passed else "fail") if self.checked else "not checked"

    @property
    def uncompared(self) -> bool:
        """Whether a rule that compares let it pass because there is no champion yet."""
        return self.passed and not self.is_fact and self.champion is None and self.threshold is None

    @property
    def is_fact(self) -> bool:
        """Whether it stands for a check or for what a person decided, and not for a rule about a score."""
        return not self.metric.startswith("eval/")


class Decision(BaseModel):
    """The verdict on a candidate: accepted when every row passed. `model_dump_json` and back is exact."""

    model_config = ConfigDict(frozen=True)

    accepted: bool
    rows: tuple[GateRow, ...]

    @property
    def refusals(self) -> list[str]:
        """The reasons of the rows that failed."""
        return [row.reason for row in self.rows if not row.passed]


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
    """Beginning of the digest of what was asked."""


class NotJudged(ValueError):
    """A score that is to be judged has questions that could not be."""


def check_judged(rules: Mapping[str, GateRule], candidate: Table, champion: Table) -> None:
    """Raise NotJudged, naming each score, where a rule judges one whose questions were not all judged."""
    lines = []
    for whose, scores in (("candidate", candidate), ("champion", champion)):
        for key in sorted({key for keys in assign(rules, scores).values() for key in keys} & scores.keys()):
            if count := getattr(scores[key], "unjudged", 0):
                lines.append(
                    f"{key} of the {whose}: {count} questions were not judged (answers.parquet says why); evaluate "
                    "again where programs get processor time: herd rerun RUN --from evaluate"
                )
    if lines:
        raise NotJudged("\n".join(lines))


class Evidence(BaseModel):
    """All that a decision is made from. Survives JSON exactly, so `decide()` replays a stored decision."""

    model_config = ConfigDict(frozen=True)

    rules: dict[str, GateRule]
    candidate: dict[str, MeasuredScore]
    champion: dict[str, MeasuredScore] | None = None
    differences: dict[str, Difference] | None = None
    checks: tuple[Check, ...] = ()
    used: int = 0
    """Earlier decisions of the family by the same held-out texts and questions."""

    @classmethod
    def of(
        cls,
        rules: Mapping[str, GateRule],
        candidate: Table,
        champion: Table | None,
        differences: Differences | None = None,
        checks: Sequence[Check] = (),
    ) -> Evidence:
        """Return the evidence from whole scores, of which only what a decision reads is kept.

        Raises NotJudged if a score that a rule judges has questions that were not: a machine that had no time for them
        is no reason to refuse a model, nor to accept it.
        """
        check_judged(rules, candidate, champion or {})
        return cls(
            rules=dict(rules),
            candidate=_measured(candidate),
            champion=None if champion is None else _measured(champion),
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
    that the 95 % bound of the worsening is below 0, `no worse than` that it is within the allowance, which is of the
    champion's magnitude, `no drop over` that it is within so many hundredths, and `no significant drop` that no drop
    has p < 0.05 after Holm over the rule's scores; without them values decide. All four pass where there is no
    champion, and where both models give the same numbers on every document; `at most` and `at least` hold always.
    """
    rows = [_checked(check) for check in checks] + [_integrity(candidate)]
    for pattern, metrics in assign(rules, candidate.keys() | (champion or {}).keys()).items():
        rule = rules[pattern]
        if not metrics and not assign([pattern], candidate)[pattern]:
            rows.append(_row(pattern, rule, None, None, RuleVerdict(False, _nothing(pattern, candidate))))
        rows += _judge(rule, metrics, candidate, champion, differences)
    return Decision(accepted=all(row.passed for row in rows), rows=tuple(rows))


def _measured(table: Table) -> dict[str, MeasuredScore]:
    return {
        key: MeasuredScore.model_validate(
            {"value": score.value, "better": score.better, "requests": score.requests[:12]}
        )
        for key, score in table.items()
    }


def _judge(
    rule: GateRule, metrics: Sequence[str], candidate: Table, champion: Table | None, differences: Differences | None
) -> list[GateRow]:
    """Return one row for each score that `rule` is to judge; together they are the family of Holm's correction."""
    ps = {metric: found.p for metric in metrics if differences and (found := differences.get(metric))}
    if rule.kind == "no significant drop":
        ps = holm(ps)
    rows = []
    for metric in metrics:
        ours, theirs = candidate.get(metric), champion.get(metric) if champion is not None else None
        found = differences.get(metric) if differences and champion is not None else None
        verdict = _certain(metric, rule, candidate, champion)
        if verdict is None:
            assert ours is not None
            assert theirs is not None
            verdict = _compared(RuleInput(metric, rule, ours, theirs, found, ps.get(metric), len(ps)), differences)
        rows.append(_row(metric, rule, ours, theirs, verdict, found, ps.get(metric)))
    return rows


def _certain(metric: str, rule: GateRule, candidate: Table, champion: Table | None) -> RuleVerdict | None:
    """Return the verdict where it needs no comparison, or where none can be made."""
    score = candidate.get(metric)
    if score is None or not math.isfinite(score.value):
        return RuleVerdict(False, _unusable(metric, score, "candidate", sorted(candidate)))
    if rule.kind in ("at most", "at least"):
        return absolute(metric, rule, score.value)
    if champion is None:
        return RuleVerdict(True, f"{metric} is {number(score.value)}; no champion yet")
    reigning = champion.get(metric)
    if reigning is None or not math.isfinite(reigning.value):
        return RuleVerdict(False, _unusable(metric, reigning, "champion", sorted(champion)))
    return None


def _compared(case: RuleInput, differences: Differences | None) -> RuleVerdict:
    if differences is None:
        return by_values(case)
    if case.difference is None:
        why = f"{case.metric}: candidate and champion were not asked the same; evaluate both with this recipe"
        return RuleVerdict(False, why, case.threshold)
    if _same(differences):
        same = f"{case.metric} {number(case.candidate.value)} is the champion's own: equal on every document"
        return RuleVerdict(True, same, case.threshold)
    return by_difference(case)


def _same(differences: Differences) -> bool:
    """Return whether both models gave the same numbers on every document: they are one, and nothing would change."""
    widths = [found.high - found.low for found in differences.values() if found.method == DOCUMENTS]
    return 0 in widths and not any(width > 0 for width in widths) and not any(d.value for d in differences.values())


def _integrity(candidate: Table) -> GateRow:
    broken = [f"{key} is {score.value}" for key, score in sorted(candidate.items()) if not math.isfinite(score.value)]
    if not candidate:
        reason = "the candidate has no scores; evaluate it first"
    elif broken:
        reason = f"not finite: {', '.join(broken)}"
    else:
        reason = f"all {len(candidate)} scores are finite"
    return _checked(
        Check(metric=INTEGRITY, passed=bool(candidate) and not broken, reason=reason, rule="every score finite")
    )


def _checked(check: Check) -> GateRow:
    return GateRow(**check.model_dump(), candidate=None, champion=None, threshold=None)


def _row(
    metric: str,
    rule: GateRule,
    candidate: GateScore | None,
    champion: GateScore | None,
    verdict: RuleVerdict,
    difference: Difference | None = None,
    p: float | None = None,
) -> GateRow:
    return GateRow(
        metric=metric,
        rule=str(rule),
        candidate=_finite(candidate.value if candidate else None),
        champion=_finite(champion.value if champion else None),
        threshold=verdict.threshold,
        passed=verdict.passed,
        reason=verdict.reason,
        difference=_finite(difference.value if difference else None),
        low=_finite(difference.low if difference else None),
        high=_finite(difference.high if difference else None),
        p=_finite(p if difference else None),
    )


def _unusable(metric: str, score: GateScore | None, whose: str, known: list[str]) -> str:
    if score is not None:
        return f"{metric} of the {whose} is {score.value}"
    return f"{metric} is not among the {whose}'s scores ({', '.join(known) or 'none'}); evaluate it with this recipe"


def _nothing(pattern: str, candidate: Table) -> str:
    return f"{pattern} matches none of the candidate's scores ({', '.join(sorted(candidate)) or 'none'})"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
