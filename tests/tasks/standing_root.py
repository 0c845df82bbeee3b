"""A root with runs of the tiny recipe as processes would leave them, made in milliseconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.llama3.train.journal import Journal, Record
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.report.progress import run_work_dir_name, training_step
from herd.tasks.runs.records import RunRecord, Runs, StepRecord

TINY = Path("tests/e2e/tiny.yaml")


def tiny(*overrides: str) -> Recipe:
    return load_recipe(TINY, list(overrides))


def commit(root: Root, kind: str, name: str, facts: dict[str, Any] | None = None, **inputs: str) -> Artifact:
    """Commit an artifact of one small file, made from `inputs` (role -> key)."""
    store = open_store(root)
    with store.staging() as folder:
        (folder / "data.txt").write_text(f"{kind} {name}")
        return store.commit(ArtifactSpec(kind, name, 1, {}, inputs), folder, facts or {}, "a test", "abc", 1.5)


def begun(root: Root, recipe: Recipe) -> RunRecord:
    """Return a run that has done its data steps and the first stage, and works on the second."""
    runs = Runs(root)
    record = runs.begin(recipe, "abc123def456")
    key = ""
    for step, kind in {"collect": "collected", "annotate": "annotated", "curate": "curated"}.items():
        artifact = commit(root, kind, recipe.name, {"documents": 10}, **({"before": key} if key else {}))
        record.steps[step], key = StepRecord(artifact=artifact.label, outcome="created", seconds=3.2), artifact.key
    tokenizer = commit(root, "tokenizer", recipe.name, curated=key)
    tokens = commit(root, "tokens", recipe.name, curated=key, tokenizer=tokenizer.key)
    record.steps["tokenizer"] = StepRecord(artifact=tokenizer.label, outcome="created", seconds=1.0)
    record.steps["tokenize"] = StepRecord(artifact=tokens.label, outcome="reused")
    span = Schedule(recipe).trained[0]
    facts = {"start": 0, "end": span.end, "first_loss": 6.64, "last_loss": 6.01, "model_sha256": "f" * 64}
    made = commit(root, "checkpoint", f"{recipe.name}-{span.name}", facts, tokens=tokens.key, parent="fresh weights")
    record.steps[span.name] = StepRecord(artifact=made.label, outcome="created", seconds=9.3)
    runs.save(record)
    return record


def train(root: Root, recipe: Recipe, record: RunRecord, steps: int, saved: int) -> Path:
    """Write the journal of `steps` steps of the run's second stage, and a checkpoint after `saved` of them."""
    span = Schedule(recipe).trained[1]
    work = root.file("work", run_work_dir_name(open_store(root), recipe, record, training_step(recipe, span.name)))
    (work / "checkpoints").mkdir(parents=True)
    batch = span.segments[0].batch
    with Journal(work / "journal.jsonl") as journal:
        for step in range(1, steps + 1):
            values = {
                metrics.LOSS: 6.0 - step / 10,
                metrics.TOKENS_PER_S: {1: 30_000.0, 2: 15_000.0}.get(step, 20_000.0),  # 20K together
                metrics.REMAINING_S: (span.end - span.start - step * batch) / 20_000.0,
                metrics.GOODPUT: 0.93,
                metrics.STEP_S: 0.1,
            }
            journal.add(Record(time.time() - (steps - step) * 0.1, span.start + step * batch, values))
    folder = work / "checkpoints" / f"{span.start + saved * batch:018}"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return work


def log_attempt(root: Root, run: str, stage: str, number: int, status: int, words: str) -> None:
    """Write how an attempt of a trainer ended, as its agent does."""
    folder = root.file("runs", run, "logs", stage, f"attempt-{number}")
    folder.mkdir(parents=True)
    (folder / "node-0.json").write_text(json.dumps({"status": status, "message": words, "time": time.time()}))
