"""What checkpoints and restarts cost a recipe's own runs, for the plan of the next one.

A run writes down how long each save blocked and took, and how long each attempt needed to its first step. The medians
of the newest run that has any replace the published figures. Given up: what a job of another size would take.
"""

from __future__ import annotations

from statistics import median

import pyarrow.parquet as parquet

from llama3.cluster.goodput import CheckpointCosts, Recovery
from llama3.cluster.uptime import RECOVERY
from llama3.train import metrics
from storage.remote_store import open_store
from storage.root import Root
from tasks.runs import RunRecord, Runs

KEYS = (metrics.CHECKPOINT_S, metrics.CHECKPOINT_WRITE_S, metrics.FIRST_STEP_S)


def measured_costs(root: Root, family: str) -> tuple[CheckpointCosts, Recovery] | None:
    """Return what saves and restarts took in the newest run of `family` that saved, or None if there is none.

    Loading is part of a restart, which is measured whole.
    """
    for record in reversed(Runs(root).all()):
        if record.family == family:
            blocked, written, first = (_values(root, record)[key] for key in KEYS)
            if blocked and written and first:
                block_s, save_s = median(blocked), median(written)
                costs = CheckpointCosts(block_s, max(block_s, save_s), 0.0, f"measured in {record.name}")
                return costs, Recovery(RECOVERY.notice_s, RECOVERY.timeout_s, median(first))
    return None


def _values(root: Root, record: RunRecord) -> dict[str, list[float]]:
    store, found = open_store(root), {key: list[float]() for key in KEYS}
    for step in record.steps.values():
        if not step.artifact.startswith("checkpoint/"):
            continue
        table = parquet.read_table(store.at(step.artifact).part("metrics.parquet"), filters=[("key", "in", KEYS)])
        for row in table.to_pylist():
            found[row["key"]].append(row["value"])
    return found
