"""What carries the end of a process to its record: its own last words, the watchdog, and nothing of a lost lease."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from prefect.exceptions import TerminationSignal

from herd.flows import run_lifecycle
from herd.flows.recipe_form import PipelineParameters
from herd.flows.run_lifecycle import _close, _closing, acquire_run, open_run, reporting_end
from herd.flows.study import StudyContext, StudyParameters
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.studies.expand import load_study
from herd.storage.lease import LeaseLost, lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.operate.recovery import reconcile_record
from herd.tasks.runs.records import RunRecord, Runs, State, mark_open, now
from herd.tasks.stages.backfill import watch_outages
from herd.tasks.step import Context, tracked_step
from herd.tasks.study.records import Studies, StudyRecord
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.dist import Forked
from tests.tasks.mlflow_server import mlflow_server, use
from tests.tasks.tracked_run import TrackedRun

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))
WORKS = """
import sys, time
from contextlib import suppress
from herd.flows.watchdog import watched
from herd.storage.lease import lease
from herd.storage.root import Root
root, work = Root.parse(sys.argv[1]), sys.argv[2]
with suppress(KeyError), lease(root, work, work), watched(root, work, 0):
    print("works", flush=True)
    asked = sys.stdin.readline()
    if asked == "fail\\n":
        raise KeyError
    if asked == "pause\\n":
        from prefect.exceptions import Pause
        raise Pause
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root.parse(tmp_path_factory.mktemp("root"))


@pytest.fixture
def run(root: Root) -> RunRecord:
    record = Runs(root).begin(RECIPE, "code")
    record.prefect_run = str(uuid4())
    Runs(root).save(record)
    mark_open(root, record.name)
    return record


@pytest.mark.parametrize("lacking", ["scores", "report"])
def test_what_cannot_be_shown_at_the_end_fails_no_run(
    lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrackedRun(Root.parse(tmp_path / "root"))
    context, span = run.context, Schedule(run.context.recipe).trained[-1]
    context.artifacts[f"evaluate-{span.name}"] = evaluation = run.evaluate(run.stage(span, run.tokens(), None))
    page = context.runs.folder(context.record.name) / "report.html"
    if lacking == "scores":
        shutil.rmtree(evaluation.folder)
    else:
        page.mkdir()
    _close(context, "finished", "FINISHED", "")
    assert context.runs.find(context.record.name).state == "finished"
    assert context.tracker.client.get_run(context.record.mlflow_run).info.status == "FINISHED"
    told = " ".join(capsys.readouterr().out.split())
    assert f"{context.record.name} has ended, and not all of it is shown: " in told
    assert f"its report: herd report {context.record.name}" in told


def test_only_a_finished_run_gets_its_report(tmp_path: Path) -> None:
    context = TrackedRun(Root.parse(tmp_path / "root")).context
    page = context.runs.folder(context.record.name) / "report.html"
    _close(context, "failed", "FAILED", "ValueError: no")
    assert not page.exists()
    _close(context, "finished", "FINISHED", "")
    assert page.exists()


@pytest.mark.slow
def test_a_run_that_is_done_is_finished_in_mlflow_though_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops for longer than a request waits, at the moment at which the run ends."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with mlflow_server(tmp_path / "mlflow") as server:
        use(monkeypatch, server.uri)
        run = TrackedRun(Root.parse(tmp_path / "root"))
        context = run.context
        watch_outages(context)
        run.tokens()
        server.signal(signal.SIGSTOP)
        threading.Timer(7.0, server.signal, [signal.SIGCONT]).start()
        _close(context, "finished", "FINISHED", "")
        status = context.tracker.client.get_run(context.record.mlflow_run).info.status
    assert (status, Runs(context.root).find(context.record.name).mlflow_stale) == ("FINISHED", False)


def works(root: Root, work: str) -> tuple[Forked, psutil.Process]:
    """Start a process that is at `work`; return it and its watchdog."""
    process = Forked("-c", WORKS, root.uri, work, environment={**os.environ})
    assert process.stdout.readline() == "works\n"
    (watchdog,) = psutil.Process(process.pid).children()
    return process, watchdog


@pytest.mark.slow
def test_the_watchdog_says_how_a_study_ended(root: Root) -> None:
    record = StudyRecord(name="warm", digest="d", kind="compare", recipe="r.yaml", started=now(), code="abc")
    record.prefect_run = str(uuid4())
    Studies(root).save(record)
    process, watchdog = works(root, "studies/warm")
    reconcile_record(root, None, "studies/warm")
    assert Studies(root).find("warm").state == "running"  # somebody works on it
    process.kill()
    process.wait()
    psutil.wait_procs([watchdog], timeout=90)
    assert Studies(root).find("warm").state == "interrupted"


def test_the_watchdog_of_a_killed_process_settles_its_run_and_leaves(root: Root, run: RunRecord) -> None:
    process, watchdog = works(root, f"runs/{run.name}")
    watchdog.send_signal(signal.SIGTERM)  # as systemd does to everything in the group
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([watchdog], timeout=90)
    assert not alive
    assert Runs(root).find(run.name).state == "interrupted"


@pytest.mark.parametrize("word", [pytest.param("end", marks=pytest.mark.slow), "fail", "pause"])
def test_the_watchdog_of_a_process_that_ends_by_itself_says_nothing(word: str, root: Root, run: RunRecord) -> None:
    """Also of one that waits for a person, who may answer before the watchdog would look."""
    process, watchdog = works(root, f"runs/{run.name}")
    process.stdin.write(f"{word}\n".encode())
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs([watchdog], timeout=30)
    assert not alive
    assert Runs(root).find(run.name).state == "running"


@pytest.mark.parametrize(
    ("error", "message", "line"),
    [
        (KeyboardInterrupt(), "stopped by Ctrl-C", ""),
        (
            TerminationSignal(signal.SIGTERM),
            "stopped by herd stop or SIGTERM",
            "stopped by herd stop or SIGTERM; herd rerun {} --until main --root {} continues it\n",
        ),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_who_is_stopped_says_how_it_goes_on_once(
    root: Root, run: RunRecord, error: BaseException, message: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C the command line says it; Prefect sends SIGTERM again before that."""
    runs, tracker = Runs(root), MLflowTracker(root, RECIPE.name)
    context = Context(RECIPE, Cluster(), open_store(root), runs, run, tracker, TerminalConsole(), [])
    run.until = "main"
    with suppress(BaseException), _closing(context):
        raise error
    ended = Runs(root).find(run.name)
    assert (ended.state, ended.error) == ("interrupted", message)
    assert capsys.readouterr().out == line.format(run.name, root.uri)


def test_a_stopped_study_says_how_it_goes_on(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    record = StudyRecord(name="warm", digest="d", kind="contrast", question="?", recipe="r", started=now(), code="c")
    config, expanded, tracker = StudyParameters(), load_study(Path("ramp-cpu")), MLflowTracker(root, RECIPE.name)
    studies = Studies(root)
    context = StudyContext(config, expanded, [], studies, record, tracker, TerminalConsole())
    with suppress(BaseException), studies.alone("warm"), reporting_end(tracker, context.close):
        raise TerminationSignal(signal.SIGTERM)
    assert Studies(root).find("warm").state == "interrupted"
    assert capsys.readouterr().out == "stopped by herd stop or SIGTERM; the same command continues warm\n"


def test_a_step_that_the_recipe_lacks_is_named_with_the_one_that_was_meant() -> None:
    config = PipelineParameters(recipe="quickstart", until="anneel")
    with pytest.raises(RecipeError, match="until: 'anneel' is not a step of quickstart; did you mean anneal"):
        open_run(config, RECIPE).__enter__()


def test_the_same_rerun_from_a_step_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lifecycle, "watched", lambda *_: nullcontext())
    runs = Runs(Root.parse(tmp_path))

    def begin(rerun_of: str, from_step: str, until: str = "", state: State = "interrupted", fresh: bool = False) -> str:
        config = PipelineParameters(rerun_of=rerun_of, from_step=from_step, until=until, fresh=fresh)
        with acquire_run(config, RECIPE, runs, TerminalConsole()) as (record, _):
            record.state = state
            runs.save(record)
        return f"{record.name} attempt {record.attempts}"

    assert begin("", "", state="finished") == "quickstart-1 attempt 1"
    assert begin("quickstart-1", "main") == "quickstart-2 attempt 1"
    assert begin("quickstart-1", "anneal") == "quickstart-3 attempt 1"
    assert begin("quickstart-2", "main") == "quickstart-4 attempt 1"
    assert begin("quickstart-1", "main", until="main") == "quickstart-5 attempt 1"
    assert begin("quickstart-1", "main", fresh=True) == "quickstart-6 attempt 1"
    assert begin("quickstart-1", "main") == "quickstart-6 attempt 2"
    assert begin("quickstart-1", "anneal", state="finished") == "quickstart-3 attempt 2"
    assert begin("quickstart-1", "anneal") == "quickstart-7 attempt 1"


def test_an_unfinished_run_that_is_looked_after_is_waited_for(tmp_path: Path) -> None:
    runs, config = Runs(Root.parse(tmp_path)), PipelineParameters()
    with acquire_run(config, RECIPE, runs, TerminalConsole()) as (record, _):
        record.state = "interrupted"
        runs.save(record)
    name = f"runs/{record.name}"
    with ExitStack() as held:
        held.enter_context(lease(runs.root, name, f"reconcile on {record.name}"))
        release = threading.Timer(1.0, held.close)
        release.start()
        with acquire_run(config, RECIPE, runs, TerminalConsole()) as (continued, _):
            assert (continued.name, continued.attempts) == (record.name, 2)
            with acquire_run(config, RECIPE, runs, TerminalConsole()) as (other, _):  # a run works on it
                assert other.name != record.name
        release.join()


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()], ids=["ends", "fails", "is stopped"])
def test_who_lost_the_run_says_nothing_of_how_it_ended(root: Root, run: RunRecord, error: BaseException | None) -> None:
    runs, tracker = Runs(root), MLflowTracker(root, RECIPE.name)
    with lease(root, f"runs/{run.name}", "first") as mine:
        runs.hold(run.name, mine)
        tracker.lost = lambda: runs.lease_lost(run.name)
        run.mlflow_run = tracker.open_run(run.name, {"attempts": "1"}, {})
        context = Context(RECIPE, Cluster(), open_store(root), runs, run, tracker, TerminalConsole(), [])
        children = []
        root.file("leases", "runs", run.name).unlink()  # as a lease that was silent for too long
        second = Runs(root)
        with second.alone(run.name, "second"):
            later = second.find(run.name).model_copy(update={"attempts": 2})
            second.save(later)
            MLflowTracker(root, RECIPE.name).open_run(run.name, {"attempts": "2"}, {})
            with (
                suppress(ValueError, KeyboardInterrupt),
                _closing(context),
                tracked_step(context, "a", "b", "c") as child,
            ):
                children.append(child)
                tracker.set_tags(run.mlflow_run, {"attempts": "1"})
                if error is not None:
                    raise error
            assert Runs(root).find(run.name) == later
            assert tracker.noted_tags(run.name)["attempts"] == "2"
            for handle in (run.mlflow_run, *children):
                assert tracker.client.get_run(handle).info.status == "RUNNING"
            with pytest.raises(LeaseLost):
                runs.save(run)


def test_who_lost_the_study_writes_its_record_no_more(root: Root) -> None:
    studies = Studies(root)
    record = StudyRecord(name="lost", digest="d", kind="contrast", question="?", recipe="r", started=now(), code="c")
    with studies.alone("lost"):
        studies.save(record)
        root.file("leases", "studies", "lost").unlink()
        with Studies(root).alone("lost"), pytest.raises(LeaseLost):
            studies.save(record.model_copy(update={"state": "failed"}))
    assert Studies(root).find("lost") == record
