"""Make the record of a run or of a study, its MLflow run and its Prefect flow run say what is true of a dead process.

Whether one is worked on is known from its lease alone; whatever else says `running` while the lease is free is wrong.
What runs and studies have in common stands here, the rest in `run_settler.py` and `study_settler.py`. Called
twice, late, or after the work was taken up again it changes nothing.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from storage.cleanup import tidy
from storage.lease import LeaseHeld, LeaseTiming, holders, lease
from storage.root import Root
from tasks.promotion.log import PromotionLog, families
from tasks.runs.records import OPEN, DamagedRecord, RunRecord, Runs, State, now
from tasks.study.records import FOLDER, Studies, StudyRecord
from tasks.tracking.backfill import STATUS, republish
from tasks.tracking.mlflow import AWAY, Tracker
from tasks.tracking.registry import Registry

GONE = "its process is gone"
GRACE_S = 120.0
"""A flow run that Prefect began later than this ago may be on its way to the lease."""
UNREACHED = re.compile(r"\b(\w+Timeout|ConnectError|ReadError|WriteError|RemoteProtocolError|PrefectHTTPStatusError)\b")
"""What Prefect's client raises where the server is slow or away: it says nothing of the work."""
PREFECT = {"finished": Completed, "failed": Failed, "interrupted": Crashed, "cancelled": Cancelled}


class Settled(NamedTuple):
    """One state that was not true, and what it is now."""

    run: str
    where: str
    before: str
    after: str


class Stands(Protocol):
    """What the records of runs and studies have in common."""

    name: str
    state: State
    error: str
    ended: str
    prefect_run: str


Record = TypeVar("Record", bound=Stands)


class Settler(ABC, Generic[Record]):
    """Settles the records of one folder of a root."""

    folder: str
    """Of the records, which is also that of their leases."""

    def __init__(
        self, root: Root, client: SyncPrefectClient | None, grace_s: float = GRACE_S, timing: LeaseTiming | None = None
    ) -> None:
        """Without `client` Prefect is left alone."""
        self.root, self.client, self.grace_s = root, client, grace_s
        self.timing = timing or LeaseTiming()
        self.trackers: dict[str, Tracker] = {}

    @abstractmethod
    def find(self, name: str) -> Record:
        """Return a record. Raises ValueError if there is none."""

    @abstractmethod
    def save(self, record: Record) -> None:
        """Write a record."""

    @abstractmethod
    def of_flow_run(self, flow_run: FlowRun) -> str:
        """Return the name of the record that a flow run works on; empty: none."""

    @abstractmethod
    def _mlflow(self, record: Record) -> list[Settled]:
        """End what still says RUNNING in MLflow."""

    def _forget(self, name: str) -> None:
        """Forget a record that was deleted."""

    def _done(self, record: Record, flow_run: FlowRun | None) -> None:
        """See to what is left once all of it says the same."""

    def settle(self, name: str, state: State = "interrupted", attempt: int = 0) -> list[Settled]:
        """Make what is shown of `name` true if nobody works on it; a record that says `running` becomes `state`.

        `attempt` is the Prefect attempt that is known to be over, whenever it began; 0: not known.
        """
        try:
            flow_run = self.flow_run(self.find(name))
            if flow_run is not None and flow_run.state is not None:
                if flow_run.state.is_paused():  # waits for a person, without a process
                    return []
                if flow_run.state.is_cancelling() or flow_run.state.is_cancelled():
                    state = "cancelled"
            record, found = self._record(name, state)
        except LeaseHeld:
            return []
        except DamagedRecord:  # `herd verify` names it
            return []
        except ValueError:
            self._forget(name)
            return []
        found += self._mlflow(record)
        found += self._prefect(record, flow_run, attempt) if flow_run is not None else []
        self._done(record, flow_run)
        return found

    def await_cancellation(self, name: str, seconds: float) -> None:
        """Wait until a flow run that is being cancelled is cancelled: its worker, if it lives, will say so."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            flow_run = self.flow_run(self.find(name))
            if flow_run is None or flow_run.state is None or not flow_run.state.is_cancelling():
                return
            time.sleep(1.0)

    def flow_run(self, record: Record) -> FlowRun | None:
        """Return the flow run of `record`; None if there is none any more, or nobody to ask."""
        if self.client is None or not record.prefect_run:
            return None
        with suppress(ObjectNotFound):
            return self.client.read_flow_run(UUID(record.prefect_run))
        return None

    def tracker(self, family: str) -> Tracker:
        """Return the MLflow experiment of a family."""
        if family not in self.trackers:
            self.trackers[family] = Tracker(self.root, family)
        return self.trackers[family]

    def _record(self, name: str, state: State) -> tuple[Record, list[Settled]]:
        """Settle the record, holding it for that moment. Raises LeaseHeld if somebody works on it."""
        with lease(self.root, f"{self.folder}/{name}", f"settling {name}", timing=self.timing):
            record = self.find(name)
            if record.state != "running" and (record.state, state) != ("interrupted", "cancelled"):
                return record, []
            before, record.state = record.state, state
            record.error, record.ended = record.error or (GONE if state == "interrupted" else state), now()
            self.save(record)
            return record, [Settled(name, "record", before, state)]

    def _prefect(self, record: Record, flow_run: FlowRun, attempt: int) -> list[Settled]:
        """Give the flow run a final state, if it has none and belongs to a process that is gone."""
        assert self.client is not None
        state = flow_run.state
        if state is not None and record.state == "finished" and (state.is_failed() or state.is_crashed()):
            if not UNREACHED.search(state.message or ""):
                return []
            self.client.set_flow_run_state(flow_run.id, Completed(message=f"{record.name} finished"), force=True)
            return [Settled(record.name, "Prefect", state.name or state.type.value, "Completed")]
        if state is None or not (state.is_running() or state.is_cancelling() or state.is_pending()):
            return []
        young = (datetime.now(UTC) - state.timestamp).total_seconds() < self.grace_s
        # Prefect counts an attempt when it runs: a pending flow run with our number is the next attempt on its way.
        over = attempt > 0 and flow_run.run_count == attempt and not state.is_pending()
        if young and not over:
            return []
        after: PrefectState = PREFECT[record.state](message=record.error or f"{record.name} {record.state}")
        self.client.set_flow_run_state(flow_run.id, after, force=True)
        return [Settled(record.name, "Prefect", state.name or state.type.value, after.name or "")]


# Each run that begins leaves a mark in `open/`, removed once everything about it is settled: a root of 10,000 settled
# runs costs one listing. A run whose mark is lost is found by a full pass only.


class RunSettler(Settler[RunRecord]):
    """Settles runs of one root."""

    folder = "runs"

    def find(self, name: str) -> RunRecord:
        return Runs(self.root).find(name)

    def save(self, record: RunRecord) -> None:
        Runs(self.root).save(record)

    def of_flow_run(self, flow_run: FlowRun) -> str:
        """Return the run of the flow run's name, else the one that names it."""
        for name in dict.fromkeys([flow_run.name, *reversed(self.root.names(OPEN))]):
            with suppress(ValueError):
                if self.find(name).prefect_run == str(flow_run.id):
                    return name
        return ""

    def _mlflow(self, record: RunRecord) -> list[Settled]:
        """Close the MLflow runs that still say RUNNING, and send what MLflow lacks."""
        tracker, status = self.tracker(record.family), STATUS[record.state]
        closed = tracker.reach.attempt(lambda: close_runs(tracker, record.name, status), -1)
        found = [Settled(record.name, "MLflow", "RUNNING", status)] if closed > 0 else []
        if closed < 0 and not record.mlflow_stale:
            record.mlflow_stale = True
            self.save(record)
        elif closed >= 0 and record.mlflow_stale:
            republish(self.root, record.name, tracker)
            record.mlflow_stale = self.find(record.name).mlflow_stale
            if not record.mlflow_stale:
                found.append(Settled(record.name, "MLflow", "stale", "complete"))
        return found

    def _forget(self, name: str) -> None:
        self.root.remove(OPEN, name)

    def _done(self, record: RunRecord, flow_run: FlowRun | None) -> None:
        """Take the mark away, unless somebody works on the run by now, or Prefect was not asked."""
        if record.mlflow_stale or (flow_run is not None and not self._is_over(record)):
            return
        name = f"{self.folder}/{record.name}"
        if (self.client is not None or not record.prefect_run) and name not in holders(self.root, [name], self.timing):
            self._forget(record.name)

    def _is_over(self, record: RunRecord) -> bool:
        flow_run = self.flow_run(record)
        return flow_run is None or (flow_run.state is not None and flow_run.state.is_final())


def close_runs(tracker: Tracker, run: str, status: str) -> int:
    """End the MLflow runs of run `run` that say RUNNING; return how many. Raises what MLflow raises."""
    query = f"{tracker.query(run)} and attributes.status = 'RUNNING'"
    left = tracker.client.search_runs([tracker.experiment], query)
    for each in left:
        tracker.client.set_terminated(each.info.run_id, status)
    return len(left)


# Studies are few and need no marks: unfinished ones are looked at every time.


class StudySettler(Settler[StudyRecord]):
    """Settles studies of one root."""

    folder = FOLDER

    def find(self, name: str) -> StudyRecord:
        return Studies(self.root).find(name)

    def save(self, record: StudyRecord) -> None:
        Studies(self.root).save(record)

    def of_flow_run(self, flow_run: FlowRun) -> str:
        """Return the study of the flow run's name, else the one that names it."""
        for name in dict.fromkeys([flow_run.name, *Studies(self.root).names()]):
            with suppress(ValueError):
                if self.find(name).prefect_run == str(flow_run.id):
                    return name
        return ""

    def _mlflow(self, record: StudyRecord) -> list[Settled]:
        """Close the MLflow run of the study if it still says RUNNING."""
        if not record.mlflow_run or record.mlflow_run.startswith(AWAY):
            return []
        tracker, status = self.tracker(record.name), STATUS[record.state]
        closed = tracker.reach.attempt(lambda: _close(tracker, record.mlflow_run, status), False)
        return [Settled(record.name, "MLflow", "RUNNING", status)] if closed else []


def _close(tracker: Tracker, run_id: str, status: str) -> bool:
    """End an MLflow run that says RUNNING; return whether it did. Raises what MLflow raises."""
    running = bool(tracker.client.get_run(run_id).info.status == "RUNNING")
    if running:
        tracker.client.set_terminated(run_id, status)
    return running


# Reconcile everything: records, MLflow runs, Prefect flow runs, aliases, storage. Hooks and watchdogs do the same for
# one run; repeating it changes nothing.

COMPLETE = ".complete"
LEFT_S = 86_400.0
"""What killed processes left in storage is removed when nothing wrote to it for so long."""


def reconcile(
    root: Root, client: SyncPrefectClient | None, full: bool = False, grace_s: float = GRACE_S
) -> list[Settled]:
    """Settle every open run and unfinished study that nobody works on; with `full`, look at all of them.

    Also sends what MLflow lacks, gives its aliases to whom the promotion logs give them, and clears what killed
    processes left in storage. Raises OSError.
    """
    full = full or root.read(OPEN, COMPLETE) is None
    runs = root.names(RunSettler.folder) if full else root.names(OPEN)
    studies = [record.name for record in Studies(root).all() if full or record.state != "finished"]
    found = [
        *_settled(RunSettler(root, client, grace_s), runs),
        *_settled(StudySettler(root, client, grace_s), studies),
    ]
    if full:
        root.write(f"{now()}\n", OPEN, COMPLETE)
    tidied = tidy(root, LEFT_S)
    return [
        *found,
        *(line for family in families(root) for line in show_aliases(root, family)),
        *([Settled("all", "storage", f"{tidied.bytes:,} bytes left over", "removed")] if tidied.bytes else []),
    ]


def _settled(settler: Settler[Any], names: list[str]) -> list[Settled]:
    place = {name: f"{settler.folder}/{name}" for name in names}
    held = holders(settler.root, [] if settler.root.is_local else list(place.values()))  # all at once: it takes seconds
    return [line for name in names if place[name] not in held for line in settler.settle(name)]


def show_aliases(root: Root, family: str) -> list[Settled]:
    """Make the aliases of a family in MLflow follow its promotion log; if it is away, another time will."""
    tracker, log = Tracker(root, family), PromotionLog(root, family)
    nothing: list[str] = []
    changes = tracker.reach.attempt(lambda: Registry(tracker).show(log), nothing)
    return [Settled(family, "MLflow", "aliases behind the promotion log", change) for change in changes]
