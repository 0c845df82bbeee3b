"""What the MLflow run of a study gets: the sums over its runs, and the gain of each finding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from herd.llama3.train import metrics
from herd.tasks.runs.records import RunRecord
from herd.tasks.study.report import _publish_to_mlflow
from herd.tasks.tracking.mlflow import MetricPoint
from tests.tasks.study_samples import finished_runs, study_record, verdict


def test_a_study_has_the_sums_of_its_runs_and_is_the_parent_of_each() -> None:
    sent: dict[str, float] = {}
    tags: dict[str, dict[str, str]] = {}

    def log_points(handles: list[str], points: list[MetricPoint]) -> None:
        assert handles == ["study"]
        sent.update({point.key: point.value for point in points})

    tracker: Any = SimpleNamespace(
        log_points=log_points,
        set_tags=lambda handle, given: tags.setdefault(handle, {}).update(given),
        run_id=lambda handle: f"id of {handle}",
    )
    given = {"family": "tiny", "recipe_digest": "d", "started": "", "code": "c"}
    answers = {n: RunRecord(name=n, mlflow_run=m, **given) for n, m in (("a", "run a"), ("b", "run b"), ("c", ""))}
    one, two, *_ = finished_runs()
    runs = [replace(one, device_hours=0.5, trained=3e12), replace(two, device_hours=0.25, trained=4e12)]
    record = study_record(mlflow_run="study", verdict=verdict(2, 2))
    _publish_to_mlflow(tracker, record, answers, runs, "text")
    sums = {metrics.STUDY_RUNS: 2, metrics.STUDY_FLOPS: 7e12, metrics.STUDY_GPU_HOURS: 0.75}
    assert record.verdict is not None
    gains = {metrics.study_gain(each.variant, each.score): each.gain for each in record.verdict.findings}
    assert sent == {**sums, **gains}
    assert len(gains) == 4
    parent = {"mlflow.parentRunId": "id of study"}
    assert (tags["run a"], tags["run b"], len(tags)) == (parent, parent, 3)
