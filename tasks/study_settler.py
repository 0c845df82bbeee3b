"""Settle studies: what a killed process could not say of the study that it worked on.

Studies are few, so they need no marks as runs do: those that did not finish are looked at every time. The runs of
their arms are settled as runs. What this gives up: a study that was killed between its last word and its end in Prefect
is found by the automation for zombies, or by a full pass.
"""

from __future__ import annotations

from contextlib import suppress

from prefect.client.schemas.objects import FlowRun

from tasks.republish import STATUS
from tasks.settler import Settled, Settler
from tasks.studies import FOLDER, Studies, StudyRecord
from tasks.tracking import AWAY, Tracker


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
