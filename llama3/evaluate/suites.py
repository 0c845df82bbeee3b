"""The suite of a recipe: which tasks a model is put to, and how likelihoods become samples and samples scores.

Two kinds of task. Bits per byte of held-out documents: bits over UTF-8 bytes, which compares models with different
tokenizers and moves smoothly while a model learns. Multiple choice by likelihood: the choice with the fewest nats per
byte of its scored text (the joining space counts) is the model's answer; noisy on small models, so it may veto a
promotion and should not decide one.

A sample is a numerator and a denominator (bits and bytes; 1 or 0 and 1), so every score is a ratio of sums over its
samples and any two models are compared sample by sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from llama3.data.worked_problems import questions
from llama3.evaluate.held_out import Document
from llama3.evaluate.requests import (
    Request,
    continuations,
    digest,
    from_documents,
    from_questions,
    read_questions,
)
from llama3.evaluate.scores import Score
from llama3.evaluate.scoring import Likelihood
from llama3.evaluate.statistics import Estimate, normal, proportion, ratio, weighted_mean
from llama3.recipe.schema import Recipe

BPB = "eval/bpb"
CORE = "eval/core"
ARITHMETIC = "eval/arithmetic"
CONTINUATION = "eval/continuation"
QUESTION_SEED = 0
"""Seed of the generated questions: not the recipe's, so that all models answer the same ones."""
_STEM = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True)
class Task:
    key: str
    kind: Literal["bits", "choice"]
    requests: tuple[Request, ...]

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing: the mean of 1 / choices over the questions; None for bits per byte."""
        if self.kind == "bits":
            return None
        counts = [len(list(group)) for _, group in groupby(self.requests, key=lambda request: request.document)]
        return math.fsum(1 / count for count in counts) / len(counts)


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


def suite(recipe: Recipe, documents: Sequence[Document]) -> list[Task]:
    """Return the recipe's tasks: bits per byte by domain, arithmetic, continuations, then its own files.

    A task without any request (too few documents for continuations) is left out. Raises ValueError naming the file
    where one of `evaluate.tasks` cannot be read or its name is taken.
    """
    count = recipe.evaluate.questions
    domains = sorted({document.domain for document in documents})
    tasks = [Task(f"{BPB}/{domain}", "bits", _whole(domain, documents)) for domain in domains]
    tasks.append(Task(ARITHMETIC, "choice", tuple(from_questions(ARITHMETIC, questions(QUESTION_SEED, count)))))
    tasks.append(Task(CONTINUATION, "choice", tuple(continuations(CONTINUATION, documents, count))))
    taken = {ARITHMETIC, CONTINUATION, BPB, CORE}
    for path in map(Path, recipe.evaluate.tasks):
        key = _file_key(path, taken)
        taken.add(key)
        tasks.append(Task(key, "choice", tuple(from_questions(key, read_questions(path, count)))))
    return [task for task in tasks if task.requests]


def samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return the task's samples in the order of its requests; `likelihoods` are those of the requests."""
    pairs = zip(task.requests, likelihoods, strict=True)
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].document)]
    return [_bits(group) if task.kind == "bits" else _answer(group) for group in groups]


def score(task: Task, items: Sequence[Sample]) -> Score:
    """Return the task's score over its samples: the ratio's standard error for bits, Wilson's interval for choices."""
    asked = digest(task.requests)
    if task.kind == "bits":
        estimate = ratio([item.numerator for item in items], [item.denominator for item in items])
        return Score.of(task.key, estimate, "bits per byte", "lower", asked, None)
    right = proportion(sum(item.numerator == 1 for item in items), len(items))
    return Score.of(task.key, right, "accuracy", "higher", asked, task.chance)


def overall(recipe: Recipe, parts: Mapping[str, Estimate]) -> Estimate:
    """Return `eval/bpb` from `eval/bpb/<domain>`: their mean by the first stage's mix.

    The shares of the domains present are scaled to sum to 1. Also averages differences of two models.
    """
    shares = recipe.mix[recipe.stages[0].mix]
    weights = [float(share) for domain, share in shares.items() if f"{BPB}/{domain}" in parts]
    return weighted_mean([parts[f"{BPB}/{domain}"] for domain in shares if f"{BPB}/{domain}" in parts], weights)


def core(accuracies: Sequence[tuple[Estimate, float]]) -> Estimate:
    """Return `eval/core`: the mean over tasks of (accuracy - chance) / (1 - chance), each given with its chance.

    DCLM (arXiv 2406.11794) calls this the centred accuracy: 0 is guessing, 1 is perfect, below 0 is possible.
    """
    centred = [
        normal((part.value - chance) / (1 - chance), part.stderr / (1 - chance), part.n) for part, chance in accuracies
    ]
    return weighted_mean(centred, [1.0] * len(centred))


def _whole(domain: str, documents: Sequence[Document]) -> tuple[Request, ...]:
    return tuple(from_documents(f"{BPB}/{domain}", (d for d in documents if d.domain == domain)))


def _file_key(path: Path, taken: set[str]) -> str:
    key = f"eval/{path.stem}"
    if not _STEM.fullmatch(path.stem) or key in taken:
        raise ValueError(
            f"evaluate.tasks: {path} would be scored as {key!r}, which is "
            f"{'taken' if key in taken else 'not a metric name (a-z, 0-9, _, . and -)'}; rename the file"
        )
    return key


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
