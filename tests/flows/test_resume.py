"""What becomes of a crashed flow run, on a real Prefect server whose automation has missed it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Cancelled, Crashed, Running
from prefect.testing.utilities import prefect_test_harness

from flows.attempts import RESUMED, was_resumed
from flows.resume import AUTO_RESUME, FIRST_REPORT, resume, resume_all, resume_soon
from flows.setup import crash_zombies, resume_crashed
from llama3.recipe.load import load_recipe
from storage.lease import lease
from storage.root import Root
from tasks.runs import Runs


@flow(name="pipeline")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@pytest.fixture(scope="module")
def client() -> Iterator[SyncPrefectClient]:
    with prefect_test_harness(server_startup_timeout=240), get_client(sync_client=True) as made:
        rule = resume_crashed()
        rule.trigger.expect = {"nothing.at.all"}  # type: ignore[union-attr]
        made.create_automation(rule)
        yield made


def crashed(client: SyncPrefectClient, message: str, tags: tuple[str, ...] = (AUTO_RESUME,)) -> UUID:
    """Return a flow run of a deployment whose first attempt crashed."""
    deployment = client.create_deployment(client.create_flow(pipeline), name="tests", tags=list(tags))
    made = client.create_flow_run_from_deployment(deployment).id
    client.set_flow_run_state(made, Running(), force=True)
    client.set_flow_run_state(made, Crashed(message=message), force=True)
    return made


def state(client: SyncPrefectClient, flow_run: UUID) -> State[None]:
    found = client.read_flow_run(flow_run).state
    assert found is not None
    return found


def test_a_first_report_is_answered_with_a_start_some_seconds_ahead(client: SyncPrefectClient) -> None:
    flow_run = crashed(client, f"{FIRST_REPORT}: -9")
    assert resume_soon(client, flow_run, attempt=1)
    now = state(client, flow_run)
    assert (now.name, now.message) == ("AwaitingRetry", RESUMED)
    assert now.state_details.scheduled_time is not None
    assert now.state_details.scheduled_time > datetime.now(UTC) + timedelta(seconds=20)
    assert was_resumed(client.read_flow_run_states(flow_run))
    assert not resume_soon(client, flow_run, attempt=1)


def test_other_crashes_are_left_to_the_automation_and_taken_up_if_it_does_not(client: SyncPrefectClient) -> None:
    flow_run = crashed(client, "its process is gone")
    assert not resume_soon(client, flow_run, attempt=1)
    assert state(client, flow_run).is_crashed()
    assert resume(client, flow_run, attempt=1, wait_s=0)
    assert (state(client, flow_run).name, state(client, flow_run).message) == ("AwaitingRetry", RESUMED)
    assert not resume(client, flow_run, attempt=1, wait_s=0)


def test_what_nobody_asked_to_resume_stays(client: SyncPrefectClient) -> None:
    untagged = crashed(client, "its process is gone", tags=("herd",))
    assert not resume(client, untagged, attempt=1, wait_s=0)
    later = crashed(client, "its process is gone")
    assert not resume(client, later, attempt=0, wait_s=0)  # another attempt has begun since
    client.set_flow_run_state(later, Cancelled(), force=True)
    assert not resume(client, later, attempt=1, wait_s=0)


def test_the_hourly_pass_finds_what_was_overlooked_but_not_what_crashed_just_now(client: SyncPrefectClient) -> None:
    flow_run = crashed(client, "no heartbeat")
    assert flow_run not in {each.id for each in resume_all(client, grace_s=60)}
    assert flow_run in {each.id for each in resume_all(client, grace_s=0)}
    assert state(client, flow_run).name == "AwaitingRetry"


def test_where_the_automation_is_switched_off_nothing_is_resumed(client: SyncPrefectClient) -> None:
    (rule,) = client.read_automations_by_name(resume_crashed().name)
    client.pause_automation(rule.id)
    flow_run = crashed(client, f"{FIRST_REPORT}: -9")
    try:
        assert not resume_soon(client, flow_run, attempt=1)
        assert not resume(client, flow_run, attempt=1, wait_s=0)
        assert not list(resume_all(client, grace_s=0))
    finally:
        client.resume_automation(rule.id)


CLAIM = """
import sys
from pathlib import Path
import flows.attempts
import flows.claim
from flows.parameters import PipelineParameters
from llama3.recipe.load import load_recipe
from storage.root import Root
from tasks.console import TerminalConsole
from tasks.runs import Runs
flows.attempts.LEAVE_S = 1.0
config, recipe = PipelineParameters(root=sys.argv[1]), load_recipe(Path("recipes/quickstart.yaml"))
with flows.claim.claimed(config, recipe, Runs(Root.of(sys.argv[1])), TerminalConsole()) as (record, fence):
    print("works on", record.name, flush=True)
"""


@pytest.mark.parametrize("by_machine", [True, False])
def test_of_two_processes_of_one_flow_run_the_later_leaves_if_a_machine_began_it(
    client: SyncPrefectClient, tmp_path: Path, by_machine: bool
) -> None:
    """A late report of the first death begins another attempt beside the one that works; a Retry waits for its end."""
    flow_run, root = crashed(client, "its process is gone"), Root.of(tmp_path)
    client.set_flow_run_state(flow_run, AwaitingRetry(message=RESUMED if by_machine else "retried"), force=True)
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")
    record.prefect_run = str(flow_run)
    Runs(root).save(record)
    surroundings = {**os.environ, "PREFECT_API_URL": str(client.api_url), "PREFECT__FLOW_RUN_ID": str(flow_run)}
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    with subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True) as process:
        with lease(root, f"runs/{record.name}", record.name):
            assert process.stdout is not None
            said = process.stdout.readline()
            if by_machine:
                assert process.wait(120) == 0
        said += process.communicate(timeout=120)[0]
    assert process.returncode == 0
    assert ("an earlier process of this flow run: this one leaves" in said) == by_machine
    assert (f"works on {record.name}" in said) != by_machine
    assert Runs(root).find(record.name).attempts == (1 if by_machine else 2)


def test_no_event_is_taken_in_by_both_automations() -> None:
    assert not crash_zombies().trigger.expect & resume_crashed().trigger.expect  # type: ignore[union-attr]
