"""Rows of `python -m benchmarks study`: how often a study's intervals hold and how often it finds what is not there.

The rows count verdicts on made-up runs whose truth is known, by the code that judges real ones; the seeds are fixed, so
the counts are the same everywhere. Noise of another kind than the made-up one is not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from benchmarks.rows import STUDY_TARGETS, Row, measured, rows_of
from benchmarks.simulated_studies import PlantedLaw, false_findings, planted_mixes, recovery
from herd.llama3.recipe.base import Domain
from herd.llama3.statistics.repeats import coverage
from herd.llama3.studies.expand import (
    BUDGETS,
    FIGURE,
    FLAGSHIP_FLOPS,
    TEXT,
    PowerLaw,
    VariantRun,
    design_mixes,
    load_study,
)
from herd.llama3.studies.isoflop import NoLawError, Trial, fit_ladder
from herd.llama3.studies.mixture import MixTrial, fit_mixture, propose
from herd.llama3.studies.study import MixDesign
from herd.llama3.studies.verdicts import round_proposal

TRIES = 100
SOURCES = 3
"""Data sources of the larger made-up annealing study."""
PUBLISHED_SIZES = 7
"""Sizes of each budget of the published ladder, which prints ranges and not how many."""
TRUTH, NOISE = PlantedLaw(), 0.002
"""Of the losses made up on the grid of a study file, as of `recovery`."""
MIX: Mapping[Domain, Fraction] = {
    "general": Fraction("0.5"), "math": Fraction("0.25"), "code": Fraction("0.17"), "multilingual": Fraction("0.08")
}  # fmt: skip
"""The published mix (arXiv 2407.21783, section 3.1.2)."""
NAMED = {"figure": (FIGURE, 16.3e12), "text": (TEXT, 10.5e12)}
"""Constants as printed, and the tokens that they are known to give at 3.8e25 operations."""


@dataclass(frozen=True)
class StudySettings:
    """What is measured."""

    only: tuple[str, ...] = ()
    ladder: Path = Path("recipes/experiments/ladder-llama3.yaml")
    """Study whose grid of budgets and sizes is tried on made-up losses."""


@dataclass(frozen=True)
class StudySession:
    """One run of the benchmark."""

    settings: StudySettings


def study_rows(session: StudySession) -> Iterator[Row]:
    """Yield the rows of `python -m benchmarks study`. Raises ValueError as `rows_of`."""
    return rows_of(session, STUDY_TARGETS, MEASURES)


def _alpha(_: StudySession, name: str) -> Row:
    """Count the ladders whose interval of alpha holds the true one."""
    if name == "alpha/laptop":
        return measured(name, recovery(TRIES), "4 budgets, 5 sizes, losses off by 0.2 %")
    note = f"{len(BUDGETS)} budgets, {PUBLISHED_SIZES} sizes, losses off by 0.2 %"
    return measured(name, recovery(TRIES, BUDGETS, PUBLISHED_SIZES), note)


def _shipped(session: StudySession, name: str) -> Row:
    """Count them on the grid of a study file: its own shapes, batches and operations, so no even steps."""
    expanded = load_study(session.settings.ladder)
    if expanded.study.ladder is None:
        raise ValueError(f"--ladder: {session.settings.ladder} is no ladder but a study of kind {expanded.study.kind}")
    runs, budgets = expanded.runs, expanded.study.ladder.budgets
    held = sum(
        _holds([_trial(run, dice) for run in runs], budgets) for dice in map(np.random.default_rng, range(TRIES))
    )
    note = f"{len(runs)} runs of {session.settings.ladder.name}, losses off by {NOISE:.1%}; alpha of 6 N D operations"
    return measured(name, held, note)


def _trial(run: VariantRun, dice: np.random.Generator) -> Trial:
    loss = TRUTH.loss(run.parameters, run.tokens) * (1 + NOISE * dice.normal())
    return Trial(run.parameters, run.tokens, run.flops, loss, run.name)


def _holds(trials: Sequence[Trial], budgets: Sequence[float]) -> bool:
    try:
        alpha = fit_ladder(trials, budgets).law.alpha
    except NoLawError:
        return False
    return alpha.low <= TRUTH.alpha <= alpha.high


def _constants(_: StudySession, name: str) -> Row:
    """Compare the tokens of a published pair of constants with what is known of it."""
    law, named = NAMED[name.partition("/")[2]]
    found = law.tokens(FLAGSHIP_FLOPS)
    return measured(name, 100 * abs(found / named - 1), _said(law, found), tokens=found)


def _said(law: PowerLaw, tokens: float) -> str:
    return f"{law.coefficient:g} C^{law.alpha:g} at {FLAGSHIP_FLOPS:.3g} operations: {tokens / 1e12:.2f}T tokens"


def _same(_: StudySession, name: str) -> Row:
    """Count the annealing studies of variants that are all the control in which a difference is declared."""
    sources = 1 if name == "same/annealing" else SOURCES
    found = false_findings(TRIES, sources=sources)
    return measured(name, found, f"{sources} variant(s) that are the control, 3 repeats, 4 domains and 2 tasks")


def _same_mix(_: StudySession, name: str) -> Row:
    """Count the searches over mixes that are all as good as the base mix in which another is proposed."""
    mixes = {"base": MIX, **design_mixes(MixDesign(), MIX)}
    found = sum(_proposes(mixes, dice) for dice in map(np.random.default_rng, range(TRIES)))
    return measured(name, found, f"{len(mixes)} mixes around the base, 3 repeats, bits per byte off by {NOISE}")


def _gain(_: StudySession, name: str) -> Row:
    """Count the searches whose interval of the gain of the proposed mix, as it is written, holds the true one."""
    law, count = name.removeprefix("gain/").split("-")
    weights, held, predicted, true = np.array([float(share) for share in MIX.values()]), 0, 0.0, 0.0
    for seed in range(TRIES):
        bits, trials = planted_mixes(law, MIX, int(count), seed)
        made = fit_mixture(trials, _plain(MIX))
        shares = round_proposal(propose(made, weights, {}))
        mix = np.array([float(shares[domain]) for domain in MIX])
        gain, truth = made.gain(mix, weights), float(weights @ (bits(weights) - bits(mix)))
        held += gain.low <= truth <= gain.high
        predicted, true = predicted + gain.value / TRIES, true + truth / TRIES
    return measured(name, held, f"{count} draws, 2 repeats; predicted {predicted:.4f}, true {true:.4f} bits per byte")


def _scatter(_: StudySession, name: str) -> Row:
    """Return how often the interval of a variant holds the truth that scatters 5 x as widely as the others."""
    repeats = int(name[len("scatter/")])
    variants = {3: 4, 2: 8}[repeats]
    return measured(
        name, 100 * coverage(variants, repeats, 5.0), f"the last of {variants} variants scatters 5 x as widely"
    )


def _proposes(mixes: Mapping[str, Mapping[Domain, Fraction]], dice: np.random.Generator) -> bool:
    """Return whether a search over mixes that differ by nothing but noise finds one."""
    trials = [
        MixTrial(mix, repeat, _plain(shares), {domain: 1 + NOISE * dice.normal() for domain in shares})
        for mix, shares in mixes.items()
        for repeat in range(3)
    ]
    made = fit_mixture(trials, _plain(MIX))
    return propose(made, np.array([float(MIX[domain]) for domain in MIX]), {}).significant


def _plain(shares: Mapping[Domain, Fraction]) -> dict[str, float]:
    return {domain: float(share) for domain, share in shares.items()}


MEASURES: Mapping[str, Callable[[StudySession, str], Row]] = {
    "alpha/laptop": _alpha,
    "alpha/published": _alpha,
    "alpha/shipped": _shipped,
    "constants/figure": _constants,
    "constants/text": _constants,
    "same/annealing": _same,
    "same/sources": _same,
    "same/mix": _same_mix,
    **{name: _gain for name in STUDY_TARGETS if name.startswith("gain/")},
    "scatter/3-repeats": _scatter,
    "scatter/2-repeats": _scatter,
}
