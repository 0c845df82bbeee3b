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
from typing import Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from storage.lease import LeaseHeld, Timing, lease
from storage.root import Root
from tasks.runs import DamagedRecord, State, now
from tasks.tracking import Tracker

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
        self, root: Root, client: SyncPrefectClient | None, grace_s: float = GRACE_S, timing: Timing | None = None
    ) -> None:
        """Without `client` Prefect is left alone."""
        self.root, self.client, self.grace_s = root, client, grace_s
        self.timing = timing or Timing()
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
