"""Progress of runs, read from records, the end of journals, and checkpoints; Prefect and MLflow are not asked.

A record that says `running` counts only while a process holds the run's lease. Only the journal after the newest
checkpoint is read, so the cost does not grow with the run. Without a local journal a stage is at its newest checkpoint.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from herd.llama3.recipe.frozen import frozen_fields
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record, read_journal
from herd.storage.artifact import Artifact, Store
from herd.storage.filesystem import is_local
from herd.storage.lease import lease_holders
from herd.storage.object_artifact import open_store
from herd.storage.objects import get_bytes, list_children, list_objects
from herd.storage.root import Root
from herd.tasks.pipeline_steps import next_step
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs, trained_stages

IN_PROGRESS = "in-progress"
"""Folder of a remote root with the checkpoints of stages in training."""
SEGMENTS = "journal"
"""Folder of journal chunks; repeats a constant of `herd.llama3.train.checkpoint`, whose import loads torch."""


class SavedCheckpoint(NamedTuple):
    """The newest checkpoint of a stage."""

    position: int
    time: float
    """When it was committed, in seconds since 1970."""


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
        return Schedule(self.recipe).tokens

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
        return stage + (self.total - Schedule(self.recipe).span(self.step).end) / rate


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
    span = next((span for span in Schedule(recipe).trained if span.name == step), None)
    if span is None:
        return base
    work = run_work_dir_name(store, recipe, record, span)
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


def run_work_dir_name(store: Store, recipe: Recipe, record: RunRecord, span: StageSpan) -> str:
    """Return the name of the stage's work folder, from the artifacts of the earlier steps of its run."""
    trained = [part.name for part in Schedule(recipe).trained]
    earlier = trained[: trained.index(span.name)]
    before = earlier[-1] if earlier else ("init-weights" if recipe.init_from else "")
    tokens, parent = artifact_of(store, record, "tokenize"), artifact_of(store, record, before)
    if tokens is None or (before and parent is None):
        return f"{span.name}-unknown"
    work_dir_key, data = record.work_dir_key(span.name), tokens.key
    if span.stage.kind == "sft":
        if (conversations := artifact_of(store, record, "conversations")) is None:
            return f"{span.name}-unknown"
        data += f" {conversations.key}"
    return work_dir_name(recipe, span, data, parent.key if parent else "fresh weights", work_dir_key)


def kept_checkpoints(root: Root, checkpoints: str, work: str) -> str | None:
    """Return the URI of the checkpoints of the work folder `work`; None: they are in it.

    `checkpoints` is the cluster's setting, empty for the default.
    """
    if not checkpoints and root.is_local:
        return None
    return f"{checkpoints.rstrip('/') or root.join(IN_PROGRESS)}/{work}"


def work_dir_name(recipe: Recipe, span: StageSpan, tokens: str, parent: str, work_dir_key: str) -> str:
    """Return the name of the work folder of a stage whose inputs have these keys.

    It depends on the recipe before the stage's start, not on its end: a stage that is lengthened while it trains
    continues (the trainer refuses changed frozen fields). `work_dir_key` is that of the run record.
    """
    return f"{span.name}-{digest([frozen_fields(recipe, span.start), tokens, parent, work_dir_key])[:16]}"


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


def newest(folders: Iterable[str]) -> SavedCheckpoint | None:
    """Return the newest committed checkpoint (one with a manifest) in any of the folders or prefixes."""
    saved = []
    for folder in folders:
        for name in sorted((name for name in list_children(folder) if name.isdigit()), reverse=True):
            if written := _manifest_times(f"{folder}/{name}"):
                saved.append(SavedCheckpoint(int(name), written[0]))
                break
    return max(saved, default=None)


def _manifest_times(folder: str) -> list[float]:
    """Return when the manifests of a checkpoint were written, newest first; a remote one has a folder per attempt."""
    if is_local(folder):
        return [path.stat().st_mtime for path in Path(folder).glob("manifest.json")]
    objects = list_objects(folder).items()
    return sorted((stored.modified for name, stored in objects if name.endswith("/manifest.json")), reverse=True)
