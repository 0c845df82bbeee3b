"""A step: one tracked unit of work that leaves an artifact.

Whatever a step does, it happens in the same order: find an artifact with the same key and reuse it; else say what is
new, open an MLflow run, call the library in a staging folder, commit, record. So retries, reruns and second runs all
do the same right thing, and none of them rests on Prefect's cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.markup import escape

from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, Design, Store
from tasks.cluster import Cluster
from tasks.console import Console
from tasks.runs import RunRecord, Runs, StepRecord
from tasks.tracking import Point, Tracker

Build = Callable[[Path, str], dict[str, Any]]
"""Fills an empty folder and returns the artifact's facts; also gets the id of the step's MLflow run."""
Show = Callable[[Artifact, str], None]
"""Shows a finished artifact in the step's MLflow run."""


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

    @property
    def folder(self) -> Path:
        """The run's own folder: recipe, logs, report."""
        return self.runs.place(self.record.name)

    @property
    def scratch(self) -> Path:
        """Where work in progress lives; outlives a killed process."""
        return self.store.root / "work"

    def tags(self) -> dict[str, str]:
        """Return the tags that every MLflow run of this run carries."""
        return {
            "herd.run": self.record.name,
            "recipe.digest": self.record.recipe_digest[:16],
            "code.commit": self.record.code,
            "prefect.flow_run_id": self.record.prefect_run,
            "cluster": self.cluster.launcher,
            "world": str(self.cluster.processes),
            "attempts": str(self.record.attempts),
        }


def ensure(context: Context, step: str, design: Design, build: Build, show: Show | None = None) -> Artifact:
    """Return the artifact of `design`, reused or made by `build`.

    Records the step in the run and in MLflow. What `build` raises passes through, with nothing committed.
    """
    design = _anew(context, step, design)
    found = context.store.find(design)
    with tracked(context, design.kind, step, design.key) as mlflow_run:
        if found is not None:
            artifact, outcome, why, seconds = found, "reused", "", 0.0
            context.console.say(f"  {step:<18}reused {artifact.label} [dim](made by {artifact.manifest.made_by})[/]")
        else:
            why = context.store.explain(design)
            context.console.say(f"  {step:<18}[dim]{escape(why)}[/]")
            artifact, seconds = _make(context, design, build, mlflow_run)
            outcome = "made"
        _record(context, step, artifact, StepRecord(
            artifact=artifact.label, outcome=outcome, why=why, seconds=seconds, mlflow_run=mlflow_run
        ))  # fmt: skip
        _project(context, mlflow_run, artifact, outcome)
        if show is not None:
            show(artifact, mlflow_run)
    return artifact


def ensure_in_scratch(
    context: Context, step: str, design: Design, build: Callable[[Path, Path], dict[str, Any]], show: Show | None = None
) -> Artifact:
    """Do as `ensure` does; `build` also gets a scratch folder of the artifact's key, which outlives a killed process.

    What is half done there is gone on with by the next attempt; it is removed once the artifact is committed.
    """
    scratch = context.scratch / f"{step}-{design.key[:8]}"

    def in_scratch(folder: Path, _: str) -> dict[str, Any]:
        scratch.mkdir(parents=True, exist_ok=True)
        return build(folder, scratch)

    artifact = ensure(context, step, design, in_scratch, show)
    shutil.rmtree(scratch, ignore_errors=True)
    return artifact


def link_files(source: Path, target: Path) -> None:
    """Give `target` the files of the folder `source` at any depth, but hidden ones, without copying them."""
    for path in sorted(source.rglob("[!.]*")):
        place = target / path.relative_to(source)
        if path.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, place)


def _make(context: Context, design: Design, build: Build, mlflow_run: str) -> tuple[Artifact, float]:
    began = time.monotonic()
    with context.store.staging() as folder:
        facts = build(folder, mlflow_run)
        seconds = time.monotonic() - began
        made_by, code = context.record.name, context.record.code
        return context.store.commit(design, folder, facts, made_by, code, seconds), seconds


def _anew(context: Context, step: str, design: Design) -> Design:
    """Give the step from which a rerun starts a key of its own, so that it is made whatever exists."""
    if step != context.record.redo_from:
        return design
    return Design(
        design.kind, design.name, design.version, design.parameters, {**design.inputs, "redo": context.record.name}
    )


def _record(context: Context, step: str, artifact: Artifact, entry: StepRecord) -> None:
    context.made[step] = artifact
    context.record.steps[step] = entry
    context.runs.save(context.record)


def _project(context: Context, mlflow_run: str, artifact: Artifact, outcome: str) -> None:
    """Show the artifact in MLflow: what it was made from as params, its numbers as metrics."""
    tracker, manifest = context.tracker, artifact.manifest
    tracker.set_tags(mlflow_run, {"artifact": artifact.label, "outcome": outcome, "made_by": manifest.made_by})
    tracker.log_params(mlflow_run, {key: value for key, value in manifest.parameters.items() if key != "recipe"})
    tracker.log_params(mlflow_run, {f"input.{role}": key[:16] for role, key in manifest.inputs.items()})
    numbers = _numbers(manifest.facts)
    tracker.log_points([mlflow_run], [Point(key, value, artifact.created, 0) for key, value in numbers.items()])


def _numbers(facts: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested facts under keys with `/` between levels."""
    numbers: dict[str, float] = {}
    for key, value in facts.items():
        if isinstance(value, dict):
            numbers |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


@contextmanager
def tracked(context: Context, kind: str, step: str, key: str) -> Iterator[str]:
    """Open the MLflow child run of `step` and close it with the truth, however the block ends.

    An attempt that makes the same artifact continues the same child; another key (the sources changed, say) gets its
    own, because MLflow's params cannot change.
    """
    tags = {**context.tags(), "stage": step, "kind": kind, "artifact.key": key[:16]}
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
