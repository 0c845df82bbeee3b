"""Compare variants with a control: the gain of each variant on each score, its 95 % interval, and the findings.

Runs are paired by repeat and by document, and the interval includes the noise of both. Findings are corrected by Holm
over all scores and variants of the study, so a study of equal variants declares a difference in at most 5 % of cases.
The intervals are not corrected. With one repeat the noise of training is unknown, and nothing is significant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from herd.llama3.evaluate.suite import BPB
from herd.llama3.statistics.estimates import mean, ratio
from herd.llama3.statistics.repeats import RepeatNoise, interval, repeat_noise, two_sided_p
from herd.llama3.statistics.significance import LEVEL, holm
from herd.llama3.studies.results import HELPS, HURTS, NOTHING, Finding, RunResult, Says, results_of_variant

Array = NDArray[np.float64]
FEW_CLUSTERS = 10
"""Below this many clusters an interval is wide."""
UNITS = {"bits per byte": "bpb"}
"""Short units for findings."""


@dataclass(frozen=True)
class Contrast:
    """Gain of one variant over the control on one score, before correction."""

    variant: str
    score: str
    unit: str
    gain: float
    """Above 0 the variant is better."""
    low: float
    """Ends of the 95 % interval."""
    high: float
    p: float
    """Two-sided; NaN with one repeat."""
    repeats: int
    documents: float
    """Standard error due to the choice of documents or questions alone."""


def comparison_flags(
    outcomes: Sequence[RunResult],
    control: str,
    variants: Sequence[str],
    scores: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[str]:
    """Return the weak points of a comparison of `variants` with `control`, each with what to add.

    Raises ValueError if nothing can be compared: no control, a variant without runs, two runs of one repeat, or
    variants that trained on different numbers of tokens.
    """
    _check_variants(outcomes, control, variants)
    flags = []
    for variant in variants:
        ours, theirs = results_of_variant(outcomes, variant).keys(), results_of_variant(outcomes, control).keys()
        for name, missing in ((variant, sorted(theirs - ours)), (control, sorted(ours - theirs))):
            if missing:
                listed = ", ".join(str(number) for number in missing)
                flags.append(f"{variant}: repeat {listed} of {name} is missing, its counterpart is left out; run it")
        match len(ours & theirs):
            case 0:
                flags.append(
                    f"{variant}: has no repeat in common with {control}, so it is not judged; run both with the same "
                    "seeds"
                )
            case 1:
                flags.append(
                    f"{variant}: one repeat, so the interval lacks the noise of training and nothing is significant; "
                    "add seeds"
                )
            case 2:
                flags.append(
                    f"{variant}: two repeats estimate the noise of training badly, so only very large gains are "
                    "significant; add seeds"
                )
    paired = [variant for variant in variants if common_repeats(outcomes, variant, control)]
    matched, left_out = _all_paired_gains(outcomes, control, paired, scores, weights or {})
    clustered = {pair.score: pair for pair in matched if pair.n < min(FEW_CLUSTERS, pair.samples)}
    for score, pair in clustered.items():
        flags.append(
            f"{score}: its {pair.samples} samples are of {pair.n} sites, files or passages, on which its intervals "
            "rest; hold out text of more"
        )
    return [*flags, *left_out]


def findings(
    outcomes: Sequence[RunResult],
    control: str,
    variants: Sequence[str],
    scores: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return the contrasts of all variants as findings, after Holm's correction over all of them."""
    gains = uncorrected_contrasts(outcomes, control, variants, scores, weights)
    adjusted = holm({f"{contrast.variant} {contrast.score}": contrast.p for contrast in gains})
    result = []
    for contrast in gains:
        says: Says = NOTHING
        if adjusted[f"{contrast.variant} {contrast.score}"] <= LEVEL:
            says = HELPS if contrast.gain > 0 else HURTS
        result.append(
            Finding(
                variant=contrast.variant,
                score=contrast.score,
                gain=contrast.gain,
                low=contrast.low,
                high=contrast.high,
                unit=contrast.unit,
                says=says,
                repeats=contrast.repeats,
            )
        )
    return result


def uncorrected_contrasts(
    outcomes: Sequence[RunResult],
    control: str,
    variants: Sequence[str],
    scores: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Contrast]:
    """Return the gain of each variant on each score, without those that cannot be compared (see `comparison_flags`).

    `scores` are keys; None selects bits per byte of each domain and the accuracy of each task. `weights` {domain:
    weight} build `eval/bpb` from the domains. The noise of the repeats is pooled over the given variants.
    Raises ValueError as `comparison_flags` does.
    """
    _check_variants(outcomes, control, variants)
    matched = _all_paired_gains(outcomes, control, variants, scores, weights or {})[0]
    if not matched:
        return []
    # Pool the noise over variants of one score that have the same repeats.
    variances, dof = np.zeros((len(matched), 2)), np.zeros((len(matched), 2))
    blocks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for index, pair in enumerate(matched):
        blocks.setdefault((pair.score, pair.repeats), []).append(index)
    for indices in blocks.values():
        block = repeat_noise(np.array([matched[index].gains for index in indices]))
        variances[indices], dof[indices] = block.variances, block.dof
    repeats = RepeatNoise(variances, dof)
    gain = np.array([pair.gains.mean() for pair in matched])
    sampling, n = np.array([pair.sampling for pair in matched]), np.array([float(pair.n) for pair in matched])
    low, high = interval(gain, sampling, n, repeats)
    p = two_sided_p(gain, sampling, n, repeats)
    return [
        Contrast(
            variant=pair.variant,
            score=pair.score,
            unit=pair.unit,
            gain=float(gain[index]),
            low=float(low[index]),
            high=float(high[index]),
            p=float(p[index]),
            repeats=len(pair.repeats),
            documents=float(np.sqrt(sampling[index])),
        )
        for index, pair in enumerate(matched)
    ]


def _check_variants(outcomes: Sequence[RunResult], control: str, variants: Sequence[str]) -> None:
    """Raise ValueError with one line per fault."""
    names = list(dict.fromkeys(result.variant for result in outcomes))
    if control not in names:
        raise ValueError(f"control: {control!r} has no finished run; the variants are {', '.join(names)}: run it too")
    if control in variants or len(set(variants)) < len(variants) or not variants:
        raise ValueError(f"variants: {list(variants)} against {control!r}; name at least one other variant, each once")
    faults = [
        f"{variant}: has no finished run; run it, or leave it out" for variant in variants if variant not in names
    ]
    for variant in (control, *variants):
        results = [result for result in outcomes if result.variant == variant]
        if len({result.repeat for result in results}) < len(results):
            runs = ", ".join(result.run for result in results)
            faults.append(f"{variant}: has two runs of one repeat ({runs}); leave one out")
    tokens = {result.tokens for result in outcomes if result.variant == control}
    for result in outcomes:
        if result.variant in (control, *variants) and (tokens | {result.tokens}) != {min(tokens)}:
            faults.append(
                f"{result.variant}: {result.run} trained on {result.tokens:,} tokens, {control} on {min(tokens):,}; "
                "end their last stages at one position"
            )
    if faults:
        raise ValueError("\n".join(faults))


# Gains of matched runs: differences within each repeat and each document


@dataclass(frozen=True)
class PairedGains:
    """Gains of one variant over the control on one score; above 0: better, whether the score rises or falls."""

    variant: str
    score: str
    unit: str
    repeats: tuple[int, ...]
    gains: Array
    """[repeats]"""
    sampling: float
    """Variance of the mean gain due to the choice of documents."""
    n: int
    """Number of documents or questions, or of their clusters; of a mean over domains, the smallest number in any."""
    samples: int = 0
    """Documents or questions of a single score."""


def common_repeats(outcomes: Sequence[RunResult], variant: str, control: str) -> tuple[int, ...]:
    """Return the repeats that both variants have, in order."""
    return tuple(sorted(results_of_variant(outcomes, variant).keys() & results_of_variant(outcomes, control).keys()))


def default_scores(outcomes: Sequence[RunResult]) -> list[str]:
    """Return bits per byte of each domain and the accuracy of each task, if any run has samples of them.

    Means over domains or tasks are left out: they add no information, and each finding would count twice.
    """
    keys = {
        key
        for result in outcomes
        for key in result.samples.keys() & result.scores.keys()
        if key.startswith(f"{BPB}/") or result.scores[key].better == "higher"
    }
    return sorted(keys, key=lambda key: (not key.startswith(f"{BPB}/"), key))


def _all_paired_gains(
    outcomes: Sequence[RunResult],
    control: str,
    variants: Sequence[str],
    scores: Sequence[str] | None,
    weights: Mapping[str, float],
) -> tuple[list[PairedGains], list[str]]:
    """Return the matched gains, and a line for each score that cannot be compared."""
    matched, flags = [], []
    for score in default_scores(outcomes) if scores is None else scores:
        for variant in variants:
            try:
                matched.append(paired_gains(outcomes, variant, control, score, weights))
            except ValueError as error:
                flags.append(f"{error}; left out")
    return matched, list(dict.fromkeys(flags))


def paired_gains(
    outcomes: Sequence[RunResult], variant: str, control: str, score: str, weights: Mapping[str, float]
) -> PairedGains:
    """Return the gains of `variant` on `score`. Raises ValueError with the reason if they cannot be computed.

    `eval/bpb` has no samples; with `weights` {domain: weight} it is computed from the measured domains. For any other
    score without samples the squared standard errors of both variants are added, as if their questions were different:
    such an interval is too wide.
    """
    numbers = common_repeats(outcomes, variant, control)
    if not numbers:
        raise ValueError(f"{variant}: has no repeat in common with {control}; run both with the same seeds")
    pairs = [
        (results_of_variant(outcomes, variant)[number], results_of_variant(outcomes, control)[number])
        for number in numbers
    ]
    measured = {key for pair in pairs for run in pair for key in run.scores}
    present = {domain: weight for domain, weight in weights.items() if weight and f"{BPB}/{domain}" in measured}
    if score != BPB or not present:
        return _paired_gains_of(variant, numbers, pairs, score)
    total = sum(present.values())
    domains = [
        (weight / total, _paired_gains_of(variant, numbers, pairs, f"{BPB}/{name}")) for name, weight in present.items()
    ]
    gains = np.sum([weight * domain.gains for weight, domain in domains], axis=0)
    sampling = sum(weight**2 * domain.sampling for weight, domain in domains)  # domains are independent samples
    return PairedGains(
        variant, BPB, domains[0][1].unit, numbers, gains, sampling, min(domain.n for _, domain in domains)
    )


def _paired_gains_of(
    variant: str, numbers: tuple[int, ...], pairs: Sequence[tuple[RunResult, RunResult]], score: str
) -> PairedGains:
    runs = [run for pair in pairs for run in pair]  # variant, control, variant, control, ...
    missing = [run.run for run in runs if score not in run.scores]
    if missing:
        raise ValueError(f"{variant}: {score} was not measured in {', '.join(missing)}; evaluate with the same suite")
    scores = [run.scores[score] for run in runs]
    odd = next((run.run for run in runs if run.scores[score].requests != scores[0].requests), None)
    if odd is not None:
        raise ValueError(
            f"{variant}: {score} was measured on other questions in {odd} than in {runs[0].run}; evaluate both again"
        )
    sign = 1.0 if scores[0].better == "higher" else -1.0
    unit = UNITS.get(scores[0].unit, scores[0].unit)
    samples = [run.samples[score] for run in runs if score in run.samples]
    if len(samples) < len(runs):
        values = np.array([value.value for value in scores])
        variances = [ours.scores[score].stderr ** 2 + theirs.scores[score].stderr ** 2 for ours, theirs in pairs]
        gains = sign * (values[0::2] - values[1::2])
        return PairedGains(
            variant, score, unit, numbers, gains, float(np.mean(variances)), min(value.n for value in scores)
        )
    first = samples[0]
    if any(run.ids != first.ids or not np.array_equal(run.denominators, first.denominators) for run in samples):
        raise ValueError(
            f"{variant}: {score} has other documents in some runs than in others; evaluate all of them again"
        )
    table = np.array([run.numerators for run in samples])
    differences = sign * (table[0::2] - table[1::2])  # [repeats, n]
    average = differences.mean(axis=0)
    if unit == UNITS["bits per byte"]:
        gains = differences.sum(axis=1) / first.denominators.sum()
        estimate = ratio(average.tolist(), first.denominators.tolist(), first.clusters)
        sampling = estimate.stderr**2
    else:
        gains = np.array([mean(row.tolist(), first.groups).value for row in differences / first.denominators])
        # As Agresti and Min add half a question to each side: answers that all agree do not prove that the variants do.
        estimate = mean((average / first.denominators).tolist(), first.groups, first.clusters)
        sampling = estimate.stderr**2 + 1 / (len(average) + 2) ** 2
    units = estimate.clusters if estimate.clusters > 1 else len(average)
    return PairedGains(variant, score, unit, numbers, gains, sampling, units, len(average))
