"""The steps of a run, and what each of them would reuse, resume or make under a root; nothing is run.

The function of a step is called until it asks for its artifact, whose key then says whether it exists.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.table import Table

from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import tokens
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.pipeline_steps import pipeline_steps
from herd.tasks.runs.records import RunRecord, Runs, now
from herd.tasks.step import REUSED, Context, PipelineStep, WorkInProgress

NEW, UNKNOWN = "new", "unknown"


@dataclass(frozen=True)
class PlannedStep:
    """A step and how a run would get its artifact."""

    step: str
    inputs: list[str]
    """Earlier steps whose artifacts it gets."""
    outcome: str
    """`reused`, `new`, `resumed at 1.2M`, or `unknown`, because a file cannot be read."""
    why: str
    """The artifact that is reused; else the first parameter that differs, or the first input that is not reused."""


class _KeyKnown(Exception):
    """Ends the function of a step whose artifact has the key of `spec`."""

    def __init__(self, spec: ArtifactSpec, artifact: Artifact | None, position: int | None) -> None:
        self.spec, self.artifact, self.position = spec, artifact, position


def _preview(store: Store, own: str, step: str, spec: ArtifactSpec, work: WorkInProgress | None) -> Artifact:
    """Return an artifact that exists and that the step `own` needs for its own; for all others raise _KeyKnown."""
    artifact = None
    with suppress(ValueError):  # absent, or damaged: `Store.find` would move it aside
        stored = store.load(spec.label)
        artifact = stored if stored.key == spec.key and not stored.missing() else None
    if artifact is None or step == own:
        raise _KeyKnown(spec, artifact, work.resumes() if work and artifact is None else None)
    return artifact


def plan_steps(recipe: Recipe, root: Root, cluster: Cluster) -> list[PlannedStep]:
    """Return the steps of a run of `recipe`, in order, each with what exists of it under `root`."""
    store, steps = open_store(root), pipeline_steps(recipe)
    record = RunRecord(name=f"{recipe.name}-plan", family=recipe.name, recipe_digest="", started=now(), code="")
    console = TerminalConsole(RichConsole(quiet=True))
    # without a tracker: `preview` ends each step before it is tracked
    context = Context(recipe, cluster, store, Runs(root), record, None, console, steps)  # type: ignore[arg-type]
    artifacts: dict[str, Artifact] = {}
    planned: dict[str, PlannedStep] = {}
    for step in steps:
        inputs = [*dict.fromkeys(name for name in step.inputs.values() if name)]
        waits = next((name for name in inputs if name not in artifacts), "")
        if waits:
            outcome = UNKNOWN if planned[waits].outcome == UNKNOWN else NEW
            why = f"{waits} is {planned[waits].outcome}"
        elif step is steps[-1]:
            outcome, why = NEW, "every run decides"
        else:
            outcome, why = _look(replace(context, preview=partial(_preview, store, step.name)), step, artifacts)
        planned[step.name] = PlannedStep(step.name, inputs, outcome, why)
    return [*planned.values()]


def _look(context: Context, step: PipelineStep, artifacts: dict[str, Artifact]) -> tuple[str, str]:
    """Return outcome and reason of a step whose inputs exist; add its artifact if it exists too."""
    try:
        step.run(context, {parameter: artifacts.get(name) for parameter, name in step.inputs.items()})
    except _KeyKnown as key:
        if key.artifact is not None:
            artifacts[step.name] = key.artifact
            return REUSED, key.artifact.label
        name, _, why = context.store.explain(key.spec).partition(": new, ")
        return NEW if key.position is None else f"resumed at {tokens(key.position)}", why or name
    except (OSError, ValueError) as error:
        return UNKNOWN, str(error).splitlines()[0]
    raise AssertionError(f"{step.name} leaves no artifact")


def steps_table(planned: list[PlannedStep]) -> Table:
    """Return the steps as a table for a console."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in ("step", "inputs", "would be"):
        table.add_column(header)
    for row in planned:
        color = {REUSED: "green", UNKNOWN: "red"}.get(row.outcome, "yellow")
        table.add_row(row.step, ", ".join(row.inputs), f"[{color}]{row.outcome}[/]: {escape(row.why)}")
    return table
