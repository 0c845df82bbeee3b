"""A stage whose attempts end in any order: as many are started as the cluster allows in a row without progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.job import TERMINATED, AttemptResult
from herd.llama3.train.journal import Journal, Record
from herd.llama3.train.main import REFUSED
from herd.storage.artifact import Store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.errors import TrainingFailed
from herd.tasks.runs.records import Runs
from herd.tasks.stages import train
from herd.tasks.stages.alerts import read_alerts
from herd.tasks.stages.evaluate import CheckpointOffers
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.llama3.train.train_samples import STEP, recipe, stages

RECIPE = recipe(stages=stages(4000))
SPAN = Schedule(RECIPE).span("main")
FULL = "trainer: OSError: [Errno 28] No space left on device"


class End(NamedTuple):
    """How an attempt ends."""

    status: int
    steps: int = 0
    message: str = ""


GOES_ON = [End(-9), End(-9, 1), End(TERMINATED, 1), End(TERMINATED)]
LAST = [End(0), End(REFUSED, 1), End(1, 1, FULL)]


class Launched:
    """An attempt that has ended by the time it is looked at."""

    label = "attempt"

    def __init__(self, end: End, logs: Path, work: Path, position: int) -> None:
        self.end, self.logs = end, logs
        logs.mkdir(parents=True)
        with Journal(work / "journal.jsonl") as journal:
            for step in range(1, end.steps + 1):
                journal.add(Record(1.0 * step, (position + step) * STEP, {metrics.LOSS: 2.0, metrics.STEP: step}))

    def poll(self) -> AttemptResult:
        return AttemptResult(status=self.end.status, message=self.end.message)

    def waits(self) -> bool:
        return False

    def used_s(self) -> None:
        return None

    def stop(self) -> None:
        return None


class Launcher:
    """Starts attempts that end as `ends` says; an attempt of an earlier supervisor may still run."""

    def __init__(self, ends: Iterator[End], work: Path, left: bool) -> None:
        self.ends, self.work, self.left = ends, work, left
        self.started = self.position = 0

    def capacity(self) -> int:
        return 1

    def live(self, job: Path) -> Launched | None:
        if not self.left:
            return None
        self.left = False
        return self._next(self.work / "left")

    def start(self, job: Path, processes: int, logs: Path) -> Launched:
        self.started += 1
        return self._next(logs)

    def _next(self, logs: Path) -> Launched:
        launched = Launched(next(self.ends), logs, self.work, self.position)
        self.position += launched.end.steps
        return launched


def expected(ends: Iterator[End], allowed: int) -> tuple[int, type[Exception] | None]:
    """Return how many attempts are made, and the error that ends the last."""
    fruitless = 0
    for made, end in enumerate(ends, start=1):
        fruitless = 0 if end.steps else fruitless + 1
        if end.status == 0:
            return made, None
        if end.message:
            return made, OSError
        if end.status == REFUSED or fruitless >= allowed:
            return made, TrainingFailed
    raise AssertionError("it would go on for ever")


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 41])
def test_attempts_end_in_any_order_and_as_many_follow_as_are_allowed(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, tracker = Runs(Root.parse(tmp_path)), MLflowTracker(Root.parse(tmp_path), "tiny")
    orders = [
        (*first, last, allowed, left)
        for length in range(3)
        for *first, last, allowed, left in product(*[GOES_ON] * length, [*LAST, End(-9)], (1, 2, 3), (False, True))
    ]
    for number, (*given, allowed, left) in enumerate(orders[::every]):
        record = runs.begin(RECIPE, "code")
        record.mlflow_run = tracker.open_run(record.name, {}, {})
        cluster, work = Cluster(processes=1, attempts=allowed), tmp_path / f"work-{number}"
        work.mkdir()
        (work / "job.json").write_text("{}")
        context = Context(RECIPE, cluster, Store(tmp_path), runs, record, tracker, TerminalConsole(), [])
        ends = [*given, *[End(-9)] * allowed]
        made, error = expected(iter(ends), allowed)
        launcher = Launcher(iter(ends), work, left)
        monkeypatch.setattr(train, "launcher_of", lambda *_, launcher=launcher: launcher)
        offers = CheckpointOffers(context, SPAN, str(work / "checkpoints"))
        with pytest.raises(error) if error else nullcontext():
            train._train(context, SPAN, work / "job.json", [record.mlflow_run], offers)
        assert launcher.started + left == made, (given, allowed, left)
        failed = [end for end in ends[:made] if end.status not in (0, TERMINATED)]
        alerts = [alert for alert in read_alerts(runs.root, record.name) if alert.kind == "attempt"]
        assert len(alerts) == len(failed), "one alert for each attempt that failed"
        logs = sorted(path.name for path in (context.folder / "logs" / "main").glob("*"))
        assert logs == [f"attempt-{attempt}" for attempt in range(1, launcher.started + 1)]
