"""The promotion gate: whether a candidate model may take over, and why, one row per rule.

A pure function of rules and scores: no clock, no file, no registry, so a stored decision can be replayed. It decides
on point values, which is what the recipe's rules say; whether a difference is more than noise is answered by the
paired intervals of `llama3.evaluate.compare`. What cannot be judged is refused: a missing or non-finite score fails
its rule by name and is never read as equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from llama3.recipe.rules import GateRule

if TYPE_CHECKING:  # it imports pyarrow, and whoever only reads decisions (`herd status`) should not wait for that
    from llama3.evaluate.scores import Score, Scores

INTEGRITY = "integrity/finite"


class Row(BaseModel):
    """The verdict on one rule."""

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


class Decision(BaseModel):
    """The verdict on a candidate: accepted when every row passed. `model_dump_json` and back is exact."""

    model_config = ConfigDict(frozen=True)

    accepted: bool
    rows: tuple[Row, ...]

    @property
    def refusals(self) -> list[str]:
        """The reasons of the rows that failed."""
        return [row.reason for row in self.rows if not row.passed]


def decide(rules: Mapping[str, GateRule], candidate: Scores, champion: Scores | None) -> Decision:
    """Judge `candidate` by `rules` (metric -> rule) against `champion`, which is None before the first promotion.

    Rows: integrity (there are scores and every one is finite), then the rules in their order. `better` and
    `no worse than` pass where there is no champion yet; `at most` and `at least` hold always. A relative allowance is
    of the champion's magnitude: no worse than 0.5 % of 2.8 bits allows 2.814.
    """
    rows = (_integrity(candidate), *(_judge(metric, rule, candidate, champion) for metric, rule in rules.items()))
    return Decision(accepted=all(row.passed for row in rows), rows=rows)


def _integrity(candidate: Scores) -> Row:
    broken = [f"{key} is {score.value}" for key, score in sorted(candidate.items()) if not math.isfinite(score.value)]
    if not candidate:
        reason = "the candidate has no scores; evaluate it first"
    elif broken:
        reason = f"not finite: {', '.join(broken)}"
    else:
        reason = f"all {len(candidate)} scores are finite"
    passed = bool(candidate) and not broken
    return Row(
        metric=INTEGRITY,
        rule="every score finite",
        candidate=None,
        champion=None,
        threshold=None,
        passed=passed,
        reason=reason,
    )


def _judge(metric: str, rule: GateRule, candidate: Scores, champion: Scores | None) -> Row:
    score = candidate.get(metric)
    reigning = champion.get(metric) if champion is not None else None
    threshold = None
    if score is None or not math.isfinite(score.value):
        passed, reason = False, _unusable(metric, score, "candidate", sorted(candidate))
    elif rule.kind in ("at most", "at least"):
        threshold = rule.bound
        passed, reason = _absolute(score, rule)
    elif champion is None:
        passed, reason = True, f"{metric} is {_number(score.value)}; no champion yet"
    elif reigning is None or not math.isfinite(reigning.value):
        passed, reason = False, _unusable(metric, reigning, "champion", sorted(champion))
    else:
        threshold = _threshold(score, reigning, rule)
        passed, reason = _relative(score, reigning, rule, threshold)
    return Row(
        metric=metric,
        rule=str(rule),
        candidate=_finite(score),
        champion=_finite(reigning),
        threshold=threshold,
        passed=passed,
        reason=reason,
    )


def _unusable(metric: str, score: Score | None, whose: str, known: list[str]) -> str:
    if score is not None:
        return f"{metric} of the {whose} is {score.value}"
    return f"{metric} is not among the {whose}'s scores ({', '.join(known) or 'none'}); evaluate it with this recipe"


def _absolute(score: Score, rule: GateRule) -> tuple[bool, str]:
    passed = score.value <= rule.bound if rule.kind == "at most" else score.value >= rule.bound
    wanted = f"{rule.kind} {rule.bound:g}"
    verdict = f"is {wanted}" if passed else f"is not {wanted}"
    return passed, f"{score.key} {_number(score.value)} {verdict}"


def _threshold(score: Score, reigning: Score, rule: GateRule) -> float:
    allowance = rule.bound * abs(reigning.value) if rule.kind == "no worse than" else 0.0
    return reigning.value + (allowance if score.better == "lower" else -allowance)


def _relative(score: Score, reigning: Score, rule: GateRule, threshold: float) -> tuple[bool, str]:
    sign = 1 if score.better == "lower" else -1
    worse = sign * (score.value - reigning.value)
    match rule.kind:
        case "better":
            passed, allowed = worse < 0, "it must be better"
        case "no worse than":
            passed, allowed = sign * (score.value - threshold) <= 0, f"allowed {rule.bound * 100:g}%"
        case _:
            raise ValueError(f"rule {rule.kind!r} of {score.key} is none of better, no worse than, at most, at least")
    text = f"{score.key} {_number(score.value)} {_change(worse, reigning.value)}; {allowed}"
    if score.requests != reigning.requests:
        text += " (the champion was scored on other requests)"
    return passed, text


def _change(worse: float, reference: float) -> str:
    """Say how far from the champion's value a score is, in percent of it where that has a meaning."""
    if not worse:
        return f"equals champion {_number(reference)}"
    size = f"{abs(worse / reference) * 100:.3g}%" if reference else f"{abs(worse):.3g}"
    return f"is {size} {'worse' if worse > 0 else 'better'} than champion {_number(reference)}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _finite(score: Score | None) -> float | None:
    return score.value if score is not None and math.isfinite(score.value) else None
