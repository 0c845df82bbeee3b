"""One change of the recipe against the recipe as it is: a batch ramp, a warm-up length, an averaging window.

An arm is taken if it is significantly better on the score that decides, and significantly worse on none; with several
such arms the one that gains most. Otherwise the recipe stays as it is: that no difference was found is an answer, with
intervals that say how large one may still be. What this gives up: an arm that is better by a hair and cheaper; and harm
elsewhere that is too small to be significant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llama3.evaluate.suites import BPB
from llama3.scaling.contrast import comparable, findings
from llama3.scaling.matched import default_scores
from llama3.scaling.outcome import Outcome
from llama3.scaling.verdict import HELPS, HURTS, NOTHING, Finding, Verdict


def ablation_verdict(
    outcomes: Sequence[Outcome],
    control: str,
    changes: Mapping[str, Sequence[str]],
    score: str = BPB,
    weights: Mapping[str, float] | None = None,
) -> Verdict:
    """Return which arm to take, if any; `changes` is arm -> overrides, without the control.

    `score` decides. `eval/bpb` is made from the domains' documents by `weights` {domain: weight}; without them its
    interval is wider than it need be, as its documents are not paired. Raises ValueError as `contrast.comparable`
    does, or if no arm was measured on `score`.
    """
    arms = list(changes)
    scores = list(dict.fromkeys([score, *default_scores(outcomes)]))
    flags = comparable(outcomes, control, arms, scores, weights)
    found = findings(outcomes, control, arms, scores, weights)
    deciding = {one.arm: one for one in found if one.score == score}
    if not deciding:
        raise ValueError(
            f"score: no arm can be compared with {control} on {score!r}; name another, or see:\n" + "\n".join(flags)
        )
    harmed = {arm: [one for one in found if one.arm == arm and one.says == HURTS] for arm in arms}
    taken = _taken(deciding, harmed)
    lines = [_decision(taken, deciding, control), *_others(arms, taken, deciding, harmed)]
    return Verdict(headline=lines, change=list(changes[taken]) if taken else [], flags=flags, findings=found)


def _taken(deciding: Mapping[str, Finding], harmed: Mapping[str, Sequence[Finding]]) -> str:
    """Return the arm that gains most of those that help and do no harm; none: empty."""
    helping = [one for one in deciding.values() if one.says == HELPS and not harmed[one.arm]]
    return max(helping, key=lambda one: one.gain).arm if helping else ""


def _decision(taken: str, deciding: Mapping[str, Finding], control: str) -> str:
    if taken:
        return f"take {taken}: {deciding[taken]}"
    if all(one.says == NOTHING for one in deciding.values()):
        return f"{NOTHING}: keep {control}"
    return f"keep {control}: no arm is better without harm"


def _others(
    arms: Sequence[str], taken: str, deciding: Mapping[str, Finding], harmed: Mapping[str, Sequence[Finding]]
) -> Iterator[str]:
    """Yield what is known of the arms that are not taken."""
    for arm in arms:
        if arm == taken:
            continue
        if arm not in deciding:
            yield f"{arm}: not judged"
            continue
        elsewhere = "; ".join(str(one) for one in harmed[arm] if one is not deciding[arm])
        yield f"{arm}: {deciding[arm]}{'; ' if elsewhere else ''}{elsewhere}"
