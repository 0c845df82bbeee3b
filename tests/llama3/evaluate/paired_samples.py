"""Paired samples as two evaluations of close checkpoints have them, with planted changes, and the gate's evidence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from herd.llama3.evaluate.compare import (
    PairedSamples,
    difference_of_documents,
    difference_of_questions,
    documents_difference,
    holm_corrected,
)
from herd.llama3.evaluate.gate import Evidence, MeasuredScore
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.gates import GateRule
from herd.llama3.statistics.estimates import combine

MIX = {"general": 0.5, "math": 0.25, "code": 0.17, "multilingual": 0.08}
LEVEL = {"general": 2.9, "math": 2.4, "code": 3.06, "multilingual": 3.8}
"""Bits per byte of the champion."""
RULES = {
    metric: GateRule.parse(rule)
    for metric, rule in {
        "eval/bpb": "better",
        "eval/bpb/*": "no worse than 0.5%",
        "eval/*": "no drop over 5 points",
    }.items()
}
TASKS = ("arithmetic", "continuation", "copa", "piqa", "mmlu")


def documents(random: np.random.Generator, domain: str, change: float, count: int = 64) -> PairedSamples:
    """Return bits of `count` documents; the candidate is worse by `change` (a share), give or take 1 % in each."""
    sizes = np.minimum(random.lognormal(6.3, 0.6, count), 2048).round()
    champion = sizes * LEVEL[domain] * (1 + 0.15 * random.standard_normal(count))
    return PairedSamples(champion * (1 + change + 0.01 * random.standard_normal(count)), champion, sizes)


def answers(random: np.random.Generator, drop: float, count: int = 1000) -> PairedSamples:
    """Return right and wrong answers; a fifth of them are others, and `drop` more of them are newly wrong."""
    champion = (random.random(count) < 0.5).astype(float)
    other = random.random(count)
    candidate = np.where(other < 0.2, (random.random(count) < 0.5).astype(float), champion)
    return PairedSamples(np.where(other > 1 - 2 * drop, 0.0, candidate), champion, np.ones(count))


def evidence(
    seed: int = 0,
    changes: Mapping[str, float] | None = None,
    drops: Mapping[str, float] | None = None,
    count: int = 64,
    resamples: int = 1000,
    questions: int = 1000,
) -> Evidence:
    """Return the evidence of a candidate that is better by 1 % in every domain but those in `changes`."""
    random = np.random.default_rng(seed)
    bits = {d: documents(random, d, (changes or {}).get(d, -0.01), count) for d in DOMAINS}
    asked = {task: answers(random, (drops or {}).get(task, 0.0), questions) for task in TASKS}
    drawn = {f"eval/bpb/{domain}": difference_of_documents(domain, pairs, resamples) for domain, pairs in bits.items()}
    differences = {key: documents_difference(found) for key, found in drawn.items()}
    differences["eval/bpb"] = documents_difference(combine(list(drawn.values()), [MIX[domain] for domain in bits]))
    differences |= {f"eval/{task}": difference_of_questions(pairs) for task, pairs in asked.items()}
    tables = [
        _scores({f"eval/bpb/{domain}": _ratio(pairs, side) for domain, pairs in bits.items()}, "lower")
        | _scores({f"eval/{task}": _ratio(pairs, side) for task, pairs in asked.items()}, "higher")
        for side in ("candidate", "champion")
    ]
    for table in tables:
        mean = sum(MIX[domain] * table[f"eval/bpb/{domain}"].value for domain in DOMAINS)
        table["eval/bpb"] = MeasuredScore(value=mean, better="lower", requests="b")
    return Evidence.from_scores(RULES, tables[0], tables[1], holm_corrected(differences))


def _ratio(pairs: PairedSamples, side: str) -> float:
    return float(getattr(pairs, side).sum() / pairs.denominators.sum())


def _scores(values: Mapping[str, float], better: str) -> dict[str, MeasuredScore]:
    return {
        key: MeasuredScore.model_validate({"value": v, "better": better, "requests": key}) for key, v in values.items()
    }
