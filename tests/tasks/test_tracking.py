from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.root import Root
from tasks.tracking import Point, Tracker


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    return Tracker(Root.of(tmp_path_factory.mktemp("root")), "family")


def test_points_sent_twice_count_once(tracker: Tracker) -> None:
    run = tracker.open_run("family-1", {"herd.run": "family-1"}, {})
    points = [Point("train/loss", 8.0 - i / 100, 1_700_000_000.5 + i, i * 4096) for i in range(1500)]
    tracker.log_points([run], points[:900])
    tracker.log_points([run], points)
    assert tracker.series(run, "train/loss") == [(point.position, point.value) for point in points]


def test_a_run_and_its_children_are_found_again(tracker: Tracker) -> None:
    first = tracker.open_run("family-2", {"herd.run": "family-2"}, {"model.dim": 64, "stages": [{"name": "main"}]})
    tags = {"herd.run": "family-2", "kind": "checkpoint", "stage": "main", "artifact.key": "abc"}
    child = tracker.open_child(first, "family-2", tags)
    tracker.close(child, "FAILED")
    tracker.close(first, "KILLED")
    assert tracker.open_run("family-2", {"herd.run": "family-2"}, {}) == first
    assert tracker.open_child(first, "family-2", tags) == child
    assert tracker.client.get_run(child).info.status == "RUNNING"
    assert tracker.open_child(first, "family-2", {**tags, "artifact.key": "def"}) != child
    assert tracker.client.get_run(first).data.params == {"model.dim": "64", "stages": '[{"name": "main"}]'}


def test_a_checkpoint_is_one_model_however_often_it_is_shown(tracker: Tracker) -> None:
    run = tracker.open_run("family-3", {"herd.run": "family-3"}, {})
    other = tracker.open_run("family-4", {"herd.run": "family-4"}, {})
    models = {
        tracker.checkpoint_model(runs, "checkpoint/family-main-1a2b3c4d", "file:///x", 4096, "d" * 64)
        for runs in ([run], [run], [other, run])
    }
    assert len(models) == 1
    tracker.log_points([run], [Point("eval/bpb", 2.5, 1_700_000_000, 4096)], models.pop())
    outputs = tracker.client.get_run(other).outputs.model_outputs
    assert [output.step for output in outputs] == [4096]


def test_a_root_does_not_decide_where_the_next_one_records(tmp_path: Path) -> None:
    for name in ("first", "second"):
        made = Tracker(Root.of(tmp_path / name), "family")
        assert made.uri == f"sqlite:///{tmp_path / name}/mlflow.db"
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_everything_stays_under_the_root(tracker: Tracker, tmp_path: Path) -> None:
    own = Tracker(Root.of(tmp_path), "elsewhere")
    run = own.open_run("elsewhere-1", {"herd.run": "elsewhere-1"}, {})
    (tmp_path / "note.txt").write_text("x")
    own.log_file(run, tmp_path / "note.txt")
    assert list((tmp_path / "mlflow-artifacts").rglob("note.txt"))
