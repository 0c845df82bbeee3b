"""Commit the result of a stage: training state, model, metrics; built beside its place and renamed when whole.

The model is made from the state on the disk, by the leading process alone, so it need not fit in the memory of any.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from llama3.model.files import save_model
from llama3.parallel.mesh import World
from llama3.recipe.schema import Recipe
from llama3.train.job import TrainJob
from llama3.train.journal import to_parquet
from llama3.train.recorder import Recorder
from llama3.train.saving import save_state
from llama3.train.state import TrainState
from llama3.train.weights import weights_of
from storage.filesystem import sync_folder

KEPT = ("skips.json", "incidents", "profile")
"""What else of a stage's folder stays with its result, where there is any."""


def commit_result(job: TrainJob, recipe: Recipe, state: TrainState, world: World, recorder: Recorder | None) -> None:
    """Write `result` into the stage's folder; every process calls it."""
    building = job.work / ".result"
    if world.leads:
        shutil.rmtree(building, ignore_errors=True)
    world.wait()
    save_state(building / "state", state, job.stage, world)
    if recorder is None:
        return
    save_model(building / "model", recipe.model, state.rows, weights_of(building / "state", state.averaged))
    recorder.journal.sync()
    to_parquet(recorder.journal.path, building / "metrics.parquet")
    for name in KEPT:
        _copy(job.work / name, building / name)
    sync_folder(building)
    building.rename(job.work / "result")
    sync_folder(job.work)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)
