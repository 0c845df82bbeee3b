"""Resume crashed flow runs, end those that crash again and again, and keep the work queue in order.

Three things resume a crashed run: Prefect's automation, the watchdog of its process, and the flow `reconcile` by the
hour. All give the same reason, so a crash loop is counted whoever resumed it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID

from httpx import HTTPError
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry, Cancelled, Crashed, Scheduled

from flows.local_server import is_temporary
from llama3.recipe.schema import Recipe
from storage.lease import holders
from storage.root import Root
from tasks.runs.records import Runs

# A work queue serves whoever waits longest, and a schedule whose runs take longer than its interval would let them pile
# up before everybody else (Prefect 3.8.8: the limit with CANCEL_NEW counts runs of the same deployment only). So a
# scheduled run that begins cancels the waiting runs of its schedule and lets runs go first that people started.

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


# Each attempt notes in the flow run's labels how much there was when it began: steps done and bytes of the stages'
# journals, which grow with every new optimizer step and with no repeated one. Shards of an unfinished data step do not
# count, and the journals are those of this machine.

RESUMED = "resumed by the automation for crashed runs"
"""Message of the state in which the automation puts a crashed run; a person's Retry has another."""
FRUITLESS = 5
"""Resumed attempts in a row that may find no progress; the next one fails. A person's Retry starts the count again."""
FOUND, COUNT = "herd.found", "herd.fruitless"
LEAVE_S = 20.0
"""Seconds that an earlier process of the same flow run may take to end."""


class TooManyCrashes(RuntimeError):
    """A flow run crashed again and again and got no further."""


def attempt_number() -> int:
    """Return which attempt of the flow run this is, counted from 1; 0 where no server outlives this process."""
    return 0 if is_temporary() else int(flow_run.run_count or 0)


def exit_if_alive_elsewhere(root: Root, work: str, say: Callable[[str], None]) -> None:
    """End this process without a word to Prefect if an earlier one of the same flow run goes on with `work`.

    A worker under load reports a death minutes later a second time, when the next attempt works already; then Prefect
    starts one more. A person's Retry is not ended so: what it finds at work is on its way out.
    """
    if not flow_run.id or is_temporary():
        return
    with get_client(sync_client=True) as client:
        if not was_resumed(client.read_flow_run_states(UUID(str(flow_run.id)))):
            return
    until = time.monotonic() + LEAVE_S
    while holder := holders(root, [work]).get(work, ""):
        if time.monotonic() > until:
            say(f"{work} is used by {holder}, an earlier process of this flow run: this one leaves")
            leave_quietly()
        time.sleep(1)


def leave_quietly() -> NoReturn:
    """End this process with status 0, of which the worker says nothing: the flow run is another process's to end."""
    logging.shutdown()  # sends the lines that wait for the server
    sys.stdout.flush()
    os._exit(0)


def end_flow_run(flow_run_id: str, message: str) -> None:
    """Give a flow run whose process is gone its final state, if this server knows it and it has none.

    Crashed, unless it is a deployment's, of which that would start another attempt: then Cancelled.
    """
    if is_temporary():
        return
    with suppress(ObjectNotFound, HTTPError), get_client(sync_client=True) as client:
        dead = client.read_flow_run(UUID(flow_run_id))
        if dead.state is not None and not (dead.state.is_final() or dead.state.is_paused()):
            state: State[Any] = Cancelled(message=message) if dead.deployment_id else Crashed(message=message)
            client.set_flow_run_state(dead.id, state, force=True)


def check_attempts(found: Callable[[str], str]) -> None:
    """Note what this attempt of the flow run finds: `found` says it, given the flow run's id.

    Raises TooManyCrashes if resuming it has become pointless.
    """
    if not flow_run.id or is_temporary():  # no automation resumes it, and nobody can retry it
        return
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(str(flow_run.id)))
        if steps_back(client, own):
            leave_quietly()
        here = found(str(own.id))
        fruitless = count_fruitless(own.labels, here, was_resumed(client.read_flow_run_states(own.id)))
        client.update_flow_run_labels(own.id, {FOUND: here, COUNT: fruitless})
    if fruitless > FRUITLESS:
        raise TooManyCrashes(
            f"attempt {own.run_count}: it crashed {fruitless} times in a row without a new step; the logs of its "
            "attempts say why (an out-of-memory kill leaves no words). Mend that, then Retry: nothing done is lost"
        )


def count_fruitless(labels: Mapping[str, object], now: str, resumed: bool) -> int:
    """Return how many resumed attempts in a row have found no more than the one before them."""

    def amounts(text: str) -> tuple[int, int]:
        steps, _, journals = text.partition(":")
        return int(steps or -1), int(journals or -1)

    if not resumed or amounts(now) > amounts(str(labels.get(FOUND, ""))):
        return 0
    return int(str(labels.get(COUNT, 0))) + 1


def progress_of_run(root: Root, recipe: Recipe, flow: str) -> str:
    """Return how far the run of the flow run `flow` is, as `steps:bytes`; larger compares as further."""
    record = Runs(root).of_flow_run(recipe, flow)
    return _progress(root, len(record.steps) if record else 0)


def progress_of_study(root: Root, name: str) -> str:
    """Return the same of a study: the steps of all its runs."""
    return _progress(root, sum(len(record.steps) for record in Runs(root).family(name)))


def _progress(root: Root, steps: int) -> str:
    size = 0
    for path in (root.local / "work").glob("*/journal.jsonl"):
        with suppress(FileNotFoundError):  # the stage was committed at this moment
            size += path.stat().st_size
    return f"{steps}:{size}"


def was_resumed(states: Iterable[State[Any]]) -> bool:
    """Return whether the automation started the newest attempt, by the last state that scheduled it."""
    # `Late` and `AwaitingConcurrencySlot` are scheduled states too, but only say that it waits.
    scheduled = [state for state in states if state.name in ("Scheduled", "AwaitingRetry")]
    return bool(scheduled) and max(scheduled, key=lambda state: state.timestamp).message == RESUMED


# A worker reports a killed process twice, before and after the hooks, 5 to 30 s apart (Prefect 3.8.8). An attempt
# resumed at the first report is called crashed by the second while it works, and a third one starts beside it. So the
# automation ignores the first report, and the watchdog schedules the next attempt AHEAD_S ahead: the second report
# turns that into a crash again, which the automation answers at once.
#
# A Prefect server on SQLite loses events while several of its tasks write ("database is locked"), and the automation
# with them. So the watchdog looks whether a crash was answered, and `reconcile` looks again. A process that is killed
# while it is imported, before it has a watchdog, is resumed by `reconcile` only.

RULE = "herd: resume crashed runs"
"""Name of the automation; where it is switched off or removed, nothing is resumed here either."""
AUTO_RESUME = "auto-resume"
"""Tag of the deployments whose crashed flow runs are resumed."""
FIRST_REPORT = "Process exited with status code"
"""Beginning of a worker's message about a killed process, before it runs the hooks."""
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
    for crash in client.read_flow_runs(flow_run_filter=crashed):
        if resume(client, crash.id, crash.run_count, wait_s=0):
            yield crash


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
