"""Progress of runs, read from records, the end of journals, and checkpoints; Prefect and MLflow are not asked.

A record that says `running` counts only while a process holds the run's lease. Only the journal after the newest
checkpoint is read, so the cost does not grow with the run. Without a local journal a stage is at its newest checkpoint.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record, read_journal
from herd.storage.artifact import Artifact, Store
from herd.storage.lease import lease_holders
from herd.storage.object_artifact import open_store
from herd.storage.objects import get_bytes, list_children
from herd.storage.root import Root
from herd.tasks.pipeline_steps import next_step, pipeline_steps
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs, trained_stages
from herd.tasks.runs.work_dirs import IN_PROGRESS, SavedCheckpoint, newest, work_dir_name
from herd.tasks.step import PipelineStep

SEGMENTS = "journal"
"""Folder of journal chunks; repeats a constant of `herd.llama3.train.checkpoint`, whose import loads torch."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run."""

    record: RunRecord
    recipe: Recipe
    holder: str
    """Process that holds its lease; empty: none."""
    step: str
    """The current step, or the one at which it ended; empty after the last."""
    position: int
    recent: list[Record] = field(default_factory=list)
    """The last steps of the stage in progress."""
    saved: SavedCheckpoint | None = None
    losses: tuple[float, ...] = ()
    """First and last mean loss of each finished stage, in order."""
    restarts: int = 0

    @property
    def state(self) -> str:
        """The record's state; `no live process` if it says running without a lease, `waiting` for an approval."""
        if self.record.state == "running" and not self.holder:
            return "no live process"
        return "waiting" if self.record.verdict == PENDING_APPROVAL and not self.holder else self.record.state

    @property
    def silent_s(self) -> float:
        """Seconds since the last step, or since the newest attempt at the run began; 0 if no process works on it."""
        if not self.recent or not self.holder:
            return 0.0
        began = datetime.fromisoformat(self.record.attempt_started or self.record.started).timestamp()
        return time.time() - max(self.recent[-1].time, began)

    @property
    def total(self) -> int:
        return self.recipe.schedule.tokens

    @property
    def loss(self) -> float | None:
        losses = [record.metrics[metrics.LOSS] for record in self.recent if metrics.LOSS in record.metrics]
        return sum(losses) / len(losses) if losses else (self.losses[-1] if self.losses else None)

    def last(self, key: str) -> float | None:
        """Return the last value of a metric in the stage in progress."""
        return next((record.metrics[key] for record in reversed(self.recent) if key in record.metrics), None)

    @property
    def remaining_s(self) -> float | None:
        """Seconds of training left in this stage and the following ones, at the rate of this one."""
        stage, rate = self.last(metrics.REMAINING_S), self.last(metrics.TOKENS_PER_S)
        if stage is None or not rate or not self.step:
            return None
        return stage + (self.total - self.recipe.schedule.span(self.step).end) / rate


SMOOTHED = 16
"""Steps whose loss is averaged."""


def run_progress(root: Root, runs: list[RunRecord]) -> list[RunProgress]:
    """Return the progress of each of `runs`."""
    running = [f"runs/{record.name}" for record in runs if record.state == "running"]
    live = lease_holders(root, running) if running else {}
    store = open_store(root)
    return [_standing(root, store, record, live.get(f"runs/{record.name}", "")) for record in runs]


def _standing(root: Root, store: Store, record: RunRecord, holder: str) -> RunProgress:
    recipe = Runs(root).recipe(record.name)
    done = trained_stages(recipe, record)
    step = next_step(recipe, record.steps, bool(record.verdict))
    position = done[-1].end if done else 0
    trained = [artifact for span in done if (artifact := artifact_of(store, record, span.name))]
    losses = tuple(artifact.metadata[key] for artifact in trained for key in ("first_loss", "last_loss"))
    saved = SavedCheckpoint(trained[-1].metadata["end"], trained[-1].created) if trained else None
    # restarts of trainers by their logs on this machine, or else those of the run itself
    starts = sum(max(0, len(attempts) - 1) for attempts in log_folders(root, record.name).values())
    restarts = max(starts, record.attempts - 1)
    base = RunProgress(record, recipe, holder, step, position, [], saved, losses, restarts)
    current = training_step(recipe, step)
    if current is None or current.span is None:
        return base
    span, work = current.span, run_work_dir_name(store, recipe, record, current)
    folders = [str(root.file("work", work, "checkpoints"))]
    folders += [] if root.is_local else [root.join(IN_PROGRESS, work)]
    saved = newest(folders) or saved
    after = max(span.start, saved.position if saved else 0) - 1
    recent = (read_journal(root.file("work", work, "journal.jsonl"), after) or _stored(root, work))[-SMOOTHED:]
    position = max(position, recent[-1].position if recent else 0, saved.position if saved else 0)
    return replace(base, position=position, recent=recent, saved=saved)


def log_folders(root: Root, run: str) -> dict[str, list[Path]]:
    """Return stage -> log folders of its attempts, both oldest first, as far as they are on this machine."""
    stages = [path for path in root.file("runs", run, "logs").glob("*") if path.is_dir()]
    return {
        stage.name: sorted(stage.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for stage in sorted(stages, key=lambda path: path.stat().st_ctime)
    }


def artifact_of(store: Store, record: RunRecord, step: str) -> Artifact | None:
    """Return the artifact of a step of the run, or None if it is not done or was deleted."""
    if step not in record.steps:
        return None
    try:
        return store.load(record.steps[step].artifact)
    except ValueError:
        return None


def training_step(recipe: Recipe, name: str) -> PipelineStep | None:
    """Return the step `name` if it trains, else None."""
    return next((step for step in pipeline_steps(recipe) if step.name == name and step.kind == "pretrain"), None)


def run_work_dir_name(store: Store, recipe: Recipe, record: RunRecord, step: PipelineStep) -> str:
    """Return the name of the work folder of a step that trains, from the artifacts of the earlier steps of its run."""
    assert step.span is not None
    roles = ("tokens", "conversations", "parent")
    inputs = {role: artifact.key for role in roles if (artifact := artifact_of(store, record, step.inputs[role]))}
    if any(step.inputs[role] and role not in inputs for role in roles):
        return f"{step.name}-unknown"
    return work_dir_name(recipe, step.span, {"parent": "fresh weights", **inputs}, record.work_dir_key(step.name))


def _stored(root: Root, work: str) -> list[Record]:
    """Return the records that a trainer on another machine uploaded with its newest checkpoint."""
    if root.is_local:
        return []
    folder_uri = root.join(IN_PROGRESS, work, SEGMENTS)
    names = [name for name in list_children(folder_uri) if name.endswith(".jsonl")]
    if not names:
        return []
    _, _, lines = get_bytes(f"{folder_uri}/{names[-1]}").partition(b"\n")  # names the segment before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(lines)
        return read_journal(path)
