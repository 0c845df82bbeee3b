"""TensorBoard's event files have MLflow's keys and steps, each point once, after restarts and rollbacks too."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.sections import Tracking
from herd.llama3.train.journal import Journal, Record, Rewind
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.operate.preflight import check_run
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.tracking.mlflow import MetricPoint
from herd.tasks.tracking.steps import SINKS, StageCurves, Thinning, curve_sinks
from herd.tasks.tracking.tensorboard import TensorBoard, read_points
from tests.tasks.tracked_run import TrackedRun

TINY = Path("tests/e2e/tiny.yaml")
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


def series_in_mlflow(run: TrackedRun, handle: str) -> dict[str, list[tuple[int, float]]]:
    tracker = run.context.tracker
    keys = [key for key in tracker.client.get_run(handle).data.metrics if not key.startswith("config_")]  # to filter by
    return {key: [(at, pytest.approx(value)) for at, value in tracker.series(handle, key)] for key in keys}


def series_in_files(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {key: [(at, point.value) for at, point in series.items()] for key, series in read_points(folder).items()}


class TestEventFiles:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'herd-llm[tensorboard]'")

    def test_a_run_and_its_steps_have_the_points_of_mlflow(self, tmp_path: Path) -> None:
        """Curves, costs, scores and the numbers of data steps."""
        run = TrackedRun(Root.parse(tmp_path), tracking={"tensorboard": True}).all()
        record, folder = run.context.record, tmp_path / "tensorboard" / run.context.record.name
        for folder_, handle in {
            folder: record.mlflow_run,
            **{folder / name: step.mlflow_run for name, step in record.steps.items()},
        }.items():
            shown = series_in_files(folder_)
            assert shown == series_in_mlflow(run, handle)
            assert shown

    def test_a_stage_that_trains_has_the_points_of_mlflow(self, tmp_path: Path) -> None:
        run = TrackedRun(Root.parse(tmp_path), tracking={"tensorboard": True})
        handle = run.context.record.mlflow_run
        reader = StageCurves(run.context.sinks, "main", Thinning(6000, -1))  # every third step is sent
        follower = JournalTailer(run.context, [handle], tmp_path / "journal.jsonl", 6000, Unseen(), readers=[reader])
        with Journal(tmp_path / "journal.jsonl") as journal:
            for step in range(1, 13):
                values = {"train/loss": 8.0 - step / 64, "train/step": float(step)}
                journal.add(Record(BEGAN + step, step * 1024, values))
            follower._process_entries(0)
            follower.send()
            assert follower.sender.drain()
            folder = tmp_path / "tensorboard" / run.context.record.name
            assert series_in_files(folder) == series_in_files(folder / "main") == series_in_mlflow(run, handle)
            assert [position for position, _ in series_in_files(folder)["train/loss"]] == [3072, 6144, 9216, 12288]
            journal.add(Rewind(BEGAN + 20, 9 * 1024, 13 * 1024))
            journal.add(Record(BEGAN + 21, 9 * 1024, {"train/loss": 7.0, "train/step": 9.0}))
            follower._process_entries(0)
        assert series_in_files(folder)["train/loss"] == [(3072, 8 - 3 / 64), (6144, 8 - 6 / 64), (9216, 7.0)]

    def test_a_resumed_run_has_every_point_once(self, tmp_path: Path) -> None:
        folder = tmp_path / "tensorboard/tiny-1/main"
        TensorBoard(Root.parse(tmp_path), "tiny-1").add("main", points(1, 20))
        files = TensorBoard(Root.parse(tmp_path), "tiny-1")  # another process; the first was killed
        files.add("main", points(1, 25))  # the journal from its start
        files.add("main", points(26, 30))
        files.add("main", points(1, 30))  # the artifact of the stage
        assert curve(folder) == expected(points(1, 30))

    def test_a_rollback_truncates_the_curve(self, tmp_path: Path) -> None:
        folder, keys = tmp_path / "tensorboard/tiny-1/main", ("train/loss", "train/grad_norm")
        files = TensorBoard(Root.parse(tmp_path), "tiny-1")
        files.add("main", points(1, 20, keys=keys))
        files.add("main", points(11, 14, later_s=100, keys=keys))
        for key in keys:
            kept = points(1, 10, keys=keys) + points(11, 14, later_s=100, keys=keys)
            assert curve(folder, key) == expected(kept, key)
        files = TensorBoard(Root.parse(tmp_path), "tiny-1")
        files.add("main", points(5, 6, later_s=200, keys=keys))
        for key in keys:
            kept = points(1, 4, keys=keys) + points(5, 6, later_s=200, keys=keys)
            assert curve(folder, key) == expected(kept, key)

    def test_points_that_arrive_late_fill_the_gap(self, tmp_path: Path) -> None:
        files = TensorBoard(Root.parse(tmp_path), "tiny-1")
        files.add("main", points(1, 5))
        files.add("main", points(9, 12))
        files.add("main", points(1, 12))
        assert curve(tmp_path / "tensorboard/tiny-1/main") == expected(points(1, 12))

    def test_a_process_that_evaluates_alone_also_writes_the_curves_of_the_run(self, tmp_path: Path) -> None:
        TensorBoard(Root.parse(tmp_path), "tiny-1").add("main", points(1, 8), of_run=True)
        scores = points(8, 8, keys=("eval/bpb",))
        TensorBoard(Root.parse(tmp_path), "tiny-1").add("evaluate-main", scores, of_run=True)
        for folder in (tmp_path / "tensorboard/tiny-1/evaluate-main", tmp_path / "tensorboard/tiny-1"):
            assert curve(folder, "eval/bpb") == expected(scores, "eval/bpb")
        assert curve(tmp_path / "tensorboard/tiny-1") == expected(points(1, 8))

    def test_without_the_field_there_are_no_files(self, tmp_path: Path) -> None:
        TrackedRun(Root.parse(tmp_path)).all()
        assert not (tmp_path / "tensorboard").exists()


class Unseen:
    def update(self, *_: object) -> None: ...


def test_a_missing_package_is_an_error_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("herd.tasks.tracking.tensorboard.find_spec", lambda name: None)
    recipe = load_recipe(TINY, ["tracking.tensorboard=true"])
    with pytest.raises(RecipeError) as refused:
        check_run(recipe, Cluster(), Root.parse(tmp_path))
    assert MISSING in str(refused.value).splitlines()


def test_every_field_of_tracking_has_its_sink(tmp_path: Path) -> None:
    assert SINKS.keys() == Tracking.model_fields.keys()
    for field in SINKS:
        assert len(curve_sinks(Tracking.model_validate({field: True}), Root.parse(tmp_path), "tiny-1")) == 1
    assert curve_sinks(Tracking(), Root.parse(tmp_path), "tiny-1") == []
