"""Send a run to MLflow again from its record, artifacts, journals and decisions alone, into an empty server too.

`herd republish RUN` does it, and a run itself when MLflow was away. It sends everything: points carry their time, runs
are found by their tags and models by their artifact, so nothing is duplicated. Missing are failed steps, which left no
artifact, and the journal of a stage that trains on another machine. MLflow numbers model versions itself.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from llama3.recipe.load import resolved
from llama3.train.journal import read_journal
from storage.artifact import Artifact, Store, flatten
from storage.lease import LeaseLost
from storage.object_artifact import open_store
from storage.root import Root
from tasks.promotion.log import Log, Promotion, PromotionLog, judged, read_log, version_tags
from tasks.runs.records import RunRecord, Runs, evaluation_of
from tasks.step import Context
from tasks.tracking.mlflow import Tracker
from tasks.tracking.registry import Registry
from tasks.tracking.steps import Shown, Thinning, checkpoint_model, child_tags, project_step, send_records, step_tags

STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "cancelled": "KILLED"}
"""What MLflow calls the state of a run that ended."""
FILES = ("recipe.yaml", "report.html", "report.md", "data.html")
FOLLOWED = "tracking.json"
"""In the work folder of a stage that trains: which run shows it in MLflow, and how its points are thinned."""


@dataclass
class Republished:
    """What was sent; most of it MLflow may have had already."""

    runs: int = 0
    points: int = 0
    versions: int = 0
    gone: int = 0
    """Steps whose artifact is not there any more."""
    complete: bool = True
    """Whether MLflow answered until the end."""


def republish(root: Root, run: str, tracker: Tracker | None = None, record: RunRecord | None = None) -> Republished:
    """Make MLflow complete for `run`; safe at any time and any number of times.

    A running run passes its own `tracker` and `record`, whose MLflow ids are set. Raises ValueError if there is no such
    run, or MLflow does not answer.
    """
    runs = Runs(root)
    mine = record or runs.find(run)
    tracker = tracker or Tracker(root, mine.family)
    if not tracker.wait_until_available(0, lambda text: None):
        raise ValueError(f"MLflow at {tracker.uri} does not answer; start it (herd up) and publish {run} again")
    tracker.reach.stale = False
    before = mine.model_copy(deep=True)
    if found := judged(read_log(root, mine.family), run):
        mine.verdict = found[-1].kind
    done = _Publisher(root, runs, mine, tracker).publish()
    done.complete = not tracker.stale
    if record is None and mine.state != "running":  # the record of a running run is its own to write
        mine.mlflow_stale = tracker.stale
        if mine != before:
            runs.save(mine)
    return done


class _Publisher:
    """One publishing of one run."""

    def __init__(self, root: Root, runs: Runs, record: RunRecord, tracker: Tracker) -> None:
        self.root, self.runs, self.record, self.tracker = root, runs, record, tracker
        self.store: Store = open_store(root)
        self.done = Republished()
        self.tags = self._tags()

    def publish(self) -> Republished:
        self._run()
        steps = list(self.record.steps)
        for step in steps:
            self._step(step)
        for folder in sorted(self.root.file("work").glob(f"*/{FOLLOWED}")):
            self._stage_in_progress(folder)
        log = PromotionLog(self.root, self.record.family)
        mine = judged(log.records, self.record.name)
        for decision in {found.artifact: found for found in mine}.values():
            self._promotion(decision, log.records)
        if mine:
            self.tracker.reach.attempt(lambda: len(Registry(self.tracker).show(log)), 0)
        self._end()
        return self.done

    def _tags(self) -> dict[str, str]:
        """Return the tags of the run: what was written down when it was opened, and what its record says."""
        record = self.record
        known = {
            "herd.run": record.name,
            "recipe.digest": record.recipe_digest[:16],
            "code.commit": record.code,
            "prefect.flow_run_id": record.prefect_run,
            "attempts": str(record.attempts),
            **({"verdict": record.verdict} if record.verdict else {}),
        }
        return {**self.tracker.noted_tags(record.name), **known}

    def _run(self) -> None:
        record, tracker = self.record, self.tracker
        params = flatten(resolved(self.runs.recipe(record.name)), depth=2)
        over = record.state != "running"
        handle = tracker.open_run(record.name, self.tags, params, start=_time(record.started), over=over)
        tracker.log_params(handle, params)
        record.mlflow_run, record.mlflow_experiment = handle, tracker.experiment
        self.done.runs += 1
        for file in FILES:
            path = self.runs.place(record.name) / file
            if not path.is_file() and (data := self.root.read("runs", record.name, file)) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            if path.is_file():
                tracker.log_file(handle, path)

    def _step(self, step: str) -> None:
        entry = self.record.steps[step]
        try:
            artifact = self.store.at(entry.artifact)
        except ValueError:
            self.done.gone += 1
            return
        made = not entry.outcome.startswith("reused")
        start = artifact.created - artifact.manifest.seconds if made else _time(self.record.started)
        child = self._child(step_tags(step, artifact.manifest.kind, artifact.key), start)
        self.done.points += project_step(Shown(self.tracker, self.store, self.record, step, artifact, child))
        self.tracker.close(child, "FINISHED", artifact.created if made else start)
        entry.mlflow_run = child

    def _stage_in_progress(self, path: Path) -> None:
        """Publish the journal of a stage that is not finished, if it is this run's."""
        followed: dict[str, Any] = json.loads(path.read_text())
        if followed["run"] != self.record.name or followed["tags"]["stage"] in self.record.steps:
            return
        child = self._child(followed["tags"], _time(self.record.started), self.record.state != "running")
        thinning = Thinning(followed["steps"], followed["end"])
        records = read_journal(path.with_name("journal.jsonl"))
        self.done.points += send_records(self.tracker, [self.record.mlflow_run, child], records, thinning)
        if self.record.state != "running":
            self.tracker.close(child, STATUS[self.record.state], _time(self.record.ended))

    def _promotion(self, decision: Promotion, log: Log) -> None:
        """Publish a decision on a model: its MLflow run, the model version, and the gate's table."""
        scored = self._judged(decision.artifact)
        if scored is None:
            self.done.gone += 1
            return
        checkpoint, evaluation = scored
        child = self._child(step_tags("promote", "promotion", evaluation.key), _time(decision.time))
        self.tracker.set_tags(child, {"verdict": decision.kind})
        model = checkpoint_model(self.tracker, [child], checkpoint)

        def version() -> int:
            registry = Registry(self.tracker)
            made = registry.version(checkpoint, self.record.name, child, model)
            registry.note(str(made.version), version_tags(log, decision.artifact))
            return 1

        self.done.versions += self.tracker.reach.attempt(version, 0)
        self.tracker.close(child, "FINISHED", _time(decision.time))

    def _judged(self, label: str) -> tuple[Artifact, Artifact] | None:
        """Return the checkpoint that was judged and its evaluation, or None if either is gone."""
        try:
            checkpoint = self.store.at(label)
        except ValueError:
            return None
        evaluation = evaluation_of(self.store, self.record, checkpoint)
        return (checkpoint, evaluation) if evaluation else None

    def _child(self, tags: dict[str, str], start: float, over: bool = True) -> str:
        self.done.runs += 1
        own = child_tags(self.tags, tags["stage"], tags["kind"], tags["artifact.key"])
        return self.tracker.open_child(self.record.mlflow_run, self.record.name, own, start, over)

    def _end(self) -> None:
        record = self.record
        if record.state != "running":
            self.tracker.close(record.mlflow_run, STATUS[record.state], _time(record.ended) if record.ended else None)


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# What a run does about an MLflow that goes away: say it, note it in the record, and publish again when it is back.


def watch(context: Context) -> None:
    """Have outages told on the console and noted in the run's record; call it before the first step."""
    reach = context.tracker.reach
    reach.stale = reach.stale or context.record.mlflow_stale
    reach.changed = partial(_changed, context)
    reach.refused = lambda words: context.console.say(f"  [yellow]MLflow refused: {escape(words)}[/]")


def catch_up(context: Context) -> bool:
    """Return whether MLflow has everything of the run; what it missed is sent now if it answers."""
    tracker, record = context.tracker, context.record
    if tracker.stale and tracker.available():
        try:
            republish(context.root, record.name, tracker, record)
        except (ValueError, OSError) as error:  # the truth itself cannot be read now; later, or by hand
            tracker.reach.stale = True
            context.console.say(f"  [yellow]MLflow lacks a part of this run: {escape(str(error))}[/]")
        else:
            if not tracker.stale:
                context.console.say("  MLflow has everything again")
    if record.mlflow_stale != tracker.stale:
        record.mlflow_stale = tracker.stale
        with suppress(LeaseLost):
            context.runs.save(record)
    return not tracker.stale


def _changed(context: Context, away: bool, why: str) -> None:
    if away:
        context.record.mlflow_stale = True
        with suppress(LeaseLost):
            context.runs.save(context.record)
        say = f"  [yellow]MLflow cannot be reached ({escape(why)}); the run goes on, what it misses is sent later[/]"
        context.console.say(say)
    else:
        context.console.say("  MLflow answers again")
