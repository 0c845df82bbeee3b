"""What a ladder says, in words: the law, the range it was fitted on, and the best use of a budget by both forms.

No number is given without its interval and without how far it lies beyond the data. What this gives up: a choice
between the two forms where they differ; a reader sees both and the flag that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from benchmarks import simulated_studies
from llama3.evaluate.suite import BPB
from llama3.recipe.units import Share
from llama3.studies.chinchilla import Chinchilla
from llama3.studies.effects import comparable, default_scores, findings
from llama3.studies.forecast import Interval
from llama3.studies.isoflop import IsoflopFit, Law, NoLaw, Optimum
from llama3.studies.mixture import Mixture, Proposal, pareto
from llama3.studies.results import HELPS, HURTS, NOTHING, Finding, RunResult, StudyVerdict
from llama3.tokens.mix import apportion

WIDE = 10.0
"""An interval of tokens whose ends differ by a larger factor decides nothing."""


def ladder_verdict(ladder: IsoflopFit, flops: float | None = None, other: Chinchilla | None = None) -> StudyVerdict:
    """Return what `ladder` says, and at `flops` operations, with the answers of `other` beside its own."""
    headline, flags = [str_law(ladder.law)], list(ladder.flags)
    if other:
        headline.append(
            f"L(N, D) = E + A/N^a + B/D^b through all runs: alpha {_plain(other.alpha)}, E {_plain(other.irreducible)}"
        )
    if flops is not None:
        best = ladder.law.at(flops)
        rival = other.at(flops) if other else None
        headline += [str_optimum(best, ladder.law), *([f"by L(N, D): {_spent(rival)}"] if rival else [])]
        flags += _doubts(best, rival)
    return StudyVerdict(headline=headline, flags=flags)


def no_law(reason: NoLaw) -> StudyVerdict:
    """Return the verdict of a ladder that shows no law."""
    used = sum(one.used for one in reason.parabolas)
    return StudyVerdict(headline=[f"no law: {used} budget(s) with a usable minimum"], flags=reason.flags)


def str_law(law: Law) -> str:
    """Return `N*(C) = 0.31 C^0.530 tokens (95 % of alpha 0.490..0.570), fitted on 2e11..3e12 FLOPs`."""
    alpha = law.alpha
    formula = f"N*(C) = {law.coefficient.value:.3g} C^{alpha.value:.3f} tokens"
    return f"{formula} (95 % of alpha {alpha.low:.3f}..{alpha.high:.3f}), fitted on {_range(law)}"


def str_optimum(best: Optimum, law: Law) -> str:
    """Return `at 1e+14 FLOPs: 21M tokens (..) for a model of 0.8M parameters (..); 330 x beyond ..`."""
    return f"at {best.flops:.3g} FLOPs: {_spent(best)}; {_place(best, law)}"


def _spent(best: Optimum) -> str:
    return f"{_counts(best.tokens)} tokens for a model of {_counts(best.parameters)} parameters"


def _place(best: Optimum, law: Law) -> str:
    if best.flops < law.least:
        return f"{law.least / best.flops:.3g} x below the range fitted ({_range(law)})"
    if best.beyond > 1:
        return f"{best.beyond:.3g} x beyond the range fitted ({_range(law)})"
    return f"inside the range fitted ({_range(law)})"


def _range(law: Law) -> str:
    return f"{law.least:.3g}..{law.most:.3g} FLOPs"


def _doubts(best: Optimum, rival: Optimum | None) -> list[str]:
    flags, at = [], f"at {best.flops:.3g} FLOPs"
    if not best.tokens.high <= WIDE * best.tokens.low:
        flags.append(f"{at} the interval of tokens spans more than a factor of {WIDE:.0f}; add larger budgets")
    if rival and (rival.tokens.low > best.tokens.high or rival.tokens.high < best.tokens.low):
        flags.append(
            f"{at} the two forms disagree beyond their intervals; add budgets, or sizes around each minimum, before "
            "trusting either"
        )
    return flags


def _plain(found: Interval) -> str:
    return f"{found.value:.3f} (95 % {found.low:.3f}..{found.high:.3f})"


def _counts(found: Interval) -> str:
    return f"{count(found.value)} (95 % {count(found.low)}..{count(found.high)})"


def count(number: float) -> str:
    """Return a number as people say it, to three digits: `16.3T`, `812K`; beyond what has a name, `3e+20`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if scale <= number < 1e15:
            return f"{float(f'{number / scale:.3g}'):g}{unit}"
    return f"{number:.3g}"


# What a mix search says: the proposal with its gain, or that no mix is better than the one there is, and what to
# add.
#
# What this gives up: a change of a mix that helps one domain at another's cost is shown in the findings and not
# proposed.

LEAST_RANK = 0.5
"""A fit whose predictions of arms left out go with what was measured less than this orders nothing."""
HALVES = 200
"""Proposed shares are whole halves of a percent."""


def mix_verdict(
    made: Mixture, found: Proposal, outcomes: Sequence[RunResult], control: str, arms: Sequence[str], mix: str
) -> StudyVerdict:
    """Return what the search came to; `arms` are all but the control, `mix` the name of the mix in the recipe."""
    flags = [*comparable(outcomes, control, arms), *_flags(made, control)]
    gain = found.gain
    ends = f"{gain.value:+.4f} bpb, 95 % {gain.low:.4f}..{gain.high:.4f}"
    rounded = whole(found)
    if found.significant:
        listed = "/".join(f"{float(share) * 100:g}" for share in rounded.values())
        headline = [f"take {mix} {listed} ({'/'.join(rounded)}): weighted {ends}"]
        change = [f"mix.{mix}.{domain}={Share(share)}" for domain, share in rounded.items()]
    else:
        headline, change = [f"{NOTHING}: keep {mix} (best blend of the arms: weighted {ends})"], []
    headline.append(f"not beaten on every domain by any other arm: {', '.join(pareto(made))}")
    headline.append(
        f"arms left out of the fit are ordered with a rank correlation of {made.rank_correlation:.2f}; "
        f"noise by {'seeds' if made.by_seeds else 'what the form leaves unexplained'}"
    )
    return StudyVerdict(headline=headline, change=change, flags=flags, findings=findings(outcomes, control, arms))


def whole(found: Proposal) -> dict[str, Fraction]:
    """Return the proposed shares in whole halves of a percent that sum to 1."""
    values = np.array([one.value for one in found.shares.values()])
    exact = [Fraction(float(value)).limit_denominator(10**6) for value in values / values.sum()]
    counts = apportion(HALVES, [share / sum(exact) for share in exact])
    return {domain: Fraction(count, HALVES) for domain, count in zip(found.shares, counts, strict=True)}


def _flags(made: Mixture, control: str) -> list[str]:
    flags = []
    if not made.rank_correlation >= LEAST_RANK:
        flags.append(
            f"the fit orders arms that it has not seen with a rank correlation of {made.rank_correlation:.2f}; add "
            "arms or seeds, or train longer"
        )
    if not made.by_seeds:
        flags.append(
            "noise is what the form leaves unexplained, not that between seeds; add seeds to tell the two apart"
        )
    if control not in pareto(made):
        flags.append(f"an arm beats {control} on every domain; see the table of findings")
    return flags


# One change of the recipe against the recipe as it is: a batch ramp, a warm-up length, an averaging window.
#
# An arm is taken if it is significantly better on the score that decides, and significantly worse on none; with
# several such arms the one that gains most. Otherwise the recipe stays as it is: that no difference was found is an
# answer, with intervals that say how large one may still be. What this gives up: an arm that is better by a hair
# and cheaper; and harm elsewhere that is too small to be significant.


def ablation_verdict(
    outcomes: Sequence[RunResult],
    control: str,
    changes: Mapping[str, Sequence[str]],
    score: str = BPB,
    weights: Mapping[str, float] | None = None,
) -> StudyVerdict:
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
    return StudyVerdict(headline=lines, change=list(changes[taken]) if taken else [], flags=flags, findings=found)


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


# Annealing as a judge of data: is a source, as 30 % of the annealing, worth more than the default mix alone?
#
# Llama 3 (arXiv 2407.21783, section 3.1.3) takes a half-trained model, lets its learning rate go linearly to zero
# on 30 % new data and 70 % default mix, and looks at the benchmarks; here a control arm anneals on the default mix
# for the same tokens, so that what annealing itself gains is not put down to the source. Each repeat is another
# helping of documents. A source may help on one domain and hurt on another; all of it is said. What this gives up:
# the effect of a source over a whole training, or at other shares than the one that was tried.

Judgement = Literal["helps", "hurts", "mixed", "no significant difference"]


def annealing_verdict(
    outcomes: Sequence[RunResult], control: str, sources: Mapping[str, str], scores: Sequence[str] | None = None
) -> StudyVerdict:
    """Return what each source does, a line each; `sources` is arm -> name of the source that it adds.

    `scores` are keys; None takes bits per byte of each domain and the accuracy of each task. There is no change: what
    is said of a source is written back to it by `herd study apply`. Raises ValueError as `contrast.comparable` does.
    """
    arms = list(sources)
    flags = comparable(outcomes, control, arms, scores)
    found = findings(outcomes, control, arms, scores)
    lines = [_line(name, [one for one in found if one.arm == arm], control) for arm, name in sources.items()]
    return StudyVerdict(headline=lines, flags=flags, findings=found)


def judgement(verdict: StudyVerdict, arm: str) -> Judgement:
    """Return what the source of `arm` does over all scores. Raises ValueError if the arm was not judged."""
    own = [one for one in verdict.findings if one.arm == arm]
    if not own:
        raise ValueError(f"{arm}: the study does not judge it; run it in the same repeats as the control")
    said = {one.says for one in own} - {NOTHING}
    if len(said) > 1:
        return "mixed"
    return said.pop() if said else NOTHING


def false_findings(studies: int, repeats: int = 3, documents: int = 64, sources: int = 1, seed: int = 0) -> int:
    """Return in how many of so many made-up studies of arms that are all the control a difference is declared.

    Four domains of so many documents and two tasks of 100 questions. At most 5 % should be.
    """
    truth = simulated_studies.PlantedEffects(
        domains=dict.fromkeys(("general", "math", "code", "multilingual"), documents),
        questions={"arithmetic": 100, "continuation": 100},
        effects={"default": {}, **{f"again-{place}": {} for place in range(sources)}},
        repeats=repeats,
    )
    names = {arm: arm for arm in truth.effects if arm != "default"}
    verdicts = (
        annealing_verdict(simulated_studies.outcomes(truth, seed + one), "default", names) for one in range(studies)
    )
    return sum(any(one.says != NOTHING for one in verdict.findings) for verdict in verdicts)


def _line(name: str, found: Sequence[Finding], control: str) -> str:
    if not found:
        return f"{name}: not judged, as nothing can be compared with {control}"
    clear = [str(one) for says in (HELPS, HURTS) for one in _largest(found) if one.says == says]
    if clear:
        return f"{name}: {'; '.join(clear)}"
    first = _largest(found)[0]
    repeats = "" if first.repeats > 1 else " can be told from one repeat"
    chance = " before correction" if first.repeats > 1 and not first.low <= 0 <= first.high else ""
    return f"{name}: {NOTHING}{repeats} (largest: {str(first).removeprefix(NOTHING).strip()}{chance})"


def _largest(found: Sequence[Finding]) -> list[Finding]:
    """Return findings by how far they lie from 0 in units of their own interval, so that units do not matter."""
    return sorted(found, key=lambda one: -abs(one.gain) / max(one.high - one.low, 1e-300))
