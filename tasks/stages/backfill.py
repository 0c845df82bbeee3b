"""Backfill: send a run to MLflow again from its record, artifacts, journals and decisions alone.

`herd mlflow sync RUN` does it, and a run itself after MLflow was away. Everything is sent and nothing is duplicated:
points carry their time, runs are found by their tags and models by their artifact. Missing are failed steps, which left
no artifact, and the journal of a stage that trains on another machine. MLflow numbers model versions itself.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from rich.markup import escape

from herd.llama3.train.journal import HEALTH, read_journal
from herd.storage.artifact import Artifact, Store
from herd.storage.lease import LeaseHeld, LeaseLost
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.promotion.log import IMPORTED, Promotion, PromotionLog, gate_decisions, read_log
from herd.tasks.promotion.registry import Registry
from herd.tasks.runs.provenance import CLUSTER
from herd.tasks.runs.records import RunRecord, Runs, evaluation_of
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker
from herd.tasks.tracking.steps import (
    LoggedStep,
    Thinning,
    checkpoint_model,
    child_tags,
    project_step,
    recipe_params,
    recipe_points,
    step_tags,
)

STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "cancelled": "KILLED"}
"""MLflow's status for the state of a run that ended."""
FILES = ("recipe.yaml", CLUSTER, "report.html", "report.md", "data.html")
FOLLOWED = "tracking.json"
"""File in the work folder of a stage that trains: its MLflow run, and how its points are thinned."""
MAX_QUEUED = 200_000
"""Points: about 40 MB."""
IDLE_S = 5.0
DRAIN_S = 60.0
CATCH_UP_INTERVAL_S = 30.0
log = logging.getLogger(__name__)


@dataclass
class BackfillResult:
    """What was sent; MLflow may have had most of it already."""

    runs: int = 0
    points: int = 0
    versions: int = 0
    gone: int = 0
    """Steps whose artifact was deleted."""
    complete: bool = True
    """Whether MLflow answered until the end."""


def backfill_run(
    root: Root, run: str, tracker: MLflowTracker | None = None, record: RunRecord | None = None
) -> BackfillResult:
    """Send everything of `run` to MLflow; safe at any time and any number of times.

    A running run passes its own `tracker` and `record`, whose MLflow ids are set. Raises ValueError if the run does not
    exist or MLflow does not answer.
    """
    runs = Runs(root)
    own = record or runs.find(run)
    mlflow = tracker or MLflowTracker(root, own.family)
    if not mlflow.reach.wait(0, lambda text: None):
        why = f"MLflow at {mlflow.uri} does not answer ({mlflow.reach.why}); start it (herd up)"
        raise ValueError(mlflow.fault or f"{why}, then: herd mlflow sync {run}")
    if not mlflow.experiment:
        raise ValueError(f"MLflow experiment {own.family}: is deleted; restore it, then: herd mlflow sync {run}")
    mlflow.reach.stale = False
    if decisions := gate_decisions(read_log(root, own.family), run):
        own.verdict = decisions[-1].kind
    done = _Publisher(root, runs, own, mlflow).publish()
    done.complete = not mlflow.stale
    if record is None and own.state != "running":
        with suppress(LeaseHeld):  # only a running run writes its own record
            runs.change(run, partial(_copy_handles, own, mlflow.stale))
    return done


def _copy_handles(sent: RunRecord, stale: bool, record: RunRecord) -> None:
    """Write what MLflow has of the run `sent` into its record, unless another attempt has begun since."""
    if record.attempts != sent.attempts:
        return
    record.mlflow_run, record.mlflow_experiment, record.mlflow_stale = sent.mlflow_run, sent.mlflow_experiment, stale
    record.verdict = sent.verdict or record.verdict
    for step, entry in sent.steps.items():
        record.steps[step].mlflow_run = entry.mlflow_run


class _Publisher:
    """One backfill of one run."""

    def __init__(self, root: Root, runs: Runs, record: RunRecord, mlflow: MLflowTracker) -> None:
        self.root, self.runs, self.record, self.mlflow = root, runs, record, mlflow
        self.store: Store = open_store(root)
        self.done = BackfillResult()
        self.tags = {
            **self.mlflow.noted_tags(record.name),
            "herd.run": record.name,
            "recipe.digest": record.recipe_digest[:16],
            "code.commit": record.code,
            "prefect.flow_run_id": record.prefect_run,
            "attempts": str(record.attempts),
            **({"verdict": record.verdict} if record.verdict else {}),
        }

    def publish(self) -> BackfillResult:
        record = self.record
        self._publish_run()
        for step in list(record.steps):
            self._publish_step(step)
        for path in sorted(self.root.file("work").glob(f"*/{FOLLOWED}")):
            followed: dict[str, Any] = json.loads(path.read_text())
            if followed["run"] == record.name and followed["tags"]["stage"] not in record.steps:
                child = self._child(followed["tags"], _time(record.started), record.state != "running")
                records = [
                    record for name in ("journal.jsonl", HEALTH) for record in read_journal(path.with_name(name))
                ]
                points = Thinning(followed["steps"], followed["end"]).points(records)
                self.mlflow.log_points([record.mlflow_run, child], points)
                self.done.points += 2 * len(points)
                if record.state != "running":
                    self.mlflow.close(child, STATUS[record.state], _time(record.ended))
        log = PromotionLog(self.root, record.family)
        decisions = gate_decisions(log.records, record.judged_in or record.name)
        imported = [each.artifact for each in log.records if (each.kind, each.run) == (IMPORTED, record.name)]
        for decision in {decision.artifact: decision for decision in decisions}.values():
            self._publish_decision(decision, imported)
        if decisions:
            self.mlflow.reach.attempt(lambda: len(Registry(self.mlflow).publish(log)), 0)
        if record.state != "running":
            end = _time(record.ended) if record.ended else None
            self.mlflow.close(record.mlflow_run, STATUS[record.state], end)
        return self.done

    def _publish_run(self) -> None:
        record, mlflow = self.record, self.mlflow
        recipe, over = self.runs.recipe(record.name), record.state != "running"
        params = recipe_params(recipe)
        handle = mlflow.open_run(record.name, self.tags, params, start=_time(record.started), over=over)
        mlflow.log_points([handle], recipe_points(recipe, record.started))
        record.mlflow_run, record.mlflow_experiment = handle, mlflow.experiment
        self.done.runs += 1
        changes = record.provenance.diff_file if record.provenance else ""
        for file in filter(None, (*FILES, changes)):
            path = self.runs.folder(record.name) / file
            if not path.is_file() and (data := self.root.read("runs", record.name, file)) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            if path.is_file():
                mlflow.log_file(handle, path)

    def _publish_step(self, step: str) -> None:
        entry = self.record.steps[step]
        try:
            artifact = self.store.load(entry.artifact)
        except ValueError:
            self.done.gone += 1
            return
        made = not entry.outcome.startswith("reused")
        start = artifact.created - artifact.manifest.seconds if made else _time(self.record.started)
        child = self._child(step_tags(step, artifact.manifest.kind, artifact.key), start)
        self.done.points += project_step(LoggedStep(self.mlflow, self.store, self.record, step, artifact, child))
        self.mlflow.close(child, "FINISHED", artifact.created if made else start)
        entry.mlflow_run = child

    def _publish_decision(self, decision: Promotion, imported: list[str]) -> None:
        """Publish a decision on a model: its run and the model version, and those of `imported` (labels)."""
        from herd.tasks.models.card import describe_model  # imports matplotlib

        evaluation: Artifact | None = None
        with suppress(ValueError):  # the checkpoint was deleted
            checkpoint = self.store.load(decision.artifact)
            evaluation = evaluation_of(self.store, self.record, checkpoint)
        if evaluation is None:
            self.done.gone += 1
            return
        child = self._child(step_tags("promote", "promotion", evaluation.key), _time(decision.time))
        self.mlflow.set_tags(child, {"verdict": decision.kind})
        models = [checkpoint]
        with suppress(ValueError):  # the weights were deleted
            models = [*map(self.store.load, imported), checkpoint]

        def register() -> int:
            for model in models:
                identity = checkpoint_model(self.mlflow, [child], model)
                Registry(self.mlflow).version(model, self.record.name, child, identity)
            return len(models)

        self.done.versions += self.mlflow.reach.attempt(register, 0)
        describe_model(self.root, self.record, self.mlflow)
        self.mlflow.close(child, "FINISHED", _time(decision.time))

    def _child(self, tags: dict[str, str], start: float, over: bool = True) -> str:
        self.done.runs += 1
        own = child_tags(self.tags, tags["stage"], tags["kind"], tags["artifact.key"])
        return self.mlflow.open_child(self.record.mlflow_run, self.record.name, own, start, over)


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def watch_outages(context: Context) -> None:
    """Report outages of MLflow on the console and in the run's record; call it before the first step."""
    reach = context.tracker.reach

    def changed(away: bool, why: str) -> None:
        if not away:
            context.console.log("  MLflow answers again")
            return
        context.record.mlflow_stale = True
        with suppress(LeaseLost, OSError):  # the next change writes it
            context.runs.save(context.record)
        message = f"MLflow cannot be reached ({escape(why)}); the run continues; missing points are sent later"
        context.console.log(f"  [yellow]{message}[/]")

    reach.stale = reach.stale or context.record.mlflow_stale
    reach.changed = changed
    reach.refused = lambda message: context.console.log(f"  [yellow]MLflow refused: {escape(message)}[/]")


def catch_up(context: Context) -> bool:
    """Return whether MLflow has everything of the run; what it missed is sent now if it answers."""
    mlflow, record = context.tracker, context.record
    if mlflow.stale and mlflow.reach.available():
        try:
            backfill_run(context.root, record.name, context.tracker, record)
        except (ValueError, OSError) as error:  # a source cannot be read now: try later, or by hand
            mlflow.reach.stale = True
            context.console.log(f"  [yellow]MLflow lacks a part of this run: {escape(str(error))}[/]")
        else:
            if not mlflow.stale:
                context.console.log("  MLflow has everything again")
    if record.mlflow_stale != mlflow.stale:
        record.mlflow_stale = mlflow.stale
        with suppress(LeaseLost, OSError):
            context.runs.save(record)
    return not mlflow.stale


class Sender:
    """A thread that sends points while a trainer is followed, so that the follower never waits for a server.

    Points that do not fit into the queue, or come while MLflow is away, are dropped: the journal has them, and
    `catch_up` sends the whole run again when MLflow answers.
    """

    def __init__(self, tracker: MLflowTracker, runs: list[str], catch_up: Callable[[], object]) -> None:
        self.tracker, self.runs, self._catch_up = tracker, runs, catch_up
        self._queue: queue.Queue[list[MetricPoint] | dict[str, str] | None] = queue.Queue()
        self._queued = 0
        self._thread: threading.Thread | None = None
        self._caught_up_at = 0.0

    def tag(self, tags: dict[str, str]) -> None:
        """Queue tags to set; returns at once."""
        self._queue.put(tags)
        self._start()

    def put(self, points: list[MetricPoint]) -> None:
        """Queue points to send; returns at once."""
        if self._queued + len(points) > MAX_QUEUED:
            self.tracker.reach.stale = True
            return
        self._queued += len(points)
        self._queue.put(points)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mlflow-sender", daemon=True)
            self._thread.start()

    def drain(self, seconds: float = DRAIN_S) -> bool:
        """Wait at most `seconds` until the queue is empty; return whether MLflow has every point."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(seconds)
            if thread.is_alive():
                self.tracker.reach.stale = True
        return not self.tracker.stale

    def _run(self) -> None:
        while True:
            try:
                points = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                points = []
            if points is None:
                return
            try:
                self._send(points)
            except Exception:  # a thread that ended here would lose the points after these without a word
                self.tracker.reach.stale = True
                log.exception("MLflow may lack points of this run; they are sent again later")

    def _send(self, points: list[MetricPoint] | dict[str, str]) -> None:
        if isinstance(points, dict):
            for run in self.runs:
                self.tracker.set_tags(run, points)
        elif points:
            self._queued -= len(points)
            self.tracker.log_points(self.runs, points)
        reach, now = self.tracker.reach, time.monotonic()
        if reach.stale and reach.available() and now - self._caught_up_at > CATCH_UP_INTERVAL_S:
            self._caught_up_at = now
            self._catch_up()
