"""Commit the result of a stage: training state, model, metrics; built beside its place and renamed when whole.

The model is made from the state on the disk, by the leading process alone, so it need not fit in the memory of any.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from llama3.model.files import save_model
from llama3.parallel.mesh import World
from llama3.recipe.schema import Recipe
from llama3.train.averaging import FILE, Choice, parts_of
from llama3.train.job import TrainJob
from llama3.train.journal import read_journal, to_parquet
from llama3.train.recorder import Recorder, log
from llama3.train.saving import save_state
from llama3.train.state import TrainState
from llama3.train.weights import weights_of
from storage.filesystem import sync_folder, write_atomic

KEPT = ("skips.json", "incidents", "profile")
"""What else of a stage's folder stays with its result, where there is any."""


def commit_result(
    job: TrainJob,
    recipe: Recipe,
    state: TrainState,
    world: World,
    recorder: Recorder | None,
    choose: Callable[[], Choice | None],
) -> None:
    """Write `result` into the stage's folder; every process calls it. `choose` says what the model is, and may lose
    the weights that are in memory."""
    building = job.work / ".result"
    if world.leads:
        shutil.rmtree(building, ignore_errors=True)
    world.wait()
    save_state(building / "state", state, job.stage, world)
    choice = choose()
    if recorder is None:
        return
    averaged = state.averaged if choice is None or choice.kept == "average" else 0
    save_model(building / "model", recipe.model, state.rows, weights_of(building / "state", averaged))
    if choice is not None:
        full = choice.model_copy(update={"parts": parts_of(recorder.span, read_journal(recorder.journal.path))})
        write_atomic(building / FILE, full.model_dump_json(indent=1) + "\n")
        log(str(full))
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
