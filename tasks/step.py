"""A step: one tracked unit of work that leaves an artifact.

Every step goes the same way: reuse a sound artifact with the same key; else take the artifact's lease, look again, say
what is new, build in a staging folder, check the lease, commit, record. Retries, reruns and runs side by side all rely
on that, not on Prefect's cache. Of two runs that want one artifact, the second waits.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape

from llama3.recipe.schema import Recipe
from llama3.recipe.units import tokens
from storage.artifact import Artifact, ArtifactSpec, Store
from storage.lease import Lease, LeaseHeld, lease
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import Console
from tasks.launch.local import Agents
from tasks.runs.peak_memory import give_back
from tasks.runs.records import RunRecord, Runs, StepRecord
from tasks.tracking.events import artifact_committed
from tasks.tracking.mlflow import Tracker
from tasks.tracking.steps import Shown, child_tags, project_step

Build = Callable[[Path, str], dict[str, Any]]
"""Fills an empty folder and returns the artifact's facts; also gets the id of the step's MLflow run."""


REUSED, MADE = "reused", "made"


@dataclass(frozen=True)
class WorkInProgress:
    """Work in progress of a step, in a folder that outlives a killed process; several designs may share it."""

    name: str
    """Of the folder below `Context.scratch`; it is removed once the artifact is committed."""
    resumes: Callable[[], int | None] = lambda: None
    """Returns how many tokens of the step are done, or None if it begins."""
    done: Callable[[], None] = lambda: None
    """Removes what lies elsewhere, once the artifact is committed."""


class Made(NamedTuple):
    """An artifact and how the step came by it."""

    artifact: Artifact
    outcome: str = REUSED
    why: str = ""
    seconds: float = 0.0


@dataclass
class Context:
    """What every step of one run needs."""

    recipe: Recipe
    cluster: Cluster
    store: Store
    runs: Runs
    record: RunRecord
    tracker: Tracker
    console: Console
    steps: list[str]
    """Names of all steps in order."""
    made: dict[str, Artifact] = field(default_factory=dict)
    fence: int = 0
    """Of the lease on the run: higher than that of every process that had the run before."""
    damaged: set[str] = field(default_factory=set)
    """Steps whose artifact was set aside because it changed after its commit."""
    agents: Agents = None  # type: ignore[assignment]  # the run's own, unless given
    """What ranks on this machine are forked from; whoever makes the context closes them."""
    restart_damaged: bool = False
    """Whether a stage without a good checkpoint among those it has is trained again from its start."""

    def __post_init__(self) -> None:
        self.agents = self.agents or Agents(self.folder / "logs" / "agent.log")

    @property
    def root(self) -> Root:
        return self.runs.root

    @property
    def folder(self) -> Path:
        """The run's own folder: recipe, logs, report."""
        return self.runs.place(self.record.name)

    @property
    def scratch(self) -> Path:
        """Where work in progress lives; outlives a killed process."""
        return self.root.local / "work"

    def tags(self) -> dict[str, str]:
        """Return the tags that every MLflow run of this run carries."""
        study = self.record.study
        part = {"study": study.study, "study.arm": study.arm, "study.repeat": str(study.repeat)} if study else {}
        return {
            **part,
            "herd.run": self.record.name,
            "recipe.digest": self.record.recipe_digest[:16],
            "code.commit": self.record.code,
            "prefect.flow_run_id": self.record.prefect_run,
            "cluster": self.cluster.launcher,
            "world": str(self.cluster.processes),
            "attempts": str(self.record.attempts),
        }


def ensure(
    context: Context, step: str, design: ArtifactSpec, build: Build, work: WorkInProgress | None = None
) -> Artifact:
    """Return the artifact of `design`, reused or made by `build`.

    While it is made its lease is held: of several runs that want it one makes it, the others wait and reuse it. Records
    the step in the run and in MLflow. What `build` raises passes through, with nothing committed; so does LeaseLost.
    """
    design = _anew(context, step, design)
    found = context.store.find(design, partial(_damaged, context, step))
    with tracked(context, design.kind, step, design.key) as mlflow_run:
        made = Made(found) if found else _make(context, step, design, build, mlflow_run, work)
        artifact = made.artifact
        if made.outcome == REUSED:
            context.console.say(f"  {step:<18}reused {artifact.label} [dim](made by {artifact.manifest.made_by})[/]")
        _record(context, step, artifact, StepRecord(
            artifact=artifact.label, outcome=made.outcome, why=made.why, seconds=made.seconds, mlflow_run=mlflow_run
        ))  # fmt: skip
        if made.outcome != REUSED:
            artifact_committed(context.record, context.root.uri, step, artifact)
        project_step(Shown(context.tracker, context.store, context.record, step, artifact, mlflow_run))
    return artifact


def ensure_in_scratch(
    context: Context, step: str, design: ArtifactSpec, build: Callable[[Path, Path], dict[str, Any]]
) -> Artifact:
    """Do as `ensure` does; `build` also gets a scratch folder of the artifact's key, which outlives a killed process.

    What is half done there is gone on with by the next attempt; it is removed once the artifact is committed.
    """
    design = _anew(context, step, design)
    work = WorkInProgress(f"{step}-{design.key[:8]}")
    scratch = context.scratch / work.name

    def in_scratch(folder: Path, _: str) -> dict[str, Any]:
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            return build(folder, scratch)
        finally:
            give_back()

    artifact = ensure(context, step, design, in_scratch, work)
    if scratch.exists():  # of a process that was killed between the commit and the removal
        with suppress(LeaseHeld), lease(context.root, f"work/{work.name}", context.record.name):
            shutil.rmtree(scratch, ignore_errors=True)
    return artifact


def link_files(source: Path, target: Path) -> None:
    """Give `target` the files of the folder `source` at any depth, but hidden ones, without copying them."""
    for path in sorted(source.rglob("[!.]*")):
        place = target / path.relative_to(source)
        if path.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, place)


def _make(
    context: Context, step: str, design: ArtifactSpec, build: Build, mlflow_run: str, work: WorkInProgress | None
) -> Made:
    """Make the artifact under its lease, unless another run has made it by then."""
    with _held(context, step, design, work) as leases:
        if (found := context.store.find(design, partial(_damaged, context, step))) is not None:
            return Made(found)
        why = "the one there was damaged" if step in context.damaged else _news(context, design)
        outcome = MADE
        position = work.resumes() if work else None
        if position is not None:
            outcome = f"resumed at {tokens(position)}"
        context.console.say(f"  {step:<18}{outcome if position is not None else f'[dim]new: {escape(why)}[/]'}")
        began = time.monotonic()
        with context.store.staging() as folder:
            facts = build(folder, mlflow_run)
            seconds = time.monotonic() - began
            for held in leases:
                held.check()
            by, code = context.record.name, context.record.code
            artifact = context.store.commit(design, folder, facts, by, code, seconds)
        if work:
            shutil.rmtree(context.scratch / work.name, ignore_errors=True)
            work.done()
        return Made(artifact, outcome, why, seconds)


@contextmanager
def _held(context: Context, step: str, design: ArtifactSpec, work: WorkInProgress | None) -> Iterator[list[Lease]]:
    """Hold the leases of the artifact and of the work folder; wait for whoever has one."""

    def wait(holder: str) -> None:
        context.console.say(f"  {step:<18}[yellow]waits for {escape(holder)}, which is making it[/]")

    def leave() -> None:
        context.console.say(f"  [red]{step}: another process has taken it over; this one leaves[/]")
        os.kill(os.getpid(), signal.SIGTERM)  # unwinds like any stop: the trainer saves and ends

    names = [design.label, *([f"work/{work.name}"] if work else [])]
    with ExitStack() as stack:
        yield [stack.enter_context(lease(context.root, name, context.record.name, wait, lost=leave)) for name in names]


def _damaged(context: Context, step: str, words: str) -> None:
    context.damaged.add(step)
    context.console.say(f"  {step:<18}[yellow]set aside: {escape(words.partition('; ')[0])}[/]")


def _news(context: Context, design: ArtifactSpec) -> str:
    """Return what is new about `design`, without its name: `curate.dedup.jaccard 0.8 -> 0.7`."""
    why = context.store.explain(design)
    return why.partition(": new, ")[2] or why


def _anew(context: Context, step: str, design: ArtifactSpec) -> ArtifactSpec:
    """Give the step from which a rerun starts a key of its own, so that it is made whatever exists."""
    if step != context.record.redo_from:
        return design
    return ArtifactSpec(
        design.kind, design.name, design.version, design.parameters, {**design.inputs, "redo": context.record.name}
    )


def _record(context: Context, step: str, artifact: Artifact, entry: StepRecord) -> None:
    context.made[step] = artifact
    context.record.steps[step] = entry
    context.runs.save(context.record)


@contextmanager
def tracked(context: Context, kind: str, step: str, key: str) -> Iterator[str]:
    """Open the MLflow child run of `step` and close it with the truth, however the block ends.

    An attempt that makes the same artifact continues the same child; another key (the sources changed, say) gets its
    own, because MLflow's params cannot change.
    """
    tags = child_tags(context.tags(), step, kind, key)
    run_id = context.tracker.open_child(context.record.mlflow_run, context.record.name, tags)
    try:
        yield run_id
    except Exception:
        context.tracker.close(run_id, "FAILED")
        raise
    except BaseException:
        context.tracker.close(run_id, "KILLED")
        raise
    context.tracker.close(run_id, "FINISHED")


@cache
def code_version() -> str:
    """Return the commit of the checkout that runs, with `+changes` if it differs from it; `unknown` outside git."""
    folder = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return (commit + ("+changes" if git("status", "--porcelain") else "")) if commit else "unknown"
    except OSError:
        return "unknown"
