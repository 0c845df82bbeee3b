"""Turn the analyses of each kind of study into a verdict: headline, proposed change, flags and findings.

Every number comes with its interval, and with its distance from the data where it is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
from scipy import stats

from herd.llama3.evaluate.suite import BPB
from herd.llama3.recipe.units import Share
from herd.llama3.studies.chinchilla import Chinchilla
from herd.llama3.studies.effects import comparison_flags, default_scores, findings, uncorrected_contrasts
from herd.llama3.studies.forecast import Interval
from herd.llama3.studies.isoflop import IsoflopFit, NoLawError, Optimum, TokenLaw
from herd.llama3.studies.mixture import Mixture, Proposal, pareto
from herd.llama3.studies.results import HELPS, HURTS, NOTHING, Finding, RunResult, StudyVerdict
from herd.llama3.studies.study import PROPOSED
from herd.llama3.tokens.mix import apportion

WIDE = 10.0
"""An interval of tokens is flagged as too wide if its ends differ by a larger factor."""
LEAST_RANK = 0.5
"""Smallest rank correlation of predicted and measured variants at which the fit of a mix search is not flagged."""
HALVES = 200
"""Proposed shares are multiples of half a percent."""
Judgement = Literal["helps", "hurts", "mixed", "no significant difference"]


# Ladder


def ladder_verdict(ladder: IsoflopFit, flops: float | None = None, other: Chinchilla | None = None) -> StudyVerdict:
    """Return the law of `ladder` and its answer at `flops` operations, next to the answer of the form L(N, D)."""
    law, headline, flags = ladder.law, [str_law(ladder.law)], list(ladder.flags)
    if other:
        alpha, floor = (
            f"{value.value:.3f} (95 % {value.low:.3f}..{value.high:.3f})" for value in (other.alpha, other.irreducible)
        )
        headline.append(f"L(N, D) = E + A/N^a + B/D^b through all runs: alpha {alpha}, E {floor}")
    if flops is not None:
        best, at = law.optimum(flops), f"at {flops:.3g} FLOPs"
        headline.append(str_optimum(best, law))
        if not best.tokens.high <= WIDE * best.tokens.low:
            flags.append(f"{at} the interval of tokens spans more than a factor of {WIDE:.0f}; add larger budgets")
        if other:
            rival = other.optimum(flops)
            headline.append(f"by L(N, D): {_str_allocation(rival)}")
            if rival.tokens.low > best.tokens.high or rival.tokens.high < best.tokens.low:
                flags.append(
                    f"{at} the two forms disagree beyond their intervals; add budgets, or sizes around each minimum, "
                    "before trusting either"
                )
    return StudyVerdict(headline=headline, flags=flags)


def no_law_verdict(reason: NoLawError) -> StudyVerdict:
    """Return the verdict of a ladder that shows no law."""
    used = sum(parabola.used for parabola in reason.parabolas)
    return StudyVerdict(headline=[f"no law: {used} budget(s) with a usable minimum"], flags=reason.flags)


def str_law(law: TokenLaw) -> str:
    """Return `N*(C) = 0.31 C^0.530 tokens (95 % of alpha 0.490..0.570), fitted on 2e11..3e12 FLOPs`."""
    alpha = law.alpha
    formula = f"N*(C) = {law.coefficient.value:.3g} C^{alpha.value:.3f} tokens"
    fitted = f"{law.min_flops:.3g}..{law.max_flops:.3g} FLOPs"
    return f"{formula} (95 % of alpha {alpha.low:.3f}..{alpha.high:.3f}), fitted on {fitted}"


def str_optimum(best: Optimum, law: TokenLaw) -> str:
    """Return `at 1e+14 FLOPs: 21M tokens (..) for a model of 0.8M parameters (..); 330 x beyond ..`."""
    position = "inside the range fitted"
    if best.flops < law.min_flops:
        position = f"{law.min_flops / best.flops:.3g} x below the range fitted"
    elif best.beyond > 1:
        position = f"{best.beyond:.3g} x beyond the range fitted"
    fitted = f"{law.min_flops:.3g}..{law.max_flops:.3g} FLOPs"
    return f"at {best.flops:.3g} FLOPs: {_str_allocation(best)}; {position} ({fitted})"


def _str_allocation(best: Optimum) -> str:
    return f"{_str_count(best.tokens)} tokens for a model of {_str_count(best.parameters)} parameters"


def _str_count(value: Interval) -> str:
    return f"{format_count(value.value)} (95 % {format_count(value.low)}..{format_count(value.high)})"


def format_count(number: float) -> str:
    """Return a number in three digits with its unit: `16.3T`, `812K`; beyond the units, `3e+20`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if scale <= number < 1e15:
            return f"{float(f'{number / scale:.3g}'):g}{unit}"
    return f"{number:.3g}"


# Mix search


def mix_verdict(
    mixture: Mixture,
    proposal: Proposal,
    outcomes: Sequence[RunResult],
    control: str,
    variants: Sequence[str],
    mix: str,
) -> StudyVerdict:
    """Return the verdict of a mix search: the proposal if, trained beside the control, it is significantly better.

    As long as it is not trained, the prediction decides. `variants` are all variants but the control, `mix` is the name
    of the mix in the recipe. A mix that helps one domain at the expense of another appears in the findings only.
    """
    flags, front = comparison_flags(outcomes, control, variants), pareto(mixture)
    gain = proposal.gain
    predicted = f"predicted {gain.value:+.4f} bpb, 95 % {gain.low:.4f}..{gain.high:.4f}"
    shares = round_proposal(proposal)
    listed = f"{'/'.join(f'{float(share) * 100:g}' for share in shares.values())} ({'/'.join(shares)})"
    change = [f"mix.{mix}.{domain}={Share(share)}" for domain, share in shares.items()]
    tried = np.abs(mixture.shares - np.array([float(share) for share in shares.values()])).max(axis=1) < 1e-9
    if tried.any():  # measured by the runs from which it was chosen
        listed += f", variant {mixture.variants[int(tried.argmax())]}"
    if not proposal.significant:
        headline, change = [f"{NOTHING}: keep {mix} (best blend of the variants: weighted, {predicted})"], []
    elif PROPOSED not in variants:
        headline = [f"take {mix} {listed}: weighted, {predicted}; it was not trained"]
    else:
        measured = measured_gain(mixture, outcomes, control, variants)
        trained = "was trained, but cannot be compared"
        if measured is not None:
            interval = f"{measured.value:+.4f} bpb, 95 % {measured.low:.4f}..{measured.high:.4f}"
            trained = f"trained beside {control}: weighted {interval}"
        if measured is not None and measured.low > 0:
            headline = [f"take {mix} {listed}, {trained}; {predicted}"]
        else:
            headline, change = [f"{NOTHING}: keep {mix}; {listed}, {trained}; {predicted}"], []
    headline.append(f"not beaten on every domain by any other variant: {', '.join(front)}")
    headline.append(
        f"rank correlation of predicted and measured left-out variants: {mixture.rank_correlation:.2f}; "
        f"noise estimated from {'seeds' if mixture.best.by_seeds else 'the residuals of the fit'}"
    )
    if not mixture.rank_correlation >= LEAST_RANK:
        flags.append(
            f"the rank correlation of predicted and measured left-out variants is {mixture.rank_correlation:.2f}; add "
            "variants or seeds, or train longer"
        )
    if not mixture.best.by_seeds:
        flags.append(
            "noise is estimated from the residuals of the fit, not from seeds; add seeds to separate noise from misfit"
        )
    if control not in front:
        flags.append(f"a variant beats {control} on every domain; see the table of findings")
    return StudyVerdict(headline=headline, change=change, flags=flags, findings=findings(outcomes, control, variants))


def measured_gain(
    mixture: Mixture,
    outcomes: Sequence[RunResult],
    control: str,
    variants: Sequence[str],
) -> Interval | None:
    """Return the weighted bits per byte that the trained proposal saves, paired by repeat and document.

    None if it cannot be compared, as `comparison_flags` says. The noise of repeats is pooled over the variants; that of
    a single repeat is what the fit leaves unexplained.
    """
    weights = dict(zip(mixture.domains, mixture.weights.tolist(), strict=True))
    contrasts = uncorrected_contrasts(outcomes, control, variants, [BPB], weights)
    contrast = next((contrast for contrast in contrasts if contrast.variant == PROPOSED), None)
    if contrast is None:
        return None
    low, high = contrast.low, contrast.high
    if contrast.repeats < 2:
        half = float(stats.t.ppf(0.975, mixture.best.dof)) * math.sqrt(2 * mixture.best.residual)
        low, high = min(low, contrast.gain - half), max(high, contrast.gain + half)
    return Interval(contrast.gain, low, high)


def round_proposal(proposal: Proposal) -> dict[str, Fraction]:
    """Return the proposed shares as multiples of half a percent that sum to 1."""
    values = np.array([share.value for share in proposal.shares.values()])
    exact = [Fraction(float(value)).limit_denominator(10**6) for value in values / values.sum()]
    counts = apportion(HALVES, [share / sum(exact) for share in exact])
    return {domain: Fraction(count, HALVES) for domain, count in zip(proposal.shares, counts, strict=True)}


# Comparison of variants


def ablation_verdict(
    outcomes: Sequence[RunResult],
    control: str,
    changes: Mapping[str, Sequence[str]],
    score: str = BPB,
    weights: Mapping[str, float] | None = None,
) -> StudyVerdict:
    """Return which variant to take, if any; `changes` is variant -> overrides, without the control.

    The best variant that is significantly better on `score` and significantly worse on no score. `eval/bpb` is computed
    from the documents of the domains with `weights` {domain: weight}; without weights its interval is too wide, since
    its documents are not paired. Raises ValueError as `effects.comparison_flags` does, or if no variant was measured on
    `score`.
    """
    variants = list(changes)
    scores = list(dict.fromkeys([score, *default_scores(outcomes)]))
    flags = comparison_flags(outcomes, control, variants, scores, weights)
    gains = findings(outcomes, control, variants, scores, weights)
    deciding = {finding.variant: finding for finding in gains if finding.score == score}
    if not deciding:
        raise ValueError(
            f"score: no variant can be compared with {control} on {score!r}; name another, or see:\n" + "\n".join(flags)
        )
    harm = {
        variant: [finding for finding in gains if finding.variant == variant and finding.says == HURTS]
        for variant in variants
    }
    better = [finding for finding in deciding.values() if finding.says == HELPS and not harm[finding.variant]]
    winner = max(better, key=lambda finding: finding.gain).variant if better else ""
    if winner:
        headline = [f"take {winner}: {deciding[winner]}"]
    elif all(finding.says == NOTHING for finding in deciding.values()):
        headline = [f"{NOTHING}: keep {control}"]
    else:
        headline = [f"keep {control}: no variant is better without harm"]
    for variant in variants:
        if variant not in deciding:
            headline.append(f"{variant}: not judged")
        elif variant != winner:
            elsewhere = "".join(f"; {finding}" for finding in harm[variant] if finding is not deciding[variant])
            headline.append(f"{variant}: {deciding[variant]}{elsewhere}")
    return StudyVerdict(headline=headline, change=list(changes[winner]) if winner else [], flags=flags, findings=gains)


# Annealing (arXiv 2407.21783, section 3.1.3): is a source, at 30 % of the annealing data, better than the default mix
# alone? The control variant anneals on the default mix, so the gain of annealing itself cancels.


def annealing_verdict(
    outcomes: Sequence[RunResult], control: str, sources: Mapping[str, str], scores: Sequence[str] | None = None
) -> StudyVerdict:
    """Return the effect of each source, one line each; `sources` is variant -> name of the source that it adds.

    `scores` are keys; None selects bits per byte of each domain and the accuracy of each task. The verdict contains no
    change; `herd study apply` writes the result to each source. Raises ValueError as `effects.comparison_flags` does.
    """
    variants = list(sources)
    flags = comparison_flags(outcomes, control, variants, scores)
    gains = findings(outcomes, control, variants, scores)
    headline = []
    for variant, name in sources.items():
        # units differ, so findings are ordered by their signal-to-noise ratio
        by_signal = sorted((gain for gain in gains if gain.variant == variant), key=lambda gain: -gain.signal_to_noise)
        headline.append(f"{name}: {_str_effects(by_signal, control)}")
    return StudyVerdict(headline=headline, flags=flags, findings=gains)


def _str_effects(by_signal: Sequence[Finding], control: str) -> str:
    """Return the significant findings of a variant, or the largest of the others."""
    if not by_signal:
        return f"not judged, as nothing can be compared with {control}"
    significant = [str(finding) for says in (HELPS, HURTS) for finding in by_signal if finding.says == says]
    if significant:
        return "; ".join(significant)
    largest = by_signal[0]
    repeats = chance = ""
    if largest.repeats < 2:
        repeats = " can be detected with one repeat"
    elif not largest.low <= 0 <= largest.high:
        chance = " before correction"
    return f"{NOTHING}{repeats} (largest: {str(largest).removeprefix(NOTHING).strip()}{chance})"


def source_effect(verdict: StudyVerdict, variant: str) -> Judgement:
    """Return the effect of the source of `variant` over all scores. Raises ValueError if the variant was not judged."""
    effects = [finding.says for finding in verdict.findings if finding.variant == variant]
    if not effects:
        raise ValueError(f"{variant}: the study does not judge it; run it in the same repeats as the control")
    significant = set(effects) - {NOTHING}
    if len(significant) > 1:
        return "mixed"
    return significant.pop() if significant else NOTHING
