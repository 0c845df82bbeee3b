"""Find what exists by the names people use, and go on with the record of a run that made it.

Scoring a checkpoint, judging it or writing a report again is no new run: it belongs to the run that made it, so it
takes that run's recipe, its record and its MLflow runs. Only the holder of a run's lease writes its record; beside one
that is at work the record is read and left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from prefect.runtime import flow_run

from flows.opening import step_names
from flows.parameters import LATEST
from storage.artifact import Artifact, Store
from storage.holder import LeaseHeld
from storage.lease import lease
from storage.remote_store import open_store
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import current_console
from tasks.models import label_of_alias
from tasks.runs import RunRecord, Runs, trained_stages
from tasks.step import Context
from tasks.tracking import Tracker


class Found(NamedTuple):
    """A checkpoint and where it stands in the run that it belongs to."""

    checkpoint: Artifact
    record: RunRecord
    stage: str
    """Name of the stage of the recipe that ends with it, or of the part of one."""


class ReadOnlyRuns(Runs):
    """The runs as somebody sees them who does not hold their leases."""

    def save(self, record: RunRecord) -> None:
        """Leave the record to the run's holder; the artifact and MLflow have what was done."""


def find_run(root: Root, name: str) -> RunRecord:
    """Return the run called `name`, or the newest one for `latest`. Raises ValueError naming the runs that exist.

    A Retry takes what its first attempt took: by then `latest` is the run that this attempt began.
    """
    runs = Runs(root)
    if name.strip() != LATEST:
        return runs.find(name.strip())
    records = runs.all()
    if not records:
        raise ValueError(f"run: there is none under {root.uri} yet; start the deployment pipeline first")
    begun = [record for record in records if flow_run.id and record.prefect_run == str(flow_run.id)]
    return runs.find(begun[-1].rerun_of) if begun and begun[-1].rerun_of else records[-1]


def find_checkpoint(root: Root, text: str) -> Found:
    """Return the checkpoint that `text` names: a label, a run, FAMILY@ALIAS, or `latest`. Raises ValueError."""
    name, store = text.strip(), open_store(root)
    if name == LATEST:
        return _of_label(root, store, _newest(root, store))
    if "@" in name:
        return _of_label(root, store, _registered(root, name))
    if "/" in name:
        return _of_label(root, store, name)
    record = find_run(root, name)
    trained = trained_stages(Runs(root).recipe(name), record)
    if not trained:
        raise ValueError(f"checkpoint: run {name} has not finished a training stage; wait for it or choose another")
    last = trained[-1].name
    return Found(store.at(record.steps[last].artifact), record, last)


def _newest(root: Root, store: Store) -> str:
    found = store.all("checkpoint")
    if not found:
        raise ValueError(f"checkpoint: there is none under {root.uri} yet; start the deployment pretrain first")
    return found[-1].label


def _registered(root: Root, name: str) -> str:
    family, _, alias = name.partition("@")
    label = label_of_alias(root, family, alias)
    if label is None:
        raise ValueError(f"checkpoint: no version of {family} holds the alias {alias!r}; promote one, or name a run")
    return label


def _of_label(root: Root, store: Store, label: str) -> Found:
    """Return the checkpoint `label` with the run that made it."""
    checkpoint = store.at(label)
    if checkpoint.manifest.kind != "checkpoint":
        raise ValueError(f"checkpoint: {label} is none; name one such as checkpoint/quickstart-main-1a2b3c4d")
    record = Runs(root).find(checkpoint.manifest.made_by)
    return Found(checkpoint, record, checkpoint.manifest.name.removeprefix(f"{record.family}-"))


@contextmanager
def existing_run(root: Root, name: str, cluster: Cluster, patience_s: float = 0) -> Iterator[Context]:
    """Yield the context of the run `name` with its record held. Raises LeaseHeld if the run is at work.

    A flow that scores one of its checkpoints holds it for some seconds: that is waited for, at most `patience_s`.
    """
    with ExitStack() as held:
        until, runs = time.monotonic() + patience_s, Runs(root)
        while True:
            try:
                holder = f"{flow_run.name or 'a command'} on {name}"
                runs.hold(name, held.enter_context(lease(root, f"runs/{name}", holder)))
                break
            except LeaseHeld:
                if time.monotonic() > until:
                    raise
                time.sleep(1)
        context = _context(root, runs, name, cluster)
        context.tracker.lost = lambda: runs.lost(name)
        with context.agents:
            yield context


@contextmanager
def existing_run_or_beside(root: Root, name: str, cluster: Cluster) -> Iterator[tuple[Context, bool]]:
    """Yield the context of the run `name`, and whether its record is ours to write or the run itself is at work."""
    with ExitStack() as held:
        try:
            context, ours = held.enter_context(existing_run(root, name, cluster)), True
        except LeaseHeld:
            context, ours = _context(root, ReadOnlyRuns(root), name, cluster), False
            held.enter_context(context.agents)
        yield context, ours


def _context(root: Root, runs: Runs, name: str, cluster: Cluster) -> Context:
    recipe, record = runs.recipe(name), runs.find(name)
    tracker, console = Tracker(root, recipe.name), current_console()
    return Context(recipe, cluster, open_store(root), runs, record, tracker, console, step_names(recipe))
