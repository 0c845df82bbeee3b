"""Traces of chosen steps, stacks of a hang, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.train.data_loader import Step
from herd.llama3.train.profiler import (
    HangStacks,
    Profile,
    Profiler,
    dump_flight,
    flight_environment,
    prepare,
    record_function,
)
from tests.dist import run

CPU = torch.device("cpu")
STEP = Step(0, 16, 16)
CONFIG = Model(layers=1, dim=32, ffn=64, heads=2, kv_heads=1, max_seq_len=64)


def traced(work: Path, profile: Profile | None, steps: int, rank: int = 0) -> None:
    """Train some steps under a profiler."""
    model = build_model(CONFIG, 64, 0, torch.float32, CPU)
    tokens = torch.arange(16).view(1, 16)
    profiler = Profiler(profile, work, rank, CPU)
    for number in range(steps):
        profiler.on_step_start(Step(16 * number, 16, 16), 0.0)
        with record_function("gradients"):
            model(tokens, None, tokens).sum().backward()
    profiler.on_train_end()


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file) as text:
        found: list[dict[str, Any]] = json.load(text)["traceEvents"]
    return found


def test_a_trace_of_the_steps_asked_for_names_our_operations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path, Profile(steps=(2, 2)), 6)
    file = tmp_path / "profile" / "rank-00000-step-000002.json.gz"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f" profile: {file} (ui.perfetto.dev)")
    names = [event.get("name") for event in events(file)]
    assert [name for name in names if str(name).startswith("herd: step")] == ["herd: step 2", "herd: step 3"]
    assert names.count("herd: gradients") == 2
    assert {"_TokenNLL", "_TokenNLLBackward", "aten::mm"} <= set(names)


def test_a_trace_that_the_end_of_training_cuts_short_is_written_too(tmp_path: Path) -> None:
    traced(tmp_path, Profile(steps=(1, 9), stacks=True), 3)
    (file,) = (tmp_path / "profile").iterdir()
    names = [str(event.get("name")) for event in events(file)]
    assert {"herd: step 1", "herd: step 2"} <= set(names)
    assert any("transformer.py" in name for name in names)  # lines of Python


def test_other_processes_and_other_steps_write_nothing(tmp_path: Path) -> None:
    traced(tmp_path, Profile(steps=(0, 1)), 2, rank=1)
    traced(tmp_path, Profile(steps=(5, 1)), 2)
    traced(tmp_path, None, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": [3, 0]}, "at least one step"),
        ({"steps": [-1, 2]}, "first from 0 on"),
        ({"memory": True}, "write steps"),
        ({"stacks": True}, "write steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Profile.model_validate(fields)


def test_memory_history_needs_a_device_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile\.memory: needs a CUDA device, this one is cpu"):
        Profiler(Profile(steps=(0, 1), memory=True), tmp_path, 0, CPU)


def test_the_flight_recorder_is_asked_for_under_both_names(tmp_path: Path) -> None:
    assert flight_environment(None, tmp_path) == flight_environment(Profile(), tmp_path) == {}
    asked = flight_environment(Profile(flight=2000), tmp_path)
    assert asked["TORCH_NCCL_TRACE_BUFFER_SIZE"] == asked["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert asked["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == str(tmp_path / "profile" / "flight-rank-")


def reduced(work: Path) -> str:
    """Take a collective or two and leave the flight recorder behind."""
    from herd.llama3.parallel.mesh import init_distributed

    asked = Profile(flight=10)
    prepare(asked, work)
    with init_distributed("cpu", 240) as world:
        for size in (3, 5):
            world.sum(torch.ones(size))
        path = dump_flight(asked, work, world.rank)
        assert path is not None
        return path.name


def test_the_flight_recorder_leaves_the_last_collectives_behind(tmp_path: Path) -> None:
    assert run(2, reduced, tmp_path) == ["flight-rank-00000.json", "flight-rank-00001.json"]
    for file in (tmp_path / "profile").iterdir():
        entries = json.loads(file.read_text())["entries"]
        sizes = [entry["input_sizes"] for entry in entries if entry["profiling_name"].endswith("all_reduce")]
        assert sizes == [[[3]], [[5]]]


def somewhere_deep(work: Path, by_signal: bool) -> str:
    """Hang for a while; return what was written to the log meanwhile."""
    log = work / "log"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    prepare(None, work)
    HangStacks(600.0).on_step_start(STEP, 0.0)
    stacks = HangStacks(600.0 if by_signal else 0.1)
    stacks.on_step_start(STEP, 0.0)
    if by_signal:
        os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 30
    while "somewhere_deep" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    stacks.on_train_end()
    return log.read_text()


def test_a_hang_shows_its_stacks_by_itself_and_on_request(tmp_path: Path) -> None:
    (alone,) = run(1, somewhere_deep, tmp_path, False)
    assert alone.startswith("Timeout (0:00:00.09")
    assert "in somewhere_deep" in alone
    (tmp_path / "log").unlink()
    (asked,) = run(1, somewhere_deep, tmp_path, True)
    assert "in somewhere_deep" in asked
    assert "Timeout" not in asked
