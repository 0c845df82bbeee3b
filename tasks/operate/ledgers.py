"""The three ledgers of runs and studies, compared: record, MLflow, Prefect. Nothing is changed.

`herd doctor` shows the differences; chaos and the tests that kill demand that there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound

from herd.storage.lease import lease_holders
from herd.storage.root import Root
from herd.tasks.operate.owners import Owners, unfinished_flow_runs
from herd.tasks.runs.records import OPEN, RunRecord, Runs
from herd.tasks.stages.backfill import STATUS
from herd.tasks.study.records import FOLDER, Studies, StudyRecord
from herd.tasks.tracking.mlflow import AWAY, MLflowTracker

NEWEST = 40
"""Runs that are compared beside the open ones."""


class LedgerDifference(NamedTuple):
    """A run, a study or a flow run of which two ledgers say different things."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def ledger_differences(
    root: Root, client: SyncPrefectClient | None, runs: Iterable[str] = ()
) -> list[LedgerDifference]:
    """Return where record, MLflow and Prefect do not agree, of `runs` or of the open, the newest, and all studies.

    What a live process works on is left out: its ledgers follow. Without `client` Prefect is not asked. Raises OSError.
    """
    known = Runs(root)
    names = list(runs) or list(dict.fromkeys([*root.names(OPEN), *(record.name for record in known.all()[-NEWEST:])]))
    records: dict[str, RunRecord | StudyRecord] = {}
    for name in names:
        with suppress(ValueError):  # a damaged record is the business of `herd verify`
            if (run := known.known(name)) is not None:
                records[f"runs/{name}"] = run
    records |= {f"{FOLDER}/{study.name}": study for study in Studies(root).all()}
    held = lease_holders(root, list(records))
    tracker = cache(partial(MLflowTracker, root))
    unfinished = {str(flow_run.id): flow_run for flow_run in unfinished_flow_runs(client)} if client else {}
    owners = Owners(client) if client else None
    found = []
    for work, record in records.items():
        if work not in held:
            flow_run = _flow_run(client, record.prefect_run)
            verdict = owners.of(flow_run).verdict if owners and flow_run else "unknown"
            owned = verdict in ("alive", "reporting")
            wrong = [*_wrong_mlflow(record, tracker), *_wrong_prefect(record, flow_run, owned)]
            if wrong or record.state == "running":
                found.append(LedgerDifference(record.name, "; ".join([f"record {record.state}", *wrong])))
            unfinished.pop(record.prefect_run, None)
    for flow_run in unfinished.values():
        assert owners is not None
        assert flow_run.state is not None
        if (owner := owners.of(flow_run)).verdict == "dead" and not flow_run.state.is_paused():
            found.append(LedgerDifference(flow_run.name, f"Prefect {flow_run.state.name}; {owner.why}"))
    return found


def _wrong_mlflow(record: RunRecord | StudyRecord, tracker: Callable[[str], MLflowTracker]) -> Iterator[str]:
    """Yield what MLflow says of a run or a study that ended, if it is not what the record says."""
    if not record.mlflow_run:  # it ended before anything was done
        if record.state in ("running", "finished"):
            yield "MLflow nothing"
        return
    if record.mlflow_run.startswith(AWAY):
        yield "MLflow nothing"
        return
    if isinstance(record, RunRecord):
        mlflow = tracker(record.family)
        query = mlflow.query(record.name)
    else:
        mlflow = tracker(record.name)
        query = f"attributes.run_id = '{record.mlflow_run}'"
    shown = mlflow.reach.attempt(lambda: list(mlflow.client.search_runs([mlflow.experiment], query)), None)
    if shown is None:
        yield "MLflow does not answer"
        return
    status = next((each.info.status for each in shown if each.info.run_id == record.mlflow_run), "nothing")
    if status != STATUS.get(record.state):
        yield f"MLflow {status}"
    if steps := [each for each in shown if each.info.status == "RUNNING" and each.info.run_id != record.mlflow_run]:
        yield f"MLflow {len(steps)} steps RUNNING"


def _wrong_prefect(record: RunRecord | StudyRecord, flow_run: FlowRun | None, owned: bool) -> Iterator[str]:
    """Yield the state of a flow run if that is not how its record ended, and no next attempt is on its way."""
    state = flow_run.state if flow_run is not None else None
    if state is None:  # deleted there, or no server was asked
        return
    ended = state.is_completed() if record.state == "finished" else state.is_final() and not state.is_completed()
    again = record.state != "finished" and (state.is_scheduled() or state.is_paused() or owned)
    if not ended and not again:
        yield f"Prefect {state.name}"


def _flow_run(client: SyncPrefectClient | None, flow_run: str) -> FlowRun | None:
    if client is not None and flow_run:
        with suppress(ObjectNotFound):
            return client.read_flow_run(UUID(flow_run))
    return None
