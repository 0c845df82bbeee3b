"""The suite of a recipe: which tasks a model is put to, and the means over them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama3.data.worked_problems import questions
from llama3.evaluate.held_out import Document
from llama3.evaluate.requests import (
    continuations,
    from_documents,
    from_questions,
    read_questions,
)
from llama3.evaluate.statistics import Estimate, normal, weighted_mean
from llama3.evaluate.task import Request, Task
from llama3.recipe.schema import Recipe

BPB = "eval/bpb"
CORE = "eval/core"
ARITHMETIC = "eval/arithmetic"
CONTINUATION = "eval/continuation"
QUESTION_SEED = 0
"""Seed of the generated questions: not the recipe's, so that all models answer the same ones."""
_STEM = re.compile(r"[a-z0-9][a-z0-9_.-]*")


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
