"""Make what is shown follow the promotion log: the run's record, the version's tags, the aliases.

It comes after the record of the log, never before, so a crash in between leaves what is shown behind and nothing
half-decided; the next call, `herd republish` and the flow `reconcile` make it true again. MLflow may be away: then it
is said aloud, and the run is marked so that `reconcile` sends what is missing.
"""

from __future__ import annotations

from tasks.promotion_log import PromotionLog
from tasks.promotions import judged
from tasks.registry import Registry
from tasks.run_settler import mark_open
from tasks.runs import RunRecord, Runs
from tasks.tracking import Tracker


def settle(runs: Runs, record: RunRecord, tracker: Tracker, log: PromotionLog, artifact: str) -> bool:
    """Show what `log` says of `artifact`, the model of run `record` (whose lease is held); return whether MLflow does.

    Raises OSError if the root does not answer.
    """
    record.verdict = judged(log.records, record.name)[-1].kind
    runs.save(record)
    tracker.set_tags(record.mlflow_run, {"verdict": record.verdict})
    shown = tracker.reach.attempt(lambda: _show(Registry(tracker), log, artifact), False)
    if tracker.stale:
        record.mlflow_stale = True
        runs.save(record)
        mark_open(runs.root, record.name)
    return shown


def _show(registry: Registry, log: PromotionLog, artifact: str) -> bool:
    registry.show(log, artifact)
    return True
