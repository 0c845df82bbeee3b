"""Studies made up from known truths, to be drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from herd.llama3.studies.isoflop import IsoflopFit, Trial, fit_ladder
from herd.llama3.studies.results import HELPS, HURTS, NOTHING, Finding, StudyVerdict
from herd.tasks.study.page import FinishedRun
from herd.tasks.study.records import StudyRecord

ALPHA = 0.53
DOMAINS = ("general", "math", "code", "multilingual")


def best_tokens(flops: float) -> float:
    return 6e6 * (flops / 4e11) ** ALPHA


def trials(
    budgets: tuple[float, ...] = (2e11, 4e11, 8e11, 1.6e12, 3.2e12),
    sizes: int = 5,
    noise: float = 0.002,
    shift: float = 0.0,
) -> list[Trial]:
    """Return runs whose losses are parabolas with noise; `shift` moves the first budget's grid off its minimum."""
    dice, made = np.random.default_rng(4), []
    for place, budget in enumerate(budgets):
        middle = math.log10(best_tokens(budget))
        for away in np.linspace(-0.5, 0.5, sizes) + (shift if place == 0 else 0.0):
            count = 10 ** (middle + away)
            loss = 2.4 - 0.25 * math.log10(budget / 2e11) + 0.6 * away**2 + noise * dice.standard_normal()
            made.append(Trial(round(budget / 6 / count), round(count), budget, float(loss), f"{budget:g}-{away:.2f}"))
    return made


def ladder(shift: float = 0.0) -> IsoflopFit:
    made = trials(shift=shift)
    return fit_ladder(made, sorted({trial.flops for trial in made}))


def findings(variants: int, scores: int = 4) -> list[Finding]:
    """Return findings of every kind, the first variant's gains significant."""
    dice, made = np.random.default_rng(1), []
    for variant in range(variants):
        for score in range(scores):
            gain = 0.012 * dice.standard_normal() + (0.03 if variant == 0 else 0.0)
            half = 0.012 + 0.006 * dice.random()
            says = HELPS if gain > half else HURTS if gain < -half else NOTHING
            ends = {"gain": gain, "low": gain - half, "high": gain + half}
            key = f"eval/bpb/{DOMAINS[score]}" if score < 4 else f"eval/task-{score}"
            unit = "bpb" if score < 4 else "accuracy"
            made.append(Finding(variant=f"variant-{variant}", score=key, **ends, unit=unit, says=says, repeats=3))
    return made


def verdict(variants: int = 3, scores: int = 4) -> StudyVerdict:
    return StudyVerdict(
        headline=["variant-0: helps +0.0300 bpb on math, 95 % 0.0150 to 0.0450"],
        change=["mix.base.general=45%", "mix.base.math=30%", "lr.peak=3e-3"],
        flags=["3 repeats leave an interval two degrees of freedom; add seeds"],
        findings=findings(variants, scores),
    )


BEFORE = {"mix.base.general": "50%", "mix.base.math": "25%"}
"""Values of the base recipe."""


def finished_runs(variants: int = 3, repeats: int = 3) -> list[FinishedRun]:
    """Return the runs of a control and of `variants` beside it."""
    dice = np.random.default_rng(2)
    return [
        FinishedRun(
            variant=name,
            run=f"sample-{index * repeats + repeat}",
            tokens=4_000_000,
            flops=4e12,
            trained=4e12,
            seconds=95.0,
            device_hours=0.05,
            scores={
                "eval/bpb": 2.1,
                **{f"eval/bpb/{domain}": 2.0 + 0.1 * dice.standard_normal() for domain in DOMAINS},
                "eval/gold_nll/arithmetic": 1.0,
                "eval/arithmetic": 0.25 + 0.02 * dice.standard_normal(),
            },
        )
        for index, name in enumerate(["base", *(f"variant-{variant}" for variant in range(variants))])
        for repeat in range(1, repeats + 1)
    ]


def study_record(**changes: Any) -> StudyRecord:
    record = StudyRecord(
        name="sample",
        digest="0123456789abcdef",
        kind="mix",
        question="Which shares of the domains give the fewest bits per byte?",
        recipe="recipes/tiny.yaml",
        state="finished",
        started="2026-11-23T04:00:00+00:00",
        ended="2026-11-23T04:31:07+00:00",
        code="abc",
        machine="2 CPU cores",
        command="herd study run recipes/experiments/sample.yaml",
    )
    return record.model_copy(update=changes)


def mixes(variants: int = 9) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return shares and bits per byte of variants, the first the base; a domain's loss falls as its share grows."""
    dice = np.random.default_rng(6)
    base = {"general": 0.5, "math": 0.25, "code": 0.17, "multilingual": 0.08}
    shares = {"base": base}
    for variant in range(1, variants):
        drawn = dice.dirichlet([12 * share for share in base.values()])
        shares[f"variant-{variant}"] = dict(zip(base, map(float, drawn), strict=True))
    losses = {
        variant: {
            domain: 1.6 + 0.9 * math.exp(-3 * share) + 0.004 * dice.standard_normal() for domain, share in own.items()
        }
        for variant, own in shares.items()
    }
    return shares, losses
