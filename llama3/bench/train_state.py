"""Rows about what stands around the steps of a run: checkpoints, restarts, the loader, layouts.

Checkpoints, layouts and restarts are measured by those who wrote them, in their own rooms; here they get a state, a job
and a row. Wall-clock time, so an idle machine is wanted, except for the layout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from llama3.bench.measure import NotMeasured
from llama3.bench.ours.token_shards import make_shards, stream_recipe
from llama3.bench.rows import Row, measured
from llama3.bench.train_session import TrainSession
from llama3.parallel.mesh import joined
from llama3.parallel.scale import measure_layout
from llama3.recipe.load import to_yaml
from llama3.recipe.schema import Model, Recipe
from llama3.train.disk_speed import measure_checkpoint
from llama3.train.job import TrainJob
from llama3.train.journal import read_journal
from llama3.train.precision import Precision
from llama3.train.state import TrainState

RANKS = 4
SEQ, SEQUENCES = 256, 8
"""Of a step of the runs measured here: 2,048 tokens."""
SHAPE = {"layers": 4, "dim": 192, "ffn": 672, "heads": 4, "kv_heads": 2, "max_seq": 1024, "tied_embeddings": True}
"""Of the model of the loader row: the smaller, the harder to hide reading behind its steps."""
SMALL = {**SHAPE, "layers": 2, "dim": 32, "ffn": 64}
"""Of the model that is restarted: what is measured is not its steps."""
DOCUMENTS = 2_000
STEPS_OUT = 2
"""First steps of a run that are not counted: torch compiles and allocates."""


def checkpoint(run: TrainSession, name: str) -> Row:
    """How long a save holds a step up, and saving and loading against what the disk does."""
    found = _checkpoint(run.settings.folder / "checkpoint", run.size.state)
    size = f"{found['bytes'] / 1e6:,.0f} MB"
    if name == "checkpoint/blocked":
        note = f"{size}: blocked {found['blocked_s']:.3f} s of {found['save_s']:.2f}"
        return measured(name, 100 * found["blocked_share"], note, **found)
    ours, raw = {"save": ("save_s", "raw_write_s"), "load": ("load_s", "raw_read_s")}[name.split("/")[1]]
    note = f"{size}: {found[ours]:.2f} s, raw {found[raw]:.2f}"
    return measured(name, 100 * found[raw] / found[ours], note, **found)


@cache
def _checkpoint(folder: Path, dim: int) -> dict[str, float]:
    """Return what `measure_checkpoint` finds for weights and moments of 8 layers of width `dim`."""
    shape = {"layers": 8, "dim": dim, "ffn": 7 * dim // 2, "heads": 8, "kv_heads": 4, "max_seq": 1024}
    recipe = _recipe(shape, 1)
    folder.mkdir()
    with joined("cpu", 60) as world:
        state = TrainState(recipe, 8192, Precision(torch.float32), world, 0)
        state.reset(recipe, 0, world)
        return measure_checkpoint(folder, state, world)


def restart(run: TrainSession, name: str) -> Row:
    """Seconds from SIGKILL of one of four ranks to the next step that is recorded."""
    measure = run.settings.restart
    if measure is None:
        raise NotMeasured("no launcher was given")
    launcher = name.split("/")[1]
    folder = run.settings.folder / f"restart-{launcher}"
    job = _job(folder, SMALL, steps=1_000)
    seconds = measure(job, RANKS, folder / "logs", launcher == "torchrun")
    return measured(name, seconds, f"{RANKS} ranks, {os.cpu_count()} cores")


def loader(run: TrainSession, name: str) -> Row:
    """Share of the steps' time that waits for data, after the first steps."""
    folder = run.settings.folder / "loader"
    job = _job(folder, SHAPE if run.settings.size != "tiny" else SMALL, run.size.steps)
    command = [sys.executable, "-m", "llama3.train.main", str(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"the trainer ended with {ended.returncode}: {ended.stdout.strip()}")
    records = read_journal(folder / "work" / "journal.jsonl")[STEPS_OUT:]
    waited, took = (sum(record.metrics[f"time/{key}_s"] for record in records) for key in ("data_wait", "step"))
    each_waited, each_took = (1e3 * seconds / len(records) for seconds in (waited, took))
    note = f"{each_waited:.2f} ms of {each_took:,.0f} per step of {SEQ * SEQUENCES:,} tokens"
    return measured(name, 100 * waited / took, note, steps=len(records))


def layout(run: TrainSession, name: str) -> Row:
    """CPU time and memory to lay out the three rows of Table 4, up to 16,384 ranks, in a fresh process."""
    seconds, size = _layout()
    if name == "layout/time":
        return measured(name, seconds, "405B, Table 4, imports included")
    return measured(name, size / 1e9, "largest size of the process")


@cache
def _layout() -> tuple[float, int]:
    return measure_layout()


def _recipe(shape: dict[str, Any], steps: int) -> Recipe:
    """Return a recipe over made-up token shards for so many steps."""
    plain = stream_recipe(SEQ * SEQUENCES * steps, SEQ).model_dump(mode="json", by_alias=True, exclude_none=True)
    for stage in plain["stages"]:
        stage["batch"] = f"{SEQ * SEQUENCES} tokens"
    return Recipe.model_validate({**plain, "compute": "fp32", "model": Model.model_validate(shape).model_dump()})


def _job(folder: Path, shape: dict[str, Any], steps: int) -> Path:
    """Write tokens, recipe and job file into `folder`; return the job file."""
    folder.mkdir(parents=True)
    make_shards(folder / "tokens", DOCUMENTS, empty=False)
    recipe = _recipe(shape, steps)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    fields: dict[str, Any] = {"recipe": folder / "recipe.yaml", "tokens": folder / "tokens", "work": folder / "work"}
    job = TrainJob(stage=recipe.stages[0].name, micro_batch=SEQUENCES, device="cpu", **fields)
    (folder / "job.json").write_text(job.model_dump_json())
    return folder / "job.json"
