"""Killed anywhere and started again, a run ends in the same bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import psutil
import pytest

from herd.storage.artifact import Store
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import (
    Herd,
    NewHerd,
    bytes_made,
    copy_artifacts,
    journal_lines,
    kill_all,
    lies,
    record,
    trainers,
    wait_for,
)
from tests.e2e.test_chain import client


def test_killed_while_it_trains_it_goes_on_to_the_same_bytes(
    herd: Herd, undisturbed: dict[str, str], new_herd: NewHerd, tmp_path: Path
) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root, "checkpoint/tiny-ramp-*")
    process = again.start("run", again.recipe, "--until", "main")
    # some steps after its first checkpoint, some before its next; a folder with a hidden name is not committed yet
    wait_for(lambda: any((again.root / "work").glob("main-*/checkpoints/[0-9]*/manifest.json")), "a checkpoint")
    kill_all(process.pid)
    reached = journal_lines(again.root, "main")
    assert 0 < reached < 32
    printed = again("run", again.recipe, "--until", "main")
    assert "continuing tiny-1, which did not finish" in printed
    ended = record(again, "tiny-1")
    assert ended.attempts == 2
    assert ended.steps["main"].outcome.startswith("resumed at ")
    assert (
        open_store(Root.parse(again.root)).load(ended.steps["main"].artifact).metadata["model_sha256"]
        == undisturbed["main"]
    )
    assert lies(again) == []


@pytest.mark.slow
def test_checkpoints_in_progress_are_scored_beside_a_training_that_they_do_not_change(
    herd: Herd, undisturbed: dict[str, str], new_herd: NewHerd, tmp_path: Path
) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root, "checkpoint/tiny-ramp-*")
    asked = "evaluate.every=8Ki", "evaluate.mean_of=2", "checkpoint.every=4Ki"
    process = again.start(
        "run", again.recipe, "--until", "main", *chain.from_iterable(("--set", each) for each in asked)
    )
    # of the two pins one is for the mean
    pins = wait_for(lambda: sorted((again.root / "work").glob("main-*/pins/[0-9]*"))[1:], "a checkpoint that waits")
    ranks = trainers(process.pid)
    for rank in ranks:
        rank.suspend()  # the stage must not end before the score
    position = int(pins[-1].name.partition(".")[0])
    printed = again("eval", "waiting", "tiny-1")
    assert f"{position:,} (mean of 2 checkpoints): eval/arithmetic" in printed
    assert "eval/bpb" in printed
    assert "no checkpoint of main waits" in again("eval", "waiting")
    for rank in ranks:
        rank.resume()
    printed, _ = process.communicate(timeout=560)
    assert process.returncode == 0, printed
    run = record(again, "tiny-1")
    store = open_store(Root.parse(again.root))
    assert store.load(run.steps["main"].artifact).metadata["model_sha256"] == undisturbed["main"]
    scored = [evaluation for evaluation in store.all("evaluation") if evaluation.metadata.get("position") == position]
    history = client(again).get_metric_history(run.mlflow_run, "eval/bpb")
    assert [(point.step, point.value) for point in history if point.step == position] == [
        (position, scored[0].metadata["eval/bpb"])
    ]


@pytest.mark.slow
def test_the_next_stage_trains_while_the_one_before_is_evaluated(
    herd: Herd, undisturbed: dict[str, str], new_herd: NewHerd, tmp_path: Path
) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root)
    again("run", again.recipe, "--set", "evaluate.next_stage=overlap", "--set", "evaluate.after=[ramp, main]")
    run = record(again, "tiny-1")
    assert (run.state, run.verdict) == ("finished", "promoted")
    assert bytes_made(Root.parse(again.root), "tiny-1") == undisturbed
    spans = {}
    for step in ("evaluate-ramp", "main", "evaluate-main", "anneal", "evaluate-anneal"):
        shown = client(again).get_run(run.steps[step].mlflow_run).info
        spans[step] = (shown.start_time, shown.end_time)
    for evaluation, training in (("evaluate-ramp", "main"), ("evaluate-main", "anneal")):
        assert spans[training][0] < spans[evaluation][1]
        assert spans[evaluation][0] < spans[training][1]
    assert spans["anneal"][1] <= spans["evaluate-anneal"][0]


@pytest.mark.slow
def test_kill_everything_again_and_again(undisturbed: dict[str, str], new_herd: NewHerd, tmp_path: Path) -> None:
    again = new_herd(tmp_path / "root")
    points: list[Callable[[], bool]] = [
        lambda: any((again.root / "work").glob("collect-*/text/*")),
        lambda: any((again.root / "work").glob("curate-*/exact/*/*")),
        lambda: (again.root / "tokens").exists() and journal_lines(again.root, "main") >= 6,
        lambda: any((again.root / "work").glob("main-*/checkpoints/*")),
        lambda: any((again.root / "work").glob("anneal-*/result*")),
    ]
    for point in points:
        process = again.start("run", again.recipe)
        while not point() and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is None:
            kill_all(process.pid)
    printed = again("run", again.recipe)
    assert "continuing tiny-1, which did not finish" in printed
    assert len(Runs(Root.parse(again.root)).all()) == 1
    assert record(again, "tiny-1").attempts >= 4
    assert lies(again) == []
    assert bytes_made(Root.parse(again.root), "tiny-1") == undisturbed


@pytest.mark.slow
@pytest.mark.fault("F1")
def test_kill_one_trainer(herd: Herd, undisturbed: dict[str, str], new_herd: NewHerd, tmp_path: Path) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root, "checkpoint/tiny-ramp-*")
    process = again.start("run", again.recipe)
    wait_for(lambda: journal_lines(again.root, "main") >= 5, "training")
    (trainer,) = trainers(process.pid)
    trainer.kill()
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == 0, printed
    assert "main: the trainer died (killed, status -9); starting it again" in printed
    assert "main: rank 0 was killed by SIGKILL" in printed
    logs = again.root / "runs" / "tiny-1" / "logs" / "main"
    assert [path.name for path in sorted(logs.glob("attempt-*/rank-*"))] == ["rank-0.log", "rank-0.log"]
    assert bytes_made(Root.parse(again.root), "tiny-1") == undisturbed


@pytest.mark.slow
def test_no_trainer_outlives_its_supervisor(herd: Herd, new_herd: NewHerd, tmp_path: Path) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root)
    process = again.start("run", again.recipe)
    wait_for(lambda: journal_lines(again.root, "ramp") >= 1, "training")
    left = trainers(process.pid)
    assert left
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(left, timeout=25)
    again.stop_all()
    assert not alive


@pytest.mark.slow
@pytest.mark.fault("F11")
@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGINT, 130, "stopped; the same command continues where it stopped"),
        (signal.SIGTERM, -signal.SIGTERM, "stopped by herd stop or SIGTERM; herd rerun tiny-1 continues it"),
    ],
)
def test_stop_is_recorded_and_continued(
    herd: Herd, new_herd: NewHerd, tmp_path: Path, number: int, status: int, line: str
) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root, "checkpoint/tiny-ramp-*")
    process = again.start("run", again.recipe)
    wait_for(lambda: journal_lines(again.root, "main") >= 2, "training")
    process.send_signal(number)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == status, printed
    assert printed.count("stopped") == 1 + line.count("it stopped"), printed
    assert line in printed
    assert record(again, "tiny-1").state == "interrupted"


@pytest.mark.slow
@pytest.mark.fault("F6")
def test_a_full_disk_loses_nothing(new_herd: NewHerd, tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    if os.system(f"mount -t tmpfs -o size=24m tmpfs {root} 2>/dev/null"):
        pytest.skip("cannot mount a small file system here (needs root)")
    try:
        herd = new_herd(root)
        (root / "filler").write_bytes(b"x" * 18_000_000)
        printed = herd("run", herd.recipe, status=1)
        assert "no space left" in printed.lower()
        assert not list((root / "checkpoint").glob("*")) or all(
            Store(root).load(f"checkpoint/{path.name}") for path in (root / "checkpoint").iterdir()
        )
    finally:
        os.system(f"umount -l {root}")
