"""Make what is shown true again after something died: records of runs, MLflow runs, Prefect flow runs.

A killed process cannot say how it ended. Whether a run is worked on is known from its lease alone; whatever else says
`running` while the lease is free is wrong, and is settled here: by the hooks of the flows, by the witness of a run, by
the flow `reconcile`, all of them as often as they like. Each run that begins leaves a mark in `open/`, which is taken
away once everything about it is settled, so a root of 10,000 settled runs costs one listing. What this gives up: a run
that was given another mark by hand, or whose mark is lost, is found by a full pass only.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from storage.janitor import tidy
from storage.lease import LeaseHeld, Timing, holders, lease
from storage.root import Root
from tasks.promotion_log import PromotionLog, families
from tasks.registry import Registry
from tasks.republish import STATUS, republish
from tasks.runs import RunRecord, Runs, State, now
from tasks.tracking import Tracker

OPEN, COMPLETE = "open", ".complete"
GONE = "its process is gone"
GRACE_S = 120.0
"""A flow run that Prefect began later than this ago may be on its way to the lease."""
LEFT_S = 86_400.0
"""What killed processes left in storage is removed when nothing wrote to it for so long."""
PREFECT = {"finished": Completed, "failed": Failed, "interrupted": Crashed, "cancelled": Cancelled}


class Settled(NamedTuple):
    """One state that was not true, and what it is now."""

    run: str
    where: str
    before: str
    after: str


def mark_open(root: Root, run: str) -> None:
    """Leave the mark of a run that is about to work. Raises OSError."""
    root.write(f"{now()}\n", OPEN, run)


def reconcile(
    root: Root, client: SyncPrefectClient | None, full: bool = False, grace_s: float = GRACE_S
) -> list[Settled]:
    """Settle every run that is marked open and that nobody works on; with `full`, look at all runs.

    Also sends what MLflow lacks, gives its aliases to whom the promotion logs give them, and clears what killed
    processes left in storage. Raises OSError.
    """
    full = full or root.read(OPEN, COMPLETE) is None
    names = root.names("runs") if full else root.names(OPEN)
    held = holders(root, [f"runs/{name}" for name in names if not root.is_local])  # all at once: it takes seconds
    settler = Settler(root, client, grace_s)
    found = [line for name in names if f"runs/{name}" not in held for line in settler.settle(name)]
    if full:
        root.write(f"{now()}\n", OPEN, COMPLETE)
    tidied = tidy(root, LEFT_S)
    return [
        *found,
        *(line for family in families(root) for line in show_aliases(root, family)),
        *([Settled("all", "storage", f"{tidied.bytes:,} bytes left over", "removed")] if tidied.bytes else []),
    ]


class Settler:
    """Settles runs of one root."""

    def __init__(
        self, root: Root, client: SyncPrefectClient | None, grace_s: float = GRACE_S, timing: Timing | None = None
    ) -> None:
        """Without `client` Prefect is left alone."""
        self.root, self.client, self.grace_s = root, client, grace_s
        self.runs, self.timing = Runs(root), timing or Timing()
        self.trackers: dict[str, Tracker] = {}

    def settle(self, name: str, state: State = "interrupted", attempt: int = 0) -> list[Settled]:
        """Make what is shown of run `name` true if nobody works on it; a record that says `running` becomes `state`.

        `attempt` is the Prefect attempt that is known to be over, whenever it began; 0: not known.
        """
        try:
            flow_run = self._flow_run(self.runs.find(name))
            if flow_run is not None and flow_run.state is not None:
                if flow_run.state.is_paused():  # waits for a person, without a process
                    return []
                if flow_run.state.is_cancelling() or flow_run.state.is_cancelled():
                    state = "cancelled"
            record, found = self._record(name, state)
        except LeaseHeld:
            return []
        except ValueError:  # the run was deleted
            self.root.remove(OPEN, name)
            return []
        found += self._mlflow(record)
        found += self._prefect(record, flow_run, attempt) if flow_run is not None else []
        if not record.mlflow_stale and (flow_run is None or self._is_over(record)):
            self._close(record)
        return found

    def await_cancellation(self, name: str, seconds: float) -> None:
        """Wait until a flow run that is being cancelled is cancelled: its worker, if it lives, will say so."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            flow_run = self._flow_run(self.runs.find(name))
            if flow_run is None or flow_run.state is None or not flow_run.state.is_cancelling():
                return
            time.sleep(1.0)

    def _record(self, name: str, state: State) -> tuple[RunRecord, list[Settled]]:
        """Settle the record, holding the run for that moment. Raises LeaseHeld if somebody works on it."""
        with lease(self.root, f"runs/{name}", f"settling {name}", timing=self.timing):
            record = self.runs.find(name)
            if record.state != "running" and (record.state, state) != ("interrupted", "cancelled"):
                return record, []
            before, record.state = record.state, state
            record.error, record.ended = record.error or (GONE if state == "interrupted" else state), now()
            self.runs.save(record)
            return record, [Settled(name, "record", before, state)]

    def _mlflow(self, record: RunRecord) -> list[Settled]:
        """Close the MLflow runs that still say RUNNING, and send what MLflow lacks."""
        if record.family not in self.trackers:
            self.trackers[record.family] = Tracker(self.root, record.family)
        tracker, status = self.trackers[record.family], STATUS[record.state]
        closed = tracker.reach.attempt(lambda: close_runs(tracker, record.name, status), -1)
        found = [Settled(record.name, "MLflow", "RUNNING", status)] if closed > 0 else []
        if closed < 0 and not record.mlflow_stale:
            record.mlflow_stale = True
            self.runs.save(record)
        elif closed >= 0 and record.mlflow_stale:
            republish(self.root, record.name, tracker)
            record.mlflow_stale = self.runs.find(record.name).mlflow_stale
            found.append(Settled(record.name, "MLflow", "stale", "stale" if record.mlflow_stale else "complete"))
        return found

    def _prefect(self, record: RunRecord, flow_run: FlowRun, attempt: int) -> list[Settled]:
        """Give the flow run a final state, if it has none and belongs to a process that is gone."""
        assert self.client is not None
        state = flow_run.state
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

    def _flow_run(self, record: RunRecord) -> FlowRun | None:
        """Return the flow run of `record`; None if there is none any more, or nobody to ask."""
        if self.client is None or not record.prefect_run:
            return None
        with suppress(ObjectNotFound):
            return self.client.read_flow_run(UUID(record.prefect_run))
        return None

    def _is_over(self, record: RunRecord) -> bool:
        flow_run = self._flow_run(record)
        return flow_run is None or (flow_run.state is not None and flow_run.state.is_final())

    def _close(self, record: RunRecord) -> None:
        """Take the mark away, unless somebody works on the run by now, or Prefect was not asked."""
        name = f"runs/{record.name}"
        if (self.client is not None or not record.prefect_run) and name not in holders(self.root, [name], self.timing):
            self.root.remove(OPEN, record.name)


def show_aliases(root: Root, family: str) -> list[Settled]:
    """Make the aliases of a family in MLflow follow its promotion log; if it is away, another time will."""
    tracker, log = Tracker(root, family), PromotionLog(root, family)
    nothing: list[str] = []
    changes = tracker.reach.attempt(lambda: Registry(tracker).show(log), nothing)
    return [Settled(family, "MLflow", "aliases behind the promotion log", change) for change in changes]


def close_runs(tracker: Tracker, run: str, status: str) -> int:
    """End the MLflow runs of run `run` that say RUNNING; return how many. Raises what MLflow raises."""
    query = f"{tracker.query(run)} and attributes.status = 'RUNNING'"
    left = tracker.client.search_runs([tracker.experiment], query)
    for each in left:
        tracker.client.set_terminated(each.info.run_id, status)
    return len(left)
