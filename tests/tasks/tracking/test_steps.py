"""What each kind of artifact logs: which points, at which positions, to the run, its step or a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.train import metrics
from herd.llama3.train.journal import Record
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.tasks.runs.records import RunRecord, StepRecord
from herd.tasks.tracking.mlflow import MetricPoint
from herd.tasks.tracking.steps import LoggedStep, project_step
from tests.tasks.tracked_run import write

RUN, STEP = "the run", "the step"


class Tracker:
    """Records its calls."""

    def __init__(self) -> None:
        self.complete: set[str] = set()
        self.points: list[tuple[tuple[str, ...], str, float, int]] = []
        self.models: list[str | None] = []
        self.inputs: dict[str, list[dict[str, Any]]] = {RUN: [], STEP: []}
        self.outputs: list[tuple[Any, ...]] = []
        self.tags: dict[str, dict[str, str]] = {RUN: {}, STEP: {}}
        self.params: dict[str, Any] = {}

    def log_points(self, handles: list[str], points: list[MetricPoint], model_id: str | None = None) -> bool:
        self.points += [(tuple(handles), point.key, point.value, point.position) for point in points]
        self.models += [model_id] * bool(points)
        return True

    def log_inputs(self, handle: str, datasets: list[dict[str, Any]]) -> None:
        self.inputs[handle] += datasets

    def log_params(self, handle: str, params: dict[str, Any]) -> None:
        self.params |= params

    def set_tags(self, handle: str, tags: dict[str, str]) -> None:
        self.tags[handle] |= tags

    def checkpoint_model(self, handles: list[str], *model: object) -> str:
        self.outputs.append((tuple(handles), *model))
        return "m-1"


class Workspace:
    """A store, and a run whose steps are what was committed and is its own."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.record = RunRecord(name="tiny-2", family="tiny", recipe_digest="d", started="", code="c", mlflow_run=RUN)

    def commit(
        self, step: str, kind: str, name: str, facts: dict[str, Any], journal: list[Record] | None = None, **inputs: str
    ) -> Artifact:
        """Commit an artifact, as a step of the run unless `step` is empty."""
        with self.store.staging() as folder:
            (folder / "data.txt").write_text(name)
            if journal:
                write(folder / "metrics.parquet", journal)
            spec = ArtifactSpec(kind, name, 1, {"recipe": "left out", "shown": 7}, inputs)
            artifact = self.store.commit(spec, folder, facts, "tiny-1", "c", 1.0)
        if step:
            self.record.steps[step] = StepRecord(artifact=artifact.label, outcome="created")
        return artifact

    def logged(self, step: str, artifact: Artifact, complete: bool = False) -> Tracker:
        """Project the artifact as the step."""
        tracker = Tracker()
        tracker.complete |= {STEP} if complete else set()
        self.record.steps.setdefault(step, StepRecord(artifact=artifact.label, outcome="reused"))
        sent = project_step(LoggedStep(tracker, self.store, self.record, step, artifact, STEP))  # type: ignore[arg-type]
        assert sent == sum(len(handles) for handles, *_ in tracker.points)
        return tracker


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def numbers(tracker: Tracker, *keys: str) -> list[tuple[tuple[str, ...], str, float, int]]:
    return [point for point in tracker.points if point[1] in keys]


@pytest.mark.parametrize("complete", [False, True])
def test_a_stage_logs_its_curves_and_all_costs_to_the_run_and_its_own_cost_to_itself(
    workspace: Workspace, complete: bool
) -> None:
    facts: dict[str, Any] = {"steps": 2, "start": 100, "model_sha256": "f" * 64, "cost": {"usd": 3.0}}
    workspace.commit("tokenize", "tokens", "tiny", {})
    first = workspace.commit("main", "checkpoint", "tiny-main", {**facts, "end": 200})
    facts |= {"end": 300, "cost_so_far": {"usd": 5.0}, "environment": {"layout": "dp 8", "topology": "long"}}
    journal = [
        Record(7.0, 250, {metrics.LOSS: 4.0, metrics.STEP: 1.0, metrics.USD: 4.5}),
        Record(9.0, 300, {metrics.LOSS: 2.0, metrics.USD: 4.9}),
    ]
    last = workspace.commit("anneal", "checkpoint", "tiny-anneal", facts, journal, parent=first.key)
    tracker, both = workspace.logged("anneal", last, complete), (STEP, RUN)
    assert numbers(tracker, metrics.LOSS) == (
        [] if complete else [(both, metrics.LOSS, 4.0, 250), (both, metrics.LOSS, 2.0, 300)]
    )
    assert numbers(tracker, metrics.cost("usd"), metrics.stage_cost("usd")) == [
        *([] if complete else [(both, metrics.cost("usd"), 4.5, 250)]),
        (both, metrics.cost("usd"), 5.0, 300),
        ((STEP,), metrics.stage_cost("usd"), 3.0, 300),
    ]
    assert len({(handles, key, position) for handles, key, _, position in tracker.points}) == len(tracker.points)
    assert numbers(tracker, "steps", "end") == [((STEP,), "steps", 2.0, 0), ((STEP,), "end", 300.0, 0)]
    assert tracker.outputs == [(both, last.label, last.uri, 300, "f" * 64)]
    assert tracker.tags[STEP]["parent.checkpoint"] == first.label
    assert tracker.tags[RUN] == {"environment.layout": "dp 8"}
    assert tracker.params == {"shown": 7, "input.parent": first.key[:16]}


def test_numbers_of_an_artifact_make_no_section_of_the_chart_page(workspace: Workspace) -> None:
    """Only steps have them, and the page shows runs: its first section was `average`, without a chart."""
    facts: dict[str, Any] = {"average": {"last": 2.5, "by_position": {"200": 2.6}}, "bytes": {"math": 7}}
    facts |= {"steps": 2, "end": 300, "model_sha256": "f" * 64}
    tracker = workspace.logged("main", workspace.commit("main", "checkpoint", "tiny-main", facts), complete=True)
    assert numbers(tracker, "average.last", "average.by_position.200", "bytes.math") == [
        ((STEP,), "average.last", 2.5, 0),
        ((STEP,), "average.by_position.200", 2.6, 0),
        ((STEP,), "bytes.math", 7.0, 0),
    ]
    assert {key for _, key, _, _ in tracker.points if "/" in key} == set()
    checkpoint = workspace.commit("", "checkpoint", "tiny-other", facts)
    scores = workspace.commit("", "evaluation", "tiny-other", {"baseline/bpb": 3.5}, checkpoint=checkpoint.key)
    assert numbers(workspace.logged("scores", scores), "baseline.bpb")


def test_the_environment_of_a_stage_that_another_run_trained_is_not_that_of_the_run(workspace: Workspace) -> None:
    facts = {"steps": 2, "end": 300, "model_sha256": "f" * 64, "environment": {"layout": "dp 8"}}
    other = workspace.commit("", "checkpoint", "tiny-main", facts)
    tracker = workspace.logged("main", other, complete=True)
    assert (tracker.tags[RUN], tracker.tags[STEP]["environment.layout"]) == ({}, "dp 8")


@pytest.mark.parametrize(
    ("kind", "own", "facts", "handles", "model", "position"),
    [
        ("evaluation", True, {}, (STEP, RUN), "m-1", 300),
        ("evaluation", False, {}, (STEP,), "m-1", 300),
        ("gate", True, {}, (STEP, RUN), None, 300),
        ("gate", False, {}, (STEP, RUN), None, 300),
        ("evaluation", True, {"position": 250}, (STEP, RUN), None, 250),
    ],
    ids=["own", "of the champion", "gate", "gate of another's", "in progress"],
)
def test_scores_go_to_the_curves_of_the_run_that_has_the_checkpoint(
    workspace: Workspace,
    kind: str,
    own: bool,
    facts: Mapping[str, int],
    handles: tuple[str, ...],
    model: str | None,
    position: int,
) -> None:
    metadata = {"end": 300, "model_sha256": "f" * 64}
    checkpoint = workspace.commit("main" if own else "", "checkpoint", "tiny-main", metadata)
    scores = {"eval/bpb": 2.5, "eval/bpb/math": 1.5, "documents": 9}
    made = workspace.commit("scores", kind, "tiny-main", {**scores, **facts}, checkpoint=checkpoint.key)
    tracker = workspace.logged("scores", made)
    assert numbers(tracker, "eval/bpb", "eval/bpb/math") == [
        (handles, "eval/bpb", 2.5, position),
        (handles, "eval/bpb/math", 1.5, position),
    ]
    assert numbers(tracker, "documents") == [((STEP,), "documents", 9.0, 0)]
    assert tracker.models[-1] == model
    workspace.store.delete(checkpoint.label)
    assert bool(numbers(workspace.logged("scores", made), "eval/bpb")) == bool(facts), "its position is unknown"


def test_training_data_are_inputs_of_the_run_and_the_step_with_their_own_counts(workspace: Workspace) -> None:
    counts = {"tokens": {"math": 40, "code": 70}, "documents": {"math": 4, "code": 7}}
    made = workspace.commit("tokenize", "tokens", "tiny", {**counts, "sources": {"code": {"x": 70}}})
    tracker = workspace.logged("tokenize", made)
    data = {"digest": made.key, "uri": made.uri}
    assert tracker.inputs[STEP] == tracker.inputs[RUN]
    assert tracker.inputs[RUN] == [
        {"name": "math", **data, "profile": {"tokens": 40, "documents": 4}},
        {"name": "code", **data, "profile": {"tokens": 70, "documents": 7, "sources": {"x": 70}}},
    ]
    sources = {"chats": {"tokens": 30, "conversations": 3}, "more": {"tokens": 20, "conversations": 2}}
    made = workspace.commit(
        "conversations", "conversations", "tiny", {"tokens": 50, "conversations": 5, "sources": sources}
    )
    tracker = workspace.logged("conversations", made)
    (dataset,) = tracker.inputs[RUN]
    assert tracker.inputs[STEP] == [dataset]
    assert dataset["profile"] == {"tokens": 50, "documents": 5, "sources": {"chats": 30, "more": 20}}
