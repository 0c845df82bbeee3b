"""Evaluate one model on the recipe's suite and write the tables that the gate, the report and `compare` read.

Files: `scores.parquet` (a row per score), `samples.parquet` (a row per document or question, for paired comparisons),
`answers.parquet` (generated answers, if a task has any), `tasks.json` (what was asked and what was skipped) and
`generations.json` (a few sample continuations). Equal inputs give equal bytes on any number of processes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from llama3.evaluate.answers import GeneratedAnswer, answer_samples, answers, too_long, unjudged, write_answers
from llama3.evaluate.distributed import Ranks, Single
from llama3.evaluate.generate import generate
from llama3.evaluate.held_out import ValidationDocument, document_bytes, held_out, longest_sequence
from llama3.evaluate.needle import KINDS, find_needles, lengths_up_to
from llama3.evaluate.scores import (
    GENERATIONS_FILE,
    SAMPLES_FILE,
    TASKS_FILE,
    Sample,
    Score,
    gold_key,
    gold_samples,
    gold_score,
    samples,
    score_table,
    write_scores,
)
from llama3.evaluate.scoring import score_requests
from llama3.evaluate.suite import ARITHMETIC, LoadedSuite, asked_of
from llama3.evaluate.task import Task, digest
from llama3.model.files import load_model
from llama3.model.rounding import keep_rounding
from llama3.model.transformer import Transformer
from llama3.recipe.schema import Recipe
from llama3.tokens.tokenizer import MODEL_FILE, Tokenizer

WRITTEN = ("generate", "code")
"""Task kinds whose answers are generated text."""
HAYSTACK_BYTES = 4
"""UTF-8 bytes of each document per position of the longest haystack."""
PROMPT_CHARS = 80
"""Characters of a held-out document that prompt a sample continuation."""
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 0}
"""Of sample continuations: greedy decoding of a small model soon repeats itself."""
GENERATED_TOKENS = 32

_SAMPLES_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("id", pa.string()),
        ("numerator", pa.float64()),
        ("denominator", pa.float64()),
        ("tokens", pa.int64()),
        ("picked", pa.int64()),
        ("gold", pa.int64()),
        ("group", pa.string()),
    ]
)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Result of `evaluate_tasks`."""

    scores: dict[str, Score]
    """By key; with `eval/core` if a suite was named."""
    asked: LoadedSuite
    too_long: dict[str, int]
    """Task -> questions that do not fit the window; they are not asked and count as wrong."""


def evaluate(
    recipe: Recipe,
    model: Path,
    tokenizer: Path,
    documents: Path,
    folder: Path,
    *,
    threads: int = 2,
    device: str = "cpu",
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Score the model in folder `model` on the curated folder `documents` and write the tables into `folder`.

    Returns {key: value} of every score (keys begin with `eval/`), plus `requests` (digest of all requests and prompts),
    `documents`, `questions`, `document_bytes` (length to which documents are cut), `window` (positions the model sees
    at once: the recipe's longest sequence, or the model's own limit if shorter), `skipped` ({task: reason}), `too_long`
    ({key: questions that were not asked and count as wrong}), `unjudged` ({key: questions left out of the score}) and
    `baselines` (`core 1`: table and version behind `eval/core`).
    With `ranks`, several processes call this with the same arguments and share the work; rank 0 writes.
    Raises ValueError if there are no held-out documents, a task is invalid, or model and tokenizer do not match.
    """
    ranks = ranks or Single()
    with _threads(threads):
        coder = Tokenizer.load(tokenizer)
        if (model / MODEL_FILE).is_file() and model.resolve() != tokenizer.resolve():
            trained_with = Tokenizer.load(model).digest
            if trained_with != coder.digest:
                raise ValueError(
                    f"model {model} was trained with tokenizer {trained_with[:8]}, {tokenizer} is {coder.digest[:8]}: "
                    "give the tokenizer that the model was trained with"
                )
        chosen = held_out(documents, recipe.evaluate.documents, document_bytes(recipe))
        suite = asked_of(recipe, chosen)
        # fp32, at half the speed of bf16: the score must not depend on the number format of the machine
        network = load_model(model, dtype=torch.float32, device=device)
        if network.rows != coder.rows:
            raise ValueError(
                f"model {model} has {network.rows} embedding rows, tokenizer {tokenizer} {coder.rows}: "
                "give the tokenizer that the model was trained with"
            )
        window = min(network.spec.max_seq, longest_sequence(recipe))
        results = _ask(network, coder, suite.tasks, window, device, ranks)
        needles = None
        lengths = lengths_up_to(window)
        if "needle" in suite.suite.built_in and lengths:
            long_documents = held_out(documents, recipe.evaluate.documents, HAYSTACK_BYTES * lengths[-1])
            texts = [document.text for document in long_documents]
            needles = find_needles(network, coder, texts, lengths, recipe.evaluate.needles, device, KINDS, ranks)
        generations = _generations(network, coder, chosen, suite.tasks)
    baselines = suite.baselines()
    scores, all_samples = score_table(recipe, suite.tasks, results.samples, baselines)
    for task, gold in zip(suite.tasks, results.gold, strict=True):
        if gold:
            scores[gold_key(task.key)] = gold_score(task, gold)
            all_samples += gold
    if needles is not None:
        scores |= needles.scores()
        all_samples += needles.samples()
    if ranks.rank == 0:
        _write_tables(folder, scores, all_samples, suite, results, baselines)
        if results.answers:
            write_answers(results.answers, folder)
        _write_json(generations, folder / GENERATIONS_FILE)
    return {
        **{key: scores[key].value for key in sorted(scores)},
        "requests": digest(chain.from_iterable(task.requests or task.prompts for task in suite.tasks)),
        "documents": len(chosen),
        "questions": sum(task.questions for task in suite.tasks if task.kind != "bits"),
        "window": window,
        "document_bytes": document_bytes(recipe),
        "skipped": suite.skipped,
        "too_long": too_long(results.answers),
        "unjudged": unjudged(results.answers),
        "baselines": suite.baselines_name,
    }


def evaluate_tasks(
    network: Transformer, coder: Tokenizer, asked: LoadedSuite, folder: Path | None = None, *, threads: int, device: str
) -> EvaluationResult:
    """Evaluate an fp32 model on `device` on the tasks of `asked`; write the tables into `folder` if given."""
    with _threads(threads):
        results = _ask(network, coder, asked.tasks, network.spec.max_seq, device, Single())
    baselines = asked.baselines() if asked.suite.name else {}
    scores, all_samples = score_table(None, asked.tasks, results.samples, baselines)
    if folder is not None:
        _write_tables(folder, scores, all_samples, asked, results, baselines)
        write_answers(results.answers, folder)
    return EvaluationResult(scores, asked, too_long(results.answers))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    keep_rounding()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class _TaskResults:
    """A model's results on a list of tasks."""

    samples: list[list[Sample]]
    """Of each task."""
    gold: list[list[Sample]]
    """Negative log-likelihoods of the gold answers to each task; empty where the kind has none."""
    answers: list[GeneratedAnswer]


def _ask(
    network: Transformer, coder: Tokenizer, tasks: Sequence[Task], window: int, device: str, ranks: Ranks
) -> _TaskResults:
    """Score the requests of all tasks together, then generate answers task by task."""
    requests = [request for task in tasks for request in task.requests]
    cloze = frozenset(task.key for task in tasks if task.kind == "cloze")
    likelihoods = iter(score_requests(network, coder, requests, window, device, greedy=cloze, ranks=ranks))
    results = _TaskResults([], [], [])
    for task in tasks:
        own = list(islice(likelihoods, len(task.requests)))
        results.gold.append(gold_samples(task, own))
        if task.kind in WRITTEN:
            generated = answers(network, coder, task, window, ranks)
            results.answers.extend(generated)
            results.samples.append(answer_samples(task, generated))
        else:
            results.samples.append(samples(task, own))
    return results


def _generations(
    model: Transformer, tokenizer: Tokenizer, documents: Sequence[ValidationDocument], tasks: Sequence[Task]
) -> list[dict[str, str]]:
    """Continue the first document of each domain and the first arithmetic question."""
    first = {document.domain: document for document in reversed(documents)}
    prompts = [(domain, first[domain].id, first[domain].text[:PROMPT_CHARS]) for domain in sorted(first)]
    requests = [task.requests[0] for task in tasks if task.key == ARITHMETIC]
    prompts += [(request.task, request.document, request.context) for request in requests]
    return [
        {
            "of": source,
            "id": name,
            "prompt": prompt,
            "text": generate(model, tokenizer, prompt, GENERATED_TOKENS, **SAMPLING),
        }
        for source, name, prompt in prompts
    ]


def _write_tables(
    folder: Path,
    scores: dict[str, Score],
    all_samples: Sequence[Sample],
    suite: LoadedSuite,
    results: _TaskResults,
    baselines: dict[str, float],
) -> None:
    """Write `scores.parquet`, `samples.parquet` and `tasks.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_scores(scores, folder)
    rows = [dataclasses.asdict(sample) for sample in sorted(all_samples, key=lambda sample: (sample.key, sample.id))]
    pq.write_table(pa.Table.from_pylist(rows, _SAMPLES_SCHEMA), folder / SAMPLES_FILE)
    tasks = [
        {
            "key": task.key,
            "kind": task.kind,
            "version": task.version,
            "shots": task.shots,
            "n": len(task_samples),
            "chance": task.chance,
            "baseline": baselines.get(task.key),
            "average": task.average,
            "digest": task.digest,
            "sources": suite.sources.get(task.key, {}),
        }
        for task, task_samples in zip(suite.tasks, results.samples, strict=True)
    ]
    content = {"suite": suite.suite.name, "baselines": suite.baselines_name, "tasks": tasks, "skipped": suite.skipped}
    _write_json(content, folder / TASKS_FILE)


def _write_json(content: object, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
