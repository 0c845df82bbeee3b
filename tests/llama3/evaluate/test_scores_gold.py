"""Nats per byte of the gold answer: of the right choice, over bytes, and of nothing else."""

from __future__ import annotations

import pytest

from herd.llama3.evaluate.scores import gold_key, gold_samples, gold_score
from herd.llama3.evaluate.task import Likelihood, Request, Task
from herd.llama3.statistics.estimates import ratio

KEY = "eval/animals"


def choice(document: str, texts: list[str], gold: int) -> list[Request]:
    return [Request(KEY, document, number, "Q:", text, gold, "zoo") for number, text in enumerate(texts)]


def test_the_gold_choice_of_every_question_is_taken_with_its_bytes() -> None:
    requests = (*choice("a", [" cat", " hörse"], 1), *choice("b", [" dog", " eel", " ox"], 0))
    task = Task(KEY, "choice", requests, shots=2, version=3)
    nll = [Likelihood(float(number + 1), number + 10) for number in range(5)]
    items = gold_samples(task, nll)
    assert [(item.id, item.numerator, item.denominator, item.tokens, item.group) for item in items] == [
        ("a", 2.0, 7.0, 11, "zoo"),
        ("b", 3.0, 4.0, 12, "zoo"),
    ]
    score = gold_score(task, items)
    assert (score.key, score.value, score.n) == ("eval/gold_nll/animals", 5 / 11, 2)
    assert score.estimate == ratio([2.0, 3.0], [7.0, 4.0])
    assert (score.better, score.unit, score.chance, score.shots, score.version) == (
        "lower",
        "nats per byte",
        None,
        2,
        3,
    )
    assert score.requests == task.digest


def test_the_likelihoods_must_be_those_of_the_requests() -> None:
    task = Task(KEY, "choice", tuple(choice("a", [" cat", " dog"], 1)))
    with pytest.raises(ValueError, match="zip"):
        gold_samples(task, [Likelihood(1.0, 1)])


def test_a_cloze_is_its_own_gold_and_other_kinds_have_none() -> None:
    request = Request(KEY, "a", 0, "The sea is", " blue", 0)
    assert [item.numerator for item in gold_samples(Task(KEY, "cloze", (request,)), [Likelihood(4.0, 1, True)])] == [4]
    assert gold_samples(Task(KEY, "rolling", (request,)), [Likelihood(4.0, 1)]) == []
    assert gold_key("eval/mmlu/law") == "eval/gold_nll/mmlu/law"
