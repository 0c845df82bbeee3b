"""A step after a fault at any call to the disk or MLflow, taken again as a rerun takes it: made and shown once."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.recipe.load import load_recipe, resolved
from herd.storage.artifact import ArtifactSpec, flatten
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks import step
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.operate.recovery import reconcile_record
from herd.tasks.runs.records import Runs, StepRecord, mark_open, now
from herd.tasks.stages.backfill import catch_up, watch_outages
from herd.tasks.step import Context, ensure_in_scratch
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.orders import Boundary, Fault, cut_short, walk, watch_mlflow

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))
PARAMS = flatten(resolved(RECIPE), depth=2)
METADATA = {"tokens": {"math": 7}, "documents": {"math": 2}, "cost": {"usd": 2.5}, "environment": {"torch": "2"}}


def attempt(root: Root, run: str) -> Context:
    """Return the context of one more attempt of a run, in a process that knows only what is recorded."""
    runs, tracker = Runs(root), MLflowTracker(root, RECIPE.name)
    context = Context(RECIPE, Cluster(), open_store(root), runs, runs.find(run), tracker, TerminalConsole(), [])
    context.record.state = "running"
    return context


@pytest.mark.fault("F2", "F15")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 37])
def test_a_step_is_made_once_after_a_fault_at_any_call(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, numbers = Root.parse(tmp_path), count()
    made, announced = list[int](), list[str]()
    monkeypatch.setattr(step, "artifact_committed", lambda record, *_: announced.append(record.name))

    def play(fault: Fault) -> int:
        number, boundary, name = next(numbers), Boundary(fault), Runs(root).begin(RECIPE, "code").name
        spec = ArtifactSpec("tokens", "quickstart", 1, {"number": number}, {})

        def build(folder: Path, scratch: Path) -> dict[str, Any]:
            (scratch / "half.txt").write_text("half")
            (folder / "a.txt").write_text(f"text {number}")
            made.append(number)
            return METADATA

        def take(context: Context) -> bool:
            """Do what a run of one step does, from its start to its end."""
            record = context.record
            watch_outages(context)
            record.mlflow_run = context.tracker.open_run(name, {}, PARAMS)
            ensure_in_scratch(context, "tokenize", spec, build)
            record.state, record.ended = "finished", now()
            context.runs.save(record)
            context.tracker.close(record.mlflow_run, "FINISHED")
            catch_up(context)
            return True

        mark_open(root, name)
        context, ended = attempt(root, name), False
        with boundary.watch_disk(root.local), watch_mlflow(boundary), cut_short():
            ended = take(context)
        committed, before = context.store.find(spec), made.count(number)
        if not ended:
            take(attempt(root, name))
            assert made.count(number) == before + (committed is None), "made again"
        reconcile_record(root, None, f"runs/{name}")
        assert announced.count(name) == 1 or (announced.count(name) == 2 and not ended), "lost, or told again"
        recorded = Runs(root).find(name)
        assert recorded.steps["tokenize"] == StepRecord(
            artifact=spec.label,
            outcome="created",
            cost={"usd": 2.5},
            environment={"torch": "2"},
            **recorded.steps["tokenize"].model_dump(include={"why", "seconds", "mlflow_run"}),
        )
        assert not recorded.mlflow_stale
        assert context.store.load(spec.label).path_of("a.txt").read_text() == f"text {number}"
        assert not list(context.scratch.glob("*")), "scratch is left"
        client = context.tracker.client
        runs = client.search_runs([context.tracker.experiment], context.tracker.query(name))
        run, child = sorted(runs, key=lambda each: str(each.data.tags["kind"]))
        assert (run.info.status, run.data.params.keys()) == ("FINISHED", PARAMS.keys())
        assert (child.info.status, child.data.params) == ("FINISHED", {"number": str(number)})
        assert (child.data.tags["outcome"], child.data.metrics) == ("created", {"tokens.math": 7, "documents.math": 2})
        assert [len(client.get_metric_history(child.info.run_id, key)) for key in child.data.metrics] == [1, 1]
        assert [entry.dataset.name for entry in child.inputs.dataset_inputs] == ["math"]
        return len(boundary.calls)

    walk(play, every)
