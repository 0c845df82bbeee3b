"""The start and the end of a run after a fault at any call to the disk or MLflow: one record, which says the truth."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

from herd.flows import run_lifecycle
from herd.flows.recipe_form import PipelineParameters
from herd.flows.run_lifecycle import _close, acquire_run
from herd.llama3.recipe.load import load_recipe
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.operate import recovery
from herd.tasks.operate.recovery import reconcile_record
from herd.tasks.runs.records import OPEN, RunRecord, Runs, State, mark_open, now
from herd.tasks.stages.backfill import STATUS, watch_outages
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.orders import Boundary, Fault, cut_short, walk, watch_mlflow

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no watchdog, and ask git once."""
    monkeypatch.setattr(run_lifecycle, "watched", lambda *_: nullcontext())
    monkeypatch.setattr(run_lifecycle, "code_version", lambda: "c0de")
    monkeypatch.setattr(run_lifecycle, "record_provenance", lambda *_: None)


@pytest.mark.fault("F2")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 23])
@pytest.mark.parametrize("earlier", [False, True], ids=["new", "continued"])
def test_a_run_that_begins_is_one_run_and_is_marked_after_a_fault_at_any_call(
    earlier: bool, every: int, tmp_path: Path
) -> None:
    numbers = count()

    def work(root: Root, state: State) -> None:
        runs = Runs(root)
        with acquire_run(PipelineParameters(), RECIPE, runs, TerminalConsole()) as (record, _):
            assert record.state == "running"
            assert record.name in root.names(OPEN)
            record.state, record.ended = state, now()
            runs.save(record)

    def play(fault: Fault) -> int:
        root, boundary, ended = Root.parse(tmp_path / str(next(numbers))), Boundary(fault), False
        if earlier:
            work(root, "failed")
        with boundary.watch_disk(root.local), cut_short():
            work(root, "finished")
            ended = True
        between = Runs(root).all()
        assert {record.name for record in between if record.state == "running"} <= {*root.names(OPEN)}, "not marked"
        if not ended and "finished" not in [record.state for record in between]:
            work(root, "finished")
            records = Runs(root).all()
            assert [record.name for record in records][: len(between)] == [record.name for record in between]
            assert len(records) == max(len(between), 1), "another run has begun"
        assert [record.state for record in Runs(root).all()] == ["finished"]
        return len(boundary.calls)

    walk(play, every)


@pytest.mark.fault("F2", "F15")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 29])
def test_a_run_that_ends_is_ended_everywhere_after_a_fault_at_any_call(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, announced = Root.parse(tmp_path), list[str]()

    def announce(record: RunRecord, uri: str) -> None:
        announced.append(record.name)

    for module in (run_lifecycle, recovery):
        monkeypatch.setattr(module, "run_ended", announce)
    monkeypatch.setattr(run_lifecycle, "PATIENCE_S", 0.0)

    def play(fault: Fault) -> int:
        runs, tracker, boundary = Runs(root), MLflowTracker(root, RECIPE.name), Boundary(fault)
        record = runs.begin(RECIPE, "code")
        context = Context(RECIPE, Cluster(), open_store(root), runs, record, tracker, TerminalConsole(), [])
        watch_outages(context)
        mark_open(root, record.name)
        record.mlflow_run = tracker.open_run(record.name, context.tags(), {"seed": 1})
        tags = {**context.tags(), "kind": "checkpoint", "stage": "main", "artifact.key": "abc"}
        tracker.open_child(record.mlflow_run, record.name, tags)
        runs.save(record)
        closed = False
        with boundary.watch_disk(root.local), watch_mlflow(boundary), cut_short():
            _close(context, "failed", "FAILED", "ValueError: no")
            closed = True
        for attempt in range(2):
            changes = reconcile_record(root, None, f"runs/{record.name}")
            assert not (attempt and changes), "it was not settled at once"
        ended = runs.find(record.name)
        assert ended.state == "failed" or (ended.state == "interrupted" and fault.number > 0)
        assert not ended.mlflow_stale
        assert record.name not in root.names(OPEN)
        shown = tracker.client.search_runs([tracker.experiment], tracker.query(record.name))
        assert [run.info.status for run in shown] == [STATUS[ended.state]] * 2
        assert announced.count(record.name) == 1 or (not closed and record.name not in announced)
        return len(boundary.calls)

    walk(play, every)
