"""The supervisor's own part: it notices silence, counts fruitless attempts, and says what the last one said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from herd.flows.run_lifecycle import _close
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import job as jobs
from herd.llama3.train import metrics
from herd.llama3.train.health import HealthSample
from herd.llama3.train.job import AttemptResult, StopEstimate
from herd.llama3.train.journal import (
    HEALTH,
    Journal,
    Record,
    Rewind,
    device_hours,
    read_attempts,
    read_journal,
    to_parquet,
)
from herd.storage.artifact import Store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, Slurm
from herd.tasks.console import TerminalConsole
from herd.tasks.errors import SchedulerRefused, TrainingFailed
from herd.tasks.launch import base as launch_base
from herd.tasks.launch.base import Launch
from herd.tasks.launch.hosts import Hosts
from herd.tasks.launch.local import Agents, LocalLauncher, rank_process
from herd.tasks.runs.records import Runs
from herd.tasks.stages import train
from herd.tasks.stages.alerts import Alerts, read_alerts
from herd.tasks.stages.evaluate import CheckpointOffers
from herd.tasks.stages.follow import HUNG, JournalTailer
from herd.tasks.stages.train import StageAttempts, _resumes
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.prometheus import Gauges, folder_faults
from herd.tasks.tracking.steps import read_series
from tests.agents import ForkedAgents
from tests.llama3.train.train_samples import STEP, job, recipe, records, stages, work

ASKED = recipe(stages=stages(4000))
SPAN = Schedule(ASKED).span("main")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is suspended saves nothing, however long it is waited for."""
    monkeypatch.setattr(jobs, "GRACE_S", 0.5)
    monkeypatch.setattr(launch_base, "REAP_S", 0.5)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    runs, cluster = Runs(Root.parse(tmp_path)), Cluster(processes=2, attempts=2)
    record = runs.begin(ASKED, "code")
    tracker = MLflowTracker(Root.parse(tmp_path), "tiny")
    record.mlflow_run = tracker.open_run(record.name, {"herd.run": record.name}, {})
    return Context(ASKED, cluster, Store(tmp_path), runs, record, tracker, TerminalConsole(), [])


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    with ForkedAgents(Path("/dev/null")) as agents:
        yield LocalLauncher(Cluster(threads=1), agents)


@pytest.mark.fault("F9")
def test_a_trainer_that_falls_silent_is_stopped(context: Context, launcher: LocalLauncher, tmp_path: Path) -> None:
    """One process alone: no peer waits for it."""
    path = job(tmp_path, recipe(stages=stages(4000), checkpoint={"every": "1 h"}), timeout_s=1)
    launch = launcher.start(path, 1, tmp_path / "logs" / "attempt-1")
    while len(records(path)) < 3:
        assert launch.poll() is None
        time.sleep(0.01)
    hung = rank_process(0)
    hung.suspend()
    with context.console.progress("main", SPAN.tokens) as line:
        follower = JournalTailer(context, [context.record.mlflow_run], work(path) / "journal.jsonl", SPAN.steps, line)
        ended = follower.follow(launch, 0, 2.0)
    assert ended == AttemptResult(status=HUNG, message="no step for 2 s; it was stopped")
    assert follower.position >= 3 * STEP
    await_end(hung)
    (attempt,) = read_attempts(work(path))
    assert attempt["ended"] - records(path)[-1].time > 2.0, "the hang is paid for"
    assert device_hours(work(path)) == pytest.approx((attempt["ended"] - attempt["time"]) / 3600)
    told = context.tracker.client.get_run(context.record.mlflow_run).data.tags
    assert (told["environment.devices"], told["environment.layout"]) == ("1", "dp 1"), "while it trained"


def test_what_is_shown_is_a_mean_of_the_last_steps_and_the_last_score_on_held_out_text(
    context: Context, tmp_path: Path
) -> None:
    """Batches alternate between an easy domain and a hard one; a single loss would say which came last."""
    losses = [2.0, 8.0] * 40
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number, loss in enumerate(losses, start=1):
            scored = {metrics.HELD_OUT: 3.0 - number / 100} if number in (20, 70) else {}
            values = {metrics.LOSS: loss, metrics.TOKENS_PER_S: 10.0 * number, **scored}
            journal.add(Record(float(number), number * STEP, values))
    shown: list[tuple[float | None, ...]] = []

    class Line:
        def update(self, position: int, *values: float | None) -> None:
            shown.append((position, *values))

    follower = JournalTailer(context, [context.record.mlflow_run], tmp_path / "journal.jsonl", len(losses), Line())
    follower._process_entries(0)
    assert shown == [(80 * STEP, pytest.approx(5.0), 800.0, pytest.approx(2.3))]


def test_the_loss_at_the_end_of_a_stage_is_the_one_that_its_model_keeps(context: Context, tmp_path: Path) -> None:
    """Also after a restart, which trains steps again. Reports, cards and `herd compare` have the same one."""
    path = tmp_path / "journal.jsonl"
    shown: list[float | None] = []

    class Line:
        def update(self, position: int, *values: float | None) -> None:
            shown.append(values[0])

    follower = JournalTailer(context, [context.record.mlflow_run], path, 400, Line())
    losses = [9.0 - number / 100 for number in range(400)]
    with Journal(path) as journal:
        for first, last in ((0, 300), (290, 350), (350, 400)):
            for number in range(first, last):
                journal.add(Record(float(number), (number + 1) * STEP, {metrics.LOSS: losses[number]}))
            follower._process_entries(0)
    assert shown[-1] == pytest.approx(metrics.mean_loss(losses), rel=1e-12)
    assert shown[-1] == pytest.approx(sum(losses[-40:]) / 40)


def test_silence_is_counted_from_a_rollback_and_not_from_the_start_of_the_attempt(
    context: Context, tmp_path: Path
) -> None:
    alerts = Alerts(context.root, context.record.name, "main", context.console)
    runs, journal_path = [context.record.mlflow_run], tmp_path / "journal.jsonl"
    follower = JournalTailer(context, runs, journal_path, 9, Unseen(), alerts=alerts)
    with Journal(journal_path) as journal:
        journal.add(Record(1.0, STEP, {metrics.LOSS: 4.0, metrics.STEP_S: 1.0}))
        journal.add(Record(2.0, 2 * STEP, {metrics.LOSS: 4.0, metrics.STEP_S: 1.0}))
        journal.add(Rewind(3.0, STEP, 3 * STEP))
    follower.last_record_at = time.monotonic() - 3600.0  # the attempt began an hour ago
    for _ in range(2):
        follower._process_entries(0)
    assert [alert.kind for alert in read_alerts(context.root, context.record.name)] == ["loss-spike"]
    assert follower.hang_detector.starting, "the steps since the checkpoint are trained again"


def test_a_scheduler_that_gives_too_little_time_to_leave_is_named_once(
    context: Context, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context.cluster = Cluster(launcher="slurm", slurm=Slurm(grace_s=100))
    follower = JournalTailer(context, [context.record.mlflow_run], tmp_path / "journal.jsonl", 9, Unseen())
    for number, save_s in enumerate((0.0, 70.0, 95.0, 99.0), start=1):  # the first save has not ended yet
        saved = {metrics.CHECKPOINT_WRITE_S: save_s} if save_s else {}
        with Journal(tmp_path / "journal.jsonl") as journal:
            journal.add(Record(float(number), number * STEP, {metrics.LOSS: 4.0, metrics.STEP_S: 3.0, **saved}))
        follower._process_entries(0)
    assert capsys.readouterr().out.strip() == (
        "cluster.slurm.grace_s: 100 is less than a stop takes here: 116 s with a save of 1:35 min; "
        "write at least 116, or stops lose steps"
    )


def test_prometheus_reads_the_newest_values_until_the_run_ends(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = tmp_path / "textfiles", context.record.name
    monkeypatch.setenv("HERD_PROMETHEUS_DIR", str(folder))
    assert folder_faults() == [
        f"HERD_PROMETHEUS_DIR: {folder} cannot be written (No such file or directory); name the folder of "
        "node_exporter's --collector.textfile.directory, or unset it"
    ]
    folder.mkdir()
    assert folder_faults() == []
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number in (1, 2, 3):
            saved = {metrics.CHECKPOINT_WRITE_S: 0.5, metrics.RESTARTS: 2.0} if number == 2 else {}
            speed = {metrics.TOKENS_PER_S: 9000.0 + number, metrics.MFU: 0.41, metrics.GOODPUT: 0.9}
            journal.add(Record(100.0 + number, number * STEP, {metrics.LOSS: 4.0 + number, **speed, **saved}))
    gauges = Gauges(context.root, run, 'a "stage"')
    follower = JournalTailer(context, [context.record.mlflow_run], tmp_path / "journal.jsonl", 3, Unseen())
    follower.readers = [gauges]
    follower._process_entries(0)
    (file,) = folder.iterdir()  # nothing temporary is left
    assert file.suffix == ".prom"
    assert file.stat().st_mode & 0o444 == 0o444  # node_exporter is another user
    samples = [sample for family in text_string_to_metric_families(file.read_text()) for sample in family.samples]
    assert {frozenset(sample.labels.items()) for sample in samples} == {
        frozenset({"run": run, "stage": 'a "stage"', "root": str(tmp_path)}.items())
    }
    assert {sample.name: sample.value for sample in samples} == {
        "herd_position_tokens": 3.0 * STEP,
        "herd_last_step_timestamp_seconds": 103.0,
        "herd_last_checkpoint_timestamp_seconds": 102.0,
        "herd_loss": 7.0,
        "herd_tokens_per_second": 9003.0,
        "herd_mfu_ratio": 0.41,
        "herd_goodput_ratio": 0.9,
        "herd_restarts": 2.0,
    }
    folder_of_another_root = Gauges(Root.parse(tmp_path / "other"), run, "main").path
    assert folder_of_another_root != file
    _close(context, "finished", "FINISHED", "")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.fault("F9")
def test_a_trainer_that_hangs_before_its_first_step_is_stopped(
    context: Context, launcher: LocalLauncher, tmp_path: Path
) -> None:
    path = job(tmp_path, ASKED, timeout_s=1)
    launch = launcher.start(path, 1, tmp_path / "logs" / "attempt-1")
    while not (hung := begun_rank()):
        time.sleep(0.001)
    hung.suspend()
    follower = JournalTailer(context, [context.record.mlflow_run], work(path) / "journal.jsonl", SPAN.steps, Unseen())
    ended = follower.follow(launch, 0, 3.0, 600.0)
    assert ended == AttemptResult(status=HUNG, message="it did nothing for 3 s before its first step; it was stopped")
    assert records(path) == []
    await_end(hung)


@pytest.mark.slow
def test_a_trainer_that_is_busy_and_never_begins_is_stopped(context: Context, tmp_path: Path) -> None:
    path = job(tmp_path, ASKED, timeout_s=1)
    follower = JournalTailer(context, [context.record.mlflow_run], work(path) / "journal.jsonl", SPAN.steps, Unseen())
    with Agents(Path("/dev/null")) as agents:  # an agent that begins now
        launch = LocalLauncher(Cluster(), agents).start(path, 1, tmp_path / "logs" / "attempt-1")
        ended = follower.follow(launch, 0, 60.0, 0.4)  # half a second is too short to import torch in
    assert ended == AttemptResult(status=HUNG, message="no step and no line of log for 0 s; it was stopped")


class Silent:
    """A trainer on another machine that records at most one step."""

    label, lasts_s, lines = "job 7", float("inf"), False

    def __init__(self, logs: Path, position: int = STEP) -> None:
        self.logs, self.position, self.stopped, self.began = logs, position, 0, time.monotonic()

    def poll(self) -> AttemptResult | None:
        if self.position:
            with Journal(self.logs / "journal.jsonl") as journal:
                journal.add(Record(time.time(), self.position, {metrics.LOSS: 2.0}))
            self.position = 0
        if self.lines:
            with (self.logs / "rank-0.log").open("a") as log:
                log.write("compiles\n")
        return AttemptResult(status=0) if time.monotonic() - self.began > self.lasts_s else None

    def waits(self) -> bool:
        return False

    def used_s(self) -> None:
        return None

    def stop(self) -> None:
        self.stopped += 1


def test_a_trainer_that_waits_for_a_slow_save_is_given_the_time_of_a_save(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save waits for the one before it, or the end of the stage does, and no step is recorded meanwhile."""
    monkeypatch.setattr("herd.tasks.stages.hang_detector.SAVE_TIMEOUT_S", 1.0)
    saved, hung = "no step for 1 s while it saves a checkpoint; it was stopped", "no step for 0 s; it was stopped"
    launch, end, now = Silent(tmp_path), 3 * STEP, time.time()
    follower = JournalTailer(context, [context.record.mlflow_run], tmp_path / "journal.jsonl", 3, Unseen(), end)
    for position, saving_since, message in (
        (STEP, now + 60, saved),
        (2 * STEP, now - 60, hung),  # a step was recorded since the save began
        (end, now - 60, saved),
        (end + STEP, 0.0, hung),
    ):
        launch.position = position
        StopEstimate(saving_since=saving_since).write(tmp_path)
        began = time.monotonic()
        assert follower.follow(launch, 0, 0.1).message == message
        assert (time.monotonic() - began > 1.0) == (message == saved)


@pytest.mark.parametrize(("error", "stops"), [(SchedulerRefused("no answer"), 0), (KeyboardInterrupt(), 1)])
def test_a_trainer_is_left_alone_if_its_scheduler_does_not_answer(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, stops: int
) -> None:
    launch = Silent(tmp_path)

    def fail() -> None:
        raise error

    monkeypatch.setattr(launch, "poll", fail)
    follower = JournalTailer(context, [context.record.mlflow_run], tmp_path / "journal.jsonl", 3, Unseen())
    with pytest.raises(type(error), match="" if stops else "job 7 was not stopped and may still run"):
        follower.follow(launch, 0, 60.0)
    assert launch.stopped == stops


@pytest.mark.parametrize(
    ("position", "lines", "startup_s", "status", "most"),
    [(0, False, 0.5, HUNG, 2), (0, True, 0.5, 0, 9), (0, False, 500.0, 0, 0), (STEP, True, 0.5, 0, 0)],
    ids=["silent", "logs", "not yet due", "trains"],
)
def test_logs_are_looked_at_only_before_the_first_step_and_when_it_matters(
    context: Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    position: int,
    lines: bool,
    startup_s: float,
    status: int,
    most: int,
) -> None:
    """There is one for each of thousands of ranks, on a file system that all nodes share."""
    launch, looked, glob = Silent(tmp_path, position), list[str](), Path.glob
    launch.lasts_s, launch.lines = 1.8, lines

    def counted(folder: Path, pattern: str) -> Iterator[Path]:
        looked.append(pattern)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    follower = JournalTailer(context, [context.record.mlflow_run], tmp_path / "journal.jsonl", 3, Unseen())
    assert follower.follow(launch, 0, 60.0, startup_s).status == status
    assert (most > 0) <= looked.count("rank-*.log") <= most


def begun_rank() -> psutil.Process | None:
    with suppress(LookupError):
        return rank_process(0)
    return None


def await_end(process: psutil.Process) -> None:
    """Wait for a process that was killed with its agent: it ends a moment later, and init may not have looked yet."""
    deadline = time.monotonic() + 30
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} runs on"
        time.sleep(0.01)


class Unseen:
    """A progress line that nobody looks at."""

    def update(self, position: int, *values: float | None) -> None:
        """Show nothing."""


def test_a_stage_resumes_where_its_progress_line_goes_on(tmp_path: Path) -> None:
    """Both count the stage's tokens, not the run's."""
    span = Schedule(recipe()).span("anneal")
    assert span.start > 0
    assert _resumes(span, tmp_path, None) is None
    saved = tmp_path / "checkpoints" / f"{span.start + 3 * STEP:018}"
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    assert _resumes(span, tmp_path, None) == 3 * STEP
    (tmp_path / "result").mkdir()
    assert _resumes(span, tmp_path, None) == span.tokens


def test_health_goes_to_the_journal_and_mlflow_and_a_fault_excludes_its_host(context: Context, tmp_path: Path) -> None:
    """Of the steps that were read at once the last gets the values; none if the trainer wrote them before."""
    logs, fault = tmp_path / "logs", "GPU 3: Xid 79, the GPU fell off the bus"
    logs.mkdir()
    alerts = Alerts(context.root, context.record.name, "main", context.console, clock=lambda: 0.0)
    runs = [context.record.mlflow_run]
    follower = JournalTailer(context, runs, tmp_path / "journal.jsonl", 4, Unseen(), 4 * STEP, alerts)

    class Trainer:
        """An attempt whose only trace are its files, and which has ended."""

        def __init__(self) -> None:
            self.logs = logs

        def poll(self) -> AttemptResult:
            with Journal(tmp_path / "journal.jsonl") as journal:
                for number in (1, 2, 3):
                    when = 1.0 if number == 1 else time.time()
                    journal.add(Record(when, number * STEP, {metrics.LOSS: 2.0, metrics.STEP: number}))
            for node, (load, faults) in enumerate([(0.5, []), (0.75, [fault])]):
                sample = HealthSample(
                    time=1.0, host=f"n{node}", node=node, metrics={metrics.CPU_LOAD: load}, faults=faults
                )
                (logs / f"health-{node}.jsonl").write_text(2 * (sample.model_dump_json() + "\n"))
            return AttemptResult(status=0)

    assert follower.follow(Trainer(), 0, 60.0).status == 0
    kept = read_journal(tmp_path / HEALTH)
    assert [(record.position, record.metrics) for record in kept] == [(3 * STEP, {metrics.CPU_LOAD: 0.75})]
    (sent,) = context.tracker.client.get_metric_history(runs[0], metrics.CPU_LOAD)
    assert (sent.value, sent.step) == (0.75, 3 * STEP)
    assert sent.timestamp == pytest.approx(kept[0].time * 1000, abs=1)
    assert Hosts(context.root).excluded() == {"n1": fault}
    (alert,) = read_alerts(context.root, context.record.name)
    assert (alert.kind, alert.text) == ("bad-node", f"n1: {fault}; it is excluded until herd hosts --clear n1")
    to_parquet(tmp_path / "journal.jsonl", tmp_path / "metrics.parquet")
    (*_, last) = read_series(tmp_path / "metrics.parquet")
    assert last.metrics == {metrics.LOSS: 2.0, metrics.STEP: 3, metrics.CPU_LOAD: 0.75}


def test_an_attempt_that_excludes_a_host_is_followed_by_another(
    context: Context, launcher: LocalLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs elsewhere, so it is not one more of the attempts in a row that may fail."""
    context.cluster = context.cluster.model_copy(update={"launcher": "slurm", "attempts": 1})
    hosts, attempts = Hosts(context.root), StageAttempts(context, SPAN, launcher)
    hosts.record("n2", "died", "killed")
    attempts.start(job(tmp_path, ASKED)).stop()
    killed = AttemptResult(status=-9, message="rank 1 was killed by SIGKILL", host="n2")
    attempts.ended(killed, progress=False)
    assert "main: host n2 is excluded: 2 attempts died there: killed, killed" in capsys.readouterr().out
    attempts.excluded = hosts.excluded()  # as at the next start
    with pytest.raises(TrainingFailed, match="killed"):
        attempts.ended(killed, progress=False)


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_trainer_that_always_dies_at_once_is_started_as_often_as_the_cluster_allows(
    attempts: int, context: Context, launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.cluster = context.cluster.model_copy(update={"attempts": attempts, "processes": 1})
    started: list[Path] = []

    class Dying:
        """Its trainers are killed before their first step."""

        capacity, live = launcher.capacity, launcher.live

        def start(self, path: Path, processes: int, logs: Path) -> Launch:
            assert len(started) < attempts, "started once more"
            started.append(logs)
            launch = launcher.start(path, processes, logs)
            while True:
                with suppress(LookupError):
                    rank_process(0).kill()
                    return launch

    monkeypatch.setattr(train, "launcher_of", lambda *_: Dying())
    offers = CheckpointOffers(context, SPAN, str(tmp_path / "work" / "checkpoints"))
    with pytest.raises(TrainingFailed, match=rf"no new step, {attempts} time\(s\) in a row"):
        train._train(context, SPAN, job(tmp_path, ASKED), [context.record.mlflow_run], offers)
    assert [logs.name for logs in started] == [f"attempt-{number}" for number in range(1, attempts + 1)]


def test_attempts_end_when_none_gets_further(
    context: Context, launcher: LocalLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job(tmp_path, ASKED)
    attempts = StageAttempts(context, SPAN, launcher)
    killed = AttemptResult(status=-9, message="rank 1 was killed by SIGKILL; see [x].log:\nlast line")
    for number in (1, 2, 3):
        attempts.start(path).stop()
        assert attempts.folder == context.folder / "logs" / "main" / f"attempt-{number}"
        if number < 3:
            attempts.ended(killed, progress=number == 2)  # the second got further, so the count begins anew
    attempts.ended(killed, progress=False)
    printed = capsys.readouterr().out
    assert "main: starts on 1 processes instead of 2; the data stay the same" in printed
    assert "main: the trainer died (killed, status -9); starting it again" in printed
    assert "main: rank 1 was killed by SIGKILL; see [x].log\n" in printed
    with pytest.raises(TrainingFailed, match=r"2 time\(s\) in a row .*attempt-3\):\nrank 1 was (.|\n)*last"):
        attempts.ended(killed, progress=False)
    full = AttemptResult(status=1, message="trainer: OSError: [Errno 28] No space left on device")
    with pytest.raises(OSError, match=r"No space left on device: .*attempt-3"):
        attempts.ended(full, progress=True)
