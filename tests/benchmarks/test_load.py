"""`python -m benchmarks load`: the root and the database that it measures are such as runs leave."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.load import COMPARED, EXPERIMENT, SERIES, LoadSession, LoadSettings, fill_sqlite, full_root
from herd.storage.root import Root
from herd.tasks.operate.gc import plan_gc
from herd.tasks.operate.integrity import verify
from herd.tasks.runs.records import Runs
from herd.tasks.tracking.mlflow_store import NAME

ARTIFACTS, RUNS = 40, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return full_root(tmp_path_factory.mktemp("load") / "root", ARTIFACTS)


@pytest.mark.slow
def test_the_root_has_runs_with_intact_artifacts(root: Root) -> None:
    done = verify(root)
    assert (done.artifacts, done.damaged) == (ARTIFACTS + 1, []), "and the tokenizer of the family"
    runs = Runs(root).all()
    assert [run.name for run in runs] == [f"load-0-{number}" for number in range(1, RUNS + 1)]
    assert len(plan_gc(root, 1, 7 * 86400.0, ()).doomed) == ARTIFACTS - ARTIFACTS // RUNS
    assert full_root(root.local, ARTIFACTS) == root, "it is made once"


def test_the_database_has_the_points_that_mlflow_looks_up_by_run(root: Root) -> None:
    path, each = root.local / NAME, 3
    fill_sqlite(path, Runs(root).all(), RUNS * len(SERIES) * each)
    with closing(sqlite3.connect(path)) as connection:
        points = connection.execute("SELECT run_uuid, key, count(*) FROM metrics GROUP BY run_uuid, key").fetchall()
        assert len(points) == RUNS * len(SERIES)
        assert {count for _, _, count in points} == {each}
        assert connection.execute("SELECT count(*) FROM runs WHERE experiment_id = ?", (EXPERIMENT,)).fetchone() == (
            RUNS,
        )
        query = "EXPLAIN QUERY PLAN SELECT * FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY timestamp"
        (plan, *_) = connection.execute(query, points[0][:2]).fetchall()
    assert "index_metrics_run_uuid_key_step (run_uuid=? AND key=?)" in plan[3]


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    from benchmarks.load import load_rows

    with (
        LoadSession(LoadSettings(tmp_path, only=("stats",))) as session,
        pytest.raises(ValueError, match="stats is no row"),
    ):
        next(load_rows(session))
    assert COMPARED < RUNS
