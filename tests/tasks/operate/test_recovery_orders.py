"""The reconciler after a fault at any call to Prefect, MLflow or the disk: the next pass settles what is left, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from herd.llama3.recipe.load import load_recipe
from herd.storage.root import Root
from herd.tasks.operate import recovery
from herd.tasks.operate.recovery import COMPLETE, reconcile, reconcile_record
from herd.tasks.runs.records import OPEN, RunRecord, Runs, mark_open, now
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.orders import Boundary, Fault, cut_short, walk, watch_mlflow
from tests.servers import only_flow_runs_of

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))
CALLS = ("read_flow_run", "set_flow_run_state")


@flow(name="settled")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@pytest.fixture(scope="module")
def client(prefect_server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    settings = temporary_settings({PREFECT_API_URL: prefect_server["api"]})
    with settings, get_client(sync_client=True) as made, only_flow_runs_of(pipeline, made):
        yield made


@pytest.mark.fault("F2", "F15", "F16")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 37])
def test_a_dead_run_is_settled_after_a_fault_at_any_call(
    every: int, client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, announced = Root.parse(tmp_path), list[str]()

    def announce(record: RunRecord, uri: str) -> None:
        announced.append(record.name)

    monkeypatch.setattr(recovery, "run_ended", announce)
    root.write(now(), OPEN, COMPLETE)  # a pass looks at runs that are marked

    def play(fault: Fault) -> int:
        runs, tracker, boundary = Runs(root), MLflowTracker(root, RECIPE.name), Boundary(fault)
        record = runs.begin(RECIPE, "code")
        name, flow_run = record.name, client.create_flow_run(pipeline, name=record.name)
        client.set_flow_run_state(flow_run.id, Running(), force=True)
        record.prefect_run, record.mlflow_run = str(flow_run.id), tracker.open_run(name, {}, {})
        runs.save(record)
        mark_open(root, name)
        prefect = boundary.watch_methods(SyncPrefectClient, CALLS, ConnectionError)
        with boundary.watch_disk(root.local), watch_mlflow(boundary), prefect, cut_short():
            reconcile_record(root, client, f"runs/{name}", grace_s=0)
        state = client.read_flow_run(flow_run.id).state
        assert state is not None
        if state.name != "Running" or runs.find(name).state == "running":
            assert (state.name, runs.find(name).state) in (("Crashed", "interrupted"), ("Running", "running"))
        reconcile(root, client, grace_s=0, cleanup=False)
        assert reconcile(root, client, grace_s=0, cleanup=False) == [], "it was not settled at once"
        ended, state = runs.find(name), client.read_flow_run(flow_run.id).state
        assert state is not None
        (shown,) = tracker.client.search_runs([tracker.experiment], tracker.query(name))
        assert (ended.state, ended.mlflow_stale, shown.info.status) == ("interrupted", False, "KILLED")
        assert state.name == "Crashed"
        assert name not in root.names(OPEN)
        assert announced.count(name) <= 1
        assert announced.count(name) == 1 or fault.number > 0
        return len(boundary.calls)

    walk(play, every)
