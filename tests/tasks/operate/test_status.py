"""`herd status` says what is: live, dead, finished, and where everything stands."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from herd.llama3.train.journal import read_journal
from herd.storage.lease import lease
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.operate.status import run_document, status_tables, summary_lines
from herd.tasks.report.progress import run_progress
from herd.tasks.runs.records import PENDING_APPROVAL, Runs
from herd.tasks.stages.alerts import Alert, emit_alert
from herd.tasks.tracking.mlflow_store import tracking_uri
from herd.tasks.tracking.moved_root import ACCESS
from tests.tasks.promotion_samples import add
from tests.tasks.standing_root import begun, log_attempt, tiny, train


def shown(root: Root, run: str | None = None, width: int = 120) -> str:
    console = RichConsole(width=width, file=io.StringIO(), force_terminal=True, color_system=None, soft_wrap=True)
    for table in status_tables(root, run):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert (
        max((len(line.rstrip()) for line in text.splitlines() if line.count("/") < 3), default=0) <= width
    )  # a path is not broken
    return text


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path / "root")


def test_a_run_that_works_shows_position_loss_speed_checkpoint_and_time_left(root: Root) -> None:
    recipe = tiny()
    record = begun(root, recipe)
    train(root, recipe, record, steps=10, saved=8)
    with lease(root, f"runs/{record.name}", record.name):
        text = shown(root)
        detail = shown(root, record.name)
    found = row(text, "tiny-1")
    assert found[1:7] == ["running", "main", "36.86K", "37%", "5.100", "20K"]
    assert "93%" in found
    assert "32.77K" in found  # the checkpoint
    assert "3 s" in text  # 45,056 tokens of main and 16,384 of anneal at 20,000 a second
    assert "speed       20K tokens/s, goodput 93%, 3 s left" in detail
    assert "main       running" in detail
    assert "20.48K of 65.54K" in detail
    assert "process     tiny-1 (process" in detail


def test_silence_counts_from_the_newest_attempt(root: Root) -> None:
    recipe, hour = tiny(), timedelta(hours=1)
    record = begun(root, recipe)
    journal = train(root, recipe, record, steps=10, saved=8) / "journal.jsonl"
    last = max(entry.time for entry in read_journal(journal)) - hour.total_seconds()
    journal.write_text(re.sub(r'"time": ?[\d.]+', f'"time":{last}', journal.read_text()))
    runs = Runs(root)
    with runs.alone(record.name, record.name):
        record.started = (datetime.now(UTC) - 2 * hour).isoformat()
        runs.save(record)
        assert "silent 1:00 h" in shown(root)
        record.attempt_started = datetime.now(UTC).isoformat()
        runs.save(record)
        assert row(shown(root), "tiny-1")[1] == "running"


def test_a_record_that_claims_to_run_is_not_believed_without_a_process(root: Root) -> None:
    recipe = tiny()
    record = begun(root, recipe)
    train(root, recipe, record, steps=3, saved=2)
    assert "no live process" in shown(root)
    assert "none; it was in main at 22.53K" in shown(root, record.name)


def test_a_stage_without_its_journal_stands_at_its_newest_checkpoint(root: Root) -> None:
    recipe = tiny()
    record = begun(root, recipe)
    work = train(root, recipe, record, steps=10, saved=8)
    (work / "journal.jsonl").unlink()
    found = run_progress(root, [record])[0]
    assert (found.step, found.position, found.loss) == ("main", 32_768, 6.01)


def test_only_the_end_of_a_journal_is_read(root: Root) -> None:
    """A broken line long before the newest checkpoint is not even looked at."""
    recipe = tiny()
    record = begun(root, recipe)
    work = train(root, recipe, record, steps=10, saved=8)
    text = (work / "journal.jsonl").read_bytes()
    first = text.splitlines(keepends=True)[0]
    (work / "journal.jsonl").write_bytes(b"broken\n" + first * 1000 + text)
    assert run_progress(root, [record])[0].position == 36_864


def test_finished_waiting_and_failed_runs(root: Root) -> None:
    runs = Runs(root)
    for number, (state, verdict, error) in enumerate(
        [("finished", "promoted", ""), ("interrupted", PENDING_APPROVAL, ""), ("failed", "", "ValueError: no text")]
    ):
        record = begun(root, tiny(f"seed={number}"))
        record.state, record.verdict, record.error = state, verdict, error  # type: ignore[assignment]
        record.ended = record.started
        runs.save(record)
    text = shown(root)
    assert "finished" in row(text, "tiny-1")
    waiting = next(line for line in text.splitlines() if line.startswith("tiny-2"))
    assert waiting.split()[1] == "waiting"
    assert waiting.rstrip().endswith("challenger")
    assert "pending_approval" in shown(root, "tiny-2")
    assert "failed" in row(text, "tiny-3")
    assert "ValueError: no text" in shown(root, "tiny-3")


def test_restarts_and_alerts_are_in_the_detail(root: Root) -> None:
    recipe = tiny()
    record = begun(root, recipe)
    log_attempt(root, record.name, "main", 1, -9, "rank 1 was killed by SIGKILL\nlast lines")
    log_attempt(root, record.name, "main", 2, 0, "")
    console = TerminalConsole(RichConsole(file=io.StringIO()))
    alert = Alert(time=0.0, kind="disk", run=record.name, stage="main", text="1.0 GB free [in] /x", position=5)
    emit_alert(root, console, alert)
    text = shown(root, record.name)
    assert "rank 1 was killed by SIGKILL" in text
    assert next(line for line in text.splitlines() if "rank 1 was" in line).split()[:3] == ["main", "1", "SIGKILL"]
    assert "complete" in text
    assert "1.0 GB free [in] /x" in text
    assert "restarts    1, attempt 1 of the run" in text


def test_a_trainer_that_is_running_is_not_asked_why_it_ended(root: Root) -> None:
    record = begun(root, tiny())
    root.file("runs", record.name, "logs", "main", "attempt-1").mkdir(parents=True)
    with lease(root, f"runs/{record.name}", record.name):
        assert "trainers" not in shown(root, record.name)
        log_attempt(root, record.name, "main", 2, -9, "rank 1 was killed by SIGKILL")
        root.file("runs", record.name, "logs", "main", "attempt-3").mkdir(parents=True)
        text = shown(root, record.name)
        assert [ending["ended"] for ending in run_document(root, record.name)["trainers"]] == ["", "SIGKILL", "running"]
    assert [line.split()[1:3] for line in text.splitlines() if line.split()[:1] == ["main"]][-1] == ["3", "running"]
    assert text.count("it did not say") == 1, "of the first, which has another after it"
    assert shown(root, record.name).count("it did not say") == 2, "no process holds the run"


def test_the_page_in_mlflow_is_that_of_a_herd_up_on_the_root(root: Root, mlflow_uri: str) -> None:
    """The shell has no variables of it; its file is left behind when it is killed."""
    record = begun(root, tiny()).model_copy(update={"mlflow_run": "r1", "mlflow_experiment": "1"})
    record = record.model_copy(update={"state": "finished", "ended": record.started})
    Runs(root).save(record)

    def told() -> list[str]:
        shown_lines = [*shown(root, record.name).splitlines(), *summary_lines(root, record.name)]
        return [" ".join(line.split()[1:]) for line in shown_lines if line.split()[:1] == ["MLflow"]]

    assert told() == [f"run r1 in {tracking_uri(root)}"] * 2
    (root.local / ACCESS).write_text(f"# in a browser: x\nexport MLFLOW_TRACKING_URI={mlflow_uri}\n")
    assert told() == [f"{mlflow_uri}/#/experiments/1/runs/r1?workflowType=machine_learning"] * 2
    (root.local / ACCESS).write_text(f"export MLFLOW_TRACKING_URI=http://127.0.0.1:{free_port()}\n")
    assert told() == [f"run r1 in {tracking_uri(root)}"] * 2


def test_the_commands_offered_name_runs_that_exist_and_a_change(root: Root) -> None:
    def offered(*overrides: str, **changes: str) -> list[str]:
        record = begun(root, tiny(*overrides))
        record = record.model_copy(update={"state": "finished", "ended": record.started, **changes})
        Runs(root).save(record)
        lines = summary_lines(root, record.name)
        return [" ".join(words[1:]) for line in lines if (words := line.split())[1:2] in (["rerun"], ["compare"])]

    other = f"--root {root.uri}"
    assert offered() == [f"rerun tiny-1 --from ramp --set stages.ramp.weight_averaging=2 {other}"]
    assert offered("stages.ramp.weight_averaging=2", rerun_of="tiny-1") == [
        f"rerun tiny-2 --from ramp --set stages.ramp.weight_averaging=4 {other}",
        f"compare tiny-1 tiny-2 {other}",
    ]
    add(root, 1)
    add(root, 2)
    add(root, 3)
    assert offered("seed=9")[1:] == [f"compare tiny-2 tiny-3 {other}"], "the champion that it was judged against"


def test_an_artifact_that_was_deleted_is_said_to_be_gone(root: Root) -> None:
    record = begun(root, tiny())
    (root.local / record.steps["collect"].artifact / "manifest.json").unlink()
    assert "gone" in shown(root, record.name)


def test_a_narrow_terminal_leaves_columns_out_and_squeezes_none(root: Root) -> None:
    recipe = tiny()
    record = begun(root, recipe)
    train(root, recipe, record, steps=10, saved=8)
    with lease(root, f"runs/{record.name}", record.name):
        narrow, wide = shown(root, width=80), shown(root, width=120)
    assert row(narrow, "tiny-1")[1:3] == ["running", "main"]
    assert "no room for: checkpoint" in narrow
    assert "no room" not in wide
    assert {"tokens/s", "left", "goodput", "checkpoint"} <= set(wide.split())
    for label in [step.artifact for step in record.steps.values()]:
        assert label in shown(root, "tiny-1", width=80)
        assert label in shown(root, "tiny-1", width=66)


def test_nothing_is_left_out_or_wrapped_in_a_pipe(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    record = begun(root, tiny())
    record.error = "ValueError: " + "a long word " * 30
    Runs(root).save(record)
    console = RichConsole(width=40, file=io.StringIO(), soft_wrap=True)
    for table in [*status_tables(root, None), *status_tables(root, "tiny-1")]:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "no room" not in text
    assert record.error.strip() in text
    assert "checkpoint/tiny-ramp-" in text


def test_an_empty_root_says_so(root: Root) -> None:
    assert f"none in {root.uri}" in shown(root)


def test_an_unknown_run_names_those_that_exist(root: Root) -> None:
    begun(root, tiny())
    with pytest.raises(ValueError, match="tiny-1"):
        status_tables(root, "tiny-9")
