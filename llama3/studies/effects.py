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
from numpy.typing import NDArray
from scipy import special

from llama3.evaluate.scores import Score
from llama3.evaluate.significance import LEVEL, holm
from llama3.evaluate.statistics import mean, ratio
from llama3.evaluate.suite import BPB
from llama3.studies.results import HELPS, HURTS, NOTHING, Finding, RunResult, Samples, Says, of_arm

# The same questions put to two arms in the same repeats: gains as arrays, or a line that says why there are none.
#
# A gain is above 0 where the arm is better than the control, whichever way the score goes. Differences are taken
# inside each document and each repeat, so what makes a document hard, or a seed lucky, for both arms cancels. What
# this gives up: scores whose texts differ between runs are left out instead of being compared on what they have in
# common.

Array = NDArray[np.float64]
UNITS = {"bits per byte": "bpb"}
"""Units as findings write them."""


@dataclass(frozen=True)
class Matched:
    """Gains of one arm over the control on one score."""

    arm: str
    score: str
    unit: str
    repeats: tuple[int, ...]
    gains: Array
    """[repeats]"""
    sampling: float
    """Variance of the mean gain by the choice of documents."""
    n: int
    """Documents or questions; of a mean over domains the fewest in any."""


def common_repeats(outcomes: Sequence[RunResult], arm: str, control: str) -> tuple[int, ...]:
    """Return the repeats that both arms have, in order."""
    return tuple(sorted(of_arm(outcomes, arm).keys() & of_arm(outcomes, control).keys()))


def default_scores(outcomes: Sequence[RunResult]) -> list[str]:
    """Return bits per byte of each domain and the accuracy of each task, of which there are samples in any run.

    No means over domains or tasks: they say nothing that their parts do not, and a finding on each would count twice.
    """
    found = {
        key
        for one in outcomes
        for key in one.samples.keys() & one.scores.keys()
        if key.startswith(f"{BPB}/") or one.scores[key].better == "higher"
    }
    return sorted(found, key=lambda key: (not key.startswith(f"{BPB}/"), key))


def match(outcomes: Sequence[RunResult], arm: str, control: str, score: str, weights: Mapping[str, float]) -> Matched:
    """Return the gains of `arm` on `score`. Raises ValueError saying why they cannot be had.

    `eval/bpb` has no samples of its own; it is made from the domains' where `weights` {domain: weight} are given, of
    the domains that were measured. Any other score without samples has the standard errors of both arms added, as if
    they had been asked different questions: wider than it need be.
    """
    numbers = common_repeats(outcomes, arm, control)
    if not numbers:
        raise ValueError(f"{arm}: has no repeat in common with {control}; run both with the same seeds")
    pairs = [(of_arm(outcomes, arm)[number], of_arm(outcomes, control)[number]) for number in numbers]
    measured = {key for pair in pairs for run in pair for key in run.scores}
    present = {domain: weight for domain, weight in weights.items() if weight and f"{BPB}/{domain}" in measured}
    if score == BPB and present:
        return _mean(arm, numbers, pairs, present)
    return _single(arm, numbers, pairs, score)


def _mean(
    arm: str, numbers: tuple[int, ...], pairs: Sequence[tuple[RunResult, RunResult]], weights: Mapping[str, float]
) -> Matched:
    """Return the mean over domains, whose documents are independent samples."""
    total = sum(weights.values())
    parts = [(weight / total, _single(arm, numbers, pairs, f"{BPB}/{domain}")) for domain, weight in weights.items()]
    gains = np.sum([weight * part.gains for weight, part in parts], axis=0)
    sampling = sum(weight**2 * part.sampling for weight, part in parts)
    return Matched(arm, BPB, parts[0][1].unit, numbers, gains, sampling, min(part.n for _, part in parts))


def _single(arm: str, numbers: tuple[int, ...], pairs: Sequence[tuple[RunResult, RunResult]], score: str) -> Matched:
    runs = [run for pair in pairs for run in pair]
    lacking = [run.run for run in runs if score not in run.scores]
    if lacking:
        raise ValueError(f"{arm}: {score} was not measured in {', '.join(lacking)}; evaluate with the same suite")
    scores = [run.scores[score] for run in runs]
    odd = next((run.run for run in runs if run.scores[score].requests != scores[0].requests), None)
    if odd is not None:
        raise ValueError(
            f"{arm}: {score} was measured on other questions in {odd} than in {runs[0].run}; evaluate both again"
        )
    sign = 1.0 if scores[0].better == "higher" else -1.0
    values = np.array([(ours.scores[score].value, theirs.scores[score].value) for ours, theirs in pairs])
    samples = [run.samples[score] for run in runs if score in run.samples]
    unit = UNITS.get(scores[0].unit, scores[0].unit)
    if len(samples) == len(runs):
        return _sampled(arm, score, unit, numbers, samples, sign)
    gains = sign * (values[:, 0] - values[:, 1])
    return Matched(arm, score, unit, numbers, gains, _apart(pairs, score), min(one.n for one in scores))


def _sampled(
    arm: str, score: str, unit: str, numbers: tuple[int, ...], samples: Sequence[Samples], sign: float
) -> Matched:
    """Return gains from samples that alternate: arm, control, arm, control."""
    first = samples[0]
    if any(one.ids != first.ids or not np.array_equal(one.denominators, first.denominators) for one in samples):
        raise ValueError(f"{arm}: {score} has other documents in some runs than in others; evaluate all of them again")
    table = np.array([one.numerators for one in samples])
    gains = sign * (table[0::2] - table[1::2])  # [repeats, n]
    average = gains.mean(axis=0)
    if unit == UNITS["bits per byte"]:
        means = gains.sum(axis=1) / first.denominators.sum()
        spread = ratio(average.tolist(), first.denominators.tolist()).stderr ** 2
        return Matched(arm, score, unit, numbers, means, spread, len(average))
    means = np.array([mean(row.tolist(), first.groups).value for row in gains / first.denominators])
    spread = mean((average / first.denominators).tolist(), first.groups).stderr ** 2
    # As Agresti and Min add half a question to each side: answers that all agree are no proof that the arms do.
    return Matched(arm, score, unit, numbers, means, spread + 1 / (len(average) + 2) ** 2, len(average))


def _apart(pairs: Sequence[tuple[RunResult, RunResult]], score: str) -> float:
    def squares(one: Score) -> float:
        return one.stderr**2

    return float(np.mean([squares(ours.scores[score]) + squares(theirs.scores[score]) for ours, theirs in pairs]))


# How sure a difference of two arms is, from two noises: of the repeats, and of the documents it was measured on.
#
# The documents are the same in all repeats, so the two cross: gain[r, i] = effect + document[i] + repeat[r] +
# rest[r, i]. The variance of the mean is at most the sum of two estimates (Owen 2007, Annals of Applied Statistics
# 1:386-411), each with the quantile of its own degrees of freedom: half^2 = t(n - 1)^2 V_documents + t(repeats)^2
# V_repeats covers at least 95 % whatever the ratio of the two (Banerjee 1960, Sankhya 22:357-358).


STEPS = 60
"""Halvings of log p; the last digit of a double."""
LEAST = 1e-16
"""Smallest p told apart from 0."""


@dataclass(frozen=True)
class Between:
    """Noise of the repeats in m mean gains, estimated twice: from an arm's own repeats, and pooled over all arms."""

    variances: Array
    """[m, 2] of the mean gain: own, pooled; NaN with a single repeat."""
    spare: Array
    """[m, 2] degrees of freedom; 0 with a single repeat."""

    @property
    def stderr(self) -> Array:
        """[m] standard errors, by the larger of the two."""
        return np.asarray(np.sqrt(self.variances.max(axis=1)))


def between(gains: Array) -> Between:
    """Return the noise of each arm's mean gain by its repeats; `gains` is [arms, repeats], each minus the control.

    What repeats leave unexplained is pooled over the arms and the control, as in a randomised block design: (arms)
    (repeats - 1) degrees of freedom instead of repeats - 1.
    """
    arms, repeats = gains.shape
    if repeats < 2:
        return Between(np.full((arms, 2), np.nan), np.zeros((arms, 2)))
    block = np.vstack([np.zeros(repeats), gains])
    rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
    pooled = 2 * float((rest**2).sum()) / (arms * (repeats - 1)) / repeats
    own = gains.var(axis=1, ddof=1) / repeats
    spare = np.tile([repeats - 1.0, arms * (repeats - 1.0)], (arms, 1))
    return Between(np.stack([own, np.full(arms, pooled)], axis=1), spare)


def half_width(p: Array, documents: Array, n: Array, repeats: Between) -> Array:
    """Return half the width of the 1 - p interval, [m].

    `documents` are variances over `n` documents. Of the two estimates by the repeats the wider interval counts, each
    with its own quantile: the pooled quantile on an arm's own variance leaves out the truth in up to a quarter of cases
    where this arm scatters more than the others (`coverage`). The pooled estimate keeps repeats that agree by luck from
    saying too much. This costs power: the remedy is a further repeat.
    One repeat (`spare` 0) leaves the documents' alone; a single document leaves no interval (infinite).
    """
    known = np.where(repeats.spare > 0, repeats.variances, 0.0)
    wider = (_quantile(p[:, None], repeats.spare) ** 2 * known).max(axis=1)
    return np.where(n > 1, np.sqrt(_quantile(p, n - 1) ** 2 * documents + wider), np.inf)


def two_sided(gain: Array, documents: Array, n: Array, repeats: Between) -> Array:
    """Return the p at which the interval ends at 0, [m]: below 5 % exactly where the 95 % interval leaves 0 out.

    NaN with one repeat: then chance of training is unknown, and so is p.
    """
    low, high = np.full(gain.shape, np.log(LEAST)), np.zeros(gain.shape)
    for _ in range(STEPS):
        middle = (low + high) / 2
        wide = half_width(np.exp(middle), documents, n, repeats) >= np.abs(gain)
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    return np.where(repeats.spare[:, 0] > 0, np.exp((low + high) / 2), np.nan)


def interval(gain: Array, documents: Array, n: Array, repeats: Between) -> tuple[Array, Array]:
    """Return the ends of the 95 % interval, [m] each."""
    half = half_width(np.full(gain.shape, LEVEL), documents, n, repeats)
    return gain - half, gain + half


def coverage(arms: int, repeats: int, scatter: float, tries: int = 2000, seed: int = 0) -> float:
    """Return how often the interval of the last of `arms`, which scatters `scatter` x as widely, holds its true gain.

    All true gains are 0, and the documents add no noise.
    """
    dice, held = np.random.default_rng(seed), 0
    for _ in range(tries):
        runs = dice.standard_normal((arms + 1, repeats))
        runs[-1] *= scatter
        gains = runs[1:] - runs[0]
        low, high = interval(gains.mean(axis=1), np.zeros(arms), np.full(arms, np.inf), between(gains))
        held += bool(low[-1] <= 0 <= high[-1])
    return held / tries


def _quantile(p: Array, spare: Array) -> Array:
    """Return the two-sided quantile of Student's t."""
    return np.asarray(-special.stdtrit(np.maximum(spare, 1), p / 2), np.float64)


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
    outcomes: Sequence[RunResult],
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
    outcomes: Sequence[RunResult],
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
    outcomes: Sequence[RunResult],
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
    outcomes: Sequence[RunResult],
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


def _refuse(outcomes: Sequence[RunResult], control: str, arms: Sequence[str]) -> None:
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


def _repeats(outcomes: Sequence[RunResult], arm: str, control: str) -> Iterator[str]:
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
