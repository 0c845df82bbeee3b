"""Rows of `python -m benchmarks gate`: how often an equal, a better and a worse model pass the rules of our recipes.

Answers and bits per byte of pairs of models are made up, in the sizes of the recipe's suite, and judged by the code
that judges real ones. Two models answer one question in ten differently, and their bits per byte differ by 1.5 % from
document to document (`checks.DISCORDANT`, `checks.SPREAD`); questions and documents are independent. The better model
has two points more on every task and 0.5 % fewer bits per byte, the worse one two points less.

The rows `null` have equal models whose documents err together in clusters: half of the variance is of the cluster.
`independent` judges the same pairs without knowing the clusters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import GATE_TARGETS, Row, measured, rows_of
from herd.llama3.evaluate.checks import BITS_GAIN, DISCORDANT, GAIN, SPREAD, SampleSize, core_baselines, expected_sizes
from herd.llama3.evaluate.compare import (
    PairedSamples,
    core_difference,
    difference_of_answers,
    difference_of_documents,
    documents_difference,
)
from herd.llama3.evaluate.gate import Decision, MeasuredScore, decide
from herd.llama3.evaluate.suite import BPB, CORE, recipe_suite, stage_suite_name, with_suite
from herd.llama3.recipe.gates import GateRule, default_policy
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Evaluate
from herd.llama3.statistics.estimates import combine, interval, paired_proportions, resample
from herd.llama3.statistics.significance import Difference

RESAMPLES = 400
LEVEL = 3.0
"""Bits per byte of the champion, in all domains."""
EACH_TASK = {"eval/bpb": "better", "eval/bpb/*": "no worse than 0.5%", "eval/*": "no drop over 5 points"}
"""The rules that our recipes had before."""
POWERS = {"power-0.2": 0.002, "power-0.5": 0.005, "power-1": 0.01}


@dataclass(frozen=True)
class GateSettings:
    """What is measured."""

    only: tuple[str, ...] = ()
    tries: int = 200


@dataclass
class GateSession:
    """One run of the benchmark; decisions are made once for the rows that count them."""

    settings: GateSettings
    decided: dict[tuple[str, float, float], list[Decision]] = field(default_factory=dict)

    def decisions(self, policy: str, points: float, bits: float) -> list[Decision]:
        """Return the decisions about models that are better by `points` on every task and by a share `bits`."""
        key = policy, points, bits
        if key not in self.decided:
            pairs = MadeUpPairs(policy)
            random = np.random.default_rng(1)
            self.decided[key] = [pairs.decide(random, points, bits) for _ in range(self.settings.tries)]
        return self.decided[key]


@dataclass(frozen=True)
class MadeUpPairs:
    """Pairs of models in the sizes of the recipe `policy`, judged by its rules."""

    policy: str

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with the suite that the gate judges."""
        name = {"default": "quickstart", "each-task": "llama3-1b-100b"}.get(self.policy, self.policy)
        recipe = load_recipe(Path(f"recipes/{name}.yaml"), [])
        if self.policy == "default":  # what a recipe evaluates that says nothing about it
            recipe = recipe.model_copy(update={"evaluate": Evaluate()})
        return with_suite(recipe, stage_suite_name(recipe, "champion"))

    @cached_property
    def rules(self) -> dict[str, GateRule]:
        """The rules of promotion."""
        if self.policy == "each-task":
            return {pattern: GateRule.parse(rule) for pattern, rule in EACH_TASK.items()}
        return default_policy() if self.policy == "default" else self.recipe.promote.when

    @cached_property
    def sizes(self) -> dict[str, SampleSize]:
        """How many documents or questions each score has."""
        return expected_sizes(self.recipe, look=False)

    def decide(self, random: np.random.Generator, points: float, bits: float) -> Decision:
        """Return the decision about a made-up model that is better by `points` on every task and a share `bits`."""
        differences: dict[str, Difference] = {}
        drawn, answers = {}, {}
        for key, size in self.sizes.items():
            if key.startswith(f"{BPB}/"):
                lengths = np.minimum(random.lognormal(6.3, 0.6, size.n), 2048).round()
                champion, change = LEVEL * lengths, SPREAD * random.standard_normal(size.n) - bits
                pairs = PairedSamples(champion * (1 + change), champion, lengths)
                drawn[key] = difference_of_documents(key, pairs, RESAMPLES)
                differences[key] = documents_difference(drawn[key])
            elif key not in (BPB, CORE):
                shares = [(DISCORDANT + points) / 2, (DISCORDANT - points) / 2, 1 - DISCORDANT]
                gained, lost, _ = map(int, random.multinomial(size.n, shares))
                answers[key] = paired_proportions(gained, lost, size.n)
                differences[key] = difference_of_answers(gained, lost, size.n)
        weights = [float(self.recipe.first_mix.get(key.removeprefix(f"{BPB}/"), 0)) for key in drawn]  # type: ignore[call-overload]
        differences[BPB] = documents_difference(combine(list(drawn.values()), weights))
        baselines = core_baselines(recipe_suite(self.recipe), answers)
        differences[CORE] = core_difference([(answers[key], base) for key, base in baselines.items()])
        ours, theirs = {}, {}
        for key, difference in differences.items():
            level = LEVEL if difference.better == "lower" else 0.5
            fields = {"better": difference.better, "requests": key, "n": difference.n}
            ours[key] = MeasuredScore.model_validate({"value": level + difference.value, **fields})
            theirs[key] = MeasuredScore.model_validate({"value": level, **fields})
        return decide(self.rules, ours, theirs, differences)


def gate_rows(session: GateSession) -> Iterator[Row]:
    """Yield the wanted rows of a benchmark as they are measured. Raises ValueError as `rows_of`."""
    return rows_of(session, GATE_TARGETS, MEASURES)


def _row(session: GateSession, name: str) -> Row:
    policy, kind = name.split("/")
    points = {"better": GAIN, "promoted": GAIN, "worse": -GAIN}.get(kind, 0.0)
    bits = {"better": BITS_GAIN, "promoted": BITS_GAIN, **POWERS}.get(kind, 0.0)
    decisions = session.decisions(policy, points, bits)
    if kind in ("false", *POWERS):
        passed = [row.passed for decision in decisions for row in decision.rows if row.metric == BPB]
    elif kind == "promoted":
        passed = [decision.accepted for decision in decisions]
    else:
        passed = [all(row.passed for row in decision.rows if row.rule != "better") for decision in decisions]
    vetoes = (row.metric for each in decisions for row in each.rows if not row.passed and row.metric != BPB)
    refusing = Counter(vetoes).most_common(3)
    note = ", ".join(f"{metric} refuses {count / len(decisions):.0%}" for metric, count in refusing)
    return measured(name, 100 * sum(passed) / len(passed), note if kind in ("equal", "better", "worse") else "")


def _null_row(session: GateSession, name: str) -> Row:
    method, kind = name.split("/")
    shape, sizes = kind.split("-", 1)
    clusters, documents = map(int, sizes.split("-of-"))
    random, better, tries = np.random.default_rng(2), 0, 5 * session.settings.tries
    for _ in range(tries):
        parts = []
        for domain in range(len(WEIGHTS)):
            lengths = np.minimum(random.lognormal(6.3, 0.6, documents), 2048).round()
            index = np.arange(documents) if clusters == documents else random.integers(0, clusters, documents)
            shared = SHAPES[shape](random, max(clusters, documents))[index]
            change = SPREAD * (math.sqrt(0.5) * shared + math.sqrt(0.5) * random.standard_normal(documents))
            names = index.astype(str).tolist() if method == "null" else ()
            parts.append(resample(LEVEL * lengths * change, lengths, domain, RESAMPLES, names))
        better += interval(combine(parts, WEIGHTS))[1] < 0
    return measured(name, 100 * better / tries)


SHAPES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda random, count: random.standard_normal(count),
    "skewed": lambda random, count: random.exponential(1.0, count) - 1.0,  # rare ones are far worse
    "heavy": lambda random, count: random.standard_t(3, count) / math.sqrt(3),
}
"""Differences with mean 0 and variance 1."""
WEIGHTS = [0.5, 0.25, 0.17, 0.08]
MEASURES = {name: _null_row if name.startswith(("null/", "independent/")) else _row for name in GATE_TARGETS}
