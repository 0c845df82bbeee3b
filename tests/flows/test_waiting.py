"""Schedules that fire faster than their runs end, on a real Prefect server: what waits, and who begins next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Running
from prefect.testing.utilities import prefect_test_harness

from flows.waiting import steps_back, thin_out

POOL, QUEUE = "local", "training"
BEGAN = timedelta(minutes=10)


@flow(name="pipeline")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@pytest.fixture(scope="module")
def server() -> Iterator[SyncPrefectClient]:
    with prefect_test_harness(server_startup_timeout=240), get_client(sync_client=True) as made:
        made.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        made.create_work_queue(QUEUE, concurrency_limit=1, work_pool_name=POOL)
        yield made


@pytest.fixture
def client(server: SyncPrefectClient) -> Iterator[SyncPrefectClient]:
    """The server with nothing on it that waits."""
    yield server
    for each in server.read_flow_runs():
        server.delete_flow_run(each.id)


def deployment(client: SyncPrefectClient, every: timedelta | None = None) -> UUID:
    """Return a deployment; with a schedule it has fired for ten minutes while its queue had no room."""
    schedules = [(IntervalSchedule(interval=every), True)] if every else None
    made = client.create_deployment(
        client.create_flow(pipeline),
        name=f"often-{uuid4().hex[:8]}",
        work_pool_name=POOL,
        work_queue_name=QUEUE,
        schedules=[{"schedule": schedule, "active": active} for schedule, active in schedules or []],  # type: ignore[misc]
    )
    if every:
        now = datetime.now(UTC)
        span = {"start_time": str(now - BEGAN), "end_time": str(now), "max_runs": 5, "min_runs": 5}
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": made}, json=span).raise_for_status()
    return made


def next_ones(client: SyncPrefectClient) -> list[FlowRun]:
    """Return what a worker would begin now, in its order; room is made for all."""
    queue = client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    client.update_work_queue(queue.id, concurrency_limit=50)
    found = client.get_scheduled_flow_runs_for_work_pool(POOL, [QUEUE], datetime.now(UTC) + timedelta(seconds=5))
    client.update_work_queue(queue.id, concurrency_limit=1)
    return [each.flow_run for each in found]


def begun(client: SyncPrefectClient) -> FlowRun:
    """Let the next one begin, as a worker does."""
    first = next_ones(client)[0]
    client.set_flow_run_state(first.id, Running(), force=True)
    return client.read_flow_run(first.id)


def test_the_first_of_a_schedule_that_begins_cancels_those_behind_it(client: SyncPrefectClient) -> None:
    often, other = deployment(client, timedelta(minutes=2)), deployment(client, timedelta(minutes=2))
    waiting = next_ones(client)
    assert [sum(each.deployment_id == made for each in waiting) for made in (often, other)] == [5, 5]
    own = begun(client)
    assert not steps_back(client, own)
    left = next_ones(client)
    assert {each.deployment_id for each in left} == {often, other} - {own.deployment_id}
    assert len(left) == 5
    cancelled = [each for each in client.read_flow_runs() if each.state is not None and each.state.is_cancelled()]
    assert len(cancelled) == 4
    assert all(own.name in str(each.state and each.state.message) for each in cancelled)


def test_a_person_goes_first_and_once(client: SyncPrefectClient) -> None:
    deployment(client, timedelta(minutes=2))
    by_hand = client.create_flow_run_from_deployment(deployment(client))
    assert next_ones(client)[-1].id == by_hand.id  # five are before it
    own = begun(client)
    assert steps_back(client, own)
    again = client.read_flow_run(own.id)
    assert again.state is not None
    assert again.state.is_scheduled()
    assert again.next_scheduled_start_time is not None
    assert by_hand.next_scheduled_start_time is not None
    assert again.next_scheduled_start_time > by_hand.next_scheduled_start_time
    assert begun(client).id == by_hand.id
    assert not steps_back(client, client.read_flow_run(by_hand.id))
    waiting = [each for each in client.read_flow_runs() if each.state is not None and each.state.is_scheduled()]
    assert [each.id for each in waiting if each.next_scheduled_start_time < datetime.now(UTC)] in ([], [own.id])  # type: ignore[operator]


def test_what_people_started_is_never_cancelled_and_of_a_schedule_one_is_left(client: SyncPrefectClient) -> None:
    plain = deployment(client)
    by_hand = [client.create_flow_run_from_deployment(plain).id for _ in range(3)]
    deployment(client, timedelta(minutes=2))
    assert len(list(thin_out(client))) == 4
    assert [each.id for each in next_ones(client)][1:] == by_hand
    assert list(thin_out(client)) == []
