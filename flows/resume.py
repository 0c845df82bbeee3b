"""Start a crashed training run again where its automation (flows/setup.py) must not, or did not: the second net.

A worker reports a killed process twice, before and after it runs the flow's hooks, 5 to 30 s apart (Prefect 3.8.8).
Resumed at the first report, the next attempt is called crashed by the second while it works, and a third one starts
beside it. So the automation leaves the first report alone, and the run's witness answers it with a start some seconds
ahead: the second report turns that into a crash again, which the automation answers at once.

The automation also needs the event that tells of the crash, and a server on SQLite loses events while several of its
own tasks write at once ("database is locked": a message is tried four times, then put away, and what follows it waits
15 minutes for it). So the witness looks whether a crash was answered, and the flow `reconcile` looks again by the hour.
All of them give the same reason, so flows/attempts.py ends a loop of crashes whoever resumed it. What this gives up: a
process that is killed before it has a witness, while it is imported, is resumed by the hour only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry

from flows.attempts import RESUMED

RULE = "herd: resume crashed runs"
"""Name of the automation; a server on which somebody switched it off or removed it resumes nothing here either."""
AUTO_RESUME = "auto-resume"
"""Tag of the deployments whose flow runs are started again by themselves."""
FIRST_REPORT = "Process exited with status code"
"""So begins what a worker says of a killed process before it runs the hooks."""
AHEAD_S = 40.0
"""A worker takes up what is due within 10 s; the hooks need 5 s on a quiet machine, 25 s on a busy one."""
ANSWER_S, LOOK_S = 15.0, 2.0
"""The automation answers a crash within a second or two."""
WATCH_S = 60.0
"""Within this the next attempt has begun, on a busy machine too."""
FORGOTTEN = timedelta(days=1)
"""An older crash is left to people."""


def resume_soon(client: SyncPrefectClient, flow_run_id: UUID, attempt: int) -> bool:
    """Answer a worker's first report that attempt `attempt` crashed; return whether this was it.

    Raises what the client raises.
    """
    flow_run = client.read_flow_run(flow_run_id)
    if not _crashed(flow_run, attempt) or not _wanted(client):
        return False
    if flow_run.state is None or not (flow_run.state.message or "").startswith(FIRST_REPORT):
        return False
    ahead = datetime.now(UTC) + timedelta(seconds=AHEAD_S)
    client.set_flow_run_state(flow_run_id, AwaitingRetry(scheduled_time=ahead, message=RESUMED))  # type: ignore[arg-type]
    return True


def resume(client: SyncPrefectClient, flow_run_id: UUID, attempt: int, wait_s: float = WATCH_S) -> bool:
    """Start the flow run again if its attempt `attempt` crashed and that is not answered; watch for `wait_s` at most.

    Return whether this started it. Raises what the client raises.
    """
    until, seen = time.monotonic() + wait_s, 0.0
    while _unanswered(flow_run := client.read_flow_run(flow_run_id), attempt) and time.monotonic() < until:
        seen = seen + LOOK_S if _crashed(flow_run, attempt) else 0.0
        if seen > ANSWER_S:
            break
        time.sleep(LOOK_S)
    if not _crashed(flow_run, attempt) or not _wanted(client):
        return False
    client.set_flow_run_state(flow_run_id, AwaitingRetry(message=RESUMED))
    return True


def resume_all(client: SyncPrefectClient, grace_s: float) -> Iterator[FlowRun]:
    """Start every flow run again that crashed more than `grace_s` ago, and within a day; yield those."""
    now = datetime.now(UTC)
    crashed = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[AUTO_RESUME]),
        state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Crashed"])),
        end_time=FlowRunFilterEndTime(after_=now - FORGOTTEN, before_=now - timedelta(seconds=grace_s)),  # type: ignore[arg-type]
    )
    for flow_run in client.read_flow_runs(flow_run_filter=crashed):
        if resume(client, flow_run.id, flow_run.run_count, wait_s=0):
            yield flow_run


def _unanswered(flow_run: FlowRun, attempt: int) -> bool:
    """Return whether nothing has come after attempt `attempt`, and something may: it crashed, or it waits."""
    state = flow_run.state
    waits = state is not None and (state.is_scheduled() or state.is_pending())
    return flow_run.run_count == attempt and (waits or _crashed(flow_run, attempt))


def _crashed(flow_run: FlowRun, attempt: int) -> bool:
    """Return whether attempt `attempt` of a deployed training run has crashed and is the last one yet."""
    ours = flow_run.deployment_id is not None and AUTO_RESUME in flow_run.tags and flow_run.run_count == attempt
    return ours and flow_run.state is not None and flow_run.state.is_crashed()


def _wanted(client: SyncPrefectClient) -> bool:
    return any(rule.enabled for rule in client.read_automations_by_name(RULE))
