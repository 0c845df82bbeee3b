"""Settle runs: what a killed process could not say of the run that it worked on.

Each run that begins leaves a mark in `open/`, which is taken away once everything about it is settled, so a root of
10,000 settled runs costs one listing. What this gives up: a run that was given another mark by hand, or whose mark is
lost, is found by a full pass only.
"""

from __future__ import annotations

from contextlib import suppress

from prefect.client.schemas.objects import FlowRun

from storage.lease import holders
from storage.root import Root
from tasks.republish import STATUS, republish
from tasks.runs import RunRecord, Runs, now
from tasks.settler import Settled, Settler
from tasks.tracking import Tracker

OPEN = "open"


def mark_open(root: Root, run: str) -> None:
    """Leave the mark of a run that is about to work. Raises OSError."""
    root.write(f"{now()}\n", OPEN, run)


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
