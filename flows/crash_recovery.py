"""Checks of a flow run that begins: whether it is its turn, whether it is alone, whether it crashes in a loop."""

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
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed, Scheduled

from herd.flows.local_server import is_temporary
from herd.llama3.recipe.schema import Recipe
from herd.storage.lease import lease_holders
from herd.storage.root import Root
from herd.tasks.console import Wait
from herd.tasks.operate.owners import TAG
from herd.tasks.operate.recovery import FRUITLESS, RESUMED, ROOT
from herd.tasks.runs.records import Runs

# A work queue serves the longest-waiting flow run first, so a schedule whose runs take longer than its interval would
# delay every other flow run (Prefect 3.8.8: the limit with CANCEL_NEW counts runs of the same deployment only).

BEHIND = timedelta(seconds=1)


def steps_back(client: SyncPrefectClient, own: FlowRun) -> bool:
    """Return whether `own`, a flow run that begins, was rescheduled behind those that people started.

    If a schedule began it, the waiting runs of this schedule are cancelled.
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
    """Cancel the waiting flow runs of each schedule except the first; yield the cancelled ones."""
    first: dict[str, FlowRun] = {}
    for each in _waiting(client):
        if each.auto_scheduled and (kept := first.setdefault(_schedule(each), each)) is not each:
            _cancel(client, each, kept.name)
            yield each


def _waiting(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the flow runs of herd that would begin now if there were room, the longest-waiting first."""
    before = filters.FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC))  # type: ignore[arg-type]
    scheduled = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    tags = filters.FlowRunFilterTags(all_=[TAG])
    due = filters.FlowRunFilter(tags=tags, state=scheduled, next_scheduled_start_time=before)
    return client.read_flow_runs(flow_run_filter=due, sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC)


def _schedule(flow_run: FlowRun) -> str:
    """Return a key that is equal for the flow runs of one schedule."""
    return f"{flow_run.deployment_id} {flow_run.parameters}" if flow_run.auto_scheduled else str(flow_run.id)


def _cancel(client: SyncPrefectClient, flow_run: FlowRun, by: str) -> None:
    message = f"its schedule fired again before there was room; {by} does its work"
    client.set_flow_run_state(flow_run.id, Cancelled(message=message), force=True)


# A flow run has one process. Two get started if a worker reports a death again while the next attempt begins.

LEAVE_S = 20.0
"""Seconds that an earlier process of the same flow run may take to end."""


def attempt_number() -> int:
    """Return which attempt of the flow run this is, counted from 1; 0 where no server outlives this process."""
    return 0 if is_temporary() else int(flow_run.run_count or 0)


def exit_if_alive_elsewhere(root: Root, work: str, log: Callable[[str], None]) -> None:
    """End this process without a report to Prefect if an earlier one of the same flow run still holds the lease `work`.

    A person's Retry is not ended: the earlier process is about to end then.
    """
    if not flow_run.id or is_temporary():
        return
    with get_client(sync_client=True) as client:
        if not was_resumed(client.read_flow_run_states(UUID(str(flow_run.id)))):
            return
    wait, until = Wait(f"the end of {work}", log), time.monotonic() + LEAVE_S
    while holder := lease_holders(root, [work]).get(work, ""):
        if time.monotonic() > until:
            log(f"{work} is used by {holder}, an earlier process of this flow run: this one leaves")
            leave_quietly()
        wait.note(f"{holder} still has it")
        time.sleep(1)


def leave_quietly() -> NoReturn:
    """End this process with status 0, which the worker does not report: another process ends the flow run."""
    logging.shutdown()  # sends the lines that wait for the server
    sys.stdout.flush()
    os._exit(0)


def end_flow_run(flow_run_id: str, message: str) -> None:
    """Give the flow run of a dead process a final state, after its record went to another flow run.

    Crashed; Cancelled for a deployment's flow run, because a crashed one would get another attempt.
    """
    # At once: in the pages both would show Running until the next pass of the reconciler.
    with suppress(ObjectNotFound, HTTPError), get_client(sync_client=True) as client:
        dead = client.read_flow_run(UUID(flow_run_id))
        if dead.state is not None and not (dead.state.is_final() or dead.state.is_paused()):
            state: State[Any] = Cancelled(message=message) if dead.deployment_id else Crashed(message=message)
            client.set_flow_run_state(dead.id, state, force=True)


# Each attempt notes in the flow run's labels the progress that it finds: steps done and bytes of the stages' journals,
# which grow with every new optimizer step and with no repeated one. Shards of an unfinished data step do not count, and
# the journals are those of this machine.

FOUND, COUNT = "herd.found", "herd.fruitless"


class TooManyCrashes(RuntimeError):
    """A flow run crashed again and again without progress."""


def check_attempts(root: Root, progress: Callable[[str], str]) -> None:
    """Note the root, and the progress that this attempt finds: `progress` returns it for a flow run id.

    Raises TooManyCrashes after more than FRUITLESS restarts without progress.
    """
    if not flow_run.id or is_temporary():  # such a flow run is neither restarted nor retried
        return
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(str(flow_run.id)))
        if steps_back(client, own):
            leave_quietly()
        current = progress(str(own.id))
        fruitless = count_fruitless(own.labels, current, was_resumed(client.read_flow_run_states(own.id)))
        client.update_flow_run_labels(own.id, {ROOT: root.uri, FOUND: current, COUNT: fruitless})
    if fruitless > FRUITLESS:
        raise TooManyCrashes(
            f"attempt {own.run_count}: it crashed {fruitless} times in a row without a new step; find the reason in "
            "the logs of its attempts (an out-of-memory kill writes none), fix it, then Retry: finished work is kept"
        )


def count_fruitless(labels: Mapping[str, object], now: str, resumed: bool) -> int:
    """Return how many restarts in a row have found no more progress than the attempt before them."""

    def amounts(text: str) -> tuple[int, int]:
        steps, _, journals = text.partition(":")
        return int(steps or -1), int(journals or -1)

    if not resumed or amounts(now) > amounts(str(labels.get(FOUND, ""))):
        return 0
    return int(str(labels.get(COUNT, 0))) + 1


def progress_of_run(root: Root, recipe: Recipe, flow: str) -> str:
    """Return the progress of the run of flow run `flow`, as `steps:bytes`; larger compares as further."""
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
    """Return whether the reconciler started the newest attempt, by the last state that scheduled it."""
    # `Late` and `AwaitingConcurrencySlot` are scheduled states too, but only say that it waits.
    scheduled = [state for state in states if state.name in ("Scheduled", "AwaitingRetry")]
    return bool(scheduled) and max(scheduled, key=lambda state: state.timestamp).message == RESUMED
