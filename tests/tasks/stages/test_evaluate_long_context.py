"""The gates of a long-context stage on real artifacts: models that pass, that fail, and what a failure tells."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console as RichConsole

from herd.llama3.evaluate.gate import Decision
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.frozen import check_frozen_fields
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import train_tokenizer
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.errors import GateFailed
from herd.tasks.runs.records import Runs
from herd.tasks.stages.evaluate import check_long_context_gates
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.agents import shared_agents

TEXTS = [
    f"Page {page}. The tide came at {page % 24}, and the boats with it. Nobody had asked them." for page in range(80)
]
LONG = "{name: long, for: 60Ki, seq_len: [512, 1024, 768], mix: base, batch: 6Ki, gates: %s}"


def asked(advance_: str) -> Recipe:
    """The quickstart with a small model and a stage of three longer sequences instead of its annealing."""
    shape = "model={layers: 1, dim: 16, ffn: 32, heads: 2, kv_heads: 1, max_seq_len: 2048, tied_embeddings: true}"
    words = [f"stages.anneal={LONG % advance_}", "evaluate={documents: 4, needles: 11}", shape]
    return load_recipe(Path("recipes/quickstart.yaml"), words)


class Workspace:
    """A root with curated documents and checkpoints of models that learnt nothing."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, Store(root)
        self.tokenizer = train_tokenizer(TEXTS, 300)
        self.curated = self.commit("curated", "documents", {})
        self.tracker = MLflowTracker(Root.parse(root), "quickstart")

    def commit(self, kind: str, name: str, facts: dict[str, int], uniform: bool = False) -> Artifact:
        design = ArtifactSpec(kind, name, 1, {}, {"made from": name})
        with self.store.staging() as folder:
            if kind == "curated":
                write_documents(folder / "documents")
            else:
                self.write_model(folder / "model", uniform)
            return self.store.commit(design, folder, facts, "test", "none", 0.0)

    def write_model(self, folder: Path, uniform: bool) -> None:
        config = asked("[needle]").model
        model = build_model(config, self.tokenizer.vocab_size, 5, torch.float32, torch.device("cpu"))
        if uniform:
            torch.nn.init.zeros_(model.get_parameter("embedding.weight"))
        save_model(folder, config, self.tokenizer.vocab_size, model.state_dict())
        self.tokenizer.save(folder)

    def context(self, recipe: Recipe) -> Context:
        runs = Runs(Root.parse(self.root))
        record = runs.begin(recipe, "none")
        record.mlflow_run = self.tracker.open_run(record.name, {"herd.run": record.name}, {})
        console = TerminalConsole(RichConsole(width=200, record=True, file=(self.root / "console").open("w")))
        return Context(
            recipe, Cluster(threads=1), self.store, runs, record, self.tracker, console, [], agents=shared_agents()
        )


def write_documents(folder: Path) -> None:
    columns = {"domain": "general", "language": "en", "url": "", "split": "held_out"}
    rows = [{"id": hashlib.sha256(text.encode()).hexdigest(), "text": text * 20, **columns} for text in TEXTS]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(sorted(rows, key=lambda row: row["id"])), folder / "general-00000.parquet")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("root"))


def test_a_length_that_passes_its_gates_is_recorded_and_not_measured_again(workspace: Workspace) -> None:
    context = workspace.context(asked("{short-context: no worse than 0%, needle: at least 0}"))
    began = workspace.commit("checkpoint", "main", {"end": 840_000})
    checkpoint = workspace.commit("checkpoint", "long-512", {"end": 860_000})
    decision = check_long_context_gates.fn(context, "long-512", checkpoint, began, workspace.curated)
    assert [row.metric for row in decision.rows] == ["integrity/finite", "eval/short-context", "eval/needle"]
    assert decision.accepted
    assert decision.rows[1].candidate == decision.rows[1].champion, "the same weights"
    written = (context.folder / "gate-long-512.json").read_text()
    assert Decision.model_validate_json(written) == decision
    found = context.artifacts["gate-long-512"]
    assert found.metadata["eval/needle"] == decision.rows[2].candidate
    assert workspace.tracker.series(context.record.mlflow_run, "eval/short-context") == [
        (end, decision.rows[1].candidate) for end in (840_000, 860_000)
    ]
    made = {step: artifact.manifest.created for step, artifact in context.artifacts.items()}
    assert check_long_context_gates.fn(context, "long-512", checkpoint, began, workspace.curated) == decision
    assert {step: artifact.manifest.created for step, artifact in context.artifacts.items()} == made


def test_a_needle_not_found_stops_the_run_with_numbers_and_remedies(workspace: Workspace) -> None:
    recipe = asked("[needle]")
    context, uniform = workspace.context(recipe), workspace.commit("checkpoint", "uniform", {"end": 1}, uniform=True)
    with pytest.raises(GateFailed) as caught:
        check_long_context_gates.fn(context, "long-1024", uniform, None, workspace.curated)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "stages.long.gates: long-1024 does not pass at sequence 1024; the run stops at position 1,403,904"
    )
    assert lines[1] == "  needle failed: 0.0% of the sentences found; the gate requires at least 0.9"
    assert lines[2].startswith("  needle by depth: 0 %: 0%, 10 %: 0%")
    assert lines[4].startswith("  stages.long.for: [18Ki, 48Ki, 18Ki]  # trains twice as long")
    assert lines[5].startswith("  stages.long.gates: {needle: at least 0}  #")


def test_the_remedy_is_legal_and_keeps_the_past(workspace: Workspace) -> None:
    before = asked("[needle]")
    parts = Schedule(before).span("long").parts
    assert [part.name for part in parts] == ["long-512", "long-1024", "long-768"]
    sizes = [part.tokens for part in parts]
    sizes[1] *= 2
    data = before.model_dump(mode="json", by_alias=True)
    data["stages"][-1]["for"] = [f"{size} tokens" for size in sizes]
    after = Recipe.model_validate(data)
    check_frozen_fields(before, after, parts[1].end)
    assert Schedule(after).span("long-1024").tokens == 2 * parts[1].tokens


def test_worse_short_context_stops_the_run(workspace: Workspace) -> None:
    context = workspace.context(asked("[short-context]"))
    began = workspace.commit("checkpoint", "main", {"end": 840_000})
    worse = workspace.commit("checkpoint", "uniform", {"end": 1}, uniform=True)
    better, other = (
        (began, worse) if _bits(workspace, context, began) < _bits(workspace, context, worse) else (worse, began)
    )
    check_long_context_gates.fn(context, "long-512", better, other, workspace.curated)
    recipe = asked("{short-context: no worse than 0%}")
    with pytest.raises(
        GateFailed, match=r"short-context failed: .* bits per byte, .* before the stage; the gate allows"
    ):
        check_long_context_gates.fn(workspace.context(recipe), "long-512", other, better, workspace.curated)


def _bits(workspace: Workspace, context: Context, checkpoint: Artifact) -> float:
    decision = check_long_context_gates.fn(context, "long-512", checkpoint, checkpoint, workspace.curated)
    assert decision.rows[1].candidate is not None
    return decision.rows[1].candidate
