"""A real MLflow server that dies, hangs and comes back while a journal is followed: nothing waits, nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from herd.llama3.train import metrics
from herd.llama3.train.job import AttemptResult
from herd.llama3.train.journal import read_journal
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.runs.records import Runs
from herd.tasks.stages import backfill, follow
from herd.tasks.stages.backfill import catch_up
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.tracking import mlflow
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.tasks.mlflow_server import MlflowServer, mlflow_server, use
from tests.tasks.tracked_run import TrackedRun, points

pytestmark = pytest.mark.slow  # test_backfill.py has a run whose server never answered
WRITER = """
import sys, time, pathlib
from herd.llama3.train import metrics
from herd.llama3.train.journal import Journal, Record
folder, position = pathlib.Path(sys.argv[1]), 0
with Journal(folder / "journal.jsonl") as journal:
    while not (folder / "stop").exists():
        position += 256
        values = {metrics.LOSS: 1000 / position, metrics.STEP: position / 256, metrics.LEARNING_RATE: 1e-3}
        journal.add(Record(time.time(), position, values))
        time.sleep(0.02)
"""
STEPS = 2000


class Writer:
    """A process that writes a journal as a trainer does, until it is told to stop."""

    label = "writer"

    def __init__(self, folder: Path) -> None:
        self.logs = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)])

    def poll(self) -> AttemptResult | None:
        status = self.process.poll()
        return None if status is None else AttemptResult(status=status, message="")

    def waits(self) -> bool:
        return False

    def used_s(self) -> None:
        return None

    def stop(self) -> None:
        (self.logs / "stop").touch()
        self.process.wait()


class Followed:
    """A run whose stage is being followed by a thread."""

    def __init__(self, root: Root) -> None:
        run = TrackedRun(root)
        self.context = context = run.context
        tags = {**context.tags(), "kind": "checkpoint", "stage": "main", "artifact.key": "k" * 16}
        child = context.tracker.open_child(context.record.mlflow_run, context.record.name, tags)
        self.runs = [context.record.mlflow_run, child]
        self.writer = Writer(root.file("work", "main-0123"))
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.ended: AttemptResult | None = None
        self.thread.start()

    def _follow(self) -> None:
        journal = self.writer.logs / "journal.jsonl"
        with TerminalConsole().progress("main", STEPS * 256) as line:
            follower = JournalTailer(self.context, self.runs, journal, STEPS, line, STEPS * 256)
            self.ended = follower.follow(self.writer, 0, 600.0)

    def end(self) -> None:
        """Tell the writer to stop and wait until the follower has returned."""
        self.writer.stop()
        self.thread.join(60)
        assert self.ended == AttemptResult(status=0, message="")

    def check_complete(self) -> None:
        """Every record of the journal is in MLflow once, in both runs."""
        written = read_journal(self.writer.logs / "journal.jsonl")
        tracker = self.context.tracker
        for handle in self.runs:
            found = points(tracker, tracker.run_id(handle), metrics.LOSS)
            assert found == [(r.position, r.metrics[metrics.LOSS], round(r.time * 1000)) for r in written]


Start = Callable[[Root], Followed]


def await_(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def server(running: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    """The server, up again if the test before failed while it was down."""
    if running.process is None:
        running.start()
    use(monkeypatch, running.uri)
    monkeypatch.setattr(follow, "SEND_INTERVAL_S", 0.3)
    monkeypatch.setattr(mlflow, "PROBE_INTERVAL_S", 1.0)
    monkeypatch.setattr(backfill, "CATCH_UP_INTERVAL_S", 1.0)
    return running


@pytest.fixture
def follow_() -> Iterator[Start]:
    """Follows; whatever still writes at the end is stopped."""
    made: list[Followed] = []

    def start(root: Root) -> Followed:
        made.append(Followed(root))
        return made[-1]

    yield start
    for followed in made:
        followed.writer.stop()
        followed.thread.join(60)


@pytest.mark.fault("F15")
def test_a_killed_server_that_comes_back_has_every_point_once(
    server: MlflowServer, follow_: Callable[[Root], Followed], tmp_path: Path
) -> None:
    followed = follow_(Root.parse(tmp_path))
    tracker, record = followed.context.tracker, followed.context.record
    await_(lambda: tracker.series(followed.runs[0], metrics.LOSS))
    server.kill()
    await_(lambda: tracker.stale and Runs(Root.parse(tmp_path)).find(record.name).mlflow_stale)
    assert followed.thread.is_alive(), "the run goes on"
    server.start()
    await_(lambda: not record.mlflow_stale)
    followed.end()
    assert not tracker.stale
    assert tracker.complete == {followed.runs[1]}
    followed.check_complete()
    assert not Runs(Root.parse(tmp_path)).find(record.name).mlflow_stale


@pytest.mark.fault("F15")
def test_a_server_that_hangs_holds_nobody_up(
    server: MlflowServer, follow_: Callable[[Root], Followed], tmp_path: Path
) -> None:
    followed = follow_(Root.parse(tmp_path))
    tracker = followed.context.tracker
    await_(lambda: tracker.series(followed.runs[0], metrics.LOSS))
    server.signal(signal.SIGSTOP)
    try:
        await_(lambda: tracker.reach.away)
        followed.end()  # while the server hangs
        assert tracker.stale
        assert not tracker.complete
        tracker.set_tags(followed.runs[0], {"later": "yes"})
        handle = tracker.open_run("tiny-99", {}, {})
        assert tracker.run_id(handle) == ""
        assert not tracker.reach.wait(0, print)
    finally:
        server.signal(signal.SIGCONT)
    assert tracker.reach.wait(60, print)
    assert catch_up(followed.context)
    followed.check_complete()
    assert tracker.tags(followed.runs[0])["later"] == "yes", "tags of a run are written down before they are sent"


@pytest.mark.fault("F15")
def test_a_run_that_begins_without_a_server_is_there_when_it_starts(server: MlflowServer, tmp_path: Path) -> None:
    server.kill()
    run = TrackedRun(Root.parse(tmp_path), name="late")
    tracker, handle = run.context.tracker, run.context.record.mlflow_run
    run.tokens()
    assert tracker.run_id(handle) == ""
    server.start()
    assert tracker.reach.wait(60, print)
    assert catch_up(run.context)
    shown = MLflowTracker(Root.parse(tmp_path), "late").client.search_runs([tracker.experiment])
    assert sorted(run.info.run_name for run in shown) == ["late-1", "late-1 tokenize"]
