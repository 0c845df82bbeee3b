"""What an artifact looks like in MLflow: tags, params, points, data sets and models of its step.

One function shows a step, live and in a backfill, so the two cannot differ. It reads only the run's record and
artifacts. Points are thinned by the step number in each record, which does not depend on the reader. Points of
rolled-back steps stay where they were sent live and are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from llama3.train import metrics
from llama3.train.journal import Record
from storage.artifact import Artifact, Store
from tasks.runs.records import RunRecord
from tasks.tracking.mlflow import MetricPoint, Tracker, metric_key

# The scores among the facts of an artifact: of an evaluation, or of a gate within a run.

SCORE = "eval/"
"""Beginning of the name of every score."""


def scores_of(artifact: Artifact) -> dict[str, float]:
    """Return the scores of the artifact, each under its whole name (`eval/bpb/math`)."""
    return {key: value for key, value in artifact.facts.items() if key.startswith(SCORE)}


POINTS_PER_SERIES = 2000
RARE = frozenset(
    {
        metrics.SKIPPED,
        metrics.SKIPPED_TOKENS,
        metrics.CHECKPOINT_S,
        metrics.CHECKPOINT_WRITE_S,
        metrics.FIRST_STEP_S,
        metrics.RESTARTS,
        metrics.ROLLBACKS,
        metrics.LOST_TOKENS,
        metrics.REPLAY_MAX_ABS_DIFF,
    }
)
"""Metrics that only a few records hold: each of their points is sent."""
RUN_TAGS = (
    "herd.run",
    "recipe.digest",
    "code.commit",
    "prefect.flow_run_id",
    "cluster",
    "world",
    "attempts",
)
"""Tags of a run that its steps carry too."""


@dataclass(frozen=True)
class Thinning:
    """Which points of a stage are sent: about 2,000 of each series, and its last."""

    steps: int
    """Of the stage."""
    end: int
    """Position at the stage's end."""

    def points(self, record: Record) -> list[MetricPoint]:
        """Return the points of one journal record that are sent."""
        whole = record.position == self.end or int(record.metrics.get(metrics.STEP, 0)) % self._stride == 0
        chosen = record.metrics if whole else {key: record.metrics[key] for key in RARE & record.metrics.keys()}
        return [MetricPoint(key, value, record.time, record.position) for key, value in chosen.items()]

    @property
    def _stride(self) -> int:
        return max(1, self.steps // POINTS_PER_SERIES)


@dataclass(frozen=True)
class Shown:
    """One step of a run and where it is shown."""

    tracker: Tracker
    store: Store
    record: RunRecord
    step: str
    artifact: Artifact
    child: str
    """Handle of the step's MLflow run."""

    @property
    def runs(self) -> list[str]:
        """The step's own MLflow run, and that of the whole run."""
        return [self.child, *([self.record.mlflow_run] if self.record.mlflow_run else [])]


def child_tags(run_tags: Mapping[str, str], step: str, kind: str, key: str) -> dict[str, str]:
    """Return the tags of the MLflow run of a step, which find it again."""
    return {**{name: run_tags[name] for name in RUN_TAGS if name in run_tags}, **step_tags(step, kind, key)}


def step_tags(step: str, kind: str, key: str) -> dict[str, str]:
    return {"stage": step, "kind": kind, "artifact.key": key[:16]}


def project_step(shown: Shown) -> int:
    """Show a step's artifact in MLflow: what it was made from, its numbers, and what its kind has besides.

    Returns how many points were sent. `shown.record` must hold the step already.
    """
    tracker, artifact, child = shown.tracker, shown.artifact, shown.child
    manifest = artifact.manifest
    tags = {"artifact": artifact.label, "outcome": shown.record.steps[shown.step].outcome, "made_by": manifest.made_by}
    tracker.set_tags(child, {**tags, **_parent(shown)})
    tracker.log_params(child, {key: value for key, value in manifest.parameters.items() if key != "recipe"})
    tracker.log_params(child, {f"input.{role}": key[:16] for role, key in manifest.inputs.items()})
    facts = {key: value for key, value in manifest.facts.items() if not key.startswith(SCORE)}
    points = [MetricPoint(key, value, artifact.created, 0) for key, value in _numbers(facts).items()]
    tracker.log_points([child], points)
    return len(points) + _KINDS.get(manifest.kind, _nothing)(shown)


def send_records(tracker: Tracker, runs: list[str], records: Iterable[Record], thinning: Thinning) -> int:
    """Send the records of a stage to the MLflow runs and return how many points; those already there stay single."""
    points = [point for record in records for point in thinning.points(record)]
    tracker.log_points(runs, points)
    return len(points) * len(runs)


def read_series(table: Path) -> list[Record]:
    """Return the records of a finished stage (`metrics.parquet`) as they stood in its journal."""
    found: dict[int, tuple[float, dict[str, float]]] = {}
    for row in parquet.read_table(table).to_pylist():
        found.setdefault(row["position"], (row["time"], {}))[1][row["key"]] = row["value"]
    return [Record(time, position, values) for position, (time, values) in sorted(found.items())]


def checkpoint_model(tracker: Tracker, runs: list[str], checkpoint: Artifact) -> str:
    """Return the LoggedModel of a checkpoint, shown as an output of the runs."""
    facts = checkpoint.facts
    return tracker.checkpoint_model(runs, checkpoint.label, checkpoint.uri, facts["end"], facts["model_sha256"])


def _parent(shown: Shown) -> dict[str, str]:
    """Return the tag that names the checkpoint which a stage went on from."""
    key = shown.artifact.manifest.inputs.get("parent", "")
    labels = [step.artifact for step in shown.record.steps.values() if key and step.artifact.endswith(f"-{key[:8]}")]
    return {"parent.checkpoint": labels[0]} if labels else {}


def _data(shown: Shown) -> int:
    """Token shards: what the run is trained on, one data set for each domain of the mix."""
    facts, artifact = shown.artifact.facts, shown.artifact
    sources = facts.get("sources", {})
    datasets = [
        {
            "name": domain,
            "digest": artifact.key,
            "uri": artifact.uri,
            "profile": {
                "tokens": facts["tokens"][domain],
                "documents": facts["documents"][domain],
                **({"sources": sources[domain]} if domain in sources else {}),
            },
        }
        for domain in facts["tokens"]
    ]
    for run in shown.runs:
        shown.tracker.log_inputs(run, datasets)
    return 0


def _stage(shown: Shown) -> int:
    """A trained stage: its curves, unless they were sent while it was trained, and its checkpoint as a model."""
    sent, facts = 0, shown.artifact.facts
    if shown.child not in shown.tracker.whole:
        records = read_series(shown.artifact.part("metrics.parquet"))
        sent = send_records(shown.tracker, shown.runs, records, Thinning(facts["steps"], facts["end"]))
    checkpoint_model(shown.tracker, shown.runs, shown.artifact)
    return sent


def _scores(shown: Shown) -> int:
    """Scores of a checkpoint, at its position; those of the run's own checkpoints are on the run's curves too.

    Those of a gate within the run always are; those of an evaluation are attached to the checkpoint's model.
    """
    checkpoint = _scored(shown)
    if checkpoint is None:
        return 0
    own = checkpoint.label in {step.artifact for step in shown.record.steps.values()}
    gate = shown.artifact.manifest.kind == "advance"
    runs, position = (shown.runs if own or gate else [shown.child]), checkpoint.facts["end"]
    points = [
        MetricPoint(key, value, shown.artifact.created, position) for key, value in scores_of(shown.artifact).items()
    ]
    model = "" if gate else checkpoint_model(shown.tracker, [shown.child], checkpoint)
    shown.tracker.log_points(runs, points, model or None)
    return len(points) * len(runs)


def _scored(shown: Shown) -> Artifact | None:
    """Return the checkpoint that was scored, or None if it is gone: scores without a position are not shown."""
    manifest = shown.artifact.manifest
    try:
        return shown.store.at(f"checkpoint/{manifest.name}-{manifest.inputs['checkpoint'][:8]}")
    except ValueError:
        return None


def _nothing(shown: Shown) -> int:
    return 0


_KINDS = {"tokens": _data, "checkpoint": _stage, "evaluation": _scores, "advance": _scores}


def _numbers(facts: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested facts under keys with `/` between levels."""
    numbers: dict[str, float] = {}
    for key, value in facts.items():
        if isinstance(value, dict):
            numbers |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[metric_key(f"{prefix}{key}")] = float(value)
    return numbers
