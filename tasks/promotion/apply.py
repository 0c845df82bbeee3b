"""Make run record, MLflow run and MLflow aliases agree with the promotion log.

They follow the log, never lead it: after a crash in between, the next command or `reconcile` completes them.
"""

from __future__ import annotations

from tasks.promotion.log import PromotionLog, gate_decisions
from tasks.runs.records import RunRecord, Runs, mark_open
from tasks.tracking.factory import mlflow_of
from tasks.tracking.mlflow import MLflowTracker
from tasks.tracking.registry import Registry
from tasks.tracking.tracker import Tracker


def apply(runs: Runs, record: RunRecord, tracker: Tracker, log: PromotionLog, artifact: str) -> bool:
    """Write the newest decision on run `record` (whose lease is held) and its model `artifact`.

    Returns whether MLflow shows it. If MLflow is away the run is marked, so that `reconcile` sends what is missing.
    Raises OSError if the root does not answer.
    """
    record.verdict = gate_decisions(log.records, record.name)[-1].kind
    runs.save(record)
    tracker.set_tags(record.mlflow_run, {"verdict": record.verdict})
    mlflow = mlflow_of(tracker)
    shown = move_aliases(mlflow, log, artifact)
    if mlflow.stale:
        record.mlflow_stale = True
        runs.save(record)
        mark_open(runs.root, record.name)
    return shown


def move_aliases(tracker: MLflowTracker, log: PromotionLog, *labels: str) -> bool:
    """Move MLflow's aliases to the holders by `log` and write the tags of the models `labels`; False if it is away."""
    return tracker.reach.attempt(lambda: Registry(tracker).publish(log, *labels) is not None, False)
