"""A step of a run: what it needs, and how its artifact is reused or made. tasks/pipeline_steps.py lists all steps.

A step reuses an intact artifact with the same key. Otherwise it takes the artifact's lease, looks again, builds in a
staging folder, checks the lease, commits and records. Retries, reruns and concurrent runs rely on that, not on
Prefect's cache.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.markup import escape

from herd.llama3.recipe.base import ArtifactKind
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import tokens
from herd.llama3.train.job import PredictedStepTimes
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.files import remove_tree
from herd.storage.lease import Lease, LeaseHeld, lease
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import Console, working
from herd.tasks.launch.local import Agents
from herd.tasks.runs.records import RunRecord, Runs, StepRecord
from herd.tasks.runs.work_dirs import IN_PROGRESS
from herd.tasks.tracking.events import artifact_committed
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.steps import CurveSink, LoggedStep, child_tags, curve_sinks, project_step

Build = Callable[[Path, str], dict[str, Any]]
"""Fills an empty folder and returns the artifact's metadata; also gets the handle of the step's MLflow run."""
REUSED, CREATED = "reused", "created"
CALIBRATION = "calibration"
KINDS = (*get_args(ArtifactKind), CALIBRATION)
"""All kinds of artifacts: what recipes decide, and measurements of devices. Nothing else is taken for an artifact."""


@dataclass(frozen=True)
class WorkInProgress:
    """Work in progress of a step, in a folder that outlives a killed process; several specs may share it."""

    name: str
    """Name of the folder below `Context.scratch`; it is removed after the commit of the artifact."""
    resumes: Callable[[], int | None] = lambda: None
    """Returns how many tokens of the step are done, or None at its start."""
    done: Callable[[], None] = lambda: None
    """Removes files elsewhere, after the commit of the artifact."""


@dataclass(frozen=True)
class PipelineStep:
    """A step of a run."""

    name: str
    """Unique in the run: `curate`, `main`, `evaluate-main`."""
    kind: str
    """Word for all steps like it: `curate`, `pretrain`, `evaluate`."""
    inputs: dict[str, str]
    """Parameter of the task -> step whose artifact it gets; empty: it gets None."""
    task: Callable[[], Callable[..., Any]]
    """Imports and returns the Prefect task: without Prefect, steps can be listed."""
    span: StageSpan | None = None
    """The stage, or the part between two gates, that the step trains, gates or evaluates."""
    subject: tuple[str, ...] = ()
    """Name of the stage or part, if the step has a span."""
    overlaps: bool = False
    """Whether the next stage may train while the step runs."""

    def run(self, context: Context, artifacts: Mapping[str, Any]) -> Any:
        """Return the result of the task: an artifact, or a Decision. `artifacts`: the inputs, by parameter."""
        task = self.task()
        if context.preview is not None:
            task = getattr(task, "fn", task)  # a task outside a flow would start a Prefect server
        return task(context, *self.subject, **artifacts)


def reaches(steps: Sequence[PipelineStep], until: str, *kinds: str) -> bool:
    """Return whether a run that stops after the step or kind `until` (empty: it does not) has a step of `kinds`."""
    ends = [number for number, step in enumerate(steps, 1) if until in (step.name, step.kind)]
    return any(step.kind in kinds for step in steps[: ends[-1] if ends else None])


class StepOutcome(NamedTuple):
    """An artifact and how the step got it."""

    artifact: Artifact
    outcome: str = REUSED
    why: str = ""
    seconds: float = 0.0


@dataclass
class Context:
    """State that all steps of one run share."""

    recipe: Recipe
    cluster: Cluster
    store: Store
    runs: Runs
    record: RunRecord
    tracker: MLflowTracker
    console: Console
    steps: Sequence[PipelineStep]
    """All steps in order."""
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    fence: int = 0
    """Fencing token of the lease on the run: higher than that of every earlier holder."""
    damaged: set[str] = field(default_factory=set)
    """Steps whose artifact was set aside because its files changed after the commit."""
    agents: Agents = None  # type: ignore[assignment]  # the run's own, unless given
    """Processes from which ranks on this machine are forked; the creator of the context closes them."""
    restart_damaged: bool = False
    """Whether a stage whose checkpoints are all damaged is trained again from its start."""
    predict: Callable[[Cluster, StageSpan], PredictedStepTimes | None] = lambda cluster, span: None
    """Predicts memory and step times of a stage; steps do not import the planner."""
    sinks: list[CurveSink] = field(init=False)
    """Where the run's points go besides MLflow."""
    preview: Callable[[str, ArtifactSpec, WorkInProgress | None], Artifact] | None = None
    """Takes the place of `ensure_artifact` in `herd plan --steps`, where nothing is made."""

    def __post_init__(self) -> None:
        self.agents = self.agents or Agents(self.folder / "logs" / "agent.log")
        self.sinks = curve_sinks(self.recipe.tracking, self.root, self.record.name)

    @property
    def root(self) -> Root:
        return self.runs.root

    @property
    def folder(self) -> Path:
        """The folder of the run: recipe, logs, report."""
        return self.runs.folder(self.record.name)

    @property
    def scratch(self) -> Path:
        """Folder of work in progress; outlives a killed process."""
        return self.root.local / "work"

    def reaches(self, *kinds: str) -> bool:
        """Return whether the run, which may stop early, has a step of one of `kinds`."""
        return reaches(self.steps, self.record.until, *kinds)

    def recorded(self, step: str) -> Artifact | None:
        """Return the artifact of a step that the run has done, or None. Raises ValueError if it was deleted."""
        return self.store.load(self.record.steps[step].artifact) if step in self.record.steps else None

    @property
    def in_store(self) -> bool:
        """Whether data workers meet in the root's object store, and not on a disk."""
        return self.cluster.data != "threads" and not self.root.is_local

    def shared_scratch(self, name: str) -> str:
        """Return the folder of work in progress `name` that data workers share, a path or a URI."""
        return self.root.join(IN_PROGRESS, name) if self.in_store else str(self.scratch / name)

    def tags(self) -> dict[str, str]:
        """Return the tags of all MLflow runs of this run."""
        study = self.record.study
        tags = (
            {"study": study.study, "study.variant": study.variant, "study.repeat": str(study.repeat)} if study else {}
        )
        return {
            **tags,
            "herd.run": self.record.name,
            "recipe.digest": self.record.recipe_digest[:16],
            "code.commit": self.record.code,
            "prefect.flow_run_id": self.record.prefect_run,
            **(self.record.provenance.tags() if self.record.provenance else {}),
            "cluster": self.cluster.launcher,
            "world": str(self.cluster.processes),
            "attempts": str(self.record.attempts),
        }


def ensure_artifact(
    context: Context, step: str, spec: ArtifactSpec, build: Build, work: WorkInProgress | None = None
) -> Artifact:
    """Return the artifact of `spec`, reused or made by `build`.

    Its lease is held while it is made: of several runs that need it one makes it, the others wait and reuse it. Records
    the step in the run and the tracker. Errors of `build` and LeaseLost pass through; then nothing is committed.
    """
    assert spec.kind in KINDS, f"{spec.kind} is not among KINDS, so nothing would delete its artifacts"
    spec = _redone(context, step, spec)
    if context.preview is not None:
        return context.preview(step, spec, work)
    existing = context.store.find(spec, partial(_report_damage, context, step))
    known = context.record.steps.get(step)
    recorded = known if existing and known and known.artifact == existing.label else None
    if existing and recorded and context.record.state != "running":
        context.artifacts[step] = existing  # another flow asks for what a run that is over has: its record stays
        return existing
    with tracked_step(context, spec.kind, step, spec.key) as mlflow_run:
        result = _earlier(context, existing, recorded) or _make(context, step, spec, build, mlflow_run, work)
        artifact = result.artifact
        if existing or result.outcome == REUSED:
            context.console.log(
                f"  {step:<17} reused {artifact.label} [dim](created by {artifact.manifest.created_by})[/]"
            )
        context.artifacts[step] = artifact
        own = {} if result.outcome == REUSED else artifact.metadata
        context.record.steps[step] = StepRecord(
            artifact=artifact.label,
            outcome=result.outcome,
            why=result.why,
            seconds=result.seconds,
            mlflow_run=mlflow_run,
            environment={name: text for name, text in own.get("environment", {}).items() if name != "topology"},
            cost=own.get("cost", {}),
        )
        if result.outcome != REUSED and not recorded:  # before the record, which says that it was announced
            artifact_committed(context.record, context.root.uri, step, artifact)
        context.runs.save(context.record)
        project_step(
            LoggedStep(context.tracker, context.store, context.record, step, artifact, mlflow_run, context.sinks)
        )
    return artifact


def ensure_in_scratch(
    context: Context, step: str, spec: ArtifactSpec, build: Callable[[Path, Path], dict[str, Any]]
) -> Artifact:
    """Do as `ensure_artifact` does; `build` also gets a scratch folder of the artifact's key.

    The folder outlives a killed process, so that the next attempt continues there; it is removed after the commit.
    """
    spec = _redone(context, step, spec)
    name = f"{step}-{spec.key[:8]}"
    work = WorkInProgress(name, done=lambda: remove_tree(context.shared_scratch(name)))
    scratch = context.scratch / work.name

    def in_scratch(folder: Path, _: str) -> dict[str, Any]:
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            return build(folder, scratch)
        finally:
            with suppress(AttributeError):  # glibc only: give freed memory back before the trainer needs it
                ctypes.CDLL(None).malloc_trim(0)

    artifact = ensure_artifact(context, step, spec, in_scratch, work)
    if context.preview is None and scratch.exists():  # a process was killed between the commit and the removal
        with suppress(LeaseHeld), lease(context.root, f"work/{work.name}", context.record.name):
            shutil.rmtree(scratch, ignore_errors=True)
    return artifact


def link_files(source: Path, target: Path) -> None:
    """Hard-link the file `source` to `target`, or the files of a folder, at any depth, without hidden ones."""
    if source.is_file():
        os.link(source, target)
    for path in sorted(source.rglob("[!.]*")):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)


def _earlier(context: Context, existing: Artifact | None, recorded: StepRecord | None) -> StepOutcome | None:
    """Return how the run got the `existing` artifact; None without one.

    What an earlier attempt of the run made or paid for stays so, also if that attempt died before it could record it.
    """
    if existing is None:
        return None
    if recorded:
        return StepOutcome(existing, recorded.outcome, recorded.why, recorded.seconds)
    record = context.record
    if existing.manifest.created_by == record.name and existing.manifest.created >= record.started:
        return StepOutcome(existing, CREATED, "an attempt died before it was recorded", existing.manifest.seconds)
    return StepOutcome(existing)


def _make(
    context: Context, step: str, spec: ArtifactSpec, build: Build, mlflow_run: str, work: WorkInProgress | None
) -> StepOutcome:
    """Make the artifact under its lease, or return it if another run has committed it."""
    with _leases(context, step, spec, work) as leases:
        if (existing := context.store.find(spec, partial(_report_damage, context, step))) is not None:
            return StepOutcome(existing)
        why = "the one there was damaged"
        if step not in context.damaged:
            why = context.store.explain(spec)
            why = why.partition(": new, ")[2] or why  # without the name: `curate.dedup.jaccard 0.8 -> 0.7`
        position = work.resumes() if work else None
        outcome = CREATED if position is None else f"resumed at {tokens(position)}"
        context.console.log(f"  {step:<17} {outcome if position is not None else f'[dim]new: {escape(why)}[/]'}")
        began = time.monotonic()
        with context.store.staging() as folder:
            with working(context.console, step, bar=spec.kind != "checkpoint"):  # the trainer draws its own bar
                metadata = build(folder, mlflow_run)
            seconds = time.monotonic() - began
            for held_lease in leases:
                held_lease.check()
            by, code = context.record.name, context.record.code
            artifact = context.store.commit(spec, folder, metadata, by, code, seconds)
        if work:
            shutil.rmtree(context.scratch / work.name, ignore_errors=True)
            work.done()
        return StepOutcome(artifact, outcome, why, seconds)


@contextmanager
def _leases(context: Context, step: str, spec: ArtifactSpec, work: WorkInProgress | None) -> Iterator[list[Lease]]:
    """Hold the leases of the artifact and of the work folder; wait while other processes hold one."""

    def wait(holder: str) -> None:
        context.console.log(f"  {step:<17} [yellow]waits for {escape(holder)}, which is making it[/]")

    def leave() -> None:
        context.console.log(f"  [red]{step}: lease lost to another process; exiting[/]")
        os.kill(os.getpid(), signal.SIGTERM)  # unwinds like any stop: the trainer saves and ends

    names = [spec.label, *([f"work/{work.name}"] if work else [])]
    with ExitStack() as stack:
        yield [stack.enter_context(lease(context.root, name, context.record.name, wait, lost=leave)) for name in names]


def _report_damage(context: Context, step: str, message: str) -> None:
    context.damaged.add(step)
    context.console.log(f"  {step:<17} [yellow]set aside: {escape(message.partition('; ')[0])}[/]")


def _redone(context: Context, step: str, spec: ArtifactSpec) -> ArtifactSpec:
    """Give the step from which a rerun starts a unique key, so that it is never reused."""
    if step != context.record.redo_from:
        return spec
    return ArtifactSpec(
        spec.kind, spec.name, spec.version, spec.parameters, {**spec.inputs, "redo": context.record.name}
    )


@contextmanager
def tracked_step(context: Context, kind: str, step: str, key: str) -> Iterator[str]:
    """Open the run of `step` in the tracker, and close it with the status with which the block ends.

    An attempt with the same artifact key continues the same run; another key (the sources changed, say) gets a new one,
    because MLflow's params cannot change.
    """
    tags = child_tags(context.tags(), step, kind, key)
    handle = context.tracker.open_child(context.record.mlflow_run, context.record.name, tags)
    try:
        yield handle
    except Exception:
        context.tracker.close(handle, "FAILED")
        raise
    except BaseException:
        context.tracker.reach.hurry()
        context.tracker.close(handle, "KILLED")
        raise
    context.tracker.close(handle, "FINISHED")
