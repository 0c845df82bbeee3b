"""Run records: the name, steps, artifacts and state of each run.

A record is a small JSON document in the run's folder, written under the run's lease. Reports, reruns and MLflow are
derived from it; nothing here needs a server.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel

from herd.llama3.recipe.base import read_plain
from herd.llama3.recipe.load import digest, parse_recipe, resolved, to_yaml
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Stage
from herd.storage.artifact import Artifact, Store
from herd.storage.fenced import VERSIONS, DamagedRecord, FencedRecords
from herd.storage.filesystem import write_atomic
from herd.storage.lease import Lease, LeaseLost
from herd.storage.processes import READERS, parallel_map
from herd.storage.root import Root
from herd.tasks.format import command
from herd.tasks.runs.provenance import Provenance

log = logging.getLogger(__name__)
Record = TypeVar("Record")
State = Literal["running", "finished", "failed", "interrupted", "cancelled"]


def read_records(read: Callable[[str], Record | None], names: Sequence[str], strict: bool) -> list[Record]:
    """Return the records of `names` that exist; a damaged one is left out, with a warning, or raises if `strict`."""

    def checked(name: str) -> Record | None:
        try:
            return read(name)
        except DamagedRecord as error:
            if strict:
                raise
            log.warning("%s", error)
            return None

    return [record for record in parallel_map(checked, names, READERS) if record is not None]


class StepRecord(BaseModel):
    """One step of a run: its artifact, and how the run got it."""

    artifact: str
    outcome: str
    """`created`, `reused`, or `resumed at 1.2B`."""
    why: str = ""
    """The first difference from the previous artifact, for a step that was made."""
    seconds: float = 0.0
    mlflow_run: str = ""
    environment: dict[str, str] = {}
    """What a stage that this run trained ran on: torch, CUDA, NCCL, devices, hosts, layout, ..."""
    cost: dict[str, float] = {}
    """Of a stage that this run trained: `gpu_hours`, `usd`, `kwh`."""


class StudyPart(BaseModel):
    """The part of a study that a run is."""

    study: str
    variant: str
    repeat: int
    mlflow_run: str = ""
    """MLflow run of the study, the parent of the run's."""


class RunRecord(BaseModel):
    name: str
    family: str
    recipe_digest: str
    state: State = "running"
    attempts: int = 1
    started: str
    attempt_started: str = ""
    """When the newest attempt began; empty for a run of an earlier herd."""
    ended: str = ""
    code: str
    provenance: Provenance | None = None
    """What the last attempt is made with; None for a run of an earlier herd."""
    study: StudyPart | None = None
    """Set for a run of a study."""
    rerun_of: str = ""
    redo_from: str = ""
    """First step that this run makes again, even if its artifact exists."""
    until: str = ""
    """Last step requested; empty: all."""
    steps: dict[str, StepRecord] = {}
    verdict: str = ""
    """`promoted`, `rejected`, or empty while there is none."""
    judged_in: str = ""
    """Run in which this model was judged, if nothing has changed since; empty: in this one."""
    error: str = ""
    mlflow_run: str = ""
    mlflow_experiment: str = ""
    mlflow_stale: bool = False
    """Whether MLflow was away and may lack points; `herd mlflow sync` sends everything again."""
    prefect_run: str = ""
    peak_memory_gib: float = 0.0

    @property
    def cost(self) -> dict[str, float]:
        """What the stages cost that this run trained, in all: `gpu_hours`, `usd`, `kwh`."""
        total: dict[str, float] = {}
        for step in self.steps.values():
            for name, amount in step.cost.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    def work_dir_key(self, stage: str) -> str:
        """Return the suffix that keeps other runs out of the stage's work folder; empty: it is shared.

        A stage that is redone has its own, and so has each variant of a study: they differ from the first token on.
        """
        if stage == self.redo_from:
            return self.name
        return self.recipe_digest if self.study else ""


class Runs:
    """The runs under one root."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._records = FencedRecords(root, "runs")

    def hold(self, name: str, held: Lease) -> None:
        """Write run `name` under `held`, its lease, from now on."""
        self._records.hold(name, held)

    @contextmanager
    def alone(self, name: str, holder: str) -> Iterator[None]:
        """Hold the lease of run `name` for `holder` until the block ends. Raises LeaseHeld."""
        with self._records.alone(name, holder):
            yield

    def check(self, name: str) -> None:
        """Raise LeaseLost if the lease of run `name`, held here, was taken over, or OSError."""
        self._records.check(name)

    def lease_lost(self, name: str) -> bool:
        """Return whether the lease of run `name` was taken over; False if the root does not answer."""
        try:
            self.check(name)
        except LeaseLost:
            return True
        except OSError:
            return False
        return False

    def folder(self, name: str) -> Path:
        """Return the run's local folder: recipe, logs, report. Raises ValueError for a name that leaves the root."""
        return self.root.file("runs", name)

    def all(self, strict: bool = False) -> list[RunRecord]:
        """Return every run, oldest first.

        A damaged record is left out, with a warning; `strict` raises DamagedRecord.
        """
        return self._read_all(self.root.names("runs"), strict)

    def find(self, name: str) -> RunRecord:
        """Return the run called `name`. Raises ValueError naming the runs that exist."""
        record = self.known(name)
        if record is None:
            known = ", ".join(record.name for record in self.all()) or "none yet; start one with: herd run RECIPE"
            raise ValueError(f"run {name!r} does not exist under {self.root.uri}; runs: {known}")
        return record

    def recipe(self, name: str) -> Recipe:
        """Return the resolved recipe that run `name` was started with."""
        text = self.root.read("runs", self.find(name).name, "recipe.yaml") or b""
        return parse_recipe(read_plain(text), f"{name}/recipe.yaml", [])

    def save(self, record: RunRecord) -> None:
        """Write a record. Raises LeaseHeld if another process works on the run, or LeaseLost if one took it over."""
        self._records.write(record.name, record.model_dump_json(indent=1))

    def change(self, name: str, edit: Callable[[RunRecord], None]) -> RunRecord:
        """Read the record of a run that nobody works on, change it by `edit` and write it; return it.

        Raises LeaseHeld if a process works on the run, and ValueError if there is no such run.
        """
        with self.alone(name, f"writing {name}"):
            record = self.find(name)
            before = record.model_copy(deep=True)
            edit(record)
            if record != before:
                self.save(record)
        return record

    def publish(self, name: str, file: str) -> None:
        """Upload a file of the run's local folder to a remote root."""
        if not self.root.is_local:
            self.root.write(self.folder(name).joinpath(file).read_bytes(), "runs", name, file)

    def unfinished(self, recipe: Recipe, until: str = "", rerun_of: str = "", redo_from: str = "") -> RunRecord | None:
        """Return the newest run of exactly this recipe, up to the same step, if it did not finish: it is continued.

        With `redo_from` only reruns of `rerun_of` from that step count.
        """
        recipe_digest, same = digest(resolved(recipe)), []
        for record in self.family(recipe.name):
            equal = (record.recipe_digest, record.until) == (recipe_digest, until)
            if equal and (not redo_from or (record.rerun_of, record.redo_from) == (rerun_of, redo_from)):
                same.append(record)
        return same[-1] if same and same[-1].state != "finished" else None

    def of_flow_run(self, recipe: Recipe, flow_run: str) -> RunRecord | None:
        """Return the run of this recipe that the Prefect flow run `flow_run` began: a Retry continues it."""
        records = [record for record in self.family(recipe.name) if flow_run and record.prefect_run == flow_run]
        return records[-1] if records else None

    def begin(self, recipe: Recipe, code: str, rerun_of: str = "", redo_from: str = "", until: str = "") -> RunRecord:
        """Create the next run of the recipe's family (`quickstart-7`) and write its resolved recipe."""
        while True:
            numbers = [family_number(recipe.name, name) for name in self.root.names("runs")]
            record = RunRecord(
                name=f"{recipe.name}-{max(numbers, default=0) + 1}",
                family=recipe.name,
                recipe_digest=digest(resolved(recipe)),
                started=now(),
                code=code,
                rerun_of=rerun_of,
                redo_from=redo_from,
                until=until,
            )
            claim = f"{record.started} {uuid.uuid4().hex}\n"  # exclusive: another process takes the next number
            if self.root.create(claim, "runs", record.name, "claim"):
                break
        self.root.write(to_yaml(recipe), "runs", record.name, "recipe.yaml")
        # It does not run before its lease is held: a process that dies until then leaves nothing to reconcile.
        first = record.model_copy(update={"state": "interrupted"})
        self._records.create(record.name, first.model_dump_json(indent=1))
        return record

    def local_recipe(self, name: str) -> Path:
        """Return the run's recipe as a file of this machine."""
        path = self.folder(name) / "recipe.yaml"
        if not self.root.is_local:
            write_atomic(path, self.root.read("runs", name, "recipe.yaml") or b"")
        return path

    def known(self, name: str) -> RunRecord | None:
        """Return the run called `name`, if there is one. Raises DamagedRecord."""
        try:
            text = self._records.read(name)
        except DamagedRecord as error:
            raise DamagedRecord(f"run {name}: {error}") from None
        except ValueError:  # a name that leaves the root
            return None
        try:
            return RunRecord.model_validate_json(text) if text else None
        except ValueError as error:
            raise DamagedRecord(
                f"run {name}: {self.root.join('runs', name, VERSIONS)} is not a run record "
                f"({' '.join(str(error).split())[:200]}); restore it from a copy, or delete the run's folder"
            ) from None

    def family(self, name: str) -> list[RunRecord]:
        """Return the runs of a recipe family, oldest first."""
        return self._read_all([run for run in self.root.names("runs") if family_number(name, run)])

    def _read_all(self, names: list[str], strict: bool = False) -> list[RunRecord]:
        """Return the runs of these names that exist, oldest first."""
        return sorted(read_records(self.known, names, strict), key=lambda record: record.started)


def rerun_command(root: Root, record: RunRecord) -> str:
    """Return the command that continues a run that was stopped; it stops after the same step."""
    return command(root, "rerun", record.name, *(("--until", record.until) if record.until else ()))


def trained_stages(recipe: Recipe, record: RunRecord) -> list[StageSpan]:
    """Return the training stages that the run has finished, in order."""
    return [span for span in recipe.schedule.trained if span.name in record.steps]


def is_merge(artifact: Artifact) -> bool:
    """Return whether the artifact is a checkpoint that `herd merge` made: no stage, without curves and without cost."""
    return MERGED in artifact.metadata


def evaluation_of(store: Store, record: RunRecord, checkpoint: Artifact) -> Artifact | None:
    """Return the run's first evaluation of a checkpoint, by its own suite, that still exists."""
    for step in record.steps.values():
        if step.artifact.startswith("evaluation/"):
            with suppress(ValueError):  # deleted by garbage collection
                evaluation = store.load(step.artifact)
                if evaluation.manifest.inputs.get("checkpoint") == checkpoint.key:
                    return evaluation
    return None


def family_number(family: str, name: str) -> int:
    """Return the number of a run of `family`, or 0 for the name of another."""
    match = re.fullmatch(rf"{re.escape(family)}-(\d+)", name)
    return int(match[1]) if match else 0


def now() -> str:
    """Return the time as ISO 8601 text in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


MERGED = "merged"
"""Field of the metadata of a checkpoint that `herd merge` made: its parents and their shares."""
PENDING_APPROVAL: Literal["pending_approval"] = "pending_approval"
"""Verdict of a run whose model waits for a person."""
OPEN = "open"


def mark_open(root: Root, run: str) -> None:
    """Mark a run as open, so that the reconciler looks at it. Raises OSError."""
    root.write(f"{now()}\n", OPEN, run)


def mark_stale(record: RunRecord) -> None:
    """Say that MLflow may lack points of the run."""
    record.mlflow_stale = True


def example_change(stage: Stage) -> str:
    """Return a change of `stage` to try in a rerun; it is not what the recipe has already."""
    return f"stages.{stage.name}.weight_averaging={4 if str(stage.weight_averaging) == 'last 2' else 2}"
