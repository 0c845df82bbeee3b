"""Rows about what stands around the steps of a run: checkpoints, restarts, the loader, layouts.

Checkpoints, layouts and restarts are measured by those who wrote them, in their own rooms; here they get a state, a job
and a row. Wall-clock time, so an idle machine is wanted, except for the layout.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch

from benchmarks.disk_speed import measure_checkpoint
from benchmarks.measure import NotMeasured
from benchmarks.ours.token_shards import VOCABULARY, make_shards, stream_recipe
from benchmarks.rows import Row, measured
from benchmarks.train_session import TrainSession
from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.parallel.check_layout import measure_layout
from herd.llama3.parallel.mesh import init_distributed
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.load import to_yaml
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Evaluate, Model
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.llama3.train import metrics
from herd.llama3.train.job import Attempt, AttemptResult, TrainJob
from herd.llama3.train.journal import Record, read_journal
from herd.llama3.train.state import Precision, TrainState
from herd.llama3.train.validation import AUTO_SHARE, FORWARD, pack_sequences

RANKS = 4
SEQ, SEQUENCES = 256, 8
"""Of a step of the runs measured here: 2,048 tokens."""
SHAPE = {"layers": 4, "dim": 192, "ffn": 672, "heads": 4, "kv_heads": 2, "max_seq_len": 1024, "tied_embeddings": True}
"""Of the model of the loader row: the smaller, the harder to hide reading behind its steps."""
SMALL = {**SHAPE, "layers": 2, "dim": 32, "ffn": 64}
"""Of the model that is restarted: what is measured is not its steps."""
STARTS = 5
DOCUMENTS = 2_000
HELD_OUT_TIMES = 3
"""Scorings of the run that measures what they cost."""
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
    shape = {"layers": 8, "dim": dim, "ffn": 7 * dim // 2, "heads": 8, "kv_heads": 4, "max_seq_len": 1024}
    recipe = _recipe(shape, 1)
    folder.mkdir()
    with init_distributed("cpu", 60) as world:
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


def rank_start(run: TrainSession, name: str) -> Row:
    """CPU seconds of a rank that an agent forks and that trains one step; the first one of the agent is not counted."""
    folder = run.settings.folder / "start"
    jobs = [_job(folder / str(number), SMALL, 1, vocabulary=1_000) for number in range(1 + STARTS)]
    attempts = [Attempt(job=job, logs=job.parent / "logs").model_dump_json() for job in jobs]
    command = [sys.executable, "-m", "herd.llama3.train.launch", "--serve"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    spent = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment) as agent:
        assert agent.stdin is not None
        for attempt in attempts:
            before = psutil.Process(agent.pid).cpu_times()
            print(attempt, file=agent.stdin, flush=True)
            while not (outcome := Attempt.model_validate_json(attempt).outcome).exists():
                if agent.poll() is not None:
                    raise RuntimeError(f"the agent ended with {agent.returncode}")
                time.sleep(0.01)
            if AttemptResult.model_validate_json(outcome.read_text()).status:
                raise RuntimeError(outcome.read_text())
            after = psutil.Process(agent.pid).cpu_times()
            spent.append(sum(after[2:4]) - sum(before[2:4]))
    return measured(name, median(spent[1:]), f"median of {STARTS}, a step and its checkpoint included")


def loader(run: TrainSession, name: str) -> Row:
    """Share of the steps' time that waits for data, after the first steps."""
    records = _trained(_job(run.settings.folder / "loader", _shape(run), run.size.steps))[STEPS_OUT:]
    waited, took = (sum(record.metrics[f"time/{key}_s"] for record in records) for key in ("data_wait", "step"))
    each_waited, each_took = (1e3 * seconds / len(records) for seconds in (waited, took))
    note = f"{each_waited:.2f} ms of {each_took:,.0f} per step of {SEQ * SEQUENCES:,} tokens"
    return measured(name, 100 * waited / took, note, steps=len(records))


def held_out(run: TrainSession, name: str) -> Row:
    """Share of the training time that scoring held-out documents takes at the interval that `every: auto` gives.

    A run of the benchmark is shorter than that interval, so it scores more often, and time per scoring is divided by
    the time of the steps between two of them.
    """
    often = f"{SEQ * SEQUENCES * max(1, run.size.steps // HELD_OUT_TIMES)} tokens"
    job = _job(run.settings.folder / "held-out", _shape(run), run.size.steps, evaluate={"val_interval": often})
    held = pack_sequences(_documents(), Tokenizer([bytes([value]) for value in range(256)]), SEQ)
    work = TrainJob.model_validate_json(job.read_text()).work
    work.mkdir()
    held.write(work)
    records = _trained(job)[STEPS_OUT:]
    steps = [record.metrics[metrics.STEP_S] for record in records]
    scored = [record.metrics[metrics.HELD_OUT_S] for record in records if metrics.HELD_OUT_S in record.metrics]
    tokens = held.columns["tokens_BS"].size
    between = math.ceil(tokens * FORWARD / AUTO_SHARE) / (SEQ * SEQUENCES) * mean(steps)
    note = f"{mean(scored):.2f} s for {tokens:,} tokens, {between:,.0f} s between two"
    return measured(name, 100 * mean(scored) / between, note, scorings=len(scored))


def _documents() -> list[ValidationDocument]:
    """Return as many documents of each domain as a recipe scores, all longer than a row."""
    texts = (f"{number:05} " * SEQ for number in range(len(DOMAINS) * Evaluate().val_documents))
    return [ValidationDocument(str(number), DOMAINS[number % len(DOMAINS)], text) for number, text in enumerate(texts)]


def _shape(run: TrainSession) -> dict[str, Any]:
    return SHAPE if run.settings.size != "tiny" else SMALL


def _trained(job: Path) -> list[Record]:
    """Run the trainer on one thread; return its journal."""
    command = [sys.executable, "-m", "herd.llama3.train.main", str(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"the trainer ended with {ended.returncode}: {ended.stdout.strip()}")
    return read_journal(job.parent / "work" / "journal.jsonl")


def layout(run: TrainSession, name: str) -> Row:
    """CPU time and memory to lay out the three rows of Table 4, up to 16,384 ranks, in a fresh process."""
    seconds, size = _layout()
    if name == "layout/time":
        return measured(name, seconds, "405B, Table 4, imports included")
    return measured(name, size / 1e9, "largest size of the process")


@cache
def _layout() -> tuple[float, int]:
    return measure_layout()


def _recipe(shape: dict[str, Any], steps: int, **more: Any) -> Recipe:
    """Return a recipe over made-up token shards for so many steps, with `more` sections."""
    plain = stream_recipe(SEQ * SEQUENCES * steps, SEQ).model_dump(mode="json", by_alias=True, exclude_none=True)
    for stage in plain["stages"]:
        stage["batch"] = f"{SEQ * SEQUENCES} tokens"
    return Recipe.model_validate(
        {**plain, "precision": "fp32", "model": Model.model_validate(shape).model_dump(), **more}
    )


def _job(folder: Path, shape: dict[str, Any], steps: int, vocabulary: int = VOCABULARY, **more: Any) -> Path:
    """Write tokens, recipe and job file into `folder`; return the job file."""
    folder.mkdir(parents=True)
    make_shards(folder / "tokens", DOCUMENTS, False, vocabulary)
    recipe = _recipe(shape, steps, **more)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    fields: dict[str, Any] = {"recipe": folder / "recipe.yaml", "tokens": folder / "tokens", "work": folder / "work"}
    job = TrainJob(stage=recipe.stages[0].name, micro_batch=SEQUENCES, device="cpu", **fields)
    (folder / "job.json").write_text(job.model_dump_json())
    return folder / "job.json"
