"""Rehearse a recipe: run its whole chain in small here, kill a rank, export the model, and say what would go wrong."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from herd.flows.pipeline import pipeline
from herd.flows.recipe_form import PipelineParameters
from herd.llama3.recipe.load import to_yaml
from herd.llama3.recipe.schema import Recipe
from herd.storage.filesystem import write_atomic
from herd.storage.object_artifact import open_store
from herd.storage.processes import in_background
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.launch.local import rank_process
from herd.tasks.models.export import export_model
from herd.tasks.models.start import with_local_models
from herd.tasks.operate.rehearsal import (
    Rehearsal,
    RehearsalFinding,
    ScaledRun,
    built_layouts,
    data_findings,
    full_size_findings,
    proofs,
    write_rehearsal,
)
from herd.tasks.pipeline_steps import next_step
from herd.tasks.runs.records import RunRecord, Runs

LOOK_S = 0.02
ERROR_LINES = 6
"""Lines of an error on the page; the run's logs have all."""


def rehearsal_root(root: Root, recipe: Recipe) -> Root:
    """Return the root of the runs in small; a second rehearsal reuses their data."""
    return Root.parse(root.local / "rehearsals" / recipe.name)


def rehearse(recipe: Recipe, cluster: Cluster, root: Root, processes: int) -> tuple[Rehearsal, Path]:
    """Rehearse `recipe` on at most `processes` trainer processes; return the rehearsal, and its page.

    Nothing is written outside of `rehearsals` of the working folder, except a trial file that shows that the root can
    be written.
    """
    scaled = ScaledRun(with_local_models(root, recipe), cluster, processes)
    rehearsal, here = Rehearsal(scaled, list(full_size_findings(recipe, cluster, root))), rehearsal_root(root, recipe)
    if layouts := built_layouts(scaled, root):
        rehearsal.proven.append(("layouts", f"built at full size: {layouts}"))
    file = here.local / "recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, to_yaml(scaled.recipe))
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # a team's server is for runs
    before = {record.name for record in Runs(here).all()}
    stage = max(scaled.recipe.schedule.trained, key=lambda span: span.steps)
    parameters = PipelineParameters(
        recipe=str(file), root=here.uri, cluster=scaled.cluster, fresh=True, from_step="pretrain"
    )
    error = ""
    with killed_rank(here, stage.name, stage.steps // 2) as killed:
        try:
            pipeline(parameters)
        except Exception as raised:  # whatever stops a run is what a rehearsal is for
            error = "\n".join((str(raised) or type(raised).__name__).splitlines()[:ERROR_LINES])
    record = next((record for record in reversed(Runs(here).all()) if record.name not in before), None)
    if record is not None:
        rehearsal.run = record.name
        rehearsal.proven += proofs(scaled, here, record, stage.name if killed.is_set() else "")
        rehearsal.findings += data_findings(scaled, open_store(here), record)
    if error:
        rehearsal.findings += _failed(scaled, record, error, rehearsal)
    else:
        rehearsal.proven.append(("export", _exported(here, rehearsal.run)))
    return rehearsal, write_rehearsal(rehearsal, here.local)


def _failed(
    scaled: ScaledRun, record: RunRecord | None, error: str, rehearsal: Rehearsal
) -> Iterator[RehearsalFinding]:
    """Yield the step that failed, unless the checks at full size have said all of it."""
    known = {finding.text for finding in rehearsal.findings}
    if record is None:
        yield from (RehearsalFinding(line) for line in error.splitlines() if line not in known)
        return
    yield RehearsalFinding(f"step {next_step(scaled.recipe, record.steps, False)}: {error}")


def _exported(here: Root, run: str) -> str:
    """Export the model for Hugging Face's libraries and return where it is."""
    folder = here.local / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    export_model(here, run, folder)
    return f"hf, {len(list(folder.iterdir()))} files in {folder}"


@contextmanager
def killed_rank(here: Root, stage: str, steps: int) -> Iterator[threading.Event]:
    """Kill a rank of `stage` with SIGKILL once, after `steps` steps; the event tells whether that happened."""
    killed = threading.Event()

    def watch(stop: threading.Event) -> None:
        old = {path: _lines(path) for path in (here.local / "work").glob(f"{stage}-*/journal.jsonl")}
        while not stop.wait(LOOK_S):
            for path in (here.local / "work").glob(f"{stage}-*/journal.jsonl"):
                if _lines(path) - old.get(path, 0) >= steps:
                    with suppress(LookupError, psutil.Error):
                        rank_process(0).kill()
                        killed.set()
                        return

    with in_background(watch):
        yield killed


def _lines(path: Path) -> int:
    with suppress(OSError):
        return path.read_bytes().count(b"\n")
    return 0
