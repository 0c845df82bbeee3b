"""What an artifact logs to the tracker: tags, params, points, data sets and models of its step.

The same function logs a step live and in a backfill. It reads only the run's record and artifacts. Points are thinned
by the step number in each record, so the result does not depend on the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from herd.llama3.recipe.load import resolved
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Tracking
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record
from herd.storage.artifact import Artifact, Store, flatten
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, is_merge
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker, metric_key
from herd.tasks.tracking.tensorboard import TensorBoard

SCORE = "eval/"
"""Prefix of the name of every score."""
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
COSTS = frozenset({metrics.GPU_HOURS, metrics.USD, metrics.KWH})
"""Metrics whose last value in a stage the artifact has: it includes the time after the last step."""
SMALL = 0.01
"""Parameters below are written with an exponent, as people write learning rates."""
RUN_TAGS = (
    *("herd.run", "recipe.digest", "code.commit", "prefect.flow_run_id", "cluster", "world", "attempts"),
    *("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit"),
)
"""Tags of a run that its steps carry too."""


def recipe_params(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe two levels deep, as a run's parameters; a small number is a text such as `3e-3`."""
    params = flatten(resolved(recipe), depth=2)
    small = {key: value for key, value in params.items() if isinstance(value, float) and 0 < abs(value) < SMALL}
    return params | {key: _exponential(value) for key, value in small.items()}


def _exponential(value: float) -> str:
    """Return the shortest text with an exponent that is read back as `value`."""
    text = next(text for digits in range(17) if float(text := f"{value:.{digits}e}") == value)
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def recipe_points(recipe: Recipe, started: str) -> list[MetricPoint]:
    """Return the numbers of a recipe that people filter runs by, as metrics: MLflow compares parameters as text.

    Without `/`, which a filter must quote; MLflow's chart page has such metrics near its end. `started`
    is the time in the run's record.
    """
    schedule, model, at = recipe.schedule, recipe.model, datetime.fromisoformat(started).timestamp()
    numbers = {
        "lr_peak": recipe.lr.peak,
        "tokens": schedule.tokens,
        "batch_tokens": max(segment.batch for segment in schedule.segments),
        "seq_len": max(segment.seq_len for segment in schedule.segments),
        "weight_decay": recipe.optimizer.weight_decay,
        "layers": model.layers,
        "dim": model.dim,
        "seed": recipe.seed,
    }
    return [MetricPoint(f"config_{name}", float(number), at, 0) for name, number in numbers.items()]


def scores_of(artifact: Artifact) -> dict[str, float]:
    """Return the scores in the metadata of an evaluation or gate, each under its full name (`eval/bpb/math`)."""
    return {key: value for key, value in artifact.metadata.items() if key.startswith(SCORE)}


@dataclass(frozen=True)
class Thinning:
    """Which points of a stage are sent: about 2,000 of each series, and its last."""

    steps: int
    """Of the stage."""
    end: int
    """Position at the stage's end."""

    def sends(self, record: Record) -> bool:
        """Return whether all values of a record are sent."""
        stride = max(1, self.steps // POINTS_PER_SERIES)
        return record.position == self.end or int(record.metrics.get(metrics.STEP, 0)) % stride == 0

    def points(self, records: Iterable[Record]) -> list[MetricPoint]:
        """Return the points of journal records that are sent; `project_step` adds the last costs."""
        points: list[MetricPoint] = []
        for record in records:
            left_out = COSTS if record.position == self.end else ()
            sent = record.metrics if self.sends(record) else RARE & record.metrics.keys()
            keys = [key for key in sent if key not in left_out]
            points += [MetricPoint(key, record.metrics[key], record.time, record.position) for key in keys]
        return points


class CurveSink(Protocol):
    """Another place for the points of a run beside MLflow. It must not raise: monitoring must not stop a run."""

    def add(self, step: str, points: list[MetricPoint], of_run: bool = False) -> None:
        """Write points of `step`, with `of_run` also to the curves of the run.

        The points of a stage come while it trains and again when it ends.
        """

    def close(self, step: str) -> None:
        """End `step`: nothing follows."""


SINKS: Mapping[str, Callable[[Root, str], CurveSink]] = {"tensorboard": TensorBoard}
"""Field of `tracking` in the recipe -> maker of the sink, from the root and the name of the run."""


def curve_sinks(tracking: Tracking, root: Root, run: str) -> list[CurveSink]:
    """Return the sinks that a recipe asks for."""
    return [make(root, run) for field, make in SINKS.items() if getattr(tracking, field)]


@dataclass(frozen=True)
class StageCurves:
    """Reads the journal of a stage and writes the points that MLflow gets to the other sinks."""

    sinks: Sequence[CurveSink]
    stage: str
    thinning: Thinning

    def update(self, records: Sequence[Record], loss: float | None) -> None:
        """Write the points of new records."""
        for sink in self.sinks:
            sink.add(self.stage, self.thinning.points(records), of_run=True)


@dataclass(frozen=True)
class LoggedStep:
    """One step of a run and where it is logged."""

    tracker: MLflowTracker
    store: Store
    record: RunRecord
    step: str
    artifact: Artifact
    child: str
    """Handle of the step's run in the tracker."""
    sinks: Sequence[CurveSink] = ()

    @property
    def runs(self) -> list[str]:
        """Handles of the step's run and of the whole run."""
        return [self.child, *([self.record.mlflow_run] if self.record.mlflow_run else [])]

    def log(self, points: list[MetricPoint], of_run: bool = False, model_id: str | None = None) -> int:
        """Log points to the step, with `of_run` also to the whole run, and return how many."""
        runs = self.runs if of_run else [self.child]
        for sink in self.sinks:
            sink.add(self.step, points, of_run)
        self.tracker.log_points(runs, points, model_id)
        return len(points) * len(runs)


def child_tags(run_tags: Mapping[str, str], step: str, kind: str, key: str) -> dict[str, str]:
    """Return the tags of a step's run, by which it is found again."""
    return {**{name: run_tags[name] for name in RUN_TAGS if name in run_tags}, **step_tags(step, kind, key)}


def step_tags(step: str, kind: str, key: str) -> dict[str, str]:
    return {"stage": step, "kind": kind, "artifact.key": key[:16]}


def environment_tags(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the tags about what a stage runs on, without the long table of links."""
    return {f"environment.{key}": value for key, value in environment.items() if key != "topology"}


def project_step(shown: LoggedStep) -> int:
    """Log a step's artifact: its inputs, its numbers, and what its kind has besides. Return how many points were sent.

    `shown.record` must hold the step already.
    """
    tracker, artifact, child, steps = shown.tracker, shown.artifact, shown.child, shown.record.steps
    manifest = artifact.manifest
    tags = {"artifact": artifact.label, "outcome": steps[shown.step].outcome, "created_by": manifest.created_by}
    parent = manifest.inputs.get("parent", "")
    if labels := [step.artifact for step in steps.values() if parent and step.artifact.endswith(f"-{parent[:8]}")]:
        tags["parent.checkpoint"] = labels[0]
    environment = environment_tags(manifest.metadata.get("environment", {}))
    tracker.set_tags(child, tags | environment)
    if environment and shown.record.mlflow_run and not steps[shown.step].outcome.startswith("reused"):
        tracker.set_tags(shown.record.mlflow_run, environment)  # of the latest stage
    tracker.log_params(child, {key: value for key, value in manifest.parameters.items() if key != "recipe"})
    tracker.log_params(child, {f"input.{role}": key[:16] for role, key in manifest.inputs.items()})
    left_out = ("cost", "cost_so_far", "provenance")
    numbers = _numbers(
        {key: value for key, value in manifest.metadata.items() if not key.startswith(SCORE) and key not in left_out}
    )
    sent = shown.log([MetricPoint(key, value, artifact.created, 0) for key, value in numbers.items()])
    match manifest.kind:
        case "tokens":
            _log_data_sets(shown)
        case "conversations":
            metadata = manifest.metadata
            sources = {name: amounts["tokens"] for name, amounts in metadata["sources"].items()}
            profile = {"tokens": metadata["tokens"], "documents": metadata["conversations"], "sources": sources}
            dataset = {"name": manifest.kind, "digest": artifact.key, "uri": artifact.uri, "profile": profile}
            for run in shown.runs:
                tracker.log_inputs(run, [dataset])
        case "checkpoint":
            sent += _log_stage(shown)
        case "evaluation" | "gate":
            sent += _log_scores(shown)
    for sink in shown.sinks:
        sink.close(shown.step)
    return sent


def read_series(table: Path) -> list[Record]:
    """Return the records of a finished stage (`metrics.parquet`) as they were in its journal."""
    import pyarrow.parquet as parquet

    records: dict[int, tuple[float, dict[str, float]]] = {}
    for row in parquet.read_table(table).to_pylist():
        records.setdefault(row["position"], (row["time"], {}))[1][row["key"]] = row["value"]
    return [Record(time, position, values) for position, (time, values) in sorted(records.items())]


def checkpoint_model(tracker: MLflowTracker, runs: list[str], checkpoint: Artifact) -> str:
    """Log a checkpoint as an output of the runs and return the id of its model."""
    metadata = checkpoint.metadata
    return tracker.checkpoint_model(runs, checkpoint.label, checkpoint.uri, metadata["end"], metadata["model_sha256"])


def _log_data_sets(shown: LoggedStep) -> None:
    """Log the token shards as training data, one data set for each domain of the mix."""
    metadata, artifact = shown.artifact.metadata, shown.artifact
    sources = metadata.get("sources", {})
    datasets = [
        {
            "name": domain,
            "digest": artifact.key,
            "uri": artifact.uri,
            "profile": {
                "tokens": metadata["tokens"][domain],
                "documents": metadata["documents"][domain],
                **({"sources": sources[domain]} if domain in sources else {}),
            },
        }
        for domain in metadata["tokens"]
    ]
    for run in shown.runs:
        shown.tracker.log_inputs(run, datasets)


def _log_stage(shown: LoggedStep) -> int:
    """Log a trained stage: its curves, unless they were sent during training, and its checkpoint as a model."""
    sent, metadata = 0, shown.artifact.metadata
    if shown.child not in shown.tracker.complete and not is_merge(shown.artifact):
        records = read_series(shown.artifact.path_of("metrics.parquet"))
        sent = shown.log(Thinning(metadata["steps"], metadata["end"]).points(records), of_run=True)
    costs = {metrics.cost(name): amount for name, amount in metadata.get("cost_so_far", {}).items()}
    stage = {metrics.stage_cost(name): amount for name, amount in metadata.get("cost", {}).items()}
    for amounts, of_run in ((costs, True), (stage, False)):
        points = [MetricPoint(key, amount, shown.artifact.created, metadata["end"]) for key, amount in amounts.items()]
        sent += shown.log(points, of_run)
    checkpoint_model(shown.tracker, shown.runs, shown.artifact)
    return sent


def _log_scores(shown: LoggedStep) -> int:
    """Log the scores of a checkpoint at its position; scores of the run's own checkpoints also go to the run's curves.

    Scores of a gate within the run always do; those of an evaluation are attached to the checkpoint's model.
    """
    manifest, scores = shown.artifact.manifest, scores_of(shown.artifact)
    if (position := manifest.metadata.get("position")) is not None:  # a checkpoint in progress is not an artifact
        points = [MetricPoint(key, value, shown.artifact.created, position) for key, value in scores.items()]
        return shown.log(points, of_run=True)
    try:
        checkpoint = shown.store.load(f"checkpoint/{manifest.name}-{manifest.inputs['checkpoint'][:8]}")
    except ValueError:  # deleted: without it the position of the scores is unknown
        return 0
    gate = manifest.kind == "gate"
    recorded = checkpoint.label in {step.artifact for step in shown.record.steps.values()}
    own = recorded and not is_merge(checkpoint)  # at its position the curves have another model
    position = checkpoint.metadata["end"]
    points = [MetricPoint(key, value, shown.artifact.created, position) for key, value in scores.items()]
    model_id = "" if gate else checkpoint_model(shown.tracker, [shown.child], checkpoint)
    return shown.log(points, own or gate, model_id or None)


def _numbers(metadata: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested metadata under keys with `.` between levels.

    With `/` each level would be a section of MLflow's chart page, empty because the page shows no steps.
    """
    numbers: dict[str, float] = {}
    for key, value in metadata.items():
        if isinstance(value, dict):
            numbers |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[metric_key(f"{prefix}{key}".replace("/", "."))] = float(value)
    return numbers
