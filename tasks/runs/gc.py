"""Garbage collection: delete old artifacts that no kept run, alias or live process needs.

Kept are the newest runs of each family, runs unfinished within the last month, runs of a study's report, models that
hold an alias, and everything that these were made from. Nothing of a family is deleted while a run of it is at work, or
while the registry does not answer. Unfinished work goes after a month without writes. Records, reports and decisions
stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.table import Table

from storage import staging
from storage.artifact import Artifact
from storage.cleanup import NO_KINDS, copies
from storage.lease import LeaseHeld, holders, lease
from storage.object_artifact import open_store
from storage.objects import children, files_below, remove_all
from storage.root import Root
from storage.staging import discard, newest, size
from tasks.format import clock, format_bytes
from tasks.plan.calibrate import KIND as CALIBRATION
from tasks.promotion.log import labels_held
from tasks.runs.progress import IN_PROGRESS
from tasks.runs.records import RunRecord, Runs
from tasks.study.records import Studies

# Unfinished work: folders below `work/`, and checkpoints of stages below `in-progress/`. Nothing says whose they are,
# so age decides.

WORK = "work"


@dataclass(frozen=True)
class Leftover:
    """Half-done work of one step."""

    name: str
    bytes: int
    last: float
    """When it was last written to, in seconds since 1970."""

    @property
    def label(self) -> str:
        """What its lease is called."""
        return f"{WORK}/{self.name}"


def leftovers(root: Root) -> list[Leftover]:
    """Return what is in progress on this machine and, under a remote root, in the object store; sorted by name."""
    names = set(_local_names(root)) | set(_remote_names(root))
    return [_leftover(root, name) for name in sorted(names)]


def remove_leftover(root: Root, name: str) -> None:
    """Delete what is there of the work `name`; the caller holds its lease. Raises OSError if some of it stays."""
    if not root.is_local:
        remove_all(root.join(IN_PROGRESS, name))
    discard(root.local, root.local / WORK / name)


def _leftover(root: Root, name: str) -> Leftover:
    folder = root.local / WORK / name
    stored = [] if root.is_local else [*files_below(root.join(IN_PROGRESS, name)).values()]
    total = size(folder) + sum(each.bytes for each in stored)
    return Leftover(name, total, max([newest(folder), *(each.modified for each in stored)]))


def _local_names(root: Root) -> list[str]:
    place = root.local / WORK
    return [path.name for path in place.iterdir() if path.is_dir()] if place.is_dir() else []


def _remote_names(root: Root) -> list[str]:
    return [] if root.is_local else list(children(root.join(IN_PROGRESS)))


COPY = "local copy"
UNFINISHED = "work in progress"
OPEN_S = 30 * 86400.0
"""A run that ended without being finished may be continued so long."""
HOLDER = "retention"


@dataclass(frozen=True)
class GcItem:
    """One artifact, or its copy or page cache on this machine, and what is to become of it."""

    label: str
    kind: str
    bytes: int
    age_s: float
    why: str
    """Why it is kept; empty: it is to be deleted."""
    copy: Path | None = None
    """The folder of a local copy or page cache; None: the artifact itself."""


@dataclass(frozen=True)
class GcPlan:
    """What is kept under a root and what is to be deleted."""

    items: tuple[GcItem, ...]
    made: float
    """When, in seconds since 1970."""

    @property
    def doomed(self) -> list[GcItem]:
        return [item for item in self.items if not item.why]

    @property
    def freed(self) -> int:
        return sum(item.bytes for item in self.doomed)


def closure(labels: Iterable[str], artifacts: Mapping[str, Artifact]) -> set[str]:
    """Return those of `labels` that exist and everything they were made from, at any depth.

    `artifacts` maps labels; inputs name keys, of artifacts or of outside data.
    """
    by_key = {artifact.key: label for label, artifact in artifacts.items()}
    kept: set[str] = set()
    waiting = [label for label in labels if label in artifacts]
    while waiting:
        label = waiting.pop()
        if label not in kept:
            kept.add(label)
            waiting += [by_key[key] for key in artifacts[label].manifest.inputs.values() if key in by_key]
    return kept


def kept_runs(records: list[RunRecord], most: int, now: float) -> list[RunRecord]:
    """Return the newest `most` runs of each family and every open one; `records` are oldest first."""
    families = {record.family for record in records}
    newest = {kept.name for family in families for kept in [r for r in records if r.family == family][-most:]}
    return [record for record in records if record.name in newest or is_open(record, now)]


def is_open(record: RunRecord, now: float) -> bool:
    """Return whether somebody may still go on with the run."""
    last = datetime.fromisoformat(record.ended or record.started).timestamp()
    return record.state != "finished" and now - last < OPEN_S


def plan_retention(
    root: Root, keep_runs: int, older_than_s: float, aliases: Iterable[str], now: float | None = None
) -> GcPlan:
    """Return what to keep and what to delete.

    `aliases` are the labels of the checkpoints that hold an alias in the registry; those of the root's own decisions
    are added. Raises ValueError for `keep_runs` below 1.
    """
    if keep_runs < 1:
        raise ValueError(f"keep_runs: {keep_runs} would keep no run; write 1 or more")
    records = Runs(root).all(strict=True)
    store, at = open_store(root), time.time() if now is None else now
    artifacts = {artifact.label: artifact for kind in _kinds(root) for artifact in store.all(kind)}
    used = [step.artifact for record in kept_runs(records, keep_runs, at) for step in record.steps.values()]
    held = {*labels_held(root), *aliases}
    champions = closure([*held, *_evaluations(held, artifacts)], artifacts)
    standing, studied = closure(used, artifacts), closure(_of_studies(root, records), artifacts)
    live = live_families(root, records)
    making = holders(root, list(artifacts)) if artifacts else {}
    measured = _newest_calibrations(artifacts.values())

    def why(label: str, artifact: Artifact) -> str:
        if label in champions:
            return "an alias stands on it"
        if label in standing:
            return "a kept run stands on it"
        if label in studied:
            return "a study stands on it"
        if label in measured:
            return "runs are predicted with it"
        if label in making or _family_of(artifact, live):
            return "a process is at work"
        return "" if at - artifact.created > older_than_s else "it is new"

    items = [
        GcItem(label, artifact.manifest.kind, artifact.bytes, at - artifact.created, why(label, artifact))
        for label, artifact in artifacts.items()
    ]
    in_use = closure([s.artifact for r in records if is_open(r, at) for s in r.steps.values()], artifacts)
    return GcPlan((*items, *_copies(root, in_use, live, older_than_s, at), *_unfinished(root, older_than_s, at)), at)


def _of_studies(root: Root, records: list[RunRecord]) -> list[str]:
    """Return the artifacts of the finished runs of every study's arms: its report can be made from them again."""
    asked = {digest for study in Studies(root).all(strict=True) for digest in study.recipes}
    runs = [record for record in records if record.state == "finished" and record.recipe_digest in asked]
    return [step.artifact for record in runs for step in record.steps.values()]


def _newest_calibrations(artifacts: Iterable[Artifact]) -> set[str]:
    """Return the labels of the last calibration of each device and type; later runs are predicted with them."""
    found = [artifact for artifact in artifacts if artifact.manifest.kind == CALIBRATION]
    newest: dict[tuple[str, str], str] = {}
    for artifact in sorted(found, key=lambda one: one.created):
        made = artifact.manifest.parameters
        newest[str(made.get("device")), str(made.get("dtype"))] = artifact.label
    return set(newest.values())


def carry_out(root: Root, plan: GcPlan) -> list[GcItem]:
    """Delete what `plan` says, each under its lease, and return what was deleted; what came into use since stays."""
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
                    remove_leftover(root, name)
                elif item.copy is None:
                    store.delete(item.label)
                else:
                    staging.discard(root.local, item.copy)
        except LeaseHeld:
            continue
        deleted.append(item)
    return deleted


def live_families(root: Root, records: list[RunRecord]) -> set[str]:
    """Return the families of the runs on which a process works."""
    running = {f"runs/{record.name}": record.family for record in records if record.state == "running"}
    return {running[name] for name in holders(root, list(running))} if running else set()


def retention_rows(plan: GcPlan, deleted: list[GcItem] | None) -> list[dict[str, str]]:
    """Return the plan by kind: what is kept, and what is (or, if `deleted` is None, would be) deleted."""
    kinds = list(dict.fromkeys(item.kind for item in plan.items))
    gone = plan.doomed if deleted is None else deleted
    rows = [
        _row(kind, [i for i in plan.items if i.kind == kind], [i for i in gone if i.kind == kind]) for kind in kinds
    ]
    return [*rows, _row("all", list(plan.items), gone)] if rows else []


def retention_table(plan: GcPlan, deleted: list[GcItem] | None) -> Table:
    """Return the same for a console."""
    rows = retention_rows(plan, deleted)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in rows[0] if rows else ("there is nothing yet",):
        table.add_column(header, justify="left" if header == "kind" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def listing(plan: GcPlan) -> list[str]:
    """Return one line for each thing that is to be deleted."""
    return [f"{item.label} ({item.kind}), {format_bytes(item.bytes)}, {clock(item.age_s)} old" for item in plan.doomed]


def _row(kind: str, items: list[GcItem], gone: list[GcItem]) -> dict[str, str]:
    """Return a line of the table; `gone` are some of `items`."""
    freed = sum(item.bytes for item in gone)
    return {
        "kind": kind,
        "kept": str(len(items) - len(gone)),
        "kept bytes": format_bytes(sum(item.bytes for item in items) - freed),
        "deleted": str(len(gone)),
        "deleted bytes": format_bytes(freed),
    }


def _evaluations(models: set[str], artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return the evaluations of `models`: a champion's card and its next comparison read them, however old it is."""
    keys = {artifacts[label].key for label in models if label in artifacts}
    found = ((label, artifact.manifest) for label, artifact in artifacts.items())
    return [label for label, made in found if made.kind == "evaluation" and made.inputs.get("checkpoint") in keys]


def _kinds(root: Root) -> list[str]:
    return [name for name in root.names() if name not in NO_KINDS and "." not in name]


def _family_of(artifact: Artifact, families: set[str]) -> bool:
    return any(_named(artifact.manifest.name, family) for family in families)


def _named(name: str, family: str) -> bool:
    """Return whether an artifact of that name may be of the family: `tiny` makes `tiny` and `tiny-main`."""
    return name == family or name.startswith(f"{family}-")


def _copies(root: Root, in_use: set[str], live: set[str], older_than_s: float, now: float) -> list[GcItem]:
    """Return the copies of remote artifacts on this machine; any of them can be brought again."""
    items = []
    for label, folder in copies(root):
        age = now - staging.newest(folder)
        used = label in in_use or any(_named(folder.name, family) for family in live)
        why = "a run needs it" if used else ("" if age > older_than_s else "it is new")
        items.append(GcItem(label, COPY, staging.size(folder), age, why, folder))
    return items


def _unfinished(root: Root, older_than_s: float, now: float) -> list[GcItem]:
    """Return what steps left half done; a run may go on with it as long as it is open itself."""
    limit = max(older_than_s, OPEN_S)
    found = ((left, now - left.last) for left in leftovers(root))
    return [
        GcItem(left.label, UNFINISHED, left.bytes, age, "" if age > limit else "a run may go on with it")
        for left, age in found
    ]
