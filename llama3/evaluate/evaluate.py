"""Evaluate one model: score the recipe's suite and write tables that a gate, a report and a comparison read.

Files: `scores.parquet` (one row per score), `samples.parquet` (one row per document or question, so that two models can
be compared sample by sample) and `generations.json` (a few continuations to look at). Equal inputs give equal bytes:
nothing here depends on time, and every order is by keys. Weights are read as fp32, so that a score measures the
model and not the number format of the machine; what this gives up is half the speed of bf16.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from llama3.evaluate.generate import generate
from llama3.evaluate.held_out import Document, document_bytes, held_out, longest_sequence
from llama3.evaluate.samples import Sample, samples, score
from llama3.evaluate.scores import GENERATIONS_FILE, SAMPLES_FILE, Score, write_scores
from llama3.evaluate.scoring import Likelihood, score_requests
from llama3.evaluate.suites import ARITHMETIC, BPB, CORE, core, overall, suite
from llama3.evaluate.task import Task, digest
from llama3.model.files import load_model
from llama3.model.rounding import keep_rounding
from llama3.model.transformer import Transformer
from llama3.recipe.schema import Recipe
from llama3.tokens.tokenizer import Tokenizer

PROMPT_CHARS = 80
"""Characters of a held-out document that a shown continuation starts from."""
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 0}
GENERATED_TOKENS = 32


def evaluate(
    recipe: Recipe,
    model: Path,
    tokenizer: Path,
    documents: Path,
    folder: Path,
    *,
    threads: int = 2,
    device: str = "cpu",
) -> dict[str, Any]:
    """Score the model in folder `model` on the curated folder `documents` and write the tables into `folder`.

    Returns {key: value} of every score (keys begin with `eval/`), plus `requests` (digest of all that was asked),
    `documents`, `questions`, `document_bytes` (where documents are cut) and `window`, the positions that the model sees
    at once: the longest sequence that the recipe trains on, or the model's own limit where that is shorter. Compare
    models under one recipe: both numbers follow it.
    Raises ValueError if there are no held-out documents, a task file is wrong, or model and tokenizer do not fit.
    """
    with _threads(threads):
        coder = Tokenizer.load(tokenizer)
        chosen = held_out(documents, recipe.evaluate.documents, document_bytes(recipe))
        tasks = suite(recipe, chosen)
        network = load_model(model, dtype=torch.float32, device=device)
        if network.rows != coder.rows:
            raise ValueError(
                f"model {model} has {network.rows} embedding rows, tokenizer {tokenizer} {coder.rows}: "
                "give the tokenizer that the model was trained with"
            )
        window = min(network.spec.max_seq, longest_sequence(recipe))
        requests = [request for task in tasks for request in task.requests]
        likelihoods = score_requests(network, coder, requests, window, device)
        shown = _generations(network, coder, chosen, tasks)
    by_task = _samples(tasks, likelihoods)
    scores = score_table(recipe, tasks, by_task)
    folder.mkdir(parents=True, exist_ok=True)
    write_scores(scores, folder)
    _write_samples([sample for items in by_task for sample in items], folder)
    (folder / GENERATIONS_FILE).write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    answered = [items for task, items in zip(tasks, by_task, strict=True) if task.kind == "choice"]
    return {
        **{key: scores[key].value for key in sorted(scores)},
        "requests": digest(requests),
        "documents": len(chosen),
        "questions": sum(map(len, answered)),
        "window": window,
        "document_bytes": document_bytes(recipe),
    }


def score_table(recipe: Recipe, tasks: Sequence[Task], by_task: Sequence[Sequence[Sample]]) -> dict[str, Score]:
    """Return the scores of each task from its samples, and the two means `eval/bpb` and `eval/core`."""
    scores = {task.key: score(task, items) for task, items in zip(tasks, by_task, strict=True)}
    bits = [task for task in tasks if task.kind == "bits"]
    choices = [task for task in tasks if task.kind == "choice"]
    bpb = overall(recipe, {task.key: scores[task.key].estimate for task in bits})
    centred = core([(scores[task.key].estimate, task.chance or 0.0) for task in choices])
    scores[BPB] = Score.of(BPB, bpb, "bits per byte", "lower", _asked(bits), None)
    scores[CORE] = Score.of(CORE, centred, "share above chance", "higher", _asked(choices), 0.0)
    return scores


def _asked(tasks: Sequence[Task]) -> str:
    return digest(request for task in tasks for request in task.requests)


def _samples(tasks: Sequence[Task], likelihoods: Sequence[Likelihood]) -> list[list[Sample]]:
    found, start = [], 0
    for task in tasks:
        end = start + len(task.requests)
        found.append(samples(task, likelihoods[start:end]))
        start = end
    return found


def _write_samples(items: Sequence[Sample], folder: Path) -> None:
    columns: dict[str, Any] = {
        "key": pa.string(),
        "id": pa.string(),
        "numerator": pa.float64(),
        "denominator": pa.float64(),
        "tokens": pa.int64(),
        "picked": pa.int64(),
        "gold": pa.int64(),
    }
    rows = [dataclasses.asdict(item) for item in sorted(items, key=lambda item: (item.key, item.id))]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(columns.items()))), folder / SAMPLES_FILE)


def _generations(
    model: Transformer, tokenizer: Tokenizer, documents: Sequence[Document], tasks: Sequence[Task]
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
