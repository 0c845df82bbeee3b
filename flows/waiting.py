"""Runs that wait for room in a work queue: of each schedule one at most, and what a person started goes first.

A queue gives its room to who waits longest, and a schedule whose runs take longer than its interval would let them pile
up before everybody else (Prefect 3.8.8; its limit with CANCEL_NEW counts the runs of the same deployment only). So a
scheduled run that begins cancels those of its schedule that wait, whose work it does, and steps back behind a person's.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Scheduled

BEHIND = timedelta(seconds=1)


def steps_back(client: SyncPrefectClient, own: FlowRun) -> bool:
    """Return whether `own`, a flow run that begins, was put behind those that people started.

    If a schedule began it, what its schedule has waiting is cancelled.
    """
    if not own.auto_scheduled:
        return False
    waiting = _waiting(client)
    for each in waiting:
        if _schedule(each) == _schedule(own):
            _cancel(client, each, own.name)
    by_people = [each for each in waiting if each.work_queue_id == own.work_queue_id and not each.auto_scheduled]
    times = [each.next_scheduled_start_time for each in by_people if each.next_scheduled_start_time]
    if times and own.run_count == 1:  # it does so once
        later: State[None] = Scheduled(scheduled_time=max(times) + BEHIND, message=f"{by_people[-1].name} goes first")
        client.set_flow_run_state(own.id, later, force=True)
        return True
    return False


def thin_out(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Leave of the runs that wait the first of each schedule; yield those that are cancelled."""
    first: dict[str, FlowRun] = {}
    for each in _waiting(client):
        if each.auto_scheduled and (kept := first.setdefault(_schedule(each), each)) is not each:
            _cancel(client, each, kept.name)
            yield each


def _waiting(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the flow runs that would begin now if there were room, who waits longest first."""
    asked = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
        next_scheduled_start_time=FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC)),  # type: ignore[arg-type]
    )
    return client.read_flow_runs(flow_run_filter=asked, sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC)


def _schedule(flow_run: FlowRun) -> str:
    """Return what tells the runs of one schedule from all others."""
    return f"{flow_run.deployment_id} {flow_run.parameters}" if flow_run.auto_scheduled else str(flow_run.id)


def _cancel(client: SyncPrefectClient, flow_run: FlowRun, by: str) -> None:
    message = f"its schedule fired again before there was room; {by} does its work"
    client.set_flow_run_state(flow_run.id, Cancelled(message=message), force=True)
