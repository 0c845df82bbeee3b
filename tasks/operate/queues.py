"""What holds the slots of queues and deployments on a Prefect server while flow runs wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType

from herd.tasks.operate.owners import TAG, Owners, unfinished_flow_runs
from herd.tasks.operate.slots import Slot

AWAITS, WAIT = "AwaitingConcurrencySlot", timedelta(minutes=2)
"""State of a flow run behind its deployment's limit; Prefect tries again every 30 s."""


def held_slots(client: SyncPrefectClient) -> Iterator[Slot]:
    """Yield the queues and deployments for whose slots flow runs wait."""
    if not (waiting := _waiting(client)):
        return
    unfinished = list(unfinished_flow_runs(client, everyone=True))
    owners, seen = Owners(client), datetime.now(UTC)

    def slot(where: str, behind: list[FlowRun], holders: list[FlowRun]) -> Slot:
        owned = [(owners.of(holder), holder) for holder in holders]
        owner, holder = min(owned, key=lambda pair: pair[0].verdict == "alive")
        assert holder.state is not None
        return Slot(
            where=where,
            waiting=len(behind),
            holder=holder.name,
            state=holder.state.name or "",
            since=holder.state.timestamp,
            verdict=owner.verdict,
            why=owner.why,
            seen=seen,
        )

    for pool in client.read_work_pools():
        for queue in client.read_work_queues(work_pool_name=pool.name):
            behind = [each for each in waiting if each.work_queue_id == queue.id and _is_due(each, seen)]
            if behind and not owners.any_worker(pool.name):
                why = f"no worker of the work pool {pool.name} lives"
                yield Slot(where=f"queue {queue.name}", waiting=len(behind), why=why, seen=seen)
            holders = [each for each in unfinished if each.work_queue_id == queue.id and _holds(each, False)]
            if behind and queue.concurrency_limit is not None and len(holders) >= max(1, queue.concurrency_limit):
                yield slot(f"queue {queue.name}", behind, holders)
    awaiting = [each for each in waiting if each.state is not None and each.state.name == AWAITS]
    for deployment in {each.deployment_id for each in awaiting if each.deployment_id}:
        holders = [each for each in unfinished if each.deployment_id == deployment and _holds(each, True)]
        behind = [each for each in awaiting if each.deployment_id == deployment]
        where = f"deployment {client.read_deployment(deployment).name}"
        if holders:
            yield slot(where, behind, holders)
        else:
            why = "no flow run has its slot; Prefect frees it within five minutes"
            yield Slot(where=where, waiting=len(behind), verdict="unknown", why=why, seen=seen)


def _waiting(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the flow runs of herd that would begin now, or once their deployment has room."""
    scheduled = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    soon = filters.FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC) + WAIT)  # type: ignore[arg-type]
    found = client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(
            tags=filters.FlowRunFilterTags(all_=[TAG]), state=scheduled, next_scheduled_start_time=soon
        )
    )
    return [each for each in found if _is_due(each, datetime.now(UTC)) or (each.state and each.state.name == AWAITS)]


def _is_due(flow_run: FlowRun, now: datetime) -> bool:
    at = flow_run.next_scheduled_start_time
    return at is not None and at <= now


def _holds(flow_run: FlowRun, cancelling: bool) -> bool:
    """Return whether a flow run takes a slot; one that is being cancelled takes that of its deployment only."""
    state = flow_run.state
    return state is not None and (state.is_pending() or state.is_running() or (cancelling and state.is_cancelling()))
