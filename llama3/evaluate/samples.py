"""How answers become samples, and samples a score.

Bits per byte of whole texts compares models with different tokenizers and moves smoothly while a model learns. A
multiple choice is answered by the choice with the fewest nats per byte (or what the task divides by) of its scored
text; noisy on small models, so it may veto a promotion and should not decide one.

A sample is a numerator and a denominator (bits and bytes; 1 or 0 and 1), so a score is a ratio of sums over its samples
(or the mean of that ratio over groups) and any two models are compared sample by sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from llama3.evaluate.likelihood import Likelihood
from llama3.evaluate.scores import Score
from llama3.evaluate.statistics import Estimate, mean, proportion, ratio
from llama3.evaluate.task import Normalise, Request, Task


@dataclass(frozen=True)
class Sample:
    """What one document or question adds to a score."""

    key: str
    id: str
    numerator: float
    """Bits, or the share of right answers: 1.0 or 0.0 where there is one answer."""
    denominator: float
    """UTF-8 bytes, or 1.0."""
    tokens: int
    """Tokens scored, over all choices; 0 where the model writes."""
    picked: int | None
    gold: int | None
    group: str = ""


def samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return the task's samples in the order of its requests; `likelihoods` are those of the requests."""
    pairs = zip(task.requests, likelihoods, strict=True)
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].document)]
    match task.kind:
        case "bits":
            return [_bits(group) for group in groups]
        case "choice":
            return [_answer(group, task.normalise) for group in groups]
        case "cloze":
            return [_cloze(group) for group in groups]
        case _:
            raise ValueError(f"{task.key}: kind {task.kind} is answered in writing; see llama3.evaluate.answers")


def score(task: Task, items: Sequence[Sample]) -> Score:
    """Return the task's score over its samples, with the standard error and interval that fit its kind.

    Bits per byte: the ratio's. One answer a question: Wilson's interval. Several answers a question, or the mean of
    groups: 1.96 standard errors, cut at 0 and 1. Questions without a sample were not judged; the value is NaN if all.
    """
    if not items:
        nothing = Estimate(math.nan, math.nan, math.nan, math.nan, 0)
        made = Score.of(task.key, nothing, "accuracy", "higher", task.digest, task.chance)
        return dataclasses.replace(made, shots=task.shots, version=task.version, unjudged=task.questions)
    numerators, denominators = [item.numerator for item in items], [item.denominator for item in items]
    if task.kind == "bits":
        unit, better, estimate = "bits per byte", "lower", ratio(numerators, denominators)
    elif task.average == "groups":
        unit, better, estimate = "accuracy", "higher", group_mean(items)
    elif task.writing.samples > 1:
        unit, better, estimate = "accuracy", "higher", _within(ratio(numerators, denominators))
    else:
        right = sum(numerator == 1 for numerator in numerators)
        unit, better, estimate = "accuracy", "higher", proportion(right, len(items))
    made = Score.of(task.key, estimate, unit, "lower" if better == "lower" else "higher", task.digest, task.chance)
    return dataclasses.replace(made, shots=task.shots, version=task.version, unjudged=task.questions - len(items))


def group_mean(items: Sequence[Sample]) -> Estimate:
    """Return the mean of the groups' means of shares (`statistics.mean`), its interval within 0 and 1.

    Without any spread (all right, or all wrong) the interval is Wilson's of all items.
    """
    found = mean([item.numerator for item in items], [item.group for item in items])
    if found.stderr == 0:
        flat = proportion(round(found.value * len(items)), len(items))
        return dataclasses.replace(found, low=flat.low, high=flat.high)
    return _within(found)


def pass_at(k: int, right: int, answers: int) -> float:
    """Return the chance that `k` answers drawn without replacement from `answers`, `right` of them right, hold one.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= answers and 0 <= right <= answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {right} right in {answers}: needs 1 <= k <= answers and right <= answers")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def _within(estimate: Estimate) -> Estimate:
    return dataclasses.replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))


def _bits(group: Sequence[tuple[Request, Likelihood]]) -> Sample:
    ((request, likelihood),) = group
    bits = likelihood.nats / math.log(2)
    size, name = float(request.bytes), request.document
    return Sample(request.task, name, bits, size, likelihood.tokens, None, None, request.group)


def _cloze(group: Sequence[tuple[Request, Likelihood]]) -> Sample:
    ((request, likelihood),) = group
    assert likelihood.greedy is not None, f"{request.task}: score_requests was not asked whether tokens are greedy"
    right = float(likelihood.greedy)
    return Sample(request.task, request.document, right, 1.0, likelihood.tokens, None, None, request.group)


def _answer(group: Sequence[tuple[Request, Likelihood]], normalise: Normalise) -> Sample:
    rates = [likelihood.nats / _size(request, likelihood, normalise) for request, likelihood in group]
    request = group[0][0]
    picked = min(range(len(rates)), key=rates.__getitem__)
    tokens = sum(likelihood.tokens for _, likelihood in group)
    right = float(picked == request.gold)
    return Sample(request.task, request.document, right, 1.0, tokens, picked, request.gold, request.group)


def _size(request: Request, likelihood: Likelihood, normalise: Normalise) -> int:
    match normalise:
        case "bytes":
            return request.bytes
        case "characters":
            return request.characters
        case "tokens":
            return likelihood.tokens
        case _:
            return 1
