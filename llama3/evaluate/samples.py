"""How answers become samples, and samples a score.

Bits per byte of whole texts compares models with different tokenizers and moves smoothly while a model learns. A
multiple choice is answered by the choice with the fewest nats per byte (or what the task divides by) of its scored
text; noisy on small models, so it may veto a promotion and should not decide one.

A sample is a numerator and a denominator (bits and bytes; 1 or 0 and 1), so every score is a ratio of sums over its
samples and any two models are compared sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from llama3.evaluate.scores import Score
from llama3.evaluate.scoring import Likelihood
from llama3.evaluate.statistics import proportion, ratio
from llama3.evaluate.task import Request, Task


@dataclass(frozen=True)
class Sample:
    """What one document or question adds to a score."""

    key: str
    id: str
    numerator: float
    """Bits, or 1.0 for a right answer and 0.0 for a wrong one."""
    denominator: float
    """UTF-8 bytes, or 1.0."""
    tokens: int
    """Tokens scored, over all choices."""
    picked: int | None
    gold: int | None
    group: str = ""


def samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return the task's samples in the order of its requests; `likelihoods` are those of the requests."""
    pairs = zip(task.requests, likelihoods, strict=True)
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].document)]
    return [_bits(group) if task.kind == "bits" else _answer(group) for group in groups]


def score(task: Task, items: Sequence[Sample]) -> Score:
    """Return the task's score over its samples: the ratio's standard error for bits, Wilson's interval for choices."""
    asked = task.digest
    if task.kind == "bits":
        estimate = ratio([item.numerator for item in items], [item.denominator for item in items])
        return Score.of(task.key, estimate, "bits per byte", "lower", asked, None)
    right = proportion(sum(item.numerator == 1 for item in items), len(items))
    return Score.of(task.key, right, "accuracy", "higher", asked, task.chance)


def _bits(group: Sequence[tuple[Request, Likelihood]]) -> Sample:
    ((request, likelihood),) = group
    bits = likelihood.nats / math.log(2)
    return Sample(request.task, request.document, bits, float(request.bytes), likelihood.tokens, None, None)


def _answer(group: Sequence[tuple[Request, Likelihood]]) -> Sample:
    rates = [likelihood.nats / request.bytes for request, likelihood in group]
    request = group[0][0]
    picked = min(range(len(rates)), key=rates.__getitem__)
    tokens = sum(likelihood.tokens for _, likelihood in group)
    return Sample(request.task, request.document, float(picked == request.gold), 1.0, tokens, picked, request.gold)
