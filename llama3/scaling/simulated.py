"""Made-up outcomes of a study whose truth is known, to count how often its verdict is wrong.

Bits per byte of document i in run (arm, repeat) are difficulty[i] + effect[arm] + effect[arm, i] + luck[run] +
luck[run, domain] + rest[run, i]; documents have uneven lengths. The default sizes are of the order seen between tiny
models trained alike. What this gives up: tails heavier than the normal's, and arms that differ in their scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llama3.evaluate.scores import Score
from llama3.evaluate.statistics import mean, ratio
from llama3.scaling.outcome import Outcome, Samples


@dataclass(frozen=True)
class Truth:
    """Sizes behind made-up outcomes; bits per byte, standard deviations unless said otherwise."""

    domains: Mapping[str, int]
    """Documents of each domain."""
    questions: Mapping[str, int]
    """Questions of each task."""
    effects: Mapping[str, Mapping[str, float]]
    """How much better each arm is than none, by domain or task: `{"gsm": {"math": 0.01}}`. The first is the control."""
    repeats: int = 3
    luck: float = 0.004
    """Of a run, the same in all its domains."""
    luck_domain: float = 0.003
    """Of a run, in one domain."""
    uneven: float = 0.01
    """How unevenly an effect falls on documents; nothing where an arm has no effect."""
    rest: float = 0.01
    """Of one document in one run."""
    luck_task: float = 0.01
    """Of a run, in the share of right answers."""


def outcomes(truth: Truth, seed: int) -> list[Outcome]:
    """Return the outcomes of all arms and repeats."""
    dice = np.random.default_rng(seed)
    arms = list(truth.effects)
    made = {name: list(_domain(truth, name, n, dice)) for name, n in truth.domains.items()}
    common = truth.luck * dice.standard_normal((len(arms), truth.repeats))
    asked = {name: list(_task(truth, name, n, dice)) for name, n in truth.questions.items()}
    return [
        _outcome(arm, repeat + 1, place * truth.repeats + repeat, made, asked, common[place, repeat])
        for place, arm in enumerate(arms)
        for repeat in range(truth.repeats)
    ]


def _domain(truth: Truth, name: str, n: int, dice: np.random.Generator) -> Iterator[Samples]:
    """Yield the samples of each run, arm by arm."""
    lengths = np.round(np.exp(7 + 0.9 * dice.standard_normal(n))).astype(np.float64)
    hard = 2 + 0.4 * dice.standard_normal(n)
    ids = tuple(f"{name}-{place}" for place in range(n))
    for effects in truth.effects.values():
        effect = effects.get(name, 0.0)
        own = hard - effect + (truth.uneven * dice.standard_normal(n) if effect else 0.0)
        for _ in range(truth.repeats):
            luck = truth.luck_domain * dice.standard_normal()
            yield Samples(ids, (own + luck + truth.rest * dice.standard_normal(n)) * lengths, lengths)


def _task(truth: Truth, name: str, n: int, dice: np.random.Generator) -> Iterator[Samples]:
    """Yield answers: the same draw decides a question in all runs, but for one in five."""
    hard, ids = dice.random(n), tuple(f"{name}-{place}" for place in range(n))
    for effects in truth.effects.values():
        for _ in range(truth.repeats):
            chance = 0.4 + effects.get(name, 0.0) + truth.luck_task * dice.standard_normal()
            draw = np.where(dice.random(n) < 0.2, dice.random(n), hard)
            yield Samples(ids, (draw < chance).astype(np.float64), np.ones(n))


def _outcome(
    arm: str,
    repeat: int,
    place: int,
    made: Mapping[str, Sequence[Samples]],
    asked: Mapping[str, Sequence[Samples]],
    luck: float,
) -> Outcome:
    bits, answers = {name: runs[place] for name, runs in made.items()}, {name: asked[name][place] for name in asked}
    shifted = {
        f"eval/bpb/{name}": Samples(one.ids, one.numerators + luck * one.denominators, one.denominators)
        for name, one in bits.items()
    }
    right = {f"eval/{name}": one for name, one in answers.items()}
    scores = {key: _bits(key, one) for key, one in shifted.items()} | {
        key: _share(key, one) for key, one in right.items()
    }
    return Outcome(arm, repeat, f"{arm}-{repeat}", 1_000_000, 160_000, 1e12, scores, shifted | right)


def _bits(key: str, samples: Samples) -> Score:
    found = ratio(samples.numerators.tolist(), samples.denominators.tolist())
    return Score.of(key, found, "bits per byte", "lower", f"asked {key}", None)


def _share(key: str, samples: Samples) -> Score:
    return Score.of(key, mean(samples.numerators.tolist()), "accuracy", "higher", f"asked {key}", 0.25)
