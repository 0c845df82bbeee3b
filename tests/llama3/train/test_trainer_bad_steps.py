"""Bad steps in the trainer as a whole: nothing of them is kept, and what follows is the same after every interruption.

The fault is a gradient that comes out wrong for the batches at certain positions, however often they are trained on.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.journal import SkippedRange, SkippedRanges, read_rewinds
from tests.dist import run
from tests.llama3.train.train_samples import (
    STEP,
    job,
    output,
    recipe,
    records,
    stages,
    train,
    train_until_signal,
    weights,
    work,
)

NAN = float("nan")
ROLLBACK = {"policy": "rollback", "window": 8, "sigma": 50, "skip_window_steps": 2}


def asked(**changes: Any) -> Recipe:
    return recipe(stages=stages(16), **changes)


def poison(steps: list[int], factor: float) -> None:
    """From now on multiply a gradient by `factor` in those steps."""
    engine: Any = importlib.import_module("herd.llama3.train.train_step").Engine
    train_step = engine.train_step

    def poisoned(self: Any, step: Any, *arguments: Any) -> Any:
        bad = step.start in [number * STEP for number in steps]
        weight = self.state.parameters["norm.weight"]
        hook = weight.register_hook(lambda gradient: gradient * factor) if bad else None
        try:
            return train_step(self, step, *arguments)
        finally:
            if hook is not None:
                hook.remove()

    engine.train_step = poisoned


def train_poisoned(path: Path, steps: list[int], factor: float) -> int:
    poison(steps, factor)
    return train(path)


def train_poisoned_until_signal(
    path: Path, steps: list[int], factor: float, target: str, after: bool, calls: int = 1
) -> int:
    poison(steps, factor)
    return train_until_signal(path, signal.SIGKILL, target, calls, after)


def skipped(path: Path) -> list[int]:
    """Return the numbers of the steps that changed nothing."""
    return [r.position // STEP - 1 for r in records(path) if "train/skipped_steps" in r.metrics]


def pass_over(path: Path, *steps: int) -> None:
    """Let the job leave out the batches of these steps."""
    work(path).mkdir()
    skips = (SkippedRange(start=n * STEP, end=(n + 1) * STEP, spike=n * STEP, reason="") for n in steps)
    SkippedRanges(tuple(skips)).write(work(path))


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = job(tmp_path_factory.mktemp("skipping"), asked(non_finite="skip"))
    assert run(1, train_poisoned, path, [3, 9], NAN) == [0]
    return path


@pytest.mark.fault("F7")
def test_not_finite_is_skipped_and_the_run_goes_on(skipping: Path) -> None:
    path = skipping
    assert skipped(path) == [3, 9]
    assert [r.position for r in records(path)] == [STEP * (number + 1) for number in range(16)]
    assert records(path)[9].metrics["train/skipped_tokens"] == 2 * STEP
    for number in (3, 9):
        incident = json.loads((work(path) / "result" / "incidents" / f"{number * STEP:018}.json").read_text())
        assert (incident["outcome"], incident["grad_norm"]) == ("skipped", "nan")
        assert incident["documents"]
        assert f"position {number * STEP}: loss " in output(path)
    assert all(value.isfinite().all() for value in load_file(work(path) / "result/model/model.safetensors").values())


def test_a_skipped_step_changes_nothing(skipping: Path, tmp_path: Path) -> None:
    """The run is the one whose schedule and data go on, but whose weights never saw the batches."""
    plain = job(tmp_path, asked(non_finite="skip"))
    pass_over(plain, 3, 9)
    assert run(1, train, plain) == [0]
    assert weights(skipping) == weights(plain)


@pytest.mark.slow
def test_skips_are_decided_again_alike_after_a_restart(tmp_path: Path) -> None:
    settings = {"non_finite": "skip", "spikes": {**ROLLBACK, "policy": "skip"}}
    plain, path = job(tmp_path, asked(**settings), name="plain"), job(tmp_path, asked(**settings))
    assert run(1, train_poisoned, plain, [10, 13], 1e6) == [0]
    with pytest.raises(RuntimeError, match="died"):
        run(
            1,
            train_poisoned_until_signal,
            path,
            [10, 13],
            1e6,
            "herd.llama3.train.trainer:Trainer.commit_result",
            False,
        )
    assert run(1, train_poisoned, path, [10, 13], 1e6) == [0]
    assert skipped(path) == skipped(plain) == [10, 13]
    assert weights(path) == weights(plain)
    assert {r.metrics.get("recovery/replay_max_abs_diff", 0.0) for r in records(path)} == {0.0}


@pytest.mark.parametrize(
    ("settings", "factor", "words"),
    [
        ({}, NAN, "not finite; non_finite is stop"),
        pytest.param({"spikes": {**ROLLBACK, "policy": "stop"}}, 1e6, "spikes.policy is stop", marks=pytest.mark.slow),
        (
            {"spikes": {**ROLLBACK, "policy": "skip", "max_bad_steps": 1}},
            1e6,
            "bad step 1 of stage main, spikes.max_bad_steps is 1",
        ),
    ],
)
def test_a_stop_names_the_documents(settings: dict[str, Any], factor: float, words: str, tmp_path: Path) -> None:
    path = job(tmp_path, asked(**settings))
    assert run(1, train_poisoned, path, [10], factor) == [2]
    (incident,) = (work(path) / "incidents").iterdir()
    last = output(path).splitlines()[-1]
    assert last.startswith(f"trainer: position {10 * STEP}: loss ")
    assert words in last
    assert str(incident) in last
    assert not (work(path) / "result").exists()


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = job(tmp_path_factory.mktemp("rolled"), asked(spikes=ROLLBACK))
    assert run(1, train_poisoned, path, [10], 1e6) == [0]
    return path


@pytest.mark.fault("F8")
def test_a_rollback_passes_over_the_data_around_the_spike(rolled_back: Path) -> None:
    assert skipped(rolled_back) == [8, 9, 10, 11, 12]
    assert [r.position for r in records(rolled_back)] == [STEP * (number + 1) for number in range(16)]
    (rewind,) = read_rewinds(work(rolled_back) / "journal.jsonl")
    assert (rewind.position, rewind.until) == (8 * STEP, 13 * STEP)
    told = records(rolled_back)[8].metrics
    assert told["recovery/rollbacks"] == 1.0
    assert told["recovery/replay_max_abs_diff"] == 0.0  # from the checkpoint at 6 to 8: trained again, the same
    assert told["recovery/lost_tokens"] >= 5 * STEP
    (skip,) = SkippedRanges.read(work(rolled_back) / "result").ranges
    assert (skip.start, skip.end, skip.spike) == (8 * STEP, 13 * STEP, 10 * STEP)
    assert f"position {10 * STEP}: loss " in output(rolled_back)
    (incident,) = (work(rolled_back) / "result" / "incidents").iterdir()
    assert json.loads(incident.read_text())["outcome"] == "roll back"


def test_tokens_recipe_and_skips_decide_the_result(rolled_back: Path, tmp_path: Path) -> None:
    """A run that is given the spans from the start, and never sees the fault, has the same weights."""
    path = job(tmp_path, asked(spikes=ROLLBACK))
    work(path).mkdir()
    SkippedRanges.read(work(rolled_back)).write(work(path))
    assert run(1, train, path) == [0]
    assert weights(path) == weights(rolled_back)


@pytest.mark.parametrize(
    ("target", "after"),
    [
        ("herd.llama3.train.journal:SkippedRanges.write", True),
        *(
            pytest.param(*moment, marks=pytest.mark.slow)
            for moment in [
                ("herd.llama3.train.loss_spikes:write_incident", True),
                ("herd.llama3.train.journal:SkippedRanges.write", False),
                ("herd.llama3.train.checkpoint.storage:LocalCheckpointStore.supersede", True),
                ("herd.llama3.train.metrics_log:Recorder.rewind", False),
                ("herd.llama3.train.callbacks:StepResult.excluded", False),
                ("herd.llama3.train.trainer:Trainer.commit_result", False),
            ]
        ),
    ],
)
def test_a_rollback_killed_at_any_moment_gives_the_same_weights(
    target: str, after: bool, rolled_back: Path, tmp_path: Path
) -> None:
    path = job(tmp_path, asked(spikes=ROLLBACK))
    calls = 2 if target.endswith("excluded") else 1  # the first one is in the journal
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_poisoned_until_signal, path, [10], 1e6, target, after, calls)
    assert run(1, train_poisoned, path, [10], 1e6) == [0]
    assert weights(path) == weights(rolled_back)
    assert skipped(path) == [8, 9, 10, 11, 12]
    assert [r.position for r in records(path)] == [STEP * (number + 1) for number in range(16)]
    assert losses_of(path) == losses_of(rolled_back)


@pytest.mark.parametrize(
    "checkpoint",
    [{"every": f"{STEP} tokens", "keep": {"last": 1}}, pytest.param({"every": "1 h"}, marks=pytest.mark.slow)],
)
def test_a_rollback_has_a_checkpoint_to_go_back_to(
    checkpoint: dict[str, Any], rolled_back: Path, tmp_path: Path
) -> None:
    """However few are kept, one is older than the window; before the first save it is that of the stage's start."""
    path = job(tmp_path, asked(spikes=ROLLBACK, checkpoint=checkpoint))
    assert run(1, train_poisoned, path, [10], 1e6) == [0]
    assert weights(path) == weights(rolled_back)


def train_poisoned_and_flip(path: Path, steps: list[int], factor: float) -> int:
    """Train; a bit of each checkpoint before the spike flips once the spike is seen."""
    storage: Any = importlib.import_module("herd.llama3.train.loss_spikes")
    write_incident = storage.write_incident

    def flip(*arguments: Any) -> Any:
        for number in range(2, 9):  # the first is being deleted
            for file in (work(path) / "checkpoints" / f"{number * STEP:018}").glob("*.safetensors"):
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
        return write_incident(*arguments)

    storage.write_incident = flip
    return train_poisoned(path, steps, factor)


def test_a_rollback_to_damaged_checkpoints_ends_the_run_and_keeps_all(tmp_path: Path) -> None:
    kept = {"every": f"{STEP} tokens", "keep": {"last": 9}}
    path = job(tmp_path, asked(spikes=ROLLBACK, checkpoint=kept))
    assert run(1, train_poisoned_and_flip, path, [10], 1e6) == [2]
    assert "spikes.policy=skip" in output(path)
    assert not (work(path) / "skips.json").exists()
    positions = [int(folder.name) // STEP for folder in sorted((work(path) / "checkpoints").glob("[0-9]*"))]
    assert positions == [*range(2, 11)]
    job(tmp_path, asked(spikes={**ROLLBACK, "policy": "skip"}, checkpoint=kept))
    assert run(1, train_poisoned, path, [10], 1e6) == [0]
    assert skipped(path) == [10]


def losses_of(path: Path) -> dict[int, float]:
    return {r.position: r.metrics["train/loss"] for r in records(path) if "train/loss" in r.metrics}


def sick_rank(path: Path, steps: list[int]) -> int:
    """Train; the last rank's part of the gradient norm is not finite in those steps."""
    engine: Any = importlib.import_module("herd.llama3.train.train_step")
    number, real = -1, engine.squared_norm

    def sick(parameters: Any, exact: bool) -> Any:
        nonlocal number
        number += 1
        squares = real(parameters, exact)
        return squares * math.inf if number in steps and os.environ["RANK"] == "1" else squares

    engine.squared_norm = sick
    return train(path)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_processes_skip_what_one_finds_bad(deterministic: bool, tmp_path: Path) -> None:
    path, plain = (
        job(tmp_path, asked(non_finite="skip"), name=name, deterministic=deterministic) for name in ("work", "plain")
    )
    assert run(2, sick_rank, path, [4]) == [0, 0]
    assert skipped(path) == [4]
    pass_over(plain, 4)
    assert run(2, train, plain) == [0, 0]
    assert weights(path) == weights(plain)
    assert torch.tensor(list(losses_of(path).values())).isfinite().all()
