"""The supervisor's own part: it notices silence, counts fruitless attempts, and says what the last one said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama3.recipe.schedule import Schedule
from llama3.train.attempt import Outcome
from storage.artifact import Store
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import TerminalConsole
from tasks.failures import TrainingFailed
from tasks.follow import HUNG, Follower
from tasks.launch import LocalLauncher
from tasks.restart import rank_process
from tasks.runs import Runs
from tasks.step import Context
from tasks.tracking import Tracker
from tasks.train import Attempts
from tests.llama3.train.train_samples import STEP, job, recipe, records, stages, work

ASKED = recipe(stages=stages(4000))
SPAN = Schedule(ASKED).span("main")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    runs, cluster = Runs(Root.of(tmp_path)), Cluster(processes=2, attempts=2)
    record = runs.begin(ASKED, "code")
    tracker = Tracker(Root.of(tmp_path), "tiny")
    record.mlflow_run = tracker.open_run(record.name, {"herd.run": record.name}, {})
    return Context(ASKED, cluster, Store(tmp_path), runs, record, tracker, TerminalConsole(), ["main"])


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    with LocalLauncher(Cluster()) as made:
        yield made


def test_a_trainer_that_falls_silent_is_stopped(context: Context, launcher: LocalLauncher, tmp_path: Path) -> None:
    """One process alone: no peer waits for it."""
    path = job(tmp_path, ASKED)
    launch = launcher.start(path, 1, tmp_path / "logs" / "attempt-1")
    while len(records(path)) < 3:
        assert launch.poll() is None
        time.sleep(0.01)
    hung = rank_process(0)
    hung.suspend()
    with context.console.progress("main", SPAN.tokens) as line:
        follower = Follower(context, [context.record.mlflow_run], work(path) / "journal.jsonl", SPAN.steps, line)
        ended = follower.follow(launch, 0, 2.0)
    assert ended == Outcome(status=HUNG, words="no step for 2 s; it was stopped")
    assert follower.position >= 3 * STEP
    assert not hung.is_running()


def test_attempts_end_when_none_gets_further(
    context: Context, launcher: LocalLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job(tmp_path, ASKED)
    attempts = Attempts(context, SPAN, launcher)
    killed = Outcome(status=-9, words="rank 1 was killed by SIGKILL; the end of [x].log:\nlast line")
    for number in (1, 2, 3):
        attempts.start(path).stop()
        assert attempts.folder == context.folder / "logs" / "main" / f"attempt-{number}"
        if number < 3:
            attempts.ended(killed, progress=number == 2)  # the second got further, so the count begins anew
    attempts.ended(killed, progress=False)
    printed = capsys.readouterr().out
    assert "main: starts on 1 processes instead of 2; the data stay the same" in printed
    assert "main: the trainer died (status -9); starting it again" in printed
    assert "main: rank 1 was killed by SIGKILL; the end of [x].log:" in printed
    with pytest.raises(TrainingFailed, match=r"2 time\(s\) in a row .*attempt-3\):\nrank 1 was (.|\n)*last"):
        attempts.ended(killed, progress=False)
    full = Outcome(status=1, words="trainer: OSError: [Errno 28] No space left on device")
    with pytest.raises(OSError, match=r"No space left on device: .*attempt-3"):
        attempts.ended(full, progress=True)
