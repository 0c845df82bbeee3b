"""The same questions put to two arms in the same repeats: gains as arrays, or a line that says why there are none.

A gain is above 0 where the arm is better than the control, whichever way the score goes. Differences are taken inside
each document and each repeat, so what makes a document hard, or a seed lucky, for both arms cancels. What this gives
up: scores whose texts differ between runs are left out instead of being compared on what they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama3.evaluate.scores import Score
from llama3.evaluate.statistics import mean, ratio
from llama3.evaluate.suites import BPB
from llama3.scaling.outcome import Outcome, Samples, of_arm

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


def common_repeats(outcomes: Sequence[Outcome], arm: str, control: str) -> tuple[int, ...]:
    """Return the repeats that both arms have, in order."""
    return tuple(sorted(of_arm(outcomes, arm).keys() & of_arm(outcomes, control).keys()))


def default_scores(outcomes: Sequence[Outcome]) -> list[str]:
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


def match(outcomes: Sequence[Outcome], arm: str, control: str, score: str, weights: Mapping[str, float]) -> Matched:
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
    arm: str, numbers: tuple[int, ...], pairs: Sequence[tuple[Outcome, Outcome]], weights: Mapping[str, float]
) -> Matched:
    """Return the mean over domains, whose documents are independent samples."""
    total = sum(weights.values())
    parts = [(weight / total, _single(arm, numbers, pairs, f"{BPB}/{domain}")) for domain, weight in weights.items()]
    gains = np.sum([weight * part.gains for weight, part in parts], axis=0)
    sampling = sum(weight**2 * part.sampling for weight, part in parts)
    return Matched(arm, BPB, parts[0][1].unit, numbers, gains, sampling, min(part.n for _, part in parts))


def _single(arm: str, numbers: tuple[int, ...], pairs: Sequence[tuple[Outcome, Outcome]], score: str) -> Matched:
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


def _apart(pairs: Sequence[tuple[Outcome, Outcome]], score: str) -> float:
    def squares(one: Score) -> float:
        return one.stderr**2

    return float(np.mean([squares(ours.scores[score]) + squares(theirs.scores[score]) for ours, theirs in pairs]))
