"""Make what is shown true again after something died: records, MLflow runs, Prefect flow runs, aliases, storage.

A killed process cannot say how it ended; hooks of flows, the witness of a process and this pass say it, all of them as
often as they like (`settler.py`). The pass looks at the runs that are marked open and at the studies that did not
finish. What this gives up: what neither says is found by a full pass only.
"""

from __future__ import annotations

from typing import Any

from prefect.client.orchestration import SyncPrefectClient

from storage.janitor import tidy
from storage.lease import holders
from storage.root import Root
from tasks.promotion_log import PromotionLog, families
from tasks.registry import Registry
from tasks.run_settler import OPEN, RunSettler
from tasks.runs import now
from tasks.settler import GRACE_S, Settled, Settler
from tasks.studies import Studies
from tasks.study_settler import StudySettler
from tasks.tracking import Tracker

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
