"""Garbage collection: delete old artifacts that no kept run, alias or live process needs, and rows of databases.

Kept are the newest runs of each family, runs unfinished within the last month, runs of a study's report, models with an
alias, and all inputs of these. Nothing of a family is deleted while a run of it is active, or while the registry does
not answer. Unfinished work is deleted after a month without writes. Records, reports and decisions are kept. Of
Prefect's and MLflow's databases goes what ended long ago, if the root can show it again.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from herd.storage.artifact import Artifact
from herd.storage.cleanup import local_copies
from herd.storage.lease import LeaseHeld, lease, lease_holders
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_children, list_objects, remove_all
from herd.storage.root import Root
from herd.storage.staging import discard, disk_usage, newest_mtime
from herd.tasks.format import format_bytes, format_duration
from herd.tasks.operate.integrity import artifact_problems
from herd.tasks.promotion.log import aliased_labels, current_aliases, families, read_log
from herd.tasks.runs.records import OPEN, RunRecord, Runs, read_records
from herd.tasks.runs.work_dirs import IN_PROGRESS
from herd.tasks.step import CALIBRATION, KINDS
from herd.tasks.study.records import Studies
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.mlflow_store import NAME, VARIABLE, database_uri, tracking_uri

if TYPE_CHECKING:
    from prefect.client.schemas.filters import FlowRunFilter

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
    ids: tuple[str, ...] = ()
    """Rows of a database: the flow run, or the MLflow runs of a run and its steps."""


@dataclass(frozen=True)
class GcPlan:
    """What is kept under a root and what is deleted."""

    items: tuple[GcItem, ...]
    time: float
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


def newest_runs(records: list[RunRecord], keep_runs: int) -> list[RunRecord]:
    """Return the newest `keep_runs` of each family of `records`, which are oldest first."""
    families: dict[str, list[RunRecord]] = {}
    for record in records:
        families.setdefault(record.family, []).append(record)
    return [record for runs in families.values() for record in runs[-keep_runs:]]


def study_runs(root: Root, records: list[RunRecord]) -> list[RunRecord]:
    """Return those of `records` that the report of a study is made from."""
    recipes = {digest for study in Studies(root).all(strict=True) for digest in study.recipes}
    return [record for record in records if record.state == "finished" and record.recipe_digest in recipes]


def plan_gc(
    root: Root, keep_runs: int, older_than_s: float, aliases: Iterable[str], now: float | None = None
) -> GcPlan:
    """Return the items to keep and to delete.

    `aliases` are the labels of the checkpoints with an alias in the registry; those of the promotion logs are added.
    Raises ValueError for `keep_runs` below 1.
    """
    if keep_runs < 1:
        raise ValueError(f"keep_runs: {keep_runs} would keep no run; write 1 or more")
    records, store, at = Runs(root).all(strict=True), open_store(root), time.time() if now is None else now
    artifacts = {artifact.label: artifact for kind in KINDS for artifact in store.all(kind)}
    open_runs = [record for record in records if is_open(record, at)]
    aliased, live = {*aliased_labels(root), *aliases}, live_families(root, records)

    def inputs_of(runs: Iterable[RunRecord]) -> set[str]:
        return with_inputs([step.artifact for record in runs for step in record.steps.values()], artifacts)

    needed = {
        "a model with an alias needs it": with_inputs([*aliased, *evaluations_of(aliased, artifacts)], artifacts),
        "a kept run needs it": inputs_of([*newest_runs(records, keep_runs), *open_runs]),
        "a study needs it": inputs_of(study_runs(root, records)),
        "predictions need it": newest_calibrations(artifacts),
        "a process is active": active_artifacts(root, live, artifacts),
    }
    items = []
    for label, artifact in artifacts.items():
        age = at - artifact.created
        reason = next((reason for reason, labels in needed.items() if label in labels), "")
        why = reason or ("" if age > older_than_s else "it is new")
        items.append(GcItem(label, artifact.manifest.kind, artifact.bytes, age, why))
    items += _copies(root, inputs_of(open_runs), live, older_than_s, at)
    return GcPlan((*items, *_unfinished(root, max(older_than_s, OPEN_S), at)), at)


def evaluations_of(labels: Iterable[str], artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return the evaluations of the checkpoints `labels`: a champion's card and its next comparison read them."""
    keys = {artifacts[label].key for label in labels if label in artifacts}
    return [
        label
        for label, artifact in artifacts.items()
        if artifact.manifest.kind == "evaluation" and artifact.manifest.inputs.get("checkpoint") in keys
    ]


def newest_calibrations(artifacts: Mapping[str, Artifact]) -> set[str]:
    """Return the last calibration of each device and type."""
    calibrations: dict[tuple[str, str], str] = {}
    for artifact in sorted(artifacts.values(), key=lambda artifact: artifact.created):
        if artifact.manifest.kind == CALIBRATION:
            parameters = artifact.manifest.parameters
            calibrations[str(parameters.get("device")), str(parameters.get("dtype"))] = artifact.label
    return set(calibrations.values())


def active_artifacts(root: Root, live: set[str], artifacts: Mapping[str, Artifact]) -> set[str]:
    """Return the artifacts with a lease, and those of the families `live`, of which a process holds a run."""
    leased = lease_holders(root, list(artifacts)) if artifacts else {}
    return {
        label
        for label, artifact in artifacts.items()
        if label in leased or any(_named(artifact.manifest.name, family) for family in live)
    }


def damaged_families(root: Root, plan: GcPlan) -> dict[str, str]:
    """Return family -> what is wrong with a model that holds one of its aliases, if the plan has checkpoints of it.

    Reads these models whole: if they are damaged, an older one is what is left.
    """
    names = [item.label.split("/", 1)[1] for item in plan.doomed if item.kind == "checkpoint"]
    damaged = {}
    for family in families(root):
        if any(_named(name, family) for name in names):
            for label in dict.fromkeys(current_aliases(read_log(root, family)).values()):
                for file, problem in artifact_problems(root, label).items():
                    damaged[family] = f"{family} has a model with an alias that is damaged: {label}/{file} {problem}"
    return damaged


def delete_items(root: Root, plan: GcPlan, log: Callable[[str], object] = str) -> list[GcItem]:
    """Delete planned items except those now in use, each under its lease; return the deleted items.

    Nothing of a family is deleted while a model that holds one of its aliases is damaged; `log` gets a line for each.
    """
    store, runs = open_store(root), Runs(root)
    damaged = damaged_families(root, plan)
    for problem in damaged.values():
        log(f"{problem}; nothing of the family is deleted: roll back (herd rollback), or run its recipe again")
    seen, live, used = dict[str, RunRecord](), set[str](), set[str]()
    deleted = []
    for item in plan.doomed:
        name = item.label.split("/", 1)[1]
        try:
            with lease(root, item.label, HOLDER):
                # The deletions before this one may have taken hours. Only runs with an open mark can have begun since,
                # and the lease of a record that is as before is not looked at again: in a store that takes seconds.
                marked = set(root.names("runs")).intersection(root.names(OPEN))
                records = read_records(runs.find, sorted(marked), strict=True) if seen else runs.all(strict=True)
                changed = [record for record in records if seen.get(record.name) != record]
                live |= live_families(root, changed)
                open_runs = [record for record in changed if seen or is_open(record, plan.time)]
                used |= {step.artifact for record in open_runs for step in record.steps.values()}
                seen |= {record.name: record for record in changed}
                if item.label in used or any(_named(name, family) for family in (*live, *damaged)):
                    continue
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
        f"{item.label} ({item.kind}), {'' if item.ids else f'{format_bytes(item.bytes)}, '}"
        f"{format_duration(item.age_s)} old"
        for item in plan.doomed
    ]


def _row(kind: str, items: list[GcItem], deleted: list[GcItem]) -> dict[str, str]:
    """Return a line of the table; `deleted` are some of `items`."""
    freed, sized = sum(item.bytes for item in deleted), kind not in ROWS
    return {
        "kind": kind,
        "kept": str(len(items) - len(deleted)),
        "kept bytes": format_bytes(sum(item.bytes for item in items) - freed) if sized else "",
        "deleted": str(len(deleted)),
        "deleted bytes": format_bytes(freed) if sized else "",
    }


def _named(name: str, family: str) -> bool:
    """Return whether an artifact of that name may belong to the family: `tiny` has `tiny` and `tiny-main`."""
    return name == family or name.startswith(f"{family}-")


def _copies(root: Root, in_use: set[str], live: set[str], older_than_s: float, now: float) -> list[GcItem]:
    """Return the copies of remote artifacts on this machine; they can be downloaded again."""
    items = []
    for label, folder in local_copies(root, KINDS):
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


# Rows of databases. Prefect's is expendable: a flow run goes with its logs when it ended long ago and no kept run links
# to it. MLflow's has the only copy of a run whose artifacts were deleted: only what `herd mlflow sync` would send again
# goes, first to MLflow's trash, where a person can restore it, and as long after that for good.

FLOW_RUN, MLFLOW_RUN, TRASH = "flow run", "MLflow run", "MLflow trash"
ROWS = (FLOW_RUN, MLFLOW_RUN, TRASH)
BATCH = 50
"""Flow runs that Prefect deletes in one call."""


def plan_rows(
    root: Root, plan: GcPlan, keep_runs: int, older_than_s: float, aliases: Iterable[str], client: Any = None
) -> GcPlan:
    """Return which rows of Prefect's and MLflow's databases to keep and which to delete; not the younger flow runs.

    `plan` is that of the artifacts, `aliases` are as for `plan_gc`, `client` (a SyncPrefectClient) is that of the
    Prefect server, if one outlives its runs. Raises what MLflow and Prefect raise if they do not answer.
    """
    records, now = Runs(root).all(strict=True), plan.time
    kept = {record.name for record in [*newest_runs(records, keep_runs), *study_runs(root, records)]}
    kept |= {record.name for record in records if record.state == "running" or is_open(record, now)}
    aliased = {*aliased_labels(root), *aliases}
    there = {item.label for item in plan.items if item.why and item.copy is None}
    trackers: dict[str, MLflowTracker] = {}
    items = []
    for record in records:
        age, steps = now - datetime.fromisoformat(record.ended or record.started).timestamp(), record.steps.values()
        ids: tuple[str, ...] = ()
        if record.name in kept:
            why = "a kept run needs it"
        elif any(step.artifact in aliased for step in steps):
            why = "a model with an alias needs it"
        elif age <= older_than_s:
            why = "it is new"
        elif not steps or not all(step.artifact in there for step in steps):
            why = "nothing else has its curves: its artifacts were deleted"
        else:
            if (tracker := trackers.get(record.family)) is None:
                tracker = trackers[record.family] = MLflowTracker(root, record.family)
            runs = tracker.client.search_runs([tracker.experiment], tracker.query(record.name))
            ids, states = tuple(str(run.info.run_id) for run in runs), {run.info.status for run in runs}
            why = "" if states == {"FINISHED"} else "a step that failed left no artifact"
            if not runs:
                continue
        items.append(GcItem(record.name, MLFLOW_RUN, 0, age, why, ids=ids))
    items += _trash(root, older_than_s, now)
    if client is not None:
        links = {record.prefect_run: record.name in kept for record in records}
        links |= {study.prefect_run: True for study in Studies(root).all(strict=True)}
        items += _flow_runs(client, links, older_than_s, now)
    return GcPlan(tuple(items), now)


def _trash(root: Root, older_than_s: float, now: float) -> Iterator[GcItem]:
    """Yield the runs that were deleted in MLflow; only of its file in the root's folder, other databases are remote."""
    path = root.local / NAME
    if path.exists():
        query = "SELECT name, run_uuid, deleted_time FROM runs WHERE lifecycle_stage = 'deleted' AND deleted_time > 0"
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as connection:
            for name, run_id, deleted in connection.execute(query).fetchall():
                age = now - deleted / 1000
                yield GcItem(name, TRASH, 0, age, "" if age > older_than_s else "it is new", ids=(run_id,))


def _flow_runs(client: Any, links: Mapping[str, bool], older_than_s: float, now: float) -> Iterator[GcItem]:
    """Yield the flow runs that ended so long ago and have herd's tag or stand in `links`: whether their run is kept."""
    from herd.tasks.operate.owners import TAG

    after = 0
    while page := client.read_flow_runs(flow_run_filter=_ended(now - older_than_s), limit=BATCH, offset=after):
        after += len(page)
        for each in page:
            name = str(each.id)
            if each.end_time is not None and (TAG in each.tags or name in links):
                why = "a kept run links to it" if links.get(name) else ""
                yield GcItem(each.name, FLOW_RUN, 0, now - each.end_time.timestamp(), why, ids=(name,))


def _ended(before: float, ids: Sequence[str] = (), parents: Sequence[str] = ()) -> FlowRunFilter:
    """Return the filter of flow runs that ended before that time: below `parents`, or (of `ids`) without a parent."""
    from prefect.client.schemas.filters import FlowRunFilter

    chosen: dict[str, Any] = {"parent_task_run_id": {"is_null_": True}}
    if parents:
        chosen = {"parent_flow_run_id": {"any_": [*parents]}}
    elif ids:
        chosen["id"] = {"any_": [*ids]}
    state = {"type": {"any_": ["COMPLETED", "FAILED", "CANCELLED", "CRASHED"]}}
    until = {"before_": datetime.fromtimestamp(before, UTC)}
    return FlowRunFilter.model_validate({"state": state, "end_time": until, **chosen})


def delete_rows(root: Root, plan: GcPlan, older_than_s: float, client: Any = None) -> list[GcItem]:
    """Delete planned rows except those now in use; return them."""
    families = {record.name: record.family for record in Runs(root).all(strict=True) if record.state == "finished"}
    doomed = {kind: [item for item in plan.doomed if item.kind == kind] for kind in ROWS}
    deleted = []
    for start in range(0, len(doomed[FLOW_RUN]) if client else 0, BATCH):
        batch = {item.ids[0]: item for item in doomed[FLOW_RUN][start : start + BATCH]}
        deleted += [batch[name] for name in _delete_flow_runs(client, [*batch], plan.time - older_than_s)]
    for item in doomed[MLFLOW_RUN]:
        if item.label in families:
            tracker = MLflowTracker(root, families[item.label])
            for run_id in item.ids:
                tracker.client.delete_run(run_id)
            deleted.append(item)
    if doomed[TRASH]:  # by MLflow's own command, which deletes the files of the runs too
        command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", database_uri(root)]
        command += ["--older-than", f"{int(older_than_s)}s"]
        environment = {**os.environ, VARIABLE: tracking_uri(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"mlflow gc failed: {done.stderr.strip()[-500:]}")
        deleted += doomed[TRASH]
    return deleted


def _delete_flow_runs(client: Any, ids: list[str], before: float) -> list[str]:
    """Delete flow runs and those below them, if they still are ended; return which of `ids` were."""

    def delete(ids: list[str]) -> list[str]:
        chosen = _ended(before, ids).model_dump(mode="json", exclude_unset=True)
        answer = client.request("POST", "/flow_runs/bulk_delete", json={"flow_runs": chosen, "limit": BATCH})
        return [str(name) for name in answer.json()["deleted"]]

    below: list[str] = []
    parents = ids
    while parents:
        parents = [str(each.id) for each in client.read_flow_runs(flow_run_filter=_ended(time.time(), parents=parents))]
        below += parents
    gone = delete(ids)
    for start in range(0, len(below), BATCH):  # their parents are deleted
        delete(below[start : start + BATCH])
    return gone
