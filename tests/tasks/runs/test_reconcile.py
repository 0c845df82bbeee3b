"""States that a killed process left behind, in the record, in a real MLflow store and on a real Prefect server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Completed, Failed, Pending, Running, Suspended
from prefect.states import State as PrefectState

from flows.crash_recovery import end_flow_run
from llama3.recipe.load import load_recipe
from storage.lease import lease
from storage.root import Root
from tasks.runs.records import OPEN, RunRecord, Runs, mark_open, now
from tasks.runs.recovery import RunSettler, Settled, reconcile
from tasks.study.records import Studies, StudyRecord
from tasks.tracking.mlflow import Tracker

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))


@flow(name="reconciled")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@pytest.fixture(scope="module")
def client(prefect_server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_server["api"]}), get_client(sync_client=True) as made:
        yield made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root.of(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def tracker(root: Root) -> Tracker:
    return Tracker(root, RECIPE.name)


@pytest.fixture
def run(root: Root, tracker: Tracker) -> RunRecord:
    """A run whose process was killed: everything says running."""
    record = Runs(root).begin(RECIPE, "code")
    record.mlflow_run = tracker.open_run(record.name, {}, {})
    tracker.open_child(record.mlflow_run, record.name, tags(record))
    Runs(root).save(record)
    mark_open(root, record.name)
    return record


def tags(record: RunRecord) -> dict[str, str]:
    return {"herd.run": record.name, "kind": "checkpoint", "stage": "main", "artifact.key": "abc"}


def statuses(tracker: Tracker, run: RunRecord) -> list[str]:
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


def test_a_dead_run_is_settled_everywhere_and_once(
    client: SyncPrefectClient, root: Root, tracker: Tracker, run: RunRecord
) -> None:
    made = flow_run(client, root, run, Running())
    found = reconcile(root, client, grace_s=0)
    assert [line for line in found if line.run == run.name] == [
        Settled(run.name, "record", "running", "interrupted"),
        Settled(run.name, "MLflow", "RUNNING", "KILLED"),
        Settled(run.name, "Prefect", "Running", "Crashed"),
    ]
    record = Runs(root).find(run.name)
    assert (record.state, record.error) == ("interrupted", "its process is gone")
    assert record.ended
    assert statuses(tracker, run) == ["KILLED", "KILLED"]
    assert state_of(client, made) == "Crashed"
    assert run.name not in root.names(OPEN)
    assert reconcile(root, client, grace_s=0) == []


@pytest.fixture
def study(root: Root) -> StudyRecord:
    """A study whose process was killed: everything says running."""
    record = StudyRecord(name="warm", digest="d" * 64, kind="compare", recipe="r.yaml", started=now(), code="abc")
    record.mlflow_run = Tracker(root, "warm").open_study("warm", "d" * 16, {}, {})
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
        Settled("warm", "record", "running", "interrupted"),
        Settled("warm", "MLflow", "RUNNING", "KILLED"),
        Settled("warm", "Prefect", "Running", "Crashed"),
    ]
    assert Studies(root).find("warm").error == "its process is gone"
    assert state_of(client, made) == "Crashed"
    assert reconcile(root, client, grace_s=0) == []


def test_a_live_run_is_left_alone(client: SyncPrefectClient, root: Root, tracker: Tracker, run: RunRecord) -> None:
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
    RunSettler(root, client).settle(run.name)
    assert state_of(client, made) == "Pending"
    assert Runs(root).find(run.name).state == "interrupted"
    assert run.name in root.names(OPEN)


def test_an_attempt_that_is_known_to_be_over_needs_no_grace(
    client: SyncPrefectClient, root: Root, run: RunRecord
) -> None:
    made = flow_run(client, root, run, Running())
    RunSettler(root, client).settle(run.name, attempt=client.read_flow_run(made.id).run_count)
    assert state_of(client, made) == "Crashed"


def test_the_next_attempt_on_its_way_is_left_alone(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    """Prefect counts attempts when they run: a pending one still has the number of the one that died."""
    made = flow_run(client, root, run, Running())
    attempt = client.read_flow_run(made.id).run_count
    client.set_flow_run_state(made.id, AwaitingRetry(), force=True)
    client.set_flow_run_state(made.id, Pending(), force=True)
    RunSettler(root, client).settle(run.name, attempt=attempt)
    assert client.read_flow_run(made.id).run_count == attempt
    assert state_of(client, made) == "Pending"


@pytest.mark.parametrize(("state", "after"), [(Cancelling(), "Cancelled"), (AwaitingRetry(), "AwaitingRetry")])
def test_prefect_knows_more(
    client: SyncPrefectClient, root: Root, run: RunRecord, state: PrefectState, after: str
) -> None:
    made = flow_run(client, root, run, state)
    RunSettler(root, client, grace_s=0).settle(run.name)
    assert state_of(client, made) == after
    assert Runs(root).find(run.name).state == ("cancelled" if after == "Cancelled" else "interrupted")


def test_a_run_that_waits_for_a_person_is_left_alone(client: SyncPrefectClient, root: Root, run: RunRecord) -> None:
    made = flow_run(client, root, run, Suspended())
    assert RunSettler(root, client, grace_s=0).settle(run.name) == []
    assert Runs(root).find(run.name).state == "running"
    assert state_of(client, made) == "Suspended"


@pytest.mark.parametrize(("state", "status"), [("finished", "FINISHED"), ("failed", "FAILED")])
def test_a_record_that_knows_the_end_decides(
    client: SyncPrefectClient, root: Root, tracker: Tracker, run: RunRecord, state: str, status: str
) -> None:
    """The process wrote its record and was killed, or its servers were away, before it could say so to them."""
    run.state = state  # type: ignore[assignment]
    made = flow_run(client, root, run, Running())
    RunSettler(root, client, grace_s=0).settle(run.name)
    assert Runs(root).find(run.name).state == state
    assert statuses(tracker, run) == [status, status]
    assert state_of(client, made) == {"finished": "Completed", "failed": "Failed"}[state]


def test_without_prefect_the_mark_stays(root: Root, run: RunRecord, client: SyncPrefectClient) -> None:
    flow_run(client, root, run, Running())
    assert [line.where for line in RunSettler(root, None).settle(run.name)] == ["record", "MLflow"]
    assert RunSettler(root, None).settle(run.name) == []
    assert run.name in root.names(OPEN)


def test_a_cancelled_run_is_not_called_interrupted(root: Root, run: RunRecord) -> None:
    """Its own process could only say that it was ended; the hook knows why."""
    run.state, run.error = "interrupted", "TerminationSignal"
    Runs(root).save(run)
    RunSettler(root, None).settle(run.name, "cancelled")
    assert Runs(root).find(run.name).state == "cancelled"
    RunSettler(root, None).settle(run.name, "interrupted")
    assert Runs(root).find(run.name).state == "cancelled"


def test_a_run_that_mlflow_missed_is_noted(
    root: Root, run: RunRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    RunSettler(root, None).settle(run.name)
    assert Runs(root).find(run.name).mlflow_stale
    assert run.name in root.names(OPEN)
    monkeypatch.undo()
    assert Settled(run.name, "MLflow", "stale", "complete") in RunSettler(root, None).settle(run.name)
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
    RunSettler(root, client).settle(run.name)
    assert state_of(client, made) == state


def test_who_takes_a_run_over_ends_the_flow_run_of_the_dead_attempt(client: SyncPrefectClient) -> None:
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
    assert RunSettler(root, client).settle("quickstart-999") == []
    assert "quickstart-999" not in root.names(OPEN)


def test_settled_runs_cost_one_listing(tmp_path: Path, client: SyncPrefectClient) -> None:
    """Records of settled runs are not opened: here they could not even be read."""
    root = Root.of(tmp_path)
    for number in range(300):
        root.write("no record", "runs", f"quickstart-{number}", "run.json")
    mark_open(root, "nobody-1")
    root.write("done", OPEN, ".complete")
    assert reconcile(root, client) == []
