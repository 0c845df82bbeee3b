from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, ErrorCode

from herd.llama3.recipe.load import load_recipe
from herd.storage.filesystem import cache_folder
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from herd.tasks.tracking.mlflow import COLOR, COLORS, CircuitBreaker, MetricPoint, MLflowTracker, color_tag, is_refusal
from herd.tasks.tracking.mlflow_store import prepare_database
from tests.dist import forkserver


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> MLflowTracker:
    return MLflowTracker(Root.parse(tmp_path_factory.mktemp("root")), "family")


def test_points_sent_twice_count_once(tracker: MLflowTracker) -> None:
    run = tracker.open_run("family-1", {"herd.run": "family-1"}, {})
    points = [MetricPoint("train/loss", 8.0 - i / 100, 1_700_000_000.5 + i, i * 4096) for i in range(1500)]
    tracker.log_points([run], points[:900])
    tracker.log_points([run], points)
    assert tracker.series(run, "train/loss") == [(point.position, point.value) for point in points]


def test_steps_that_another_machine_trains_again_count_once(tracker: MLflowTracker) -> None:
    run = tracker.open_run("family-9", {"herd.run": "family-9"}, {})

    def recorded(steps: range, began: float, key: str = "train/loss") -> list[MetricPoint]:
        return [MetricPoint(key, 8.0 - i / 100, began + i, i * 4096) for i in steps]

    first = recorded(range(10), 1_700_000_000.0)
    tracker.log_points([run], first)
    other = MLflowTracker(tracker.root, "family")  # has the journal up to step 6
    again = recorded(range(6, 14), 1_700_000_500.0)
    save = recorded(range(8, 9), 1_700_000_509.0, "checkpoint/write_s")
    for _ in range(2):
        other.log_points([run], [*first[:6], *again, *recorded(range(6, 14), 1_700_000_500.0, "train/lr"), *save])
    wanted = [*first, *again[4:]]
    assert other.series(run, "train/loss") == [(point.position, point.value) for point in wanted]
    assert [position // 4096 for position, _ in other.series(run, "train/lr")] == [10, 11, 12, 13]
    assert [position // 4096 for position, _ in other.series(run, "checkpoint/write_s")] == [8]


def test_one_call_that_fails_is_sent_again_and_a_refusal_is_not() -> None:
    """An outage may begin and end between two points: nothing else is skipped then."""
    reached = True

    def probe() -> None:
        if not reached:
            raise ConnectionError("refused")

    def fail() -> str:
        raise ConnectionError("reset by peer")

    def refuse() -> str:
        raise MlflowException("no such metric", error_code=INVALID_PARAMETER_VALUE)

    reach = CircuitBreaker(probe)
    assert reach.attempt(refuse, "instead") == "instead"
    assert (reach.stale, reach.away) == (False, False)
    assert reach.attempt(fail, "instead") == "instead"
    assert (reach.stale, reach.away) == (True, True)
    assert 29.0 < reach._retry_at - time.monotonic() <= 30.0
    assert reach.attempt(lambda: pytest.fail("called too early"), "instead") == "instead"
    reach._retry_at = 0.0
    assert reach.attempt(lambda: "sent", "instead") == "sent"
    assert (reach.stale, reach.away) == (True, False), "until the run was sent again"


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("INVALID_PARAMETER_VALUE", True),
        ("RESOURCE_DOES_NOT_EXIST", True),
        ("RESOURCE_ALREADY_EXISTS", True),
        ("PERMISSION_DENIED", False),
        ("UNAUTHENTICATED", False),
        ("REQUEST_LIMIT_EXCEEDED", False),
        ("INTERNAL_ERROR", False),
        ("TEMPORARILY_UNAVAILABLE", False),
    ],
)
def test_what_another_call_may_not_meet_is_no_refusal(code: str, refused: bool) -> None:
    assert is_refusal(MlflowException("no", ErrorCode.Value(code))) == refused


def test_a_run_and_its_children_are_found_again(tracker: MLflowTracker) -> None:
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


def test_a_run_and_its_steps_have_one_color_until_a_person_chooses_another(tracker: MLflowTracker) -> None:
    tags = {"herd.run": "family-12", "kind": "checkpoint", "stage": "main", "artifact.key": "abc"}
    for color in (COLORS[4], "#000000"):
        run = tracker.open_run("family-12", {"herd.run": "family-12"}, {})
        child = tracker.open_child(run, "family-12", tags)
        assert tracker.tags(run)[COLOR] == color
        assert tracker.tags(child)[COLOR] == COLORS[4]
        tracker.client.set_tag(run, COLOR, "#000000")
    assert color_tag("plan of a cluster") == {}


def test_colors_of_runs_differ_from_their_neighbors_and_from_every_page() -> None:
    """Also where red and green look alike (Machado and others, 2009, full deuteranopia and protanopia)."""
    numbers = [color_tag(f"tiny-{number}")[COLOR] for number in range(1, 30)]
    assert len(set(numbers)) == len(COLORS)
    assert all(perceived(one, other) > 50 for one, other in pairwise(numbers))
    assert all(perceived(one, other, SEEN[:1]) > 30 for one, other in combinations(COLORS, 2))
    for page in ("#ffffff", "#11171c"):
        assert all(contrast(color, page) > 3 for color in COLORS), "WCAG 2, graphical objects"


def linear(color: str) -> np.ndarray[Any, Any]:
    """Return the linear RGB of `#rrggbb`."""
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(color: str, page: str) -> float:
    dark, light = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(each)) for each in (color, page))
    return (light + 0.05) / (dark + 0.05)


XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])
SEEN = [
    np.eye(3),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
]


def perceived(one: str, other: str, ways: Sequence[np.ndarray[Any, Any]] = SEEN) -> float:
    """Return the least CIE76 distance of two colors over ways of seeing."""

    def lab(color: str, way: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x, y, z = np.cbrt(np.clip(XYZ @ way @ linear(color), 0, None) / WHITE)
        return np.array([116 * y, 500 * (x - y), 200 * (y - z)])

    return min(float(np.linalg.norm(lab(one, way) - lab(other, way))) for way in ways)


def test_a_checkpoint_is_one_model_however_often_it_is_shown(tracker: MLflowTracker) -> None:
    run = tracker.open_run("family-3", {"herd.run": "family-3"}, {})
    other = tracker.open_run("family-4", {"herd.run": "family-4"}, {})
    models = {
        tracker.checkpoint_model(runs, "checkpoint/family-main-1a2b3c4d", "file:///x", 4096, "d" * 64)
        for runs in ([run], [run], [other, run])
    }
    assert len(models) == 1
    tracker.log_points([run], [MetricPoint("eval/bpb", 2.5, 1_700_000_000, 4096)], models.pop())
    outputs = tracker.client.get_run(other).outputs.model_outputs
    assert [output.step for output in outputs] == [4096]


def test_a_root_does_not_decide_where_the_next_one_records(tmp_path: Path) -> None:
    for name in ("first", "second"):
        made = MLflowTracker(Root.parse(tmp_path / name), "family")
        assert made.uri == f"sqlite:///{tmp_path / name}/mlflow.db"
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_everything_stays_under_the_root(tracker: MLflowTracker, tmp_path: Path) -> None:
    own = MLflowTracker(Root.parse(tmp_path), "elsewhere")
    run = own.open_run("elsewhere-1", {"herd.run": "elsewhere-1"}, {})
    (tmp_path / "note.txt").write_text("x")
    own.log_file(run, tmp_path / "note.txt")
    assert list((tmp_path / "mlflow-artifacts").rglob("note.txt"))


def die_at_statement(folder: Path, number: int, plain: bool) -> None:
    """Be killed at SQL statement `number` of the first use of MLflow; `plain`: of MLflow's own, as it makes a file."""
    import sqlalchemy

    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", counted)
    if plain:
        from mlflow import MlflowClient

        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    else:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # without the empty database that others made
        MLflowTracker(Root.parse(folder), "family").experiment  # noqa: B018


def killed(folder: Path, number: int, plain: bool) -> None:
    process = forkserver().Process(target=die_at_statement, args=(folder, number, plain))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("plain", [False, True], ids=["ours", "half-made by MLflow"])
@pytest.mark.parametrize(
    "number", [pytest.param(40, marks=pytest.mark.slow), 150, pytest.param(400, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_killed_while_the_database_is_first_made_the_next_process_records(
    tmp_path: Path, number: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.tasks.tracking.mlflow_store.STEADY_S", 0.3)
    killed(tmp_path, number, plain)
    assert not (tmp_path / "cache").exists()
    again = MLflowTracker(Root.parse(tmp_path), "family")
    run = again.open_run("family-1", {"herd.run": "family-1"}, {})
    assert again.reach.available()
    assert again.run_id(run) == run
    assert again.client.get_run(run).info.status == "RUNNING"


def test_a_damaged_database_is_set_aside_and_earlier_runs_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.tasks.tracking.mlflow_store.STEADY_S", 0.3)
    root = Root.parse(tmp_path)
    record = Runs(root).begin(load_recipe(Path("tests/e2e/tiny.yaml")), "c0de")
    record.state = "finished"
    Runs(root).save(record)
    (tmp_path / "mlflow.db").write_bytes(b"no database at all, " * 1000)
    tracker = MLflowTracker(root, "tiny")
    assert tracker.experiment
    assert tracker.stale
    assert Runs(root).find(record.name).mlflow_stale
    assert root.names("open") == [record.name]
    assert len(list((tmp_path / ".damaged").glob("mlflow-*.db"))) == 1
    assert not prepare_database(root)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("spoil", ["", "torn page", "another version"])
@pytest.mark.slow
def test_a_new_database_is_a_copy_of_one_that_is_whole(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache_folder() / f"mlflow-{version('mlflow')}.db"
    prepare_database(Root.parse(tmp_path / "first"))
    mine = tmp_path / "cache" / "herd" / kept.name
    mine.parent.mkdir(parents=True)
    whole = kept.read_bytes()
    mine.write_bytes(whole)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    if spoil == "torn page":
        mine.write_bytes(whole[:8192] + bytes(4096) + whole[12288:])
    if spoil == "another version":
        with closing(sqlite3.connect(mine)) as connection:
            connection.execute("update alembic_version set version_num = 'gone'")
            connection.commit()
    before = mine.stat().st_ino
    prepare_database(Root.parse(tmp_path / "second"))
    assert MLflowTracker(Root.parse(tmp_path / "second"), "family").experiment
    assert (mine.stat().st_ino == before) == (not spoil)  # made again only if it was spoiled
    for path in (mine, tmp_path / "second" / "mlflow.db"):
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]


def test_a_database_of_an_earlier_mlflow_is_migrated_and_kept(tmp_path: Path) -> None:
    import sqlalchemy
    from alembic import command
    from mlflow.store.db import utils
    from mlflow.store.tracking.dbmodels.initial_models import Base

    path = tmp_path / "mlflow.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    Base.metadata.create_all(engine)
    config = utils._get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "heads")
        earlier = utils.ScriptDirectory.from_config(config).get_revision("heads").down_revision
        command.downgrade(config, earlier)
    engine.dispose()
    assert MLflowTracker(Root.parse(tmp_path), "family").experiment
    with closing(sqlite3.connect(tmp_path / f"mlflow-{earlier}.db")) as kept:
        assert kept.execute("select version_num from alembic_version").fetchall() == [(earlier,)]


def test_a_database_that_cannot_be_used_never_stops_a_run(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    tracker = MLflowTracker(Root.parse(tmp_path), "family")
    run = tracker.open_run("family-1", {"herd.run": "family-1"}, {})
    tracker.close(run, "FINISHED")
    assert (tracker.run_id(run), tracker.experiment, tracker.stale, tracker.reach.available()) == ("", "", True, False)
