"""A root at another place: its databases lead there, and nothing is written where it was."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from herd.llama3.recipe.load import load_recipe
from herd.storage.lease import lease
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from herd.tasks.stages.backfill import backfill_run
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.mlflow_store import VARIABLE, SchemaUnknown, prepare_database, server_uri
from herd.tasks.tracking.moved_root import ACCESS, follow_root, former_places, moved_from


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root with a run in MLflow, and a deployment with two flow runs that name the root, in Prefect."""
    root = Root.parse(tmp_path / "r ü")
    tracker = MLflowTracker(root, "tiny")
    run = tracker.open_run("tiny-1", {}, {})
    tracker.checkpoint_model([run], "checkpoint/tiny-1a2b3c4d", f"{root.uri}/checkpoint/tiny-1a2b3c4d", 1, "digest")
    (root.local / ACCESS).write_text("export HERD_ROOT=there")
    parameters = json.dumps({"config": {"root": root.uri, "recipe": f"{root.uri}/my.yaml", "other": f"{root.uri}2"}})
    with closing(sqlite3.connect(root.local / "prefect.db")) as database, database:
        database.execute("create table deployment (name varchar, parameters JSON, infra_overrides JSON)")
        variables = json.dumps({"env": {"HERD_ROOT": root.uri}})
        database.execute("insert into deployment values ('mine', ?, ?)", (parameters, variables))
        database.execute("create table flow_run (state_type varchar(9), parameters JSON)")
        database.executemany("insert into flow_run values (?, ?)", [("SCHEDULED", parameters), ("FAILED", parameters)])
    return root


def texts(root: Root, name: str) -> str:
    with closing(sqlite3.connect(root.local / name)) as database:
        return "\n".join(database.iterdump())


def test_a_copy_writes_nothing_into_the_folder_of_the_original(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Root.parse(shutil.copytree(root.local, tmp_path / "copy"))
    before = {path: path.stat().st_mtime_ns for path in root.local.rglob("*")}
    assert moved_from(copy) == [root.uri, root.uri]
    tracker = MLflowTracker(copy, "tiny")
    run = tracker.open_run("tiny-1", {}, {})
    (tmp_path / "report.html").write_text("report")
    tracker.log_file(run, tmp_path / "report.html")
    label, uri = "checkpoint/tiny-1a2b3c4d", f"{copy.uri}/checkpoint/tiny-1a2b3c4d"
    assert tracker.checkpoint_model([run], label, uri, 1, "digest")
    assert len(tracker.client.search_logged_models([tracker.experiment])) == 1, "it is known by its place"
    assert list((copy.local / "mlflow-artifacts").rglob("report.html"))
    assert {path: path.stat().st_mtime_ns for path in root.local.rglob("*")} == before
    assert not (copy.local / ACCESS).exists()
    (line,) = [text for text in caplog.messages if "moved" in text]
    assert line.startswith(f"root: was moved or copied from {root.uri}; ")
    assert former_places(copy) == [root.uri, root.uri]
    assert moved_from(copy) == []

    for form in (root.uri, root.local.as_uri()):
        assert f"{form}/" in texts(root, "mlflow.db")
        assert f"{form}/" not in texts(copy, "mlflow.db")
    with closing(sqlite3.connect(copy.local / "prefect.db")) as database:
        ((parameters, variables),) = database.execute("select parameters, infra_overrides from deployment")
        runs = dict(database.execute("select state_type, parameters from flow_run").fetchall())
    expected = {"root": copy.uri, "recipe": f"{copy.uri}/my.yaml", "other": f"{root.uri}2"}
    assert json.loads(parameters)["config"] == json.loads(runs["SCHEDULED"])["config"] == expected
    assert json.loads(variables)["env"]["HERD_ROOT"] == copy.uri
    assert json.loads(runs["FAILED"])["config"]["root"] == root.uri, "what is over stays as it was"


def test_the_same_folder_by_another_path_is_not_moved(root: Root, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root.local)
    linked = Root.parse(tmp_path / "link")
    assert moved_from(linked) == []
    prepare_database(linked)
    assert (root.local / ACCESS).exists()
    assert MLflowTracker(linked, "tiny").client.get_experiment_by_name("tiny").artifact_location.startswith("file:")


def test_a_root_that_is_moved_under_its_servers_is_refused_before_anything_is_written(
    root: Root, tmp_path: Path
) -> None:
    with lease(root, "up", "herd up"):
        moved = Root.parse(root.local.rename(tmp_path / "moved"))
        before = texts(moved, "mlflow.db")
        with pytest.raises(ValueError, match=r"root: was moved from .* while herd up.* works on it; end that first"):
            follow_root(moved)
        assert texts(moved, "mlflow.db") == before
    follow_root(moved)
    assert texts(moved, "mlflow.db") != before


@pytest.mark.parametrize(("uri", "server"), [("sqlite:////x.db", ""), ("http://h:5000/", "http://h:5000"), ("", "")])
def test_only_a_server_has_an_address(monkeypatch: pytest.MonkeyPatch, uri: str, server: str) -> None:
    monkeypatch.setenv(VARIABLE, uri)
    assert server_uri() == server


def test_a_database_of_another_mlflow_is_named_as_such(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    prepare_database(root)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        database.execute("update alembic_version set version_num = 'a3b9c7d2e5f1'")
    with pytest.raises(
        SchemaUnknown, match=r"mlflow.db: its schema a3b9c7d2e5f1 is of another MLflow than [\d.]+ here"
    ):
        prepare_database(root)
    tracker = MLflowTracker(root, "tiny")
    assert not tracker.experiment
    assert tracker.stale
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")
    with pytest.raises(ValueError, match=r"its schema a3b9c7d2e5f1 is of .*; install that one, or move the file away"):
        backfill_run(root, record.name)
