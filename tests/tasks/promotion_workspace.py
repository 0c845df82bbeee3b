"""A root with all that a judgement reads: documents, tokenizer, tokens, and checkpoints of small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.load import load_recipe
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.runs.records import Runs, StepRecord
from herd.tasks.stages.evaluate import evaluate_model
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.agents import shared_agents
from tests.llama3.export.export_samples import TEXTS, tokenizer

SHAPE = "model={layers: 1, dim: 16, ffn: 32, heads: 2, kv_heads: 1, max_seq_len: 2048, tied_embeddings: true}"
Fill = Callable[[Path], object]


class PromotionWorkspace:
    """One run of the quickstart's recipe with a small model."""

    def __init__(self, place: Path, *changes: str) -> None:
        words = ["evaluate={documents: 4, questions: 4}", SHAPE, *changes]
        self.recipe = load_recipe(Path("recipes/quickstart.yaml"), words)
        self.root, self.coder = Root.parse(place), tokenizer()
        self.store: Store = open_store(self.root)
        runs = Runs(self.root)
        record = runs.begin(self.recipe, "c0de")
        tracker = MLflowTracker(self.root, self.recipe.name)
        cluster = Cluster(threads=1)
        self.context = Context(
            self.recipe, cluster, self.store, runs, record, tracker, TerminalConsole(), [], agents=shared_agents()
        )
        made = self.commit("tokenizer", self.coder.save, {"digest": self.coder.digest})
        self.tokens = self.commit("tokens", _nothing, {}, tokenizer=made.key)
        self.curated = self.commit("curated", lambda folder: write_documents(folder / "documents"), {})

    def commit(self, kind: str, fill: Fill, facts: dict[str, Any], name: str = "quickstart", **inputs: str) -> Artifact:
        """Commit an artifact as a step of the run."""
        with self.store.staging() as folder:
            fill(folder)
            made = self.store.commit(
                ArtifactSpec(kind, name, 1, {}, inputs), folder, facts, self.context.record.name, "", 1
            )
        self.context.record.steps[f"{kind} {name}"] = StepRecord(artifact=made.label, outcome="created")
        self.context.runs.save(self.context.record)
        return made

    def checkpoint(self, seed: int = 0, change: Fill = lambda model: None) -> Artifact:
        """Commit a model with random weights; `change` may do something to its folder before."""

        def fill(folder: Path) -> None:
            made = build_model(self.recipe.model, self.coder.vocab_size, seed, torch.float32, torch.device("cpu"))
            save_model(folder / "model", self.recipe.final_model, self.coder.vocab_size, made.state_dict())
            self.coder.save(folder / "model")
            change(folder / "model")

        facts = {"end": 100, "model_sha256": f"{seed:064x}"}
        return self.commit("checkpoint", fill, facts, "quickstart-anneal", tokens=self.tokens.key, seed=str(seed))

    def evaluation(self, checkpoint: Artifact) -> Artifact:
        return evaluate_model.fn(self.context, "anneal", checkpoint, self.curated)

    def with_benchmark(self, action: str, confirmed: int) -> Artifact:
        """Commit documents in which `confirmed` of 50 examples of an evaluation set were found."""
        row = {"benchmark": "trivia", "action": action, "threshold": "50%", "examples": 50, "confirmed": confirmed}

        def fill(folder: Path) -> None:
            write_documents(folder / "documents")
            (folder / "report").mkdir()
            pq.write_table(pa.Table.from_pylist([row]), folder / "report" / "contamination.parquet")

        return self.commit("curated", fill, {}, action=action, confirmed=str(confirmed))


def write_documents(folder: Path) -> None:
    """Write held-out documents of one domain as curation does."""
    texts = [f"Page {page}. The tide came at {page % 24}, and the boats with it." for page in range(8)]
    rows = [
        {"id": f"{place:064x}", "text": text * 9, "domain": "general", "language": "en", "url": "", "split": "held_out"}
        for place, text in enumerate(texts)
    ]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "general-00000.parquet")


def _nothing(folder: Path) -> None:
    (folder / "none.txt").write_text(TEXTS[0])
