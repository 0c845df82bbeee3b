"""What a model pays for the right answers: nats per byte of the gold continuation of every question.

Accuracy of small models stands at chance while this falls already, on a straight line in log compute: it is what the
scaling forecast goes by (`llama3.scaling.forecast`, after arXiv 2407.21783, section 3.2.1). Taken from the likelihoods
that answer the questions, so it costs nothing. Bytes instead of the paper's characters, so that every language and
tokenizer is measured alike. What this gives up: tasks that are answered in writing have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby

from llama3.evaluate.likelihood import Likelihood
from llama3.evaluate.samples import Sample
from llama3.evaluate.scores import Score
from llama3.evaluate.statistics import ratio
from llama3.evaluate.task import Task

PREFIX = "eval/"
GOLD = f"{PREFIX}gold_nll"


def gold_key(key: str) -> str:
    """Return the name of the score that goes with the accuracy `key`: `eval/gold_nll/arc` for `eval/arc`."""
    return f"{GOLD}/{key.removeprefix(PREFIX)}"


def gold_samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return nats over bytes of each question's gold continuation; `likelihoods` are those of the task's requests.

    None for a task that is not answered by likelihood, or that is bits per byte already.
    """
    if task.kind not in ("choice", "cloze"):
        return []
    found = []
    pairs = zip(task.requests, likelihoods, strict=True)
    for document, group in groupby(pairs, key=lambda pair: pair[0].document):
        choices = list(group)
        request, likelihood = choices[choices[0][0].gold]
        found.append(
            Sample(
                key=gold_key(task.key),
                id=document,
                numerator=likelihood.nats,
                denominator=float(request.bytes),
                tokens=likelihood.tokens,
                picked=None,
                gold=request.gold,
                group=request.group,
            )
        )
    return found


def gold_score(task: Task, items: Sequence[Sample]) -> Score:
    """Return nats per byte over all of `items`, which are the task's `gold_samples`."""
    estimate = ratio([item.numerator for item in items], [item.denominator for item in items])
    made = Score.of(gold_key(task.key), estimate, "nats per byte", "lower", task.digest, None)
    return dataclasses.replace(made, shots=task.shots, version=task.version)
