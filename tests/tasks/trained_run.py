"""A root with one finished run whose token shards, models, curves and scores are real, made without a trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from herd.llama3.evaluate.scores import Score, write_scores
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.train import metrics
from herd.llama3.train.journal import Journal, Record, to_parquet
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, Runs, StepRecord
from tests.llama3.export.export_samples import tokenizer
from tests.llama3.train.train_samples import recipe, write_tokens

CODER = tokenizer()


class TrainedRun:
    """Commits what the steps of a run of two stages commit, and writes its record."""

    def __init__(self, folder: Path, seed: int = 3) -> None:
        self.root, self.recipe = Root.parse(folder), recipe(seed=seed)
        self.runs, self.store = Runs(self.root), open_store(self.root)
        self.record: RunRecord = self.runs.begin(self.recipe, "c0de")
        tokens = self._step(
            "tokenize", ArtifactSpec("tokens", "tiny", 1, {}, {}), {}, lambda at: write_tokens(at, self.recipe)
        )
        self._step("tokenizer", ArtifactSpec("tokenizer", "tiny", 1, {}, {}), {"digest": CODER.digest}, CODER.save)
        for span in Schedule(self.recipe).trained:
            self.checkpoint = self._stage(span, tokens)
        design = ArtifactSpec("evaluation", "tiny-anneal", 1, {}, {"checkpoint": self.checkpoint.key})
        self._step("evaluate-anneal", design, {}, lambda at: write_scores({SCORE.key: SCORE}, at))
        self.record.state = "finished"
        self.runs.save(self.record)

    @property
    def model(self) -> Path:
        """The folder of the last stage's model."""
        return self.checkpoint.path_of("model")

    def _stage(self, span: StageSpan, tokens: Artifact) -> Artifact:
        design = ArtifactSpec("checkpoint", f"tiny-{span.name}", 1, {"stage": span.name}, {"tokens": tokens.key})
        facts = {"start": span.start, "end": span.end, "steps": span.steps, "last_loss": 3.5, "model_sha256": "d" * 64}

        def write(folder: Path) -> None:
            made = build_model(
                self.recipe.model, CODER.vocab_size, self.recipe.seed, torch.float32, torch.device("cpu")
            )
            save_model(folder / "model", self.recipe.final_model, CODER.vocab_size, made.state_dict())
            CODER.save(folder / "model")
            curve(span, folder / "metrics.parquet")

        return self._step(span.name, design, facts, write)

    def _step(self, step: str, design: ArtifactSpec, facts: dict[str, Any], write: Any) -> Artifact:
        with self.store.staging() as folder:
            write(folder)
            artifact = self.store.commit(design, folder, facts, self.record.name, "c0de", 1.0)
        self.record.steps[step] = StepRecord(artifact=artifact.label, outcome="created")
        return artifact


SCORE = Score("eval/bpb", 2.5, 0.1, 2.304, 2.696, 40, None, "bits per byte", "lower", "ab" * 32)


def curve(span: StageSpan, path: Path) -> None:
    place = path.with_name("journal.jsonl")
    with Journal(place) as journal:
        for number in range(1, span.steps + 1):
            position = span.start + number * span.tokens // span.steps
            journal.add(Record(float(position), position, {metrics.LOSS: 3 + 3 * math.exp(-position / 2000)}))
    to_parquet(place, path)
    place.unlink()
