"""TensorBoard's event files have MLflow's keys and steps, each point once, after restarts and rollbacks too."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.sections import Tracking
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.operate.preflight import check_run
from herd.tasks.tracking.mlflow import mlflow_of, open_tracker
from herd.tasks.tracking.tracker import MetricPoint, Tracker

TINY = Path("tests/e2e/tiny.yaml")
TAGS = {"herd.run": "tiny-1", "kind": "checkpoint", "stage": "main", "artifact.key": "abc"}
BEGAN = 1_700_000_000.25
MISSING = "tracking.tensorboard: true needs the package tensorboard; pip install 'herd-llm[tensorboard]'"


def points(first: int, last: int, later_s: float = 0.0, keys: tuple[str, ...] = ("train/loss",)) -> list[MetricPoint]:
    """Return a point of each key at the steps `first` to `last`, of 1,024 tokens and a second each."""
    return [
        MetricPoint(key, 8.0 - step / 64, BEGAN + later_s + step, step * 1024)
        for step in range(first, last + 1)
        for key in keys
    ]


def curve(folder: Path, key: str = "train/loss") -> list[tuple[int, float, float]]:
    """Return step, time and value of every event of a key that TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return sorted((event.step, event.wall_time, event.value) for event in events.Scalars(key))


def expected(sent: list[MetricPoint], key: str = "train/loss") -> list[tuple[int, float, float]]:
    return [(point.position, point.time, point.value) for point in sent if point.key == key]


def opened(root: Root) -> tuple[Tracker, list[str]]:
    """Return the tracker of a process that starts or resumes run tiny-1, and handles of its stage and of the run."""
    tracker = open_tracker(root, "tiny", Tracking(tensorboard=True))
    run = tracker.open_run("tiny-1", {}, {"seed": 1})
    return tracker, [tracker.open_child(run, "tiny-1", TAGS), run]


class TestEventFiles:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'herd-llm[tensorboard]'")

    def test_keys_and_steps_are_those_of_mlflow(self, tmp_path: Path) -> None:
        tracker, handles = opened(Root.parse(tmp_path))
        keys = ("train/loss", "throughput/tokens_per_s")
        assert tracker.log_points(handles, points(1, 40, keys=keys))
        tracker.close(handles[0], "FINISHED")
        for folder, handle in (
            (tmp_path / "tensorboard/tiny-1/main", handles[0]),
            (tmp_path / "tensorboard/tiny-1", handles[1]),
        ):
            for key in keys:
                shown = [(step, value) for step, _, value in curve(folder, key)]
                assert shown == mlflow_of(tracker).series(handle, key)
        assert mlflow_of(tracker).client.get_run(handles[0]).info.status == "FINISHED"

    def test_a_resumed_run_has_every_point_once(self, tmp_path: Path) -> None:
        folder = tmp_path / "tensorboard/tiny-1/main"
        tracker, handles = opened(Root.parse(tmp_path))
        tracker.log_points(handles[:1], points(1, 20))
        tracker, handles = opened(Root.parse(tmp_path))  # another process, without a goodbye of the first
        tracker.log_points(handles[:1], points(1, 25))  # the journal from its start
        tracker.log_points(handles[:1], points(26, 30))
        tracker.log_points(handles[:1], points(1, 30))  # a backfill
        assert curve(folder) == expected(points(1, 30))

    def test_a_rollback_truncates_the_curve(self, tmp_path: Path) -> None:
        folder, keys = tmp_path / "tensorboard/tiny-1/main", ("train/loss", "train/grad_norm")
        tracker, handles = opened(Root.parse(tmp_path))
        tracker.log_points(handles[:1], points(1, 20, keys=keys))
        tracker.log_points(handles[:1], points(11, 14, later_s=100, keys=keys))
        for key in keys:
            kept = points(1, 10, keys=keys) + points(11, 14, later_s=100, keys=keys)
            assert curve(folder, key) == expected(kept, key)
        tracker, handles = opened(Root.parse(tmp_path))
        tracker.log_points(handles[:1], points(5, 6, later_s=200, keys=keys))
        for key in keys:
            kept = points(1, 4, keys=keys) + points(5, 6, later_s=200, keys=keys)
            assert curve(folder, key) == expected(kept, key)

    def test_points_that_arrive_late_fill_the_gap(self, tmp_path: Path) -> None:
        folder = tmp_path / "tensorboard/tiny-1/main"
        tracker, handles = opened(Root.parse(tmp_path))
        tracker.log_points(handles[:1], points(1, 5))
        tracker.log_points(handles[:1], points(9, 12))
        tracker.log_points(handles[:1], points(1, 12))
        assert curve(folder) == expected(points(1, 12))

    def test_a_process_that_resumes_a_step_alone_also_writes_the_curves_of_the_run(self, tmp_path: Path) -> None:
        _, (_, run) = opened(Root.parse(tmp_path))
        tracker = open_tracker(Root.parse(tmp_path), "tiny", Tracking(tensorboard=True))
        step = tracker.open_child(run, "tiny-1", {**TAGS, "kind": "evaluation", "stage": "evaluate-main"})
        scores = points(8, 8, keys=("eval/bpb",))
        tracker.log_points([step, run], scores)
        for folder in (tmp_path / "tensorboard/tiny-1/evaluate-main", tmp_path / "tensorboard/tiny-1"):
            assert curve(folder, "eval/bpb") == expected(scores, "eval/bpb")

    def test_without_the_field_there_are_no_files(self, tmp_path: Path) -> None:
        tracker = open_tracker(Root.parse(tmp_path), "tiny", Tracking())
        tracker.log_points([tracker.open_run("tiny-1", {}, {})], points(1, 3))
        assert not (tmp_path / "tensorboard").exists()


def test_a_missing_package_is_an_error_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("herd.tasks.tracking.mlflow.find_spec", lambda name: None)
    recipe = load_recipe(TINY, ["tracking.tensorboard=true"])
    with pytest.raises(RecipeError) as refused:
        check_run(recipe, Cluster(), Root.parse(tmp_path))
    assert MISSING in str(refused.value).splitlines()
    with pytest.raises(ValueError, match="pip install"):
        open_tracker(Root.parse(tmp_path), "tiny", recipe.tracking)
