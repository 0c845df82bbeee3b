"""`python -m benchmarks storage`: what it prints, and one real measurement with few artifacts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import storage
from benchmarks.__main__ import bench
from benchmarks.measure import NotMeasured
from benchmarks.rows import STORAGE_TARGETS as TARGETS
from benchmarks.rows import Row, measured
from benchmarks.storage import StorageSession, design, full_store


def quick(run: StorageSession, name: str) -> Row:
    if name.endswith("/remote"):
        raise NotMeasured("moto[server] is not installed and there is no --endpoint")
    return measured(name, 0.95, "a note")


@pytest.fixture
def herd(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(storage, "MEASURES", dict.fromkeys(TARGETS, quick))
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    return app


def call(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "storage", *arguments])


def test_every_row_has_a_target_and_a_measure() -> None:
    assert list(storage.MEASURES) == list(TARGETS)


def test_rows_are_json_and_go_to_a_file_too(herd: typer.Typer, tmp_path: Path) -> None:
    result = call(herd, "--json", "--out", str(tmp_path / "made" / "rows.json"))
    made = json.loads(result.stdout)
    assert json.loads((tmp_path / "made" / "rows.json").read_text()) == made
    rows = {row["name"]: row for row in made["rows"]}
    assert (rows["write/wall"]["ok"], rows["reuse/local"]["ok"], rows["reuse/remote"]["ok"]) == (True, True, None)
    assert rows["reuse/remote"]["note"].startswith("not measured: moto")
    assert "s3fs" in made["versions"]


def test_only_takes_rows_and_groups(herd: typer.Typer) -> None:
    rows = json.loads(call(herd, "--json", "--only", "write,explain/local").stdout)["rows"]
    assert [row["name"] for row in rows] == ["write/wall", "write/cpu", "explain/local"]


def test_a_row_that_there_is_not_is_refused(herd: typer.Typer) -> None:
    result = call(herd, "--only", "moon")
    assert result.exit_code == 2
    assert "--only: moon is no row" in " ".join(result.output.split())


def test_the_full_local_store_is_one_that_stages_understand(tmp_path: Path) -> None:
    store = full_store(tmp_path, 5)
    found = store.find(design(2))
    assert found is not None
    found.verify()
    assert len(store.all("checkpoint")) == 5
    assert store.explain(design(9)) == "checkpoint/bench: new, number 4 -> 9"


def test_a_store_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "HERD_S3_DEADLINE_S": "1"}
    ended = run("--only", "write", "--endpoint", "http://127.0.0.1:9", keys=keys)
    assert ended.returncode == 2, ended.stderr
    assert "--bucket: herd-bench cannot be used at http://127.0.0.1:9" in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_every_row_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("moto.server")
    ended = run("--size", "tiny", "--json")
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)["rows"]}
    assert list(rows) == list(TARGETS)
    assert all(row["value"] is not None and row["value"] > 0 for row in rows.values()), rows
    assert len(rows["write/cpu"]["detail"]["ours"]) == 3


def run(*arguments: str, keys: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which has reached for no object store before."""
    command = [sys.executable, "-c", "from benchmarks.__main__ import bench; bench()", "storage", *arguments]
    return subprocess.run(command, env={**os.environ, **(keys or {})}, capture_output=True, text=True, timeout=250)
