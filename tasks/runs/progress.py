"""Where a run is: read from its record, the end of its journal, and its checkpoints.

A record that says `running` counts only while a process holds the run's lease. Prefect and MLflow are not asked. Of a
journal only what follows the newest checkpoint is read, so a run of weeks costs as much as one of minutes. On a machine
without the journal a stage is at its newest checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from llama3.recipe.frozen import past
from llama3.recipe.load import digest
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from llama3.train.journal import Record, read_journal
from storage.artifact import Artifact, Store
from storage.filesystem import filesystem_of, is_local
from storage.lease import holders
from storage.object_artifact import open_store
from storage.objects import children, get_bytes
from storage.root import Root
from tasks.pipeline_steps import next_step
from tasks.promotion.log import WAITS
from tasks.runs.records import RunRecord, Runs, trained_stages

IN_PROGRESS = "in-progress"
"""Folder of a remote root with the checkpoints of stages that are being trained."""
SEGMENTS = "journal"
"""Folder beside them with the journal in chunks. Copied from `journal_upload`, whose import would load torch."""


class SavedCheckpoint(NamedTuple):
    """The newest checkpoint of a stage."""

    position: int
    time: float
    """When it was committed, in seconds since 1970."""


@dataclass(frozen=True)
class RunProgress:
    """Where one run stands."""

    record: RunRecord
    recipe: Recipe
    holder: str
    """Who works on it; empty: nobody."""
    step: str
    """The step that it is at, or was at when it ended; empty after the last."""
    position: int
    recent: list[Record] = field(default_factory=list)
    """The last steps of the stage in progress."""
    saved: SavedCheckpoint | None = None
    losses: tuple[float, ...] = ()
    """First and last of each finished stage, in order."""
    restarts: int = 0

    @property
    def state(self) -> str:
        """The record's state; `no live process` for one that claims to run, `waiting` where a person is asked."""
        if self.record.state == "running" and not self.holder:
            return "no live process"
        return "waiting" if self.record.verdict == WAITS and not self.holder else self.record.state

    @property
    def total(self) -> int:
        return Schedule(self.recipe).tokens

    @property
    def loss(self) -> float | None:
        found = [record.metrics[metrics.LOSS] for record in self.recent if metrics.LOSS in record.metrics]
        return sum(found) / len(found) if found else (self.losses[-1] if self.losses else None)

    def last(self, key: str) -> float | None:
        """Return the last value of a metric in the stage in progress."""
        return next((record.metrics[key] for record in reversed(self.recent) if key in record.metrics), None)

    @property
    def remaining_s(self) -> float | None:
        """Seconds of training left, of this stage and of those after it at the rate of this one."""
        stage, rate = self.last(metrics.REMAINING_S), self.last(metrics.TOKENS_PER_S)
        if stage is None or not rate or not self.step:
            return None
        return stage + (self.total - Schedule(self.recipe).span(self.step).end) / rate


SMOOTHED = 16
"""Steps whose loss is averaged."""


def standings(root: Root, runs: list[RunRecord]) -> list[RunProgress]:
    """Return where each of `runs` stands."""
    claimed = [f"runs/{record.name}" for record in runs if record.state == "running"]
    live = holders(root, claimed) if claimed else {}
    store = open_store(root)
    return [_standing(root, store, record, live.get(f"runs/{record.name}", "")) for record in runs]


def _standing(root: Root, store: Store, record: RunRecord, holder: str) -> RunProgress:
    recipe = Runs(root).recipe(record.name)
    done = trained_stages(recipe, record)
    step = next_step(recipe, record.steps, bool(record.verdict))
    position = done[-1].end if done else 0
    made = [artifact for span in done if (artifact := artifact_of(store, record, span.name))]
    losses = tuple(artifact.facts[key] for artifact in made for key in ("first_loss", "last_loss"))
    saved = SavedCheckpoint(made[-1].facts["end"], made[-1].created) if made else None
    base = RunProgress(record, recipe, holder, step, position, [], saved, losses, _restarts(root, record))
    spans = [span for span in Schedule(recipe).trained if span.name == step]
    return _in_progress(root, store, base, spans[0]) if spans else base


def _in_progress(root: Root, store: Store, base: RunProgress, span: StageSpan) -> RunProgress:
    """Add what journal and checkpoints say of the stage that is being trained."""
    work = work_name(store, base.recipe, base.record, span)
    saved = newest(_shelves(root, work)) or base.saved
    after = max(span.start, saved.position if saved else 0) - 1
    recent = (read_journal(root.file("work", work, "journal.jsonl"), after) or _stored(root, work))[-SMOOTHED:]
    position = max(base.position, recent[-1].position if recent else 0, saved.position if saved else 0)
    return replace(base, position=position, recent=recent, saved=saved)


def artifact_of(store: Store, record: RunRecord, step: str) -> Artifact | None:
    """Return the artifact of a step of the run, or None if it is not done or was deleted since."""
    if step not in record.steps:
        return None
    try:
        return store.at(record.steps[step].artifact)
    except ValueError:
        return None


def work_name(store: Store, recipe: Recipe, record: RunRecord, span: StageSpan) -> str:
    """Return the name of the stage's work folder, from what its run has done before it."""
    trained = [part.name for part in Schedule(recipe).trained]
    earlier = trained[: trained.index(span.name)]
    before = earlier[-1] if earlier else ("start" if recipe.start else "")
    tokens, parent = artifact_of(store, record, "tokenise"), artifact_of(store, record, before)
    if tokens is None or (before and parent is None):
        return f"{span.name}-unknown"
    apart = record.apart(span.name)
    return name_of_work(recipe, span, tokens.key, parent.key if parent else "fresh weights", apart)


def name_of_work(recipe: Recipe, span: StageSpan, tokens: str, parent: str, apart: str) -> str:
    """Return the name of the work folder of a stage that is made from artifacts with these keys.

    It is named by what was decided before the stage began, not by its end: a stage that is made longer while it trains
    goes on where it stands (the trainer refuses a changed past). `apart` is what `RunRecord.apart` says.
    """
    return f"{span.name}-{digest([past(recipe, span.start), tokens, parent, apart])[:16]}"


def _shelves(root: Root, work: str) -> Iterable[str]:
    """Return where checkpoints of the work folder may lie."""
    yield str(root.file("work", work, "checkpoints"))
    if not root.is_local:
        yield root.join(IN_PROGRESS, work)


def _stored(root: Root, work: str) -> list[Record]:
    """Return the records that the trainer of another machine stored with its newest checkpoint."""
    if root.is_local:
        return []
    place = root.join(IN_PROGRESS, work, SEGMENTS)
    names = [name for name in children(place) if name.endswith(".jsonl")]
    if not names:
        return []
    _, _, lines = get_bytes(f"{place}/{names[-1]}").partition(b"\n")  # the first names the segment before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(lines)
        return read_journal(path)


def newest(shelves: Iterable[str]) -> SavedCheckpoint | None:
    found = [saved for shelf in shelves if (saved := _newest_in(shelf))]
    return max(found, default=None)


def _newest_in(shelf: str) -> SavedCheckpoint | None:
    """Return the newest committed checkpoint of a folder or prefix: the one whose manifest is there."""
    for name in sorted((name for name in children(shelf) if name.isdigit()), reverse=True):
        for manifest in _manifests(f"{shelf}/{name}"):
            return SavedCheckpoint(int(name), manifest)
    return None


def _manifests(place: str) -> list[float]:
    """Return when the manifests of a checkpoint's folder were written; a remote one has a folder per attempt."""
    if is_local(place):
        return [path.stat().st_mtime for path in Path(place).glob("manifest.json")]
    files = filesystem_of(place)
    found = [files.info(name) for name in files.glob(f"{place}/*/manifest.json")]
    return sorted((info["LastModified"].timestamp() for info in found), reverse=True)


def _restarts(root: Root, record: RunRecord) -> int:
    """Return how often trainers were started again, as their logs on this machine tell, or else the run itself."""
    stages = [path for path in root.file("runs", record.name, "logs").glob("*") if path.is_dir()]
    starts = sum(max(0, len(list(stage.glob("attempt-*"))) - 1) for stage in stages)
    return max(starts, record.attempts - 1)
