"""What MLflow shows of a run is made again from its record, artifacts and decisions: the same, once, anywhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.journal import Journal, Record
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.models.card import describe_model
from herd.tasks.operate.gc import TRASH, GcItem, GcPlan, delete_rows, plan_gc, plan_rows
from herd.tasks.promotion.log import REJECTED, PromotionLog, version_description
from herd.tasks.promotion.registry import RULE, Registry
from herd.tasks.runs.records import RunRecord, Runs, StepRecord
from herd.tasks.stages import backfill
from herd.tasks.stages.backfill import Sender, backfill_run, catch_up, watch_outages
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.tracking.mlflow import CircuitBreaker, MetricPoint, MLflowTracker
from herd.tasks.tracking.steps import Thinning
from tests.tasks.mlflow_server import empty_database, use
from tests.tasks.promotion_samples import add
from tests.tasks.tracked_run import TrackedRun, models, records, seen, two_runs

DAY = 86400.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Two runs of one family, tracked in the root's own database; the second reuses the tokens."""
    return two_runs(tmp_path_factory.mktemp("root"))


def test_a_version_has_decision_report_and_card_also_after_another_judgement(root: Root, tmp_path: Path) -> None:
    root = Root.parse(shutil.copytree(root.local, tmp_path / "root"))
    tracker, log = MLflowTracker(root, "tiny"), PromotionLog(root, "tiny")
    label, registry = log.records[0].artifact, Registry(tracker)
    describe_model(root, Runs(root).find("tiny-1"), tracker)
    version = registry.versions()[label]
    decision, _, card = version.description.partition(RULE)
    line, address = re.fullmatch(r"(.*) · \[report\]\((.*)\)", decision.partition("\n")[0]).groups()  # type: ignore[union-attr]
    assert line == version_description(log.records, label)
    assert "| eval/bpb | better | better |" in decision
    experiment, run = re.fullmatch("#/experiments/(.*)/runs/(.*)/artifactPath/report.html", address).groups()  # type: ignore[union-attr]
    assert tracker.client.get_run(run).info.run_name == "tiny-1"
    assert tracker.client.get_run(run).info.experiment_id == experiment
    card = "Free.\n\n## Model\n\nsmall\n\n## Data" + " long" * 1200
    registry.describe(log.records, label, address, card)
    assert registry.versions()[label].description == f"{decision}{RULE}Free.\n\n## Model\n\nsmall"
    add(root, 1, REJECTED, artifact=label)
    registry.publish(PromotionLog(root, "tiny"))
    after = registry.versions()[label].description
    assert "Judged again: rejected" in after
    assert after.endswith(f"{RULE}Free.\n\n## Model\n\nsmall"), "the card stays"
    assert f"[report]({address})" in after


@pytest.mark.slow
def test_an_empty_database_shows_the_same_as_the_live_one(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["tiny-1", "tiny-2"]
    # the records of the copy will name the runs of the other server
    root = Root.parse(shutil.copytree(root.local, tmp_path / "root"))
    live = MLflowTracker(root, "tiny")
    expected, expected_models = seen(live, names), models(live)
    assert set(expected) == {
        *(f"{run} {step}" for run in names for step in ("tokenize", "main", "anneal", "evaluate-anneal", "promote")),
        *names,
    }
    use(monkeypatch, empty_database(tmp_path / "empty"))
    for name in reversed(names):  # in any order
        done = backfill_run(root, name)
        assert (done.runs, done.versions, done.gone, done.complete) == (6, 1, 0, True)
    rebuilt = MLflowTracker(root, "tiny")
    assert expected_models["aliases"]["champion"].startswith("checkpoint/tiny-anneal")
    assert (seen(rebuilt, names), models(rebuilt)) == (expected, expected_models)
    for name in names:  # once more
        backfill_run(root, name)
    assert (seen(rebuilt, names), models(rebuilt)) == (expected, expected_models)
    assert Runs(root).find("tiny-1").mlflow_run == MLflowTracker(root, "tiny").open_run("tiny-1", {}, {})


def test_a_finished_run_is_never_set_running_again(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """What MLflow showed as ended stays so, also while it is sent once more or if the sending breaks off."""
    tracker = MLflowTracker(root, "tiny")
    before, during = seen(tracker, ["tiny-1"]), []
    log_batch = tracker.client.log_batch

    def watched(*words: Any, **more: Any) -> None:
        found = tracker.client.search_runs([tracker.experiment], tracker.query("tiny-1"))
        during.extend(each.info.status for each in found)
        log_batch(*words, **more)

    monkeypatch.setattr(tracker.client, "log_batch", watched)
    assert backfill_run(root, "tiny-1", tracker).complete
    assert set(during) == {"FINISHED"}
    assert seen(tracker, ["tiny-1"]) == before


def test_an_attempt_that_began_meanwhile_keeps_its_record(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is the former attempt; the next one has ended, and MLflow lacks points of it."""
    runs, close = Runs(root), MLflowTracker.close

    def next_attempt(record: RunRecord) -> None:
        record.attempts, record.mlflow_stale = record.attempts + 1, True

    def once(*arguments: Any) -> None:
        monkeypatch.undo()
        runs.change("tiny-2", next_attempt)
        close(*arguments)

    before = runs.find("tiny-2")
    monkeypatch.setattr(MLflowTracker, "close", once)
    backfill_run(root, "tiny-2")
    after = runs.find("tiny-2")
    assert (after.attempts, after.mlflow_stale) == (before.attempts + 1, True)
    backfill_run(root, "tiny-2")
    assert not runs.find("tiny-2").mlflow_stale


@pytest.mark.slow
def test_a_decision_is_shown_though_another_evaluation_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention keeps the champion's own evaluation of an old run, and no other."""
    root = Root.parse(tmp_path)
    record = TrackedRun(root).all().context.record
    record.steps = {"evaluate-main": StepRecord(artifact="evaluation/tiny-main-0", outcome="created"), **record.steps}
    Runs(root).save(record)
    use(monkeypatch, empty_database(tmp_path / "empty"))
    done = backfill_run(root, record.name)
    assert (done.versions, done.gone) == (1, 1)


def test_a_stage_shows_what_it_went_on_from_and_its_metrics_once(root: Root) -> None:
    tracker = MLflowTracker(root, "tiny")
    shown = seen(tracker, ["tiny-1"])
    steps = Runs(root).find("tiny-1").steps
    assert shown["tiny-1 anneal"]["tags"]["parent.checkpoint"] == steps["main"].artifact
    assert "parent.checkpoint" not in shown["tiny-1 main"]["tags"]
    assert [position for position, _, _ in shown["tiny-1 main"]["points"][metrics.LOSS]] == list(range(256, 3073, 256))
    assert len(shown["tiny-1"]["points"][metrics.LOSS]) == 12 + 8
    assert shown["tiny-1"]["points"]["eval/bpb"][0][0] == 20 * 256
    assert shown["tiny-1 tokenize"]["points"]["odd_key"], "a name that MLflow would refuse"


def test_a_run_that_never_reached_mlflow_is_whole_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    root = Root.parse(tmp_path / "root")
    run = TrackedRun(root)
    context = run.context
    watch_outages(context)
    tokens, parent = run.tokens(), None
    for span in Schedule(context.recipe).trained:
        parent = run.stage(span, tokens, parent)
    assert context.tracker.stale
    assert context.tracker.page(context.record.mlflow_run) == ""
    assert not catch_up(context)
    assert Runs(root).find("tiny-1").mlflow_stale
    run.end()
    assert "mlflow_stale=True" in repr(Runs(root).find("tiny-1"))
    use(monkeypatch, empty_database(tmp_path / "late"))
    backfill_run(root, "tiny-1")
    record = Runs(root).find("tiny-1")
    assert not record.mlflow_stale
    shown = seen(MLflowTracker(root, "tiny"), ["tiny-1"])
    assert {run["status"] for run in shown.values()} == {"FINISHED"}
    assert len(shown["tiny-1"]["points"][metrics.LOSS]) == 20
    client = MLflowTracker(root, "tiny").client
    assert client.get_run(record.steps["main"].mlflow_run).info.run_name == "tiny-1 main"
    for step in record.steps.values():
        info, made = client.get_run(step.mlflow_run).info, context.store.load(step.artifact).created
        assert (info.start_time, info.end_time) == pytest.approx((1000 * (made - 1.0), 1000 * made), abs=1)
    ended = client.get_run(record.mlflow_run).info.end_time
    assert ended == pytest.approx(1000 * datetime.fromisoformat(record.ended).timestamp(), abs=1)


def test_an_outage_of_mlflow_and_of_the_root_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    context = TrackedRun(Root.parse(tmp_path)).context
    tracker, save = context.tracker, context.runs.save

    def away(record: Any) -> None:
        raise OSError("the root is away")

    monkeypatch.setattr(context.runs, "save", away)
    watch_outages(context)
    tracker.reach.away = False
    assert not tracker.log_points([context.record.mlflow_run], [MetricPoint(metrics.LOSS, 1.0, 1.0, 1)])
    context.record.mlflow_stale = False
    assert not catch_up(context)
    save(context.record)
    assert Runs(Root.parse(tmp_path)).find("tiny-1").mlflow_stale


def test_points_after_an_unexpected_error_are_sent_and_the_sender_does_not_claim_that_all_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker, sent = MLflowTracker(Root.parse(tmp_path), "tiny"), []

    def log_points(runs: list[str], points: list[MetricPoint]) -> bool:
        sent.append(points[0].position)
        if sent == [1]:
            raise ZeroDivisionError("unexpected")
        return True

    monkeypatch.setattr(tracker, "log_points", log_points)
    monkeypatch.setattr(tracker.reach, "available", lambda: False)
    sender = Sender(tracker, ["run"], lambda: None)
    for position in (1, 2):
        sender.put([MetricPoint(metrics.LOSS, 1.0, 1.0, position)])
    assert not sender.drain()
    assert sent == [1, 2]
    assert "ZeroDivisionError: unexpected" in caplog.text


@pytest.mark.parametrize("known", [True, False])
def test_a_run_that_is_continued_knows_that_mlflow_lacks_points(known: bool) -> None:
    reach, record = CircuitBreaker(lambda: None), SimpleNamespace(mlflow_stale=known)
    watch_outages(SimpleNamespace(tracker=SimpleNamespace(reach=reach), record=record))  # type: ignore[arg-type]
    assert reach.stale == known


def test_the_queue_is_bounded_by_what_waits_and_not_by_what_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "MAX_QUEUED", 10)
    tracker, sent = MLflowTracker(Root.parse(tmp_path), "tiny"), list[int]()
    begun, opened = threading.Event(), threading.Event()
    opened.set()

    def log_points(runs: list[str], points: list[MetricPoint]) -> None:
        begun.set()
        opened.wait(30)
        sent.append(len(points))

    monkeypatch.setattr(tracker, "log_points", log_points)
    monkeypatch.setattr(tracker.reach, "available", lambda: False)
    sender = Sender(tracker, ["run"], lambda: None)
    for count in range(1, 4):
        sender.put([MetricPoint(metrics.LOSS, 1.0, 1.0, 1)] * 10)
        assert sender.drain()
        assert sent == [10] * count
    opened.clear()
    begun.clear()
    sender.put([MetricPoint(metrics.LOSS, 1.0, 1.0, 1)] * 9)
    assert begun.wait(30)
    assert not sender.drain(0.01), "a call that hangs may send nothing"
    tracker.reach.stale = False
    for count, stale in ((9, False), (1, False), (1, True)):
        sender.put([MetricPoint(metrics.LOSS, 1.0, 1.0, 1)] * count)
        assert tracker.stale == stale
    opened.set()


def test_an_unfinished_stage_is_published_from_its_journal(root: Root, tmp_path: Path) -> None:
    run = TrackedRun(Root.parse(tmp_path))
    context = run.context
    span = Schedule(context.recipe).span("main")
    tags = {**context.tags(), "kind": "checkpoint", "stage": "main", "artifact.key": "k" * 16}
    child = context.tracker.open_child(context.record.mlflow_run, "tiny-1", tags)
    work = tmp_path / "work" / "main-0123"
    with TerminalConsole().progress("main", span.tokens) as line:
        runs = [context.record.mlflow_run, child]
        JournalTailer(context, runs, work / "journal.jsonl", span.steps, line, span.end)
    with Journal(work / "journal.jsonl") as journal:
        for record in records(span, Schedule(context.recipe))[:5]:
            journal.add(record)
    context.record.state, context.record.ended = "interrupted", "2026-11-22T00:00:00+00:00"
    context.runs.save(context.record)
    for _ in range(2):
        backfill_run(Root.parse(tmp_path), "tiny-1")
    shown = seen(MLflowTracker(Root.parse(tmp_path), "tiny"), ["tiny-1"])
    assert set(shown) == {"tiny-1", "tiny-1 main"}
    assert shown["tiny-1 main"]["status"] == "KILLED"
    assert len(shown["tiny-1 main"]["points"][metrics.LOSS]) == 5
    assert shown["tiny-1"]["points"][metrics.LOSS] == shown["tiny-1 main"]["points"][metrics.LOSS]


def test_thinning_keeps_the_last_point_and_what_is_rare() -> None:
    thinning = Thinning(steps=6000, end=6000)
    steps = [Record(0.0, step, {metrics.STEP: float(step), metrics.LOSS: 1.0}) for step in range(6001)]
    kept = [point.position for point in thinning.points(steps) if point.key == metrics.LOSS]
    assert kept == [*range(0, 6001, 3)]
    rare = thinning.points([Record(0.0, 7, {metrics.STEP: 7.0, metrics.LOSS: 1.0, metrics.CHECKPOINT_S: 2.0})])
    assert [point.key for point in rare] == [metrics.CHECKPOINT_S]
    assert len(Thinning(7, 100).points([Record(0.0, 100, {metrics.STEP: 7.0, metrics.LOSS: 1.0})])) == 2


def test_a_server_that_is_away_is_a_plain_error(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match=r"does not answer \(Connection refused\); start it"):
        backfill_run(root, "tiny-1")
    assert caplog.messages == ["MLflow cannot be reached: Connection refused"]


def test_an_experiment_in_mlflows_trash_is_an_error_with_the_remedy(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Root.parse(shutil.copytree(root.local, tmp_path / "root"))
    tracker = MLflowTracker(copy, "tiny")
    tracker.client.delete_experiment(tracker.experiment)
    with pytest.raises(ValueError, match="MLflow experiment tiny: is deleted; restore it, then: herd mlflow sync"):
        backfill_run(copy, "tiny-1")
    (command,) = re.findall(r"restore it: (.*)", caplog.text)
    subprocess.run(shlex.split(command), check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert backfill_run(copy, "tiny-1").complete


def test_no_run_ends_before_it_starts(root: Root, tmp_path: Path) -> None:
    """A step of an earlier attempt is opened again later than that attempt began."""
    tracker = MLflowTracker(Root.parse(tmp_path), "tiny")
    run = tracker.open_run("tiny-9", {}, {}, start=2_000.0)
    tracker.close(run, "FINISHED", 1_990.0)
    info = tracker.client.get_run(tracker.run_id(run)).info
    assert info.end_time == info.start_time == 2_000_000


def test_a_run_is_deleted_from_mlflow_only_while_the_root_can_show_it_again(root: Root, tmp_path: Path) -> None:
    copy = Root.parse(shutil.copytree(root.local, tmp_path / "root"))
    copy.remove("promotions")  # the model of tiny-1 would be kept for a rollback
    tracker, later = MLflowTracker(copy, "tiny"), time.time() + 200 * DAY
    before = seen(tracker, ["tiny-1", "tiny-2"])

    def planned(artifacts_kept_s: float) -> dict[str, GcItem]:
        rows = plan_rows(copy, plan_gc(copy, 1, artifacts_kept_s, (), later), 1, 90 * DAY, ())
        return {item.label: item for item in rows.items}

    assert planned(7 * DAY)["tiny-1"].why == "nothing else has its curves: its artifacts were deleted"
    rows = planned(365 * DAY)
    assert (rows["tiny-1"].why, len(rows["tiny-1"].ids), rows["tiny-2"].why) == ("", 6, "a kept run needs it")
    tracker.client.set_terminated(Runs(copy).find("tiny-1").steps["main"].mlflow_run, "FAILED")
    assert planned(365 * DAY)["tiny-1"].why == "a step that failed left no artifact"
    tracker.client.set_terminated(Runs(copy).find("tiny-1").steps["main"].mlflow_run, "FINISHED")
    assert [item.label for item in delete_rows(copy, GcPlan(tuple(rows.values()), later), 90 * DAY)] == ["tiny-1"]
    assert {name.split()[0] for name in seen(tracker, ["tiny-1", "tiny-2"])} == {"tiny-2"}
    assert backfill_run(copy, "tiny-1").gone == 0
    restored = seen(tracker, ["tiny-1", "tiny-2"])
    assert {*before} - {*restored} == {"tiny-1 promote"}, "its log was removed"
    assert all(run["points"] == before[name]["points"] for name, run in restored.items())
    trash = planned(365 * DAY)
    assert sum(item.kind == TRASH and not item.why for item in trash.values()) == 6, "days after they were deleted"


@pytest.mark.slow
def test_mlflows_trash_is_emptied_of_what_is_old(root: Root, tmp_path: Path) -> None:
    copy = Root.parse(shutil.copytree(root.local, tmp_path / "root"))
    tracker, runs = MLflowTracker(copy, "tiny"), Runs(copy)
    kept, thrown = runs.find("tiny-2").mlflow_run, runs.find("tiny-1").mlflow_run
    expected = seen(tracker, ["tiny-2"])
    tracker.client.delete_run(thrown)
    young = plan_rows(copy, GcPlan((), time.time()), 1, DAY, ())
    assert [item.why for item in young.items if item.kind == TRASH] == ["it is new"]
    old = plan_rows(copy, GcPlan((), time.time() + 1), 5, 0, ())
    assert [(item.kind, item.ids) for item in delete_rows(copy, old, 0)] == [(TRASH, (thrown,))]
    with pytest.raises(MlflowException, match="not found"):
        tracker.client.get_run(thrown)
    assert tracker.client.get_run(kept)
    assert seen(tracker, ["tiny-2"]) == expected
