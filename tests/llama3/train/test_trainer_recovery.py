"""Death at any moment, damaged checkpoints, other numbers of processes: the run must come out the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from herd.llama3.recipe.schema import Recipe
from herd.storage.lease import folder_lease
from tests.dist import run
from tests.llama3.train.train_samples import (
    STEP,
    job,
    losses,
    output,
    recipe,
    records,
    stages,
    train,
    train_until_signal,
    weights,
    work,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    path = job(folder, averaging())
    assert run(1, train, path) == [0]
    return path


def averaging() -> Recipe:
    """A stage that averages, so that the running sum must survive too."""
    return recipe(precision="bf16", stages=[stages(12)[0] | {"weight_averaging": 4}])


def assert_same(path: Path, undisturbed: Path) -> None:
    assert losses(path) == losses(undisturbed)
    assert weights(path) == weights(undisturbed)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage that died in its eighth step, with checkpoints after three and six."""
    path = job(tmp_path_factory.mktemp("interrupted"), averaging())
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 8, True)
    return path


def copied(interrupted: Path, folder: Path) -> Path:
    """Return a job in `folder` that goes on where `interrupted` died."""
    path = job(folder, averaging())
    shutil.copytree(work(interrupted), work(path))
    return path


def test_killed_in_a_step_gives_the_same_bits(undisturbed: Path, interrupted: Path, tmp_path: Path) -> None:
    path = copied(interrupted, tmp_path)
    assert run(1, train, path) == [0]
    assert_same(path, undisturbed)
    assert not list((work(path) / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "calls", "after"),
    [
        ("torch.optim:AdamW.step", 2, True),  # before any checkpoint
        ("herd.llama3.train.checkpoint.manager:Checkpoints.begin", 2, False),
        ("herd.llama3.train.checkpoint.manager:Checkpoints.begin", 2, True),
        ("herd.llama3.train.checkpoint.manifest:write_atomic", 2, False),
        ("herd.llama3.train.checkpoint.manifest:write_atomic", 2, True),
        ("herd.llama3.train.checkpoint.manager:Checkpoints._prune", 2, False),  # committed, older ones not yet deleted
        ("herd.llama3.train.checkpoint.storage:sync_folder", 2, False),
        ("shutil:rmtree", 2, False),  # while an older one is deleted
        ("herd.llama3.train.trainer:save_model", 1, False),
        ("herd.llama3.train.trainer:to_parquet", 1, True),
        ("herd.llama3.train.trainer:sync_folder", 2, False),  # result is in its place
    ],
)
@pytest.mark.fault("F1", "F2")
def test_killed_anywhere_gives_the_same_bits(
    target: str, calls: int, after: bool, undisturbed: Path, tmp_path: Path
) -> None:
    path = job(tmp_path, averaging())
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_until_signal, path, signal.SIGKILL, target, calls, after)
    assert run(1, train, path) == [0]
    assert_same(path, undisturbed)
    assert not list((work(path) / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_killed_process_from_outside(undisturbed: Path, tmp_path: Path) -> None:
    """The real command, killed at a moment nobody chose, twice; each restart says what it cost."""
    path = job(tmp_path, averaging())
    for seen in (2, 9):
        process = subprocess.Popen(
            [sys.executable, "-m", "herd.llama3.train.main", str(path)], stdout=subprocess.DEVNULL
        )
        while process.poll() is None and len(records(path)) < seen:
            time.sleep(0.002)
        process.kill()
        process.wait()
    done = subprocess.run([sys.executable, "-m", "herd.llama3.train.main", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(path, undisturbed)
    told = [record.metrics for record in records(path) if "recovery/restarts" in record.metrics]
    assert told[-1]["recovery/restarts"] == 2
    assert all(values.get("recovery/replay_max_abs_diff", 0.0) == 0.0 for values in told)
    assert len((work(path) / "attempts.jsonl").read_text().splitlines()) == 3


def test_replay_is_compared_with_the_journal(undisturbed: Path, interrupted: Path, tmp_path: Path) -> None:
    path = copied(interrupted, tmp_path)
    journal = work(path) / "journal.jsonl"
    *before, last = journal.read_text().splitlines()
    record = json.loads(last)
    record["metrics"]["train/loss"] += 0.25  # as if the machine had computed something else the first time
    journal.write_text("\n".join([*before, json.dumps(record), ""]))
    assert run(1, train, path) == [0]
    values = records(path)[len(before) + 1].metrics
    assert values["recovery/lost_tokens"] == (len(before) + 1 - 6) * STEP
    assert values["recovery/replay_max_abs_diff"] == pytest.approx(0.25)
    assert weights(path) == weights(undisturbed)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "flip": (lambda file: flip(file), "has changed since it was written"),
    "truncate": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes, "),
    "missing": (lambda file: file.unlink(), "is missing"),
    "manifest": (lambda file: flip(file.with_name("manifest.json")), "manifest.json: "),
    "no manifest": (lambda file: file.with_name("manifest.json").unlink(), "manifest.json: cannot be read"),
    "foreign": (
        lambda file: shutil.copy(file, file.with_name("x.safetensors")),
        "x.safetensors: is not in the manifest",
    ),
}


@pytest.mark.parametrize("damage", ["flip", *(pytest.param(name, marks=pytest.mark.slow) for name in list(DAMAGE)[1:])])
@pytest.mark.fault("F3")
def test_damaged_checkpoint_is_passed_over_by_name(
    damage: str, undisturbed: Path, interrupted: Path, tmp_path: Path
) -> None:
    path = copied(interrupted, tmp_path)
    newest = work(path) / "checkpoints" / f"{6 * STEP:018}"
    do, reason = DAMAGE[damage]
    do(next(newest.glob("*.safetensors")))
    assert run(1, train, path) == [0]
    log = output(path)
    assert f"checkpoint skipped: {newest}" in log
    assert reason in log
    assert f"from checkpoint {3 * STEP:018}" in log
    assert (newest.parent / f".damaged-{newest.name}").is_dir()
    assert_same(path, undisturbed)


def test_a_stage_without_a_good_checkpoint_waits_to_be_told(
    undisturbed: Path, interrupted: Path, tmp_path: Path
) -> None:
    path = copied(interrupted, tmp_path)
    kept = sorted((work(path) / "checkpoints").iterdir())
    for folder in kept:
        flip(next(folder.glob("*.safetensors")))
    before = (work(path) / "journal.jsonl").read_bytes()
    assert run(1, train, path) == [2]
    last = output(path).strip().rpartition("trainer: ")[2]
    assert all(f"{folder}/" in last for folder in kept)
    assert "--restart-damaged" in last
    assert (work(path) / "journal.jsonl").read_bytes() == before
    assert run(1, train, job(tmp_path, averaging(), restart_damaged=True)) == [0]
    assert "initial weights of seed" in output(path)
    assert_same(path, undisturbed)


def test_damaged_parent_is_refused(tmp_path: Path) -> None:
    asked = recipe(stages=[stages(1)[0], stages(1)[0] | {"name": "anneal", "lr": "linear to 0"}])
    first = job(tmp_path, asked, name="main")
    assert run(1, train, first) == [0]
    state = work(first) / "result" / "state"
    second = job(tmp_path, asked, stage="anneal", name="anneal", parent=state)
    flip(next(state.glob("*.safetensors")))
    assert run(1, train, second) == [2]
    assert f"trainer: {state}" in output(second)


@pytest.mark.parametrize(("before", "after"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
@pytest.mark.fault("F23")
def test_resume_on_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    asked = recipe(stages=[stages(8)[0] | {"weight_averaging": 4}])
    plain, path = job(tmp_path, asked, name="plain"), job(tmp_path, asked, name="resharded")
    assert run(1, train, plain) == [0]
    with pytest.raises(RuntimeError):
        run(before, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 5, True)
    assert run(after, train, path) == [0] * after
    one, other = losses(plain), losses(path)
    assert one.keys() == other.keys()
    for position, values in one.items():
        assert other[position] == pytest.approx(values, rel=1e-11)
    kept = load_file(work(plain) / "result" / "model" / "model.safetensors")
    for name, value in load_file(work(path) / "result" / "model" / "model.safetensors").items():
        assert (value - kept[name]).abs().max() < 1e-9


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(tmp_path: Path) -> None:
    asked = recipe(precision="bf16", stages=stages(8))
    plain, path = job(tmp_path, asked, name="plain"), job(tmp_path, asked, name="killed")
    assert run(2, train, plain) == [0, 0]
    with pytest.raises(RuntimeError):
        run(2, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 7, False)
    assert run(2, train, path) == [0, 0]
    assert_same(path, plain)


@pytest.mark.fault("F11")
def test_sigterm_saves_and_leaves(undisturbed: Path, tmp_path: Path) -> None:
    path = job(tmp_path, averaging())
    assert run(1, train_until_signal, path, signal.SIGTERM, "herd.llama3.train.journal:Journal.add", 5, True) == [143]
    saved = {int(folder.name) for folder in (work(path) / "checkpoints").iterdir()}
    assert saved == {3 * STEP, 6 * STEP}  # the signal came after the last look of step 5: step 6 is whole
    assert records(path)[-1].position == 6 * STEP
    assert run(1, train, path) == [0]
    assert_same(path, undisturbed)
    assert records(path)[6].metrics["recovery/lost_tokens"] == 0


def test_second_trainer_is_refused_by_name(tmp_path: Path) -> None:
    path = job(tmp_path)
    with folder_lease(work(path), "stage main"):
        assert run(1, train, path) == [2]
    assert f"process {os.getpid()} on" in output(path)
    assert not (work(path) / "journal.jsonl").exists()


def test_complete_stage_is_left_alone(undisturbed: Path) -> None:
    before = weights(undisturbed)
    assert run(1, train, undisturbed) == [0]
    assert weights(undisturbed) == before
    assert len((work(undisturbed) / "attempts.jsonl").read_text().splitlines()) == 1


def test_not_a_number_stops_before_the_weights(tmp_path: Path) -> None:
    rate = {"peak": 1e200, "warmup": "0 steps", "cosine": {"to": 0, "over": "100 steps"}}
    path = job(tmp_path, recipe(lr=rate, checkpoint={"every": f"{STEP} tokens", "keep": {"last": 9}}))
    assert run(1, train, path) == [2]
    message = output(path)
    bad = records(path)[-1].position
    assert f"trainer: position {bad}: loss " in message
    assert bad < 12 * STEP
    assert not (work(path) / "result").exists()
    newest = max((work(path) / "checkpoints").iterdir())
    assert int(newest.name) <= bad


SHORT, LONG = (recipe(precision="bf16", stages=stages(steps)) for steps in (8, 10))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = job(tmp_path_factory.mktemp("plain"), LONG)
    assert run(1, train, path) == [0]
    return path


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage of eight steps that died in its sixth, with a checkpoint after three."""
    path = job(tmp_path_factory.mktemp("died"), SHORT)
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 6, True)
    return path


def test_the_past_may_not_change_and_the_first_differing_line_is_shown(died: Path) -> None:
    before = (work(died) / "journal.jsonl").read_bytes()
    path = job(died.parent, recipe(precision="fp32", stages=stages(8)))
    assert run(1, train, path) == [2]
    assert "- precision: bf16\n+ precision: fp32" in output(path)
    assert (work(path) / "journal.jsonl").read_bytes() == before


def test_the_future_may_change_while_a_stage_trains(died: Path, plain: Path) -> None:
    """The stage is made longer: as if it had been so from the start."""
    path = job(died.parent, LONG)
    assert run(1, train, path) == [0], output(path)
    assert_same(path, plain)
    left = [line for file in work(path).glob("abandoned-*.jsonl") for line in file.read_text().splitlines()]
    assert [json.loads(line)["position"] for line in left] == [4 * STEP, 5 * STEP]


@pytest.mark.slow
def test_a_finished_stage_that_is_made_longer_goes_on(plain: Path, tmp_path: Path) -> None:
    assert run(1, train, job(tmp_path, SHORT)) == [0]
    path = job(tmp_path, LONG)
    assert run(1, train, path) == [0], output(path)
    assert_same(path, plain)
