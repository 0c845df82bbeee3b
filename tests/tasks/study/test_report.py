"""What the MLflow run of a study gets: the sums over its runs, and the gain of each finding; what weakens a verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.recipe.data_schema import Source
from herd.llama3.train import metrics
from herd.storage.artifact import ArtifactSpec, Store
from herd.tasks.runs.records import RunRecord, StepRecord
from herd.tasks.study.analysis import leaks
from herd.tasks.study.report import _publish_to_mlflow
from herd.tasks.tracking.mlflow import MetricPoint
from tests.tasks.standing_root import tiny
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


def test_a_source_that_holds_an_evaluation_set_is_named(tmp_path: Path) -> None:
    """By the name that the study gives it; the ledger has its address, and another domain one of the same address."""
    math = [
        Source(uri="old/a.jsonl"),
        Source(uri="new/clean.jsonl", name="clean"),
        Source(uri="new/a.jsonl", name="leak"),
    ]
    recipe = tiny().model_copy(update={"sources": {"general": [Source(uri="new/a.jsonl")], "math": math}})
    rows = [
        ("math", "new/clean", "kept", 30),
        ("math", "new/a", "contaminated", 12),
        ("math", "new/a", "kept", 28),
        ("math", "old/a", "contaminated", 5),
        ("general", "new/a", "contaminated", 3),
    ]
    store = Store(tmp_path)

    def curate() -> RunRecord:
        with store.staging() as folder:
            columns = dict(zip(("domain", "source", "outcome", "documents"), zip(*rows, strict=True), strict=True))
            pq.write_table(pa.table(columns), folder / "ledger.parquet")
            made = store.commit(ArtifactSpec("curated", "x", 1, {}, {}), folder, {}, "a test", "abc", 1.0)
        step = StepRecord(artifact=made.label, outcome="created")
        return RunRecord(name="a", family="tiny", recipe_digest="d", started="", code="c", steps={"curate": step})

    answers = {"a": curate()}
    (line,) = leaks(store, {**answers, "b": answers["a"]}, recipe)
    assert line.startswith("leak: 12 of 40 documents held an example of an evaluation set")
    gone = answers["a"].steps["curate"].model_copy(update={"artifact": "curated/gone-1a2b3c4d"})
    assert leaks(store, {"a": answers["a"].model_copy(update={"steps": {"curate": gone}})}, recipe) == []
