"""The owners of flow runs: the process and the worker that a state of Prefect needs, asked whether they live.

A process is asked by its pid and start time. The age of a state says nothing: an import may take minutes. What cannot
be asked from here is `unknown`, and nothing happens to it.
"""

# A worker proposes Pending, writes its name into the flow run's labels, proposes Submitting, and starts the engine with
# the flow run's id in its environment; the engine imports the flow and proposes Running (Prefect 3.8.8). So a Pending
# flow run may be any worker's that lived then, and its labels may be of an earlier attempt.

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import NamedTuple

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType, Worker, WorkerStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound

from herd.storage.processes import process_alive, process_name
from herd.tasks.operate.slots import Verdict

TAG = "herd"
"""Tag of herd's deployments, and so of their flow runs."""
PROCESS = "process:"
"""Begins the tag of a flow run without a worker; the rest is the name of its process."""
WORKER = "prefect.worker.name"
"""Label with the name of the worker that submitted a flow run last."""
ENGINE = re.compile(r"prefect[./](engine|runner[./]_workspace)")
"""Second or third word of the command of a flow run's process."""
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
LATELY = timedelta(days=1)
"""Workers without a heartbeat for so long are not read."""
PAGE = 200


class Owner(NamedTuple):
    """Whether what a flow run needs lives, and how that is known."""

    verdict: Verdict
    why: str
    pid: int = 0
    """Of its process on this machine."""


def process_tag() -> str:
    """Return the tag with which this process creates flow runs."""
    return f"{PROCESS}{process_name()}"


def is_own(flow_run: FlowRun) -> bool:
    """Return whether a flow run is of herd, on a server that others may use too."""
    return TAG in flow_run.tags or any(tag.startswith(PROCESS) for tag in flow_run.tags)


def judge(state: StateType, process: bool | None, worker: bool | None) -> Verdict:
    """Return whether a flow run in `state` has an owner; None: it cannot be asked from here.

    `worker` is False for a flow run that has none.
    """
    if process:
        return "unheard" if state is StateType.CANCELLING and worker is False else "alive"
    if process is False:
        return "unknown" if worker is None else "reporting" if worker else "dead"
    if worker:
        return "alive"
    # Elsewhere, a process outlives its worker: once it runs, its heartbeats tell.
    return "dead" if worker is False and state is not StateType.RUNNING else "unknown"


def unfinished_flow_runs(client: SyncPrefectClient, everyone: bool = False) -> Iterator[FlowRun]:
    """Yield the flow runs of herd, or of `everyone`, whose state needs an owner."""
    state = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=UNFINISHED))
    unfinished, seen, count = filters.FlowRunFilter(state=state), 0, PAGE
    while count == PAGE:
        page = client.read_flow_runs(flow_run_filter=unfinished, sort=FlowRunSort.ID_DESC, limit=PAGE, offset=seen)
        seen, count = seen + len(page), len(page)
        yield from (each for each in page if everyone or is_own(each))


def engines() -> tuple[dict[str, int], set[str]]:
    """Return the process here of each flow run of a worker, and the ids of processes that may not be asked."""
    found, hidden = dict[str, int](), set[str]()
    for process in psutil.process_iter():
        try:
            if any(ENGINE.search(word) for word in process.cmdline()[1:3]):
                found[process.environ().get(FLOW_RUN, "")] = process.pid
        except psutil.AccessDenied:
            hidden.add(str(process.pid))
        except psutil.Error:  # it has just ended
            continue
    return found, hidden


class Owners:
    """The processes of this machine and the workers of a server, seen once; make it after the flow runs were read."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self.client = client
        self._workers: dict[str, list[Worker]] = {}

    def of(self, flow_run: FlowRun) -> Owner:
        """Return the owner of an unfinished flow run."""
        state = flow_run.state
        assert state is not None
        if flow_run.deployment_id is None:
            name = next((tag.removeprefix(PROCESS) for tag in flow_run.tags if tag.startswith(PROCESS)), "")
            alive = process_alive(name)
            verdict = judge(state.type, alive, None if alive is None else False)
            return Owner(verdict, _said("process", name, alive), int(name.split("-")[-3]) if alive else 0)
        engines, hidden = self._engines
        pid, name = engines.get(str(flow_run.id), 0), str(flow_run.labels.get(WORKER, ""))
        process: bool | None = True if pid else None if flow_run.infrastructure_pid in hidden else False
        if (state.type, state.name) == (StateType.PENDING, "Pending"):
            workers = [
                each
                for each in self._workers_of(flow_run.work_pool_name or "")
                if each.created and each.created <= state.timestamp
            ]
            living = [each for each in workers if _lives(each)]
            if process is False and any(process_alive(each.name) is None for each in living):
                process = None  # it may be that worker's, elsewhere
            worker: bool | None = bool(living)
            said = f"{living[0].name} may submit it" if living else "the worker that submitted it is gone"
        else:
            worker = process_alive(name)
            if worker is None:
                process = process or None
                named = [each for each in self._workers_of(flow_run.work_pool_name or "") if each.name == name]
                worker = _lives(named[0]) if named else None
            said = _said("worker", name, worker)
        why = f"process {pid} works on it" if pid else said if process is None else f"it has no process, and {said}"
        return Owner(judge(state.type, process, worker), why, pid)

    def any_worker(self, pool: str) -> bool:
        """Return whether a worker of the work pool lives."""
        return any(map(_lives, self._workers_of(pool)))

    @cached_property
    def _engines(self) -> tuple[dict[str, int], set[str]]:
        return engines()

    def _workers_of(self, pool: str) -> list[Worker]:
        if pool not in self._workers:
            lately = filters.WorkerFilterLastHeartbeatTime(after_=datetime.now(UTC) - LATELY)  # type: ignore[arg-type]
            seen = filters.WorkerFilter(last_heartbeat_time=lately)
            try:
                self._workers[pool] = self.client.read_workers_for_work_pool(pool, seen) if pool else []
            except ObjectNotFound:
                self._workers[pool] = []
        return self._workers[pool]


def _lives(worker: Worker) -> bool:
    alive = process_alive(worker.name)
    return worker.status is WorkerStatus.ONLINE if alive is None else alive


def _said(kind: str, name: str, alive: bool | None) -> str:
    if not name:
        return f"nothing names its {kind}"
    return f"{kind} {name} " + ("cannot be asked from here" if alive is None else "lives" if alive else "is gone")
