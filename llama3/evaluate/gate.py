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
from typing import Literal

from pydantic import BaseModel, ConfigDict

from llama3.evaluate.significance import DOCUMENTS, Difference, Number, holm
from llama3.evaluate.verdict import Case, Judged, Verdict, absolute, by_difference, by_values, number
from llama3.recipe.rules import GateRule, assign

INTEGRITY = "integrity/finite"
Table = Mapping[str, Judged]
Differences = Mapping[str, Difference]


class Unfinished(RuntimeError):
    """A check did not come to its end because of the machine: nothing is known of the model."""


class Row(BaseModel):
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
    rows: tuple[Row, ...]

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


class Measured(BaseModel):
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
    candidate: dict[str, Measured]
    champion: dict[str, Measured] | None = None
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
            rows.append(_row(pattern, rule, None, None, Verdict(False, _nothing(pattern, candidate))))
        rows += _judge(rule, metrics, candidate, champion, differences)
    return Decision(accepted=all(row.passed for row in rows), rows=tuple(rows))


def _measured(table: Table) -> dict[str, Measured]:
    return {
        key: Measured.model_validate({"value": score.value, "better": score.better, "requests": score.requests[:12]})
        for key, score in table.items()
    }


def _judge(
    rule: GateRule, metrics: Sequence[str], candidate: Table, champion: Table | None, differences: Differences | None
) -> list[Row]:
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
            verdict = _compared(Case(metric, rule, ours, theirs, found, ps.get(metric), len(ps)), differences)
        rows.append(_row(metric, rule, ours, theirs, verdict, found, ps.get(metric)))
    return rows


def _certain(metric: str, rule: GateRule, candidate: Table, champion: Table | None) -> Verdict | None:
    """Return the verdict where it needs no comparison, or where none can be made."""
    score = candidate.get(metric)
    if score is None or not math.isfinite(score.value):
        return Verdict(False, _unusable(metric, score, "candidate", sorted(candidate)))
    if rule.kind in ("at most", "at least"):
        return absolute(metric, rule, score.value)
    if champion is None:
        return Verdict(True, f"{metric} is {number(score.value)}; no champion yet")
    reigning = champion.get(metric)
    if reigning is None or not math.isfinite(reigning.value):
        return Verdict(False, _unusable(metric, reigning, "champion", sorted(champion)))
    return None


def _compared(case: Case, differences: Differences | None) -> Verdict:
    if differences is None:
        return by_values(case)
    if case.difference is None:
        why = f"{case.metric}: candidate and champion were not asked the same; evaluate both with this recipe"
        return Verdict(False, why, case.threshold)
    if _same(differences):
        same = f"{case.metric} {number(case.candidate.value)} is the champion's own: equal on every document"
        return Verdict(True, same, case.threshold)
    return by_difference(case)


def _same(differences: Differences) -> bool:
    """Return whether both models gave the same numbers on every document: they are one, and nothing would change."""
    widths = [found.high - found.low for found in differences.values() if found.method == DOCUMENTS]
    return 0 in widths and not any(width > 0 for width in widths) and not any(d.value for d in differences.values())


def _integrity(candidate: Table) -> Row:
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


def _checked(check: Check) -> Row:
    return Row(**check.model_dump(), candidate=None, champion=None, threshold=None)


def _row(
    metric: str,
    rule: GateRule,
    candidate: Judged | None,
    champion: Judged | None,
    verdict: Verdict,
    difference: Difference | None = None,
    p: float | None = None,
) -> Row:
    return Row(
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


def _unusable(metric: str, score: Judged | None, whose: str, known: list[str]) -> str:
    if score is not None:
        return f"{metric} of the {whose} is {score.value}"
    return f"{metric} is not among the {whose}'s scores ({', '.join(known) or 'none'}); evaluate it with this recipe"


def _nothing(pattern: str, candidate: Table) -> str:
    return f"{pattern} matches none of the candidate's scores ({', '.join(sorted(candidate)) or 'none'})"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
