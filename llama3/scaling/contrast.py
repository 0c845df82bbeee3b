"""Arms against a control: the gain of each on each score, with an interval, and what is left after so many looks.

Runs are paired by repeat and by document (`matched.py`), noise of both kinds is in the interval (`noise.py`), and what
a finding says is corrected by Holm over all scores and arms of the study, so that a study of arms that do not differ
says anything else in at most 5 % of cases. The interval itself is not corrected. What this gives up: with one repeat
chance of training is unknown, so nothing is found, whatever the documents say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llama3.evaluate.significance import LEVEL, holm
from llama3.scaling.matched import Matched, common_repeats, default_scores, match
from llama3.scaling.noise import Between, between, interval, two_sided
from llama3.scaling.outcome import Outcome, of_arm
from llama3.scaling.verdict import HELPS, HURTS, NOTHING, Finding, Says


@dataclass(frozen=True)
class Contrast:
    """Gain of one arm over the control on one score, before correction."""

    arm: str
    score: str
    unit: str
    gain: float
    """Above 0 the arm is better."""
    low: float
    """Ends of the 95 % interval."""
    high: float
    p: float
    """Two-sided; NaN with one repeat."""
    repeats: int
    documents: float
    """Standard error by the choice of documents or questions alone."""
    training: float
    """Standard error by the repeats alone; NaN with one."""


def comparable(
    outcomes: Sequence[Outcome],
    control: str,
    arms: Sequence[str],
    scores: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[str]:
    """Return what weakens a comparison of `arms` with `control`, a line each with what to add.

    Raises ValueError where there is nothing to compare: no control, an arm without runs, two runs of one repeat, or
    arms that trained on different numbers of tokens.
    """
    _refuse(outcomes, control, arms)
    flags = [flag for arm in arms for flag in _repeats(outcomes, arm, control)]
    paired = [arm for arm in arms if common_repeats(outcomes, arm, control)]
    return [*flags, *_matches(outcomes, control, paired, scores, weights or {})[1]]


def contrasts(
    outcomes: Sequence[Outcome],
    control: str,
    arms: Sequence[str],
    scores: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Contrast]:
    """Return the gain of each arm on each score; those that cannot be compared are left out (`comparable` says why).

    `scores` are keys; None takes bits per byte of each domain and the accuracy of each task. `weights` {domain: weight}
    make `eval/bpb` from the domains. The noise between repeats is pooled over the arms that are given.
    Raises ValueError as `comparable` does.
    """
    _refuse(outcomes, control, arms)
    matched = _matches(outcomes, control, arms, scores, weights or {})[0]
    if not matched:
        return []
    repeats = _between(matched)
    gain = np.array([one.gains.mean() for one in matched])
    sampling, n = np.array([one.sampling for one in matched]), np.array([float(one.n) for one in matched])
    low, high = interval(gain, sampling, n, repeats)
    p = two_sided(gain, sampling, n, repeats)
    return [
        Contrast(
            arm=one.arm,
            score=one.score,
            unit=one.unit,
            gain=float(gain[place]),
            low=float(low[place]),
            high=float(high[place]),
            p=float(p[place]),
            repeats=len(one.repeats),
            documents=float(np.sqrt(sampling[place])),
            training=float(repeats.stderr[place]),
        )
        for place, one in enumerate(matched)
    ]


def findings(
    outcomes: Sequence[Outcome],
    control: str,
    arms: Sequence[str],
    scores: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return the contrasts of all arms and what each says after Holm's correction over all of them."""
    found = contrasts(outcomes, control, arms, scores, weights)
    adjusted = holm({f"{one.arm} {one.score}": one.p for one in found})
    return [_finding(one, adjusted[f"{one.arm} {one.score}"]) for one in found]


def _finding(one: Contrast, p: float) -> Finding:
    says: Says = NOTHING
    if p <= LEVEL:
        says = HELPS if one.gain > 0 else HURTS
    return Finding(
        arm=one.arm,
        score=one.score,
        gain=one.gain,
        low=one.low,
        high=one.high,
        unit=one.unit,
        says=says,
        repeats=one.repeats,
    )


def _matches(
    outcomes: Sequence[Outcome],
    control: str,
    arms: Sequence[str],
    scores: Sequence[str] | None,
    weights: Mapping[str, float],
) -> tuple[list[Matched], list[str]]:
    """Return what can be compared, and a line for each that cannot."""
    found, flags = [], []
    for score in default_scores(outcomes) if scores is None else scores:
        for arm in arms:
            try:
                found.append(match(outcomes, arm, control, score, weights))
            except ValueError as error:
                flags.append(f"{error}; left out")
    return found, list(dict.fromkeys(flags))


def _between(matched: Sequence[Matched]) -> Between:
    """Return the noise by the repeats; pooled over arms of one score that have the same repeats."""
    variances, spare = np.zeros((len(matched), 2)), np.zeros((len(matched), 2))
    blocks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for place, one in enumerate(matched):
        blocks.setdefault((one.score, one.repeats), []).append(place)
    for places in blocks.values():
        block = between(np.array([matched[place].gains for place in places]))
        variances[places], spare[places] = block.variances, block.spare
    return Between(variances, spare)


def _refuse(outcomes: Sequence[Outcome], control: str, arms: Sequence[str]) -> None:
    """Raise ValueError, a line for each fault."""
    names = list(dict.fromkeys(one.arm for one in outcomes))
    if control not in names:
        raise ValueError(f"control: {control!r} has no finished run; the arms are {', '.join(names)}: run it too")
    if control in arms or len(set(arms)) < len(arms) or not arms:
        raise ValueError(f"arms: {list(arms)} against {control!r}; name at least one other arm, each once")
    faults = [f"{arm}: has no finished run; run it, or leave it out" for arm in arms if arm not in names]
    for arm in (control, *arms):
        own = [one for one in outcomes if one.arm == arm]
        if len({one.repeat for one in own}) < len(own):
            faults.append(f"{arm}: has two runs of one repeat ({', '.join(one.run for one in own)}); leave one out")
    tokens = {one.tokens for one in outcomes if one.arm == control}
    for one in outcomes:
        if one.arm in (control, *arms) and (tokens | {one.tokens}) != {min(tokens)}:
            faults.append(
                f"{one.arm}: {one.run} trained on {one.tokens:,} tokens, {control} on {min(tokens):,}; "
                "end their last stages at one position"
            )
    if faults:
        raise ValueError("\n".join(faults))


def _repeats(outcomes: Sequence[Outcome], arm: str, control: str) -> Iterator[str]:
    ours, theirs = of_arm(outcomes, arm).keys(), of_arm(outcomes, control).keys()
    for name, lacking in ((arm, sorted(theirs - ours)), (control, sorted(ours - theirs))):
        if lacking:
            listed = ", ".join(str(number) for number in lacking)
            yield f"{arm}: repeat {listed} of {name} is missing, its counterpart is left out; run it"
    if not ours & theirs:
        yield f"{arm}: has no repeat in common with {control}, so it is not judged; run both with the same seeds"
    if len(ours & theirs) == 1:
        yield f"{arm}: one repeat, so chance of training is not in the interval and nothing is found; add seeds"
    if len(ours & theirs) == 2:
        yield f"{arm}: two repeats tell little of chance of training, so only very large gains are found; add seeds"
