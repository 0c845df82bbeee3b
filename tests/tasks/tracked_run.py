"""A small run with every kind of artifact that MLflow shows, tracked as a run tracks itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from herd.llama3.evaluate.gate import Decision, GateRow
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.train import metrics
from herd.llama3.train.journal import Journal, Record, to_parquet
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.promotion.log import PROMOTED, Promotion, PromotionLog, current_label
from herd.tasks.promotion.registry import Registry, apply
from herd.tasks.runs.provenance import Provenance
from herd.tasks.runs.records import Runs, StepRecord, now
from herd.tasks.step import Context, tracked_step
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.steps import LoggedStep, checkpoint_model, project_step, recipe_params, recipe_points
from tests.llama3.train.train_samples import recipe

DOMAINS = ("general", "math", "code", "multilingual")
BEGAN = 1_700_000_000.0


def records(span: StageSpan, schedule: Schedule, better: float = 0.0) -> list[Record]:
    """Return a made-up journal of a stage: a loss that falls, and what else stands in one."""
    made = []
    for number in range(1, span.steps + 1):
        position = span.start + number * span.tokens // span.steps
        loss = 3 + 3 * math.exp(-position / 2000) - better + 0.05 * math.sin(number)
        values = {
            metrics.LOSS: loss,
            metrics.STEP: float(schedule.step_at(position)),
            metrics.LEARNING_RATE: 1e-2 * (1 - position / 6000) + better / 100,
            metrics.BATCH_TOKENS: 256.0,
            metrics.SEQ_LEN: 16.0,
            metrics.TOKENS_PER_S: 9000 + 100 * math.cos(number) + 1000 * better,
            **{metrics.domain_loss(domain): loss + place / 5 for place, domain in enumerate(DOMAINS)},
            **({metrics.CHECKPOINT_S: 0.25} if number % 3 == 0 else {}),
        }
        made.append(Record(BEGAN + position / 100, position, values))
    return made


class TrackedRun:
    """Does what the steps of a run do, with made-up results."""

    def __init__(self, root: Root, better: float = 0.0, **changes: Any) -> None:
        self.root, self.better = root, better
        recipe_ = recipe(**changes)
        runs = Runs(root)
        tracker = MLflowTracker(root, recipe_.name)
        record = runs.begin(recipe_, "c0de")
        made = Provenance(user="ann", host="login", command="herd run tiny.yaml", packages={"numpy": "2.4"})
        record.provenance = made
        self.context = Context(recipe_, Cluster(), open_store(root), runs, record, tracker, TerminalConsole(), [])
        record.mlflow_run = tracker.open_run(record.name, self.context.tags(), recipe_params(recipe_))
        tracker.log_points([record.mlflow_run], recipe_points(recipe_, record.started))
        record.mlflow_experiment = tracker.experiment
        tracker.set_tags(record.mlflow_run, {"prefect.url": "http://prefect/1", "mlflow.note.content": "a note"})
        runs.save(record)

    def all(self) -> TrackedRun:
        """Take every step and end."""
        tokens = self.tokens()
        checkpoint: Artifact | None = None
        for span in Schedule(self.context.recipe).trained:
            checkpoint = self.stage(span, tokens, checkpoint)
        assert checkpoint is not None
        self.promote(checkpoint, self.evaluate(checkpoint))
        self.end()
        return self

    def tokens(self) -> Artifact:
        counts = {"tokens": dict.fromkeys(DOMAINS, 4000), "documents": dict.fromkeys(DOMAINS, 40)}
        return self.step(
            "tokenize", ArtifactSpec("tokens", "tiny", 1, {"dtype": "uint16"}, {}), {**counts, "odd@key": 1}, {}
        )

    def stage(self, span: StageSpan, tokens: Artifact, parent: Artifact | None) -> Artifact:
        inputs = {"tokens": tokens.key, "parent": parent.key if parent else "fresh weights"}
        design = ArtifactSpec("checkpoint", f"tiny-{span.name}", 1, {"better": self.better}, inputs)
        facts = {"start": span.start, "end": span.end, "steps": span.steps, "last_loss": 3.0, "model_sha256": "d" * 64}
        facts["environment"] = {"torch": "2.14" if self.better else "2.13", "layout": "dp 8", "hosts": "n1"}
        facts |= {"cost": {"gpu_hours": 2.0, "usd": 5.0}, "cost_so_far": {"gpu_hours": 4.0, "usd": 10.0}}
        journal = records(span, Schedule(self.context.recipe), self.better)
        return self.step(span.name, design, facts, {"metrics.parquet": journal})

    def evaluate(self, checkpoint: Artifact) -> Artifact:
        design = ArtifactSpec("evaluation", checkpoint.manifest.name, 1, {}, {"checkpoint": checkpoint.key})
        facts = {"eval/bpb": 1.5 - self.better, "eval/arithmetic": 0.3}
        return self.step("evaluate-anneal", design, facts, {"generations.json": []})

    def step(self, step: str, design: ArtifactSpec, facts: dict[str, Any], files: dict[str, Any]) -> Artifact:
        context = self.context
        with tracked_step(context, design.kind, step, design.key) as child:
            artifact = context.store.find(design) or self._make(design, facts, files)
            outcome = "created" if artifact.manifest.created_by == context.record.name else "reused"
            context.record.steps[step] = StepRecord(
                artifact=artifact.label, outcome=outcome, mlflow_run=child, cost=artifact.metadata.get("cost", {})
            )
            context.runs.save(context.record)
            project_step(
                LoggedStep(context.tracker, context.store, context.record, step, artifact, child, context.sinks)
            )
        return artifact

    def _make(self, design: ArtifactSpec, facts: dict[str, Any], files: dict[str, Any]) -> Artifact:
        with self.context.store.staging() as folder:
            for name, content in files.items():
                write(folder / name, content)
            return self.context.store.commit(design, folder, facts, self.context.record.name, "c0de", 1.0)

    def promote(self, checkpoint: Artifact, evaluation: Artifact) -> None:
        context, registry = self.context, Registry(self.context.tracker)
        row = GateRow(
            metric="eval/bpb", rule="better", candidate=1, champion=2, threshold=2, passed=True, reason="better"
        )
        decision = Decision(accepted=True, rows=(row,))
        with tracked_step(context, "promotion", "promote", evaluation.key) as child:
            model = checkpoint_model(context.tracker, [child], checkpoint)
            registry.version(checkpoint, context.record.name, child, model)
            log = PromotionLog(self.root, context.recipe.name)
            promotion = Promotion(
                time=now(),
                kind=PROMOTED,
                run=context.record.name,
                family=context.recipe.name,
                artifact=checkpoint.label,
                digest=checkpoint.metadata["model_sha256"],
                position=checkpoint.metadata["end"],
                alias="champion",
                champion=current_label(log.records, "champion"),
                gate=decision,
            )
            log.append(promotion, log.head)
            apply(context.runs, context.record, context.tracker, log)
            context.tracker.set_tags(child, {"verdict": "promoted"})

    def end(self) -> None:
        record = self.context.record
        record.state, record.ended = "finished", now()
        self.context.runs.save(record)
        self.context.tracker.close(record.mlflow_run, "FINISHED")


def two_runs(folder: Path) -> Root:
    """Return a root with two runs of one family, `tiny-1` and `tiny-2`; the second is better and reuses the tokens."""
    root = Root.parse(folder)
    TrackedRun(root).all()
    TrackedRun(root, better=0.5, seed=4).all()
    return root


def write(path: Path, content: Any) -> None:
    """Write a journal as the table of its metrics, anything else as JSON."""
    if path.suffix != ".parquet":
        path.write_text(json.dumps(content))
        return
    place = path.parent.parent / f"{path.parent.name}.jsonl"
    with Journal(place) as journal:
        for record in content:
            journal.add(record)
    to_parquet(place, path)
    place.unlink()


def seen(tracker: MLflowTracker, names: list[str]) -> dict[str, Any]:
    """Return everything that MLflow shows of runs, by names that do not change from server to server."""
    client = tracker.client
    found: dict[str, Any] = {}
    for name in names:
        for run in client.search_runs([tracker.experiment], f"tags.`herd.run` = '{name}'"):
            tags = {key: value for key, value in run.data.tags.items() if key not in ("mlflow.parentRunId",)}
            parent = run.data.tags.get("mlflow.parentRunId", "")
            found[run.info.run_name] = {
                "tags": tags,
                "parent": client.get_run(parent).info.run_name if parent else "",
                "params": run.data.params,
                "status": run.info.status,
                "points": {key: points(tracker, run.info.run_id, key) for key in run.data.metrics},
                "inputs": [(i.dataset.name, i.dataset.digest, i.dataset.profile) for i in run.inputs.dataset_inputs],
                "outputs": sorted(output.step for output in run.outputs.model_outputs),
            }
    return found


def points(tracker: MLflowTracker, run: str, key: str) -> list[tuple[int, float, int]]:
    """Return the points of a series as (position, value, time in ms), each as often as it is there."""
    history = tracker.client.get_metric_history(run, key)
    return sorted((point.step, point.value, point.timestamp) for point in history)


def models(tracker: MLflowTracker) -> dict[str, Any]:
    """Return the logged models by artifact, and the versions and aliases of the registered model."""
    client = tracker.client
    logged = {
        model.tags["herd.artifact"]: (model.params, sorted((m.key, m.value, m.step) for m in model.metrics or []))
        for model in client.search_logged_models([tracker.experiment])
    }
    versions = {
        version.tags["herd.artifact"]: version.tags
        for version in client.search_model_versions(f"name = '{tracker.family}'")
    }
    aliases = client.get_registered_model(tracker.family).aliases
    holders = {
        alias: client.get_model_version(tracker.family, version).tags["herd.artifact"]
        for alias, version in aliases.items()
    }
    return {"logged": logged, "versions": versions, "aliases": holders}
