"""A run sent to MLflow again after a fault at any call: one run, one model, every point once, all of it closed."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from mlflow.entities import LoggedModelStatus

from herd.storage.root import Root
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker
from tests.orders import Boundary, Died, Fault, walk, watch_mlflow

POINTS = [MetricPoint("train/loss", 8.0 - step, 1_700_000_000.0 + step, 4096 * step) for step in range(1, 4)]
SCORE = MetricPoint("eval/bpb", 2.5, 1_700_000_009.0, 3 * 4096)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_what_is_sent_again_is_there_once_after_a_fault_at_any_call(every: int, tmp_path: Path) -> None:
    root, numbers = Root.parse(tmp_path), count()

    def send(number: int) -> MLflowTracker:
        """Send everything of a run, as a process does that knows its record."""
        tracker = MLflowTracker(root, "family")
        run = tracker.open_run(f"family-{number}", {"user": "ann"}, {"model.dim": 64, "seed": 1})
        tracker.log_points([run], POINTS)
        label = f"checkpoint/family-main-{number:08x}"
        model = tracker.checkpoint_model([run], label, f"file:///{label}", 3 * 4096, "d" * 64)
        tracker.log_points([run], [SCORE], model)
        tracker.close(run, "FINISHED")
        return tracker

    def play(fault: Fault) -> int:
        number, boundary = next(numbers), Boundary(fault)
        with watch_mlflow(boundary), suppress(Died):  # nothing else is raised
            assert send(number).stale == (fault.number > 0)
        tracker = send(number)
        assert not tracker.stale
        client = tracker.client
        (run,) = client.search_runs([tracker.experiment], tracker.query(f"family-{number}"))
        assert (run.info.status, run.data.params) == ("FINISHED", {"model.dim": "64", "seed": "1"})
        assert run.data.tags["user"] == "ann"
        for key, points in (("train/loss", POINTS), ("eval/bpb", [SCORE])):
            history = client.get_metric_history(run.info.run_id, key)
            assert [point.value for point in history] == [point.value for point in points]
        query = f"tags.`herd.artifact` = 'checkpoint/family-main-{number:08x}'"
        (model,) = client.search_logged_models([tracker.experiment], filter_string=query)
        assert model.status == LoggedModelStatus.READY
        assert [metric.key for metric in model.metrics] == ["eval/bpb"]
        assert [output.step for output in run.outputs.model_outputs] == [3 * 4096]
        return len(boundary.calls)

    walk(play, every)
