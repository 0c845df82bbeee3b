"""The reconciler: make the records of dead processes, MLflow and Prefect agree, and restart what crashed.

A record that says `running` whose lease has expired becomes `interrupted`, in MLflow and Prefect too. A flow run that
has no owner (owners.py) becomes Crashed or Cancelled, which frees its slots; it gets another attempt if its deployment
asks for that. A pass can be repeated, late or at the same time, without effect.
"""

# Callers: the watchdog of a killed process (its own record, 2 s after the death), the loop of `herd up` (every 30 s),
# the flow `reconcile` (every 5 min), and `herd run` when its Prefect server went away. Without the watchdog the next
# pass after the lease timeout sees a death: 0 s on a local root (the kernel frees an flock), 30 s on an object store.

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Running

from herd.storage.cleanup import clean_up_root
from herd.storage.fenced import DamagedRecord
from herd.storage.filesystem import is_local
from herd.storage.lease import LeaseHeld, lease_holders
from herd.storage.processes import process_alive
from herd.storage.root import DEFAULT_ROOT, Root
from herd.tasks.operate.owners import TAG, WORKER, Owner, Owners, unfinished_flow_runs
from herd.tasks.operate.queues import held_slots
from herd.tasks.operate.slots import write_slots
from herd.tasks.promotion.log import PromotionLog, families
from herd.tasks.promotion.registry import Registry
from herd.tasks.runs.records import OPEN, RunRecord, Runs, State, mark_stale, now
from herd.tasks.stages.backfill import STATUS, backfill_run
from herd.tasks.step import KINDS
from herd.tasks.study.records import FOLDER, Studies, StudyRecord
from herd.tasks.tracking.events import run_ended
from herd.tasks.tracking.mlflow import AWAY, MLflowTracker

GONE = "its process is gone"
COMPLETE = ".complete"
"""In `open/`, after the first full pass. Each run that begins leaves a mark in `open/`, removed once record, MLflow and
Prefect agree: a pass over 10,000 reconciled runs costs one listing. Studies are few and need no marks."""
GRACE_S = 120.0
"""Without a lease, a state may be this young if no process can be asked: the next attempt is imported first."""
REPORT_S = 60.0
"""Time of a living worker to report that the process of its flow run is gone; then it could not."""
GONE_SINCE, ROOT = "herd.gone", "herd.root"
"""Labels of a flow run: the state without a process and the time of the pass that saw it, and its root."""
LEFT_S = 86_400.0
"""Files of killed processes in storage are removed after this time without a write."""
UNREACHED = re.compile(r"\b(\w+Timeout|ConnectError|ReadError|WriteError|RemoteProtocolError|PrefectHTTPStatusError)\b")
"""Errors of Prefect's client for a slow or absent server: they say nothing about the run."""
PREFECT = {"finished": Completed, "failed": Failed, "interrupted": Crashed, "cancelled": Cancelled}

# Restart policy: a crashed flow run of a deployment with this tag gets another attempt, within a day of the crash.
AUTO_RESUME = "auto-resume"
RESUMED = "restarted by the reconciler"
"""State message of such an attempt; a person's Retry has another one."""
FRUITLESS = 5
"""Restarts in a row that may find no progress; the next attempt fails (flows/crash_recovery.py)."""
RESTART_WITHIN = timedelta(days=1)
FIRST_REPORT = "Process exited with status code"
"""Start of a worker's first message about a killed process. The second follows 5 to 30 s later (Prefect 3.8.8)."""
AHEAD_S = 40.0
"""An attempt that starts between the two reports is called crashed by the second. So the first one is answered with a
start AHEAD_S later; the second turns this Scheduled state into Crashed, which is answered at once."""


class Reconciled(NamedTuple):
    """One state that was not true, and what it is now."""

    run: str
    where: str
    before: str
    after: str


def reconcile(
    root: Root, client: SyncPrefectClient | None, full: bool = False, grace_s: float = GRACE_S, cleanup: bool = True
) -> list[Reconciled]:
    """Reconcile every open run and unfinished study whose lease has expired; with `full`, look at all of them.

    Without `client` Prefect is left alone. `cleanup` also makes MLflow's aliases follow the promotion logs and
    removes leftover files. Raises OSError.
    """
    full = full or root.read(OPEN, COMPLETE) is None
    works = [f"runs/{name}" for name in (root.names("runs") if full else root.names(OPEN))]
    works += [f"{FOLDER}/{record.name}" for record in Studies(root).all() if full or record.state != "finished"]
    # On an object store all leases are observed at once, because that takes seconds; flocks are tried one by one.
    alive = {} if root.is_local else lease_holders(root, works)
    tracker = cache(partial(MLflowTracker, root))  # one per family: an MLflow that is away is waited for once
    changes: list[Reconciled] = []
    for work in works:
        if work not in alive:
            changes += reconcile_record(root, client, work, grace_s=grace_s, tracker=tracker)
    if full:
        root.write(f"{now()}\n", OPEN, COMPLETE)
    if client is not None:
        changes += _settle_ownerless(root, client)
        changes += _restart_crashed(root, client)
        write_slots(root, list(held_slots(client)))
    if cleanup:
        for family in families(root):
            changes += show_aliases(root, family)
        if removed := clean_up_root(root, LEFT_S, KINDS).bytes:
            changes.append(Reconciled("all", "storage", f"{removed:,} bytes left over", "removed"))
    return changes


def reconcile_record(
    root: Root,
    client: SyncPrefectClient | None,
    work: str,
    attempt: int = 0,
    grace_s: float = GRACE_S,
    tracker: Callable[[str], MLflowTracker] | None = None,
) -> list[Reconciled]:
    """Reconcile the record `work` (`runs/quickstart-3`, `studies/ramp-cpu`), unless its lease is held.

    `attempt` is the Prefect attempt whose process is known to be dead; 0: unknown.
    """
    folder, _, name = work.partition("/")
    dead = DeadRun(root, name) if folder == "runs" else DeadStudy(root, name)
    try:
        flow_run = _flow_run(client, dead.read().prefect_run)
        state = flow_run.state if flow_run is not None else None
        if state is not None and state.is_paused():  # waits for a person's approval, without a process
            return []
        changes = dead.end_record(_state_by_prefect(state))
    except (LeaseHeld, DamagedRecord):  # `herd verify` reports a damaged record
        return []
    except ValueError:  # the record was deleted
        dead.unmark()
        return []
    changes += dead.end_mlflow_runs(tracker or partial(MLflowTracker, root))
    if client is not None and flow_run is not None:
        changes += _end_flow_run(client, flow_run, dead.record, attempt, grace_s)
    if dead.settled(client):
        dead.unmark()
    return changes


class DeadRun:
    """A run whose process is gone; each method makes the record or another system say so."""

    record: RunRecord

    def __init__(self, root: Root, name: str) -> None:
        self.root, self.name, self.runs = root, name, Runs(root)

    def read(self) -> RunRecord:
        """Read the record again and return it. Raises ValueError if it was deleted, or DamagedRecord."""
        self.record = self.runs.find(self.name)
        return self.record

    def end_record(self, state: State) -> list[Reconciled]:
        """End the record with `state` if it says `running`. Raises LeaseHeld if a process works on it."""
        with self.runs.alone(self.name, f"reconciling {self.name}"):
            if changes := _end_record(self.read(), state):
                self.runs.save(self.record)
                run_ended(self.record, self.root.uri)
        return changes

    def end_mlflow_runs(self, tracker: Callable[[str], MLflowTracker]) -> list[Reconciled]:
        """End the run and its steps in MLflow, and send what it missed; if MLflow is away the record says so."""
        mlflow, record = tracker(self.record.family), self.record
        ended = _end_mlflow_runs(mlflow, mlflow.query(self.name), STATUS[record.state])
        changes = [Reconciled(self.name, "MLflow", "RUNNING", STATUS[record.state])] if ended else []
        if ended is None and not record.mlflow_stale:
            with suppress(LeaseHeld):  # a new attempt has begun; it asks MLflow itself
                self.record = self.runs.change(self.name, mark_stale)
        elif ended is not None and record.mlflow_stale:
            backfill_run(self.root, self.name, mlflow)
            record.mlflow_stale = self.runs.find(self.name).mlflow_stale
            if not record.mlflow_stale:
                changes.append(Reconciled(self.name, "MLflow", "stale", "complete"))
        return changes

    def settled(self, client: SyncPrefectClient | None) -> bool:
        """Return whether record, MLflow and Prefect agree and no new attempt has begun."""
        if self.record.mlflow_stale or (client is None and self.record.prefect_run):
            return False
        flow_run, work = _flow_run(client, self.record.prefect_run), f"runs/{self.name}"
        ended = flow_run is None or (flow_run.state is not None and flow_run.state.is_final())
        return ended and work not in lease_holders(self.root, [work])

    def unmark(self) -> None:
        """Remove the mark of an open run: the next passes do not look at it."""
        self.root.remove(OPEN, self.name)


class DeadStudy:
    """A study whose process is gone. It has one MLflow run, which its next report writes again, and no mark."""

    record: StudyRecord

    def __init__(self, root: Root, name: str) -> None:
        self.root, self.name, self.studies = root, name, Studies(root)

    def read(self) -> StudyRecord:
        self.record = self.studies.find(self.name)
        return self.record

    def end_record(self, state: State) -> list[Reconciled]:
        with self.studies.alone(self.name):
            if changes := _end_record(self.read(), state):
                self.studies.save(self.record)
        return changes

    def end_mlflow_runs(self, tracker: Callable[[str], MLflowTracker]) -> list[Reconciled]:
        run, status = self.record.mlflow_run, STATUS[self.record.state]
        if not run or run.startswith(AWAY):
            return []
        ended = _end_mlflow_runs(tracker(self.name), f"attributes.run_id = '{run}'", status)
        return [Reconciled(self.name, "MLflow", "RUNNING", status)] if ended else []

    def settled(self, client: SyncPrefectClient | None) -> bool:
        return False

    def unmark(self) -> None: ...


def _state_by_prefect(state: PrefectState | None) -> State:
    """Return how a run ended by the state of its flow run: Prefect knows of cancellations and failures."""
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        return "cancelled"
    return "failed" if state is not None and state.is_failed() else "interrupted"


def _end_record(record: RunRecord | StudyRecord, state: State) -> list[Reconciled]:
    """Set the end of a record that says `running`, or `interrupted` where Prefect knows that it was cancelled."""
    if record.state != "running" and (record.state, state) != ("interrupted", "cancelled"):
        return []
    change = Reconciled(record.name, "record", record.state, state)
    record.state, record.ended = state, now()
    record.error = record.error or (GONE if state == "interrupted" else state)
    return [change]


def _end_mlflow_runs(mlflow: MLflowTracker, query: str, status: str) -> int | None:
    """End the runs of `query` that MLflow calls RUNNING; return how many, None if MLflow is away."""

    def end() -> int:
        running = mlflow.client.search_runs([mlflow.experiment], f"{query} and attributes.status = 'RUNNING'")
        for run in running:
            mlflow.client.set_terminated(run.info.run_id, status)
        return len(running)

    return mlflow.reach.attempt(end, None)


def _flow_run(client: SyncPrefectClient | None, flow_run_id: str) -> FlowRun | None:
    """Return a flow run; None if there is none, it was deleted or Prefect is left alone."""
    if client is not None and flow_run_id:
        with suppress(ObjectNotFound):
            return client.read_flow_run(UUID(flow_run_id))
    return None


def _end_flow_run(
    client: SyncPrefectClient,
    flow_run: FlowRun,
    record: RunRecord | StudyRecord,
    attempt: int,
    grace_s: float,
) -> Iterator[Reconciled]:
    """Give the flow run of a dead process its final state, if it has none or a wrong one."""
    state = flow_run.state
    if state is not None and record.state == "finished" and (state.is_failed() or state.is_crashed()):
        if state.is_failed() and not UNREACHED.search(state.message or ""):
            return  # an error of what follows the end; Crashed only says that the process was killed there
        after: PrefectState = Completed(message=f"{record.name} finished")
    else:
        if state is None or not (state.is_running() or state.is_cancelling() or state.is_pending()):
            return
        # Prefect counts an attempt when it runs: a pending flow run with our number is the next attempt on its way.
        over = attempt > 0 and flow_run.run_count == attempt and not state.is_pending()
        owner = "dead" if over else Owners(client).of(flow_run).verdict
        if owner == "alive":
            return
        if owner != "dead" and (datetime.now(UTC) - state.timestamp).total_seconds() < grace_s:
            return
        after = PREFECT[record.state](message=record.error or f"{record.name} {record.state}")
    client.set_flow_run_state(flow_run.id, after, force=True)
    yield Reconciled(record.name, "Prefect", state.name or state.type.value, after.name or "")


def _settle_ownerless(root: Root, client: SyncPrefectClient) -> Iterator[Reconciled]:
    """End the flow runs that nothing works on: not yet begun, superseded, without a record, of deleted runs."""
    flow_runs, owners = list(unfinished_flow_runs(client)), Owners(client)
    for flow_run in flow_runs:
        state, owner = flow_run.state, owners.of(flow_run)
        assert state is not None
        after = _end_of_paused(root, flow_run) if state.is_paused() else _end_of(root, client, flow_run, owner)
        if after is None:
            continue
        with suppress(ObjectNotFound):  # deleted since it was read
            # Its process may have ended it since it was read; a dead one does nothing after this.
            if client.read_flow_run(flow_run.id).state_id == flow_run.state_id:
                client.set_flow_run_state(flow_run.id, after, force=True)
                yield Reconciled(flow_run.name, "Prefect", state.name or state.type.value, after.name or "")
                if owner.verdict == "unheard":
                    with suppress(OSError):
                        os.kill(owner.pid, signal.SIGTERM)


def _end_of(root: Root, client: SyncPrefectClient, flow_run: FlowRun, owner: Owner) -> PrefectState | None:
    """Return the end of a flow run without an owner; None: it has one, or that cannot be known here."""
    if owner.verdict in ("alive", "unknown"):
        return None
    if owner.verdict == "reporting":
        seen, _, since = str(flow_run.labels.get(GONE_SINCE, "")).partition(" ")
        if seen != str(flow_run.state_id):
            client.update_flow_run_labels(flow_run.id, {GONE_SINCE: f"{flow_run.state_id} {now()}"})
            return None
        if (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() < REPORT_S:
            return None
    if flow_run.state is not None and flow_run.state.is_cancelling():
        return Cancelled(message=owner.why)
    with suppress(DamagedRecord):
        record = Runs(root).known(flow_run.name) if flow_run.labels.get(ROOT) == root.uri else None
        if record is not None and record.prefect_run != str(flow_run.id):  # a Crashed one would get another attempt
            return Cancelled(message=f"{GONE}; {record.name} continues in another flow run")
    return Crashed(message=owner.why)


def _end_of_paused(root: Root, flow_run: FlowRun) -> PrefectState | None:
    """Return the end of a flow run that waits for the approval of a deleted run, or in a deleted root."""
    uri = str(flow_run.labels.get(ROOT, ""))
    if uri == root.uri and not _work_of(root, flow_run, root.names("runs"))[0]:
        return Cancelled(message="its run was deleted")
    here = process_alive(str(flow_run.labels.get(WORKER, ""))) is not None
    if uri and is_local(uri) and here and not Path(uri).is_dir():
        return Cancelled(message=f"its root {uri} was deleted")
    return None


def restart(client: SyncPrefectClient, flow_run: FlowRun) -> bool:
    """Schedule another attempt of a flow run if it crashed and its deployment asks for that; return whether it did."""
    state = flow_run.state
    if state is None or not state.is_crashed() or flow_run.deployment_id is None or AUTO_RESUME not in flow_run.tags:
        return False
    start, ahead = datetime.now(UTC), timedelta(seconds=AHEAD_S)
    if (state.message or "").startswith(FIRST_REPORT) and start - state.timestamp < ahead:
        start += ahead
    client.set_flow_run_state(flow_run.id, AwaitingRetry(scheduled_time=start, message=RESUMED))  # type: ignore[arg-type]
    return True


def _restart_crashed(root: Root, client: SyncPrefectClient) -> Iterator[Reconciled]:
    """Restart the flow runs of `root` that crashed lately; those that died before they had a record, too."""
    crashed = filters.FlowRunFilter(
        tags=filters.FlowRunFilterTags(all_=[TAG, AUTO_RESUME]),
        state=filters.FlowRunFilterState(name=filters.FlowRunFilterStateName(any_=["Crashed"])),
        end_time=filters.FlowRunFilterEndTime(after_=datetime.now(UTC) - RESTART_WITHIN),  # type: ignore[arg-type]
    )
    for flow_run in client.read_flow_runs(flow_run_filter=crashed):
        config = flow_run.parameters.get("config") or {}
        try:
            if Root.parse(config.get("root") or os.environ.get("HERD_ROOT") or DEFAULT_ROOT).uri != root.uri:
                continue
        except ValueError:  # a root that contains a password
            continue
        work, record_state = _work_of(root, flow_run, root.names(OPEN))
        if work and lease_holders(root, [work]):
            # A busy worker reports a death again minutes later, when the next attempt works. A Crashed flow run can be
            # neither cancelled nor suspended for an approval, so it is Running again.
            if record_state == "running":
                client.set_flow_run_state(flow_run.id, Running(message="its process is alive"), force=True)
                yield Reconciled(flow_run.name, "Prefect", "Crashed", "Running")
            continue
        # Attempts that die while they are imported never run, so they cannot count themselves.
        states = sorted(client.read_flow_run_states(flow_run.id), key=lambda state: state.timestamp, reverse=True)
        unborn = takewhile(lambda state: not state.is_running(), states)
        if sum(state.message == RESUMED for state in unborn) < FRUITLESS and restart(client, flow_run):
            yield Reconciled(flow_run.name, "Prefect", "Crashed", "AwaitingRetry")


def _work_of(root: Root, flow_run: FlowRun, runs: Sequence[str]) -> tuple[str, str]:
    """Return lease name and state of the record that a flow run works on, one of `runs`; both are empty for none."""
    studies = Studies(root)
    candidates: list[tuple[str, Callable[[str], RunRecord | StudyRecord | None], Sequence[str]]] = [
        ("runs", Runs(root).known, runs),
        (FOLDER, studies.known, studies.names()),
    ]
    for folder, known, names in candidates:
        for name in dict.fromkeys([flow_run.name, *reversed(names)]):
            with suppress(ValueError):
                record = known(name)
                if record is not None and record.prefect_run == str(flow_run.id):
                    return f"{folder}/{name}", record.state
    return "", ""


def show_aliases(root: Root, family: str) -> list[Reconciled]:
    """Make the aliases of a family in MLflow follow its promotion log; if MLflow is away, a later pass does."""
    tracker, log = MLflowTracker(root, family), PromotionLog(root, family)
    nothing: list[str] = []
    changes = tracker.reach.attempt(lambda: Registry(tracker).publish(log), nothing)
    return [Reconciled(family, "MLflow", "aliases behind the promotion log", change) for change in changes]
