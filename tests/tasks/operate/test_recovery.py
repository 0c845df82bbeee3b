"""States that a killed process left behind, in the record, in a real MLflow store and on a real Prefect server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Suspended
from prefect.states import State as PrefectState

from herd.flows.crash_recovery import end_flow_run
from herd.flows.local_server import NAME
from herd.llama3.recipe.load import load_recipe
from herd.storage.lease import lease
from herd.storage.root import Root
from herd.tasks.operate import recovery
from herd.tasks.operate.ledgers import ledger_differences
from herd.tasks.operate.recovery import Reconciled, reconcile, reconcile_record
from herd.tasks.runs.records import OPEN, RunRecord, Runs, mark_open, now
from herd.tasks.study.records import Studies, StudyRecord
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.servers import only_flow_runs_of

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))


@flow(name="reconciled")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@pytest.fixture(scope="module")
def client(prefect_server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    settings = temporary_settings({PREFECT_API_URL: prefect_server["api"]})
    with settings, get_client(sync_client=True) as made, only_flow_runs_of(pipeline, made):
        yield made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root.parse(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def tracker(root: Root) -> MLflowTracker:
    return MLflowTracker(root, RECIPE.name)


@pytest.fixture
def run(root: Root, tracker: MLflowTracker) -> RunRecord:
    """A run whose process was killed: everything says running."""
    record = Runs(root).begin(RECIPE, "code")
    record.mlflow_run = tracker.open_run(record.name, {}, {})
    tracker.open_child(record.mlflow_run, record.name, tags(record))
    Runs(root).save(record)
    mark_open(root, record.name)
    return record


def tags(record: RunRecord) -> dict[str, str]:
    return {"herd.run": record.name, "kind": "checkpoint", "stage": "main", "artifact.key": "abc"}


def statuses(tracker: MLflowTracker, run: RunRecord) -> list[str]:
    found = tracker.client.search_runs([tracker.experiment], f"tags.`herd.run` = '{run.name}'")
    return [each.info.status for each in found]


def flow_run(client: SyncPrefectClient, root: Root, run: RunRecord, state: PrefectState) -> FlowRun:
    made = client.create_flow_run(pipeline, name=run.name)
    client.set_flow_run_state(made.id, state, force=True)
    run.prefect_run = str(made.id)
    Runs(root).save(run)
    return made


def state_of(client: SyncPrefectClient, made: FlowRun) -> str:
    state = client.read_flow_run(made.id).state
    assert state is not None
    return state.name or ""


def test_people_are_told_of_a_killed_run_and_once(root: Root, run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own process could not send the event that a notification is made of."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(recovery, "run_ended", lambda record, uri: told.append((record.name, record.state)))
    for _ in range(2):
        reconcile_record(root, None, f"runs/{run.name}")
    assert told == [(run.name, "interrupted")]


@pytest.mark.fault("F16")
def test_a_dead_run_is_settled_everywhere_and_once(
    client: SyncPrefectClient, root: Root, tracker: MLflowTracker, run: RunRecord
) -> None:
    made = flow_run(client, root, run, Running())
    (lie,) = ledger_differences(root, client, [run.name])
    assert lie.text == "record running; MLflow RUNNING; MLflow 1 steps RUNNING; Prefect Running"
    found = reconcile(root, client, grace_s=0)
    assert [line for line in found if line.run == run.name] == [
        Reconciled(run.name, "record", "running", "interrupted"),
        Reconciled(run.name, "MLflow", "RUNNING", "KILLED"),
        Reconciled(run.name, "Prefect", "Running", "Crashed"),
    ]
    record = Runs(root).find(run.name)
    assert (record.state, record.error) == ("interrupted", "its process is gone")
    assert record.ended
    assert statuses(tracker, run) == ["KILLED", "KILLED"]
    assert state_of(client, made) == "Crashed"
    assert ledger_differences(root, client, [run.name]) == []
    assert run.name not in root.names(OPEN)
    assert reconcile(root, client, grace_s=0) == []


@pytest.fixture
def study(root: Root) -> StudyRecord:
    """A study whose process was killed: everything says running."""
    record = StudyRecord(name="warm", digest="d" * 64, kind="compare", recipe="r.yaml", started=now(), code="abc")
    record.mlflow_run = MLflowTracker(root, "warm").open_study("warm", "d" * 16, {}, {})
    Studies(root).save(record)
    return record


def test_a_dead_study_is_settled_everywhere_and_once(client: SyncPrefectClient, root: Root, study: StudyRecord) -> None:
    made = client.create_flow_run(pipeline, name="reconciled study")
    client.set_flow_run_state(made.id, Running(), force=True)
    study.prefect_run = str(made.id)
    Studies(root).save(study)
    with lease(root, "studies/warm", "warm"):
        assert reconcile(root, client, grace_s=0) == []
    assert reconcile(root, client, grace_s=0) == [
        Reconciled("warm", "record", "running", "interrupted"),
        Reconciled("warm", "MLflow", "RUNNING", "KILLED"),
        Reconciled("warm", "Prefect", "Running", "Crashed"),
    ]
    assert Studies(root).find("warm").error == "its process is gone"
    assert state_of(client, made) == "Crashed"
    assert reconcile(root, client, grace_s=0) == []


def test_a_live_run_is_left_alone(
    client: SyncPrefectClient, root: Root, tracker: MLflowTracker, run: RunRecord
) -> None:
    made = flow_run(client, root, run, Running())
    with lease(root, f"runs/{run.name}", run.name):
        assert reconcile(root, client, grace_s=0) == []
    assert Runs(root).find(run.name).state == "running"
    assert statuses(tracker, run) == ["RUNNING", "RUNNING"]
    assert state_of(client, made) == "Running"
    assert run.name in root.names(OPEN)


def test_a_flow_run_that_just_began_is_not_crashed(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    """Between Prefect's Running and the lease lie seconds of imports."""
    made = flow_run(client, root, run, Pending())
    reconcile_record(root, client, f"runs/{run.name}")
    assert state_of(client, made) == "Pending"
    assert Runs(root).find(run.name).state == "interrupted"
    assert run.name in root.names(OPEN)


def test_an_attempt_that_is_known_to_be_over_needs_no_grace(
    client: SyncPrefectClient, root: Root, run: RunRecord
) -> None:
    made = flow_run(client, root, run, Running())
    reconcile_record(root, client, f"runs/{run.name}", attempt=client.read_flow_run(made.id).run_count)
    assert state_of(client, made) == "Crashed"


def test_the_next_attempt_on_its_way_is_left_alone(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    """Prefect counts attempts when they run: a pending one still has the number of the one that died."""
    made = flow_run(client, root, run, Running())
    attempt = client.read_flow_run(made.id).run_count
    client.set_flow_run_state(made.id, AwaitingRetry(), force=True)
    client.set_flow_run_state(made.id, Pending(), force=True)
    reconcile_record(root, client, f"runs/{run.name}", attempt=attempt)
    assert client.read_flow_run(made.id).run_count == attempt
    assert state_of(client, made) == "Pending"


@pytest.mark.parametrize(
    ("state", "after", "expected"),
    [
        (Cancelling(), "Cancelled", "cancelled"),
        (AwaitingRetry(), "AwaitingRetry", "interrupted"),
        (Crashed(), "Crashed", "interrupted"),
        (Failed(), "Failed", "failed"),
    ],
)
def test_prefect_knows_more(
    client: SyncPrefectClient, root: Root, run: RunRecord, state: PrefectState, after: str, expected: str
) -> None:
    made = flow_run(client, root, run, state)
    reconcile_record(root, client, f"runs/{run.name}", grace_s=0)
    assert state_of(client, made) == after
    assert Runs(root).find(run.name).state == expected


def test_a_run_that_waits_for_a_person_is_left_alone(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    made = flow_run(client, root, run, Suspended())
    assert reconcile_record(root, client, f"runs/{run.name}", grace_s=0) == []
    assert Runs(root).find(run.name).state == "running"
    assert state_of(client, made) == "Suspended"


@pytest.mark.parametrize(("state", "status"), [("finished", "FINISHED"), ("failed", "FAILED")])
def test_a_record_that_knows_the_end_decides(
    client: SyncPrefectClient, root: Root, tracker: MLflowTracker, run: RunRecord, state: str, status: str
) -> None:
    """The process wrote its record and was killed, or its servers were away, before it could say so to them."""
    run.state = state  # type: ignore[assignment]
    made = flow_run(client, root, run, Running())
    reconcile_record(root, client, f"runs/{run.name}", grace_s=0)
    assert Runs(root).find(run.name).state == state
    assert statuses(tracker, run) == [status, status]
    assert state_of(client, made) == {"finished": "Completed", "failed": "Failed"}[state]


def test_without_prefect_the_mark_stays(root: Root, run: RunRecord, client: SyncPrefectClient) -> None:
    flow_run(client, root, run, Running())
    assert [line.where for line in reconcile_record(root, None, f"runs/{run.name}")] == ["record", "MLflow"]
    assert reconcile_record(root, None, f"runs/{run.name}") == []
    assert run.name in root.names(OPEN)


def test_a_cancelled_run_is_not_called_interrupted(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    """Its own process could only say that it was ended; Prefect knows why."""
    run.state, run.error = "interrupted", "TerminationSignal"
    flow_run(client, root, run, Cancelled())
    reconcile_record(root, client, f"runs/{run.name}")
    assert Runs(root).find(run.name).state == "cancelled"
    reconcile_record(root, None, f"runs/{run.name}")
    assert Runs(root).find(run.name).state == "cancelled"


def test_a_run_that_mlflow_missed_is_noted(
    root: Root, run: RunRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    reconcile_record(root, None, f"runs/{run.name}")
    assert Runs(root).find(run.name).mlflow_stale
    assert run.name in root.names(OPEN)
    monkeypatch.undo()
    assert Reconciled(run.name, "MLflow", "stale", "complete") in reconcile_record(root, None, f"runs/{run.name}")
    assert not Runs(root).find(run.name).mlflow_stale


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ("Flow run encountered an exception: ReadTimeout: timed out", "Completed"),
        (
            "Flow run encountered an exception: PrefectHTTPStatusError: 503 Service Unavailable",
            "Completed",
        ),
        ("Flow run encountered an exception: KeyError: 'report'", "Failed"),
    ],
)
def test_a_finished_run_is_no_failure_because_prefect_was_slow(
    client: SyncPrefectClient, root: Root, run: RunRecord, message: str, state: str
) -> None:
    made = flow_run(client, root, run, Failed(message=message))
    run.state, run.ended = "finished", now()
    Runs(root).save(run)
    reconcile_record(root, client, f"runs/{run.name}")
    assert state_of(client, made) == state


def test_a_run_that_was_killed_after_its_end_is_finished(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    made = flow_run(client, root, run, Crashed(message="Execution was cancelled by the runtime environment."))
    run.state, run.ended = "finished", now()
    Runs(root).save(run)
    assert [line.after for line in reconcile_record(root, client, f"runs/{run.name}") if line.where == "Prefect"] == [
        "Completed"
    ]
    assert state_of(client, made) == "Completed"


def test_who_takes_a_run_over_ends_the_flow_run_of_the_dead_attempt(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "a server of `herd run` writes into the database that `herd up` shows")
    by_hand = client.create_flow_run(pipeline, name="tiny-1")
    deployment = client.create_deployment(client.create_flow(pipeline), name="taken", tags=["auto-resume"])
    deployed, done = (client.create_flow_run_from_deployment(deployment) for _ in range(2))
    for each in (by_hand, deployed):
        client.set_flow_run_state(each.id, Running(), force=True)
    client.set_flow_run_state(done.id, Completed(), force=True)
    for each in (by_hand, deployed, done):
        end_flow_run(str(each.id), "its process is gone")
    assert [state_of(client, each) for each in (by_hand, deployed, done)] == ["Crashed", "Cancelled", "Completed"]
    end_flow_run(str(uuid4()), "unknown to this server")


def test_a_deleted_run_takes_its_mark_along(root: Root, client: SyncPrefectClient) -> None:
    mark_open(root, "quickstart-999")
    assert reconcile_record(root, client, "runs/quickstart-999") == []
    assert "quickstart-999" not in root.names(OPEN)


def test_files_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    for name, hours in (("young", 23), ("old", 25)):
        folder, lock = tmp_path / ".staging" / name, tmp_path / ".locks" / "staging" / name
        for path in (folder, lock.parent):
            path.mkdir(parents=True, exist_ok=True)
        lock.touch()
        (folder / "half.bin").write_bytes(b"x" * 5000)
        for path in (folder / "half.bin", folder):
            os.utime(path, (time.time() - 3600 * hours,) * 2)
    assert reconcile(root, None, cleanup=False) == []
    assert [(line.where, line.after) for line in reconcile(root, None)] == [("storage", "removed")]
    assert [path.name for path in (tmp_path / ".staging").iterdir()] == ["young"]


def test_settled_runs_cost_one_listing(tmp_path: Path, client: SyncPrefectClient) -> None:
    """Records of settled runs are not opened: here they could not even be read."""
    root = Root.parse(tmp_path)
    for number in range(300):
        root.write("no record", "runs", f"quickstart-{number}", "record", "1-1-0.json")
    mark_open(root, "nobody-1")
    root.write("done", OPEN, ".complete")
    assert reconcile(root, client) == []
