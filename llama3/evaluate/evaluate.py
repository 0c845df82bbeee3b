"""Evaluate one model: put it to the recipe's suite and write tables that a gate, a report and a comparison read.

Files: `scores.parquet` (one row per score), `samples.parquet` (one row per document or question, so that two models can
be compared sample by sample), `answers.parquet` (what was written, where a task asks for that), `tasks.json` (what was
asked, and what was left out) and `generations.json` (a few continuations to look at). Equal inputs give equal bytes, on
any number of processes: nothing here depends on time, and every order is by keys. Weights are read as fp32, so that a
score measures the model and not the number format of the machine; what this gives up is half the speed of bf16.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from llama3.evaluate.answers import GeneratedAnswer, answer_samples, answers, too_long, unjudged, write_answers
from llama3.evaluate.distributed import Ranks, Single
from llama3.evaluate.generate import generate
from llama3.evaluate.held_out import ValidationDocument, document_bytes, held_out, longest_sequence
from llama3.evaluate.needle import KINDS, Retrieval, find_needles, lengths_up_to
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
"""Kinds that are answered in writing."""
HAYSTACK_BYTES = 4
"""UTF-8 bytes of a document for each position of the longest haystack."""
PROMPT_CHARS = 80
"""Characters of a held-out document that a shown continuation starts from."""
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 0}
GENERATED_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a model made of all tasks."""

    samples: list[list[Sample]]
    """Those of each task."""
    gold: list[list[Sample]]
    """Nats of the gold answers to each task; none where it has no such."""
    answers: list[GeneratedAnswer]


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

    Returns {key: value} of every score (keys begin with `eval/`), plus `requests` (digest of all that was asked),
    `documents`, `questions`, `document_bytes` (where documents are cut), `window`, the positions that the model sees
    at once: the longest sequence that the recipe trains on, or the model's own limit where that is shorter (compare
    models under one recipe: both numbers follow it), `skipped` ({task: why}), `too_long` ({key: questions that were
    not asked and count as wrong}), `unjudged` ({key: questions that count neither as right nor as wrong}) and
    `baselines` (`core 1`: table and version behind `eval/core`).
    With `ranks`, several processes call this with the same arguments and share the work; the first one writes.
    Raises ValueError if there are no held-out documents, a task is wrong, or model and tokenizer do not fit.
    """
    ranks = ranks or Single()
    with _threads(threads):
        coder = _tokenizer(model, tokenizer)
        chosen = held_out(documents, recipe.evaluate.documents, document_bytes(recipe))
        asked = asked_of(recipe, chosen)
        network = load_model(model, dtype=torch.float32, device=device)
        if network.rows != coder.rows:
            raise ValueError(
                f"model {model} has {network.rows} embedding rows, tokenizer {tokenizer} {coder.rows}: "
                "give the tokenizer that the model was trained with"
            )
        window = min(network.spec.max_seq, longest_sequence(recipe))
        found = _answered(network, coder, asked.tasks, window, device, ranks)
        needles = _needles(recipe, network, coder, documents, asked, window, device, ranks)
        shown = _generations(network, coder, chosen, asked.tasks)
    baselines = asked.baselines()
    scores, rows = score_table(recipe, asked.tasks, found.samples, baselines)
    with_gold = [(task, items) for task, items in zip(asked.tasks, found.gold, strict=True) if items]
    scores |= {gold_key(task.key): gold_score(task, items) for task, items in with_gold}
    rows += [item for _, items in with_gold for item in items]
    if needles is not None:
        scores |= needles.scores()
        rows += needles.samples()
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_scores(scores, folder)
        _write_samples(rows, folder)
        if found.answers:
            write_answers(found.answers, folder)
        _write_json(shown, folder / GENERATIONS_FILE)
        _write_json(_tasks(asked, found.samples, baselines), folder / TASKS_FILE)
    return {
        **{key: scores[key].value for key in sorted(scores)},
        "requests": digest(chain.from_iterable(task.requests or task.prompts for task in asked.tasks)),
        "documents": len(chosen),
        "questions": sum(task.questions for task in asked.tasks if task.kind != "bits"),
        "window": window,
        "document_bytes": document_bytes(recipe),
        "skipped": asked.skipped,
        "too_long": too_long(found.answers),
        "unjudged": unjudged(found.answers),
        "baselines": _table(asked),
    }


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """What a model came to without a recipe."""

    scores: dict[str, Score]
    """By key; `eval/core` too if a suite was asked for."""
    asked: LoadedSuite
    too_long: dict[str, int]
    """Task -> questions that were not asked because the window is too short, and count as wrong."""


def evaluate_tasks(
    network: Transformer, coder: Tokenizer, asked: LoadedSuite, folder: Path | None = None, *, threads: int, device: str
) -> EvaluationResult:
    """Put a model, fp32 on `device`, to the tasks of `asked`; write the tables of `evaluate` into `folder` if given."""
    with _threads(threads):
        found = _answered(network, coder, asked.tasks, network.spec.max_seq, device, Single())
    baselines = asked.baselines() if asked.suite.name else {}
    scores, rows = score_table(None, asked.tasks, found.samples, baselines)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_scores(scores, folder)
        _write_samples(rows, folder)
        write_answers(found.answers, folder)
        _write_json(_tasks(asked, found.samples, baselines), folder / TASKS_FILE)
    return EvaluationResult(scores, asked, too_long(found.answers))


def _tokenizer(model: Path, tokenizer: Path) -> Tokenizer:
    """Return the tokenizer in folder `tokenizer`. Raises ValueError if the folder `model` holds another one."""
    coder = Tokenizer.load(tokenizer)
    if (model / MODEL_FILE).is_file() and model.resolve() != tokenizer.resolve():
        own = Tokenizer.load(model).digest
        if own != coder.digest:
            raise ValueError(
                f"model {model} was trained with tokenizer {own[:8]}, {tokenizer} is {coder.digest[:8]}: "
                "give the tokenizer that the model was trained with"
            )
    return coder


def _answered(
    network: Transformer, coder: Tokenizer, tasks: Sequence[Task], window: int, device: str, ranks: Ranks
) -> _Found:
    """Return the samples of each task: all requests are scored together, writing tasks one after the other."""
    requests = [request for task in tasks for request in task.requests]
    cloze = frozenset(task.key for task in tasks if task.kind == "cloze")
    likelihoods = iter(score_requests(network, coder, requests, window, device, greedy=cloze, ranks=ranks))
    found = _Found([], [], [])
    for task in tasks:
        mine = [next(likelihoods) for _ in task.requests]
        found.gold.append(gold_samples(task, mine))
        if task.kind in WRITTEN:
            written = answers(network, coder, task, window, ranks)
            found.answers.extend(written)
            found.samples.append(answer_samples(task, written))
        else:
            found.samples.append(samples(task, mine))
    return found


def _needles(
    recipe: Recipe,
    network: Transformer,
    coder: Tokenizer,
    documents: Path,
    asked: LoadedSuite,
    window: int,
    device: str,
    ranks: Ranks,
) -> Retrieval | None:
    """Return what is found in haystacks of all lengths up to the window, if the suite asks and the window has room."""
    lengths = lengths_up_to(window)
    if "needle" not in asked.suite.built_in or not lengths:
        return None
    texts = [d.text for d in held_out(documents, recipe.evaluate.documents, HAYSTACK_BYTES * lengths[-1])]
    return find_needles(network, coder, texts, lengths, recipe.evaluate.needles, device, KINDS, ranks)


def _tasks(asked: LoadedSuite, by_task: Sequence[Sequence[Sample]], baselines: dict[str, float]) -> dict[str, Any]:
    """Return what was asked, for people and for whoever compares two evaluations."""
    tasks = [
        {
            "key": task.key,
            "kind": task.kind,
            "version": task.version,
            "shots": task.shots,
            "n": len(items),
            "chance": task.chance,
            "baseline": baselines.get(task.key),
            "average": task.average,
            "digest": task.digest,
            "sources": asked.sources.get(task.key, {}),
        }
        for task, items in zip(asked.tasks, by_task, strict=True)
    ]
    return {"suite": asked.suite.name, "baselines": _table(asked), "tasks": tasks, "skipped": asked.skipped}


def _table(asked: LoadedSuite) -> str:
    """Return name and version of the table of baselines behind `eval/core`."""
    table = asked.suite.baselines
    return f"{asked.suite.table} {table.version}" if table else "chance of each task"


def _write_samples(items: Sequence[Sample], folder: Path) -> None:
    columns: dict[str, Any] = {
        "key": pa.string(),
        "id": pa.string(),
        "numerator": pa.float64(),
        "denominator": pa.float64(),
        "tokens": pa.int64(),
        "picked": pa.int64(),
        "gold": pa.int64(),
        "group": pa.string(),
    }
    rows = [dataclasses.asdict(item) for item in sorted(items, key=lambda item: (item.key, item.id))]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(columns.items()))), folder / SAMPLES_FILE)


def _write_json(content: object, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _generations(
    model: Transformer, tokenizer: Tokenizer, documents: Sequence[ValidationDocument], tasks: Sequence[Task]
) -> list[dict[str, str]]:
    """Continue the first document of each domain and the first arithmetic question.

    Sampled with a fixed seed: a small model that always takes the likeliest token soon repeats one.
    """
    first = {document.domain: document for document in reversed(documents)}
    prompts = [(domain, first[domain].id, first[domain].text[:PROMPT_CHARS]) for domain in sorted(first)]
    asked = [task.requests[0] for task in tasks if task.key == ARITHMETIC]
    prompts += [(request.task, request.document, request.context) for request in asked]
    return [
        {
            "of": of,
            "id": name,
            "prompt": prompt,
            "text": generate(model, tokenizer, prompt, GENERATED_TOKENS, **SAMPLING),
        }
        for of, name, prompt in prompts
    ]


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
