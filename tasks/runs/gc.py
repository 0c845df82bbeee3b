"""Garbage collection: delete old artifacts that no kept run, alias or live process needs.

Kept are the newest runs of each family, runs unfinished within the last month, runs of a study's report, models with an
alias, and all inputs of these. Nothing of a family is deleted while a run of it is active, or while the registry does
not answer. Unfinished work is deleted after a month without writes. Records, reports and decisions are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.table import Table

from storage.artifact import Artifact
from storage.cleanup import NO_KINDS, local_copies
from storage.lease import LeaseHeld, lease, lease_holders
from storage.object_artifact import open_store
from storage.objects import list_children, list_objects, remove_all
from storage.root import Root
from storage.staging import discard, disk_usage, newest_mtime
from tasks.format import format_bytes, format_duration
from tasks.plan.calibrate import KIND as CALIBRATION
from tasks.promotion.log import aliased_labels
from tasks.runs.progress import IN_PROGRESS
from tasks.runs.records import RunRecord, Runs
from tasks.study.records import Studies

WORK = "work"
COPY = "local copy"
UNFINISHED = "work in progress"
OPEN_S = 30 * 86400.0
"""A run that ended unfinished may be continued for this long."""
HOLDER = "gc"


@dataclass(frozen=True)
class GcItem:
    """One artifact, or its copy or page cache on this machine, and whether it is deleted."""

    label: str
    kind: str
    bytes: int
    age_s: float
    why: str
    """Why it is kept; empty: it is deleted."""
    copy: Path | None = None
    """The folder of a local copy or page cache; None: the artifact itself."""


@dataclass(frozen=True)
class GcPlan:
    """What is kept under a root and what is deleted."""

    items: tuple[GcItem, ...]
    made: float
    """Seconds since 1970."""

    @property
    def doomed(self) -> list[GcItem]:
        return [item for item in self.items if not item.why]

    @property
    def freed(self) -> int:
        return sum(item.bytes for item in self.doomed)


def with_inputs(labels: Iterable[str], artifacts: Mapping[str, Artifact]) -> set[str]:
    """Return those of `labels` that exist and all their inputs, at any depth.

    `artifacts` is by label; the inputs of a manifest are keys, of artifacts or of outside data.
    """
    by_key = {artifact.key: label for label, artifact in artifacts.items()}
    kept: set[str] = set()
    queue = [label for label in labels if label in artifacts]
    while queue:
        label = queue.pop()
        if label not in kept:
            kept.add(label)
            queue += [by_key[key] for key in artifacts[label].manifest.inputs.values() if key in by_key]
    return kept


def is_open(record: RunRecord, now: float) -> bool:
    """Return whether the run may still be continued."""
    last = datetime.fromisoformat(record.ended or record.started).timestamp()
    return record.state != "finished" and now - last < OPEN_S


def plan_gc(
    root: Root, keep_runs: int, older_than_s: float, aliases: Iterable[str], now: float | None = None
) -> GcPlan:
    """Return what to keep and what to delete.

    `aliases` are the labels of the checkpoints with an alias in the registry; those of the promotion logs are added.
    Raises ValueError for `keep_runs` below 1.
    """
    if keep_runs < 1:
        raise ValueError(f"keep_runs: {keep_runs} would keep no run; write 1 or more")
    records, store, at = Runs(root).all(strict=True), open_store(root), time.time() if now is None else now
    kinds = [name for name in root.names() if name not in NO_KINDS and "." not in name]
    artifacts = {artifact.label: artifact for kind in kinds for artifact in store.all(kind)}
    aliased = {*aliased_labels(root), *aliases}
    keys = {artifacts[label].key for label in aliased if label in artifacts}
    evaluations = [  # a champion's card and its next comparison read them
        label
        for label, artifact in artifacts.items()
        if artifact.manifest.kind == "evaluation" and artifact.manifest.inputs.get("checkpoint") in keys
    ]
    families = {record.family for record in records}
    newest_runs = {kept.name for family in families for kept in [r for r in records if r.family == family][-keep_runs:]}
    open_runs = [record for record in records if is_open(record, at)]
    recipes = {digest for study in Studies(root).all(strict=True) for digest in study.recipes}
    calibrations: dict[tuple[str, str], str] = {}  # the last of each device and type
    for artifact in sorted(artifacts.values(), key=lambda artifact: artifact.created):
        if artifact.manifest.kind == CALIBRATION:
            parameters = artifact.manifest.parameters
            calibrations[str(parameters.get("device")), str(parameters.get("dtype"))] = artifact.label
    live = live_families(root, records)
    leased = lease_holders(root, list(artifacts)) if artifacts else {}

    def inputs_of(runs: Iterable[RunRecord]) -> set[str]:
        return with_inputs([step.artifact for record in runs for step in record.steps.values()], artifacts)

    needed = {
        "a model with an alias needs it": with_inputs([*aliased, *evaluations], artifacts),
        "a kept run needs it": inputs_of([*(r for r in records if r.name in newest_runs), *open_runs]),
        "a study needs it": inputs_of(r for r in records if r.state == "finished" and r.recipe_digest in recipes),
        "predictions need it": set(calibrations.values()),
        "a process is active": {
            label
            for label, artifact in artifacts.items()
            if label in leased or any(_named(artifact.manifest.name, family) for family in live)
        },
    }
    items = []
    for label, artifact in artifacts.items():
        age = at - artifact.created
        reason = next((reason for reason, labels in needed.items() if label in labels), "")
        why = reason or ("" if age > older_than_s else "it is new")
        items.append(GcItem(label, artifact.manifest.kind, artifact.bytes, age, why))
    items += _copies(root, inputs_of(open_runs), live, older_than_s, at)
    return GcPlan((*items, *_unfinished(root, max(older_than_s, OPEN_S), at)), at)


def delete_items(root: Root, plan: GcPlan) -> list[GcItem]:
    """Delete what `plan` says, each under its lease, and return what was deleted; what is in use by now is kept."""
    store, records = open_store(root), Runs(root).all(strict=True)
    live = live_families(root, records)
    used = {step.artifact for record in records if is_open(record, plan.made) for step in record.steps.values()}
    deleted = []
    for item in plan.doomed:
        name = item.label.split("/", 1)[1]
        if item.label in used or any(_named(name, family) for family in live):
            continue
        try:
            with lease(root, item.label, HOLDER):
                if item.kind == UNFINISHED:
                    if not root.is_local:
                        remove_all(root.join(IN_PROGRESS, name))
                    discard(root.local, root.local / WORK / name)
                elif item.copy is None:
                    store.delete(item.label)
                else:
                    discard(root.local, item.copy)
        except LeaseHeld:
            continue
        deleted.append(item)
    return deleted


def live_families(root: Root, records: list[RunRecord]) -> set[str]:
    """Return the families of the runs that a process holds."""
    running = {f"runs/{record.name}": record.family for record in records if record.state == "running"}
    return {running[name] for name in lease_holders(root, list(running))} if running else set()


def gc_rows(plan: GcPlan, deleted: list[GcItem] | None) -> list[dict[str, str]]:
    """Return the plan by kind: what is kept and what is deleted (would be, if `deleted` is None)."""
    kinds = list(dict.fromkeys(item.kind for item in plan.items))
    deleted = plan.doomed if deleted is None else deleted
    rows = [
        _row(kind, [i for i in plan.items if i.kind == kind], [i for i in deleted if i.kind == kind]) for kind in kinds
    ]
    return [*rows, _row("all", list(plan.items), deleted)] if rows else []


def gc_table(plan: GcPlan, deleted: list[GcItem] | None) -> Table:
    """Return the plan by kind as a table for the console."""
    rows = gc_rows(plan, deleted)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in rows[0] if rows else ("nothing yet",):
        table.add_column(header, justify="left" if header == "kind" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def gc_lines(plan: GcPlan) -> list[str]:
    """Return one line for each item to delete."""
    return [
        f"{item.label} ({item.kind}), {format_bytes(item.bytes)}, {format_duration(item.age_s)} old"
        for item in plan.doomed
    ]


def _row(kind: str, items: list[GcItem], deleted: list[GcItem]) -> dict[str, str]:
    """Return a line of the table; `deleted` are some of `items`."""
    freed = sum(item.bytes for item in deleted)
    return {
        "kind": kind,
        "kept": str(len(items) - len(deleted)),
        "kept bytes": format_bytes(sum(item.bytes for item in items) - freed),
        "deleted": str(len(deleted)),
        "deleted bytes": format_bytes(freed),
    }


def _named(name: str, family: str) -> bool:
    """Return whether an artifact of that name may belong to the family: `tiny` has `tiny` and `tiny-main`."""
    return name == family or name.startswith(f"{family}-")


def _copies(root: Root, in_use: set[str], live: set[str], older_than_s: float, now: float) -> list[GcItem]:
    """Return the copies of remote artifacts on this machine; they can be downloaded again."""
    items = []
    for label, folder in local_copies(root):
        age = now - newest_mtime(folder)
        used = label in in_use or any(_named(folder.name, family) for family in live)
        why = "a run needs it" if used else ("" if age > older_than_s else "it is new")
        items.append(GcItem(label, COPY, disk_usage(folder), age, why, folder))
    return items


def _unfinished(root: Root, older_than_s: float, now: float) -> list[GcItem]:
    """Return unfinished work of steps: folders below `work/`, and checkpoints below `in-progress/` of a remote root.

    Nothing says which run it belongs to, so its age decides.
    """
    items = []
    names = {path.name for path in (root.local / WORK).glob("*") if path.is_dir()}
    for name in sorted(names if root.is_local else names | set(list_children(root.join(IN_PROGRESS)))):
        folder = root.local / WORK / name
        stored = [] if root.is_local else [*list_objects(root.join(IN_PROGRESS, name)).values()]
        total = disk_usage(folder) + sum(file.bytes for file in stored)
        age = now - max([newest_mtime(folder), *(file.modified for file in stored)])
        why = "" if age > older_than_s else "a run may continue it"
        items.append(GcItem(f"{WORK}/{name}", UNFINISHED, total, age, why))
    return items
