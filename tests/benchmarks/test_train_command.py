"""`python -m benchmarks train`: what it prints, with measurements that take no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import train
from benchmarks.__main__ import bench
from benchmarks.measure import NotMeasured
from benchmarks.rows import TRAIN_TARGETS as TARGETS
from benchmarks.rows import Row, measured
from benchmarks.train_session import TrainSession


def quick(run: TrainSession, name: str) -> Row:
    if name.startswith(("gpu/", "null-cuda/")):
        raise NotMeasured("no CUDA device")
    if name == "loader/wait":
        raise RuntimeError("the trainer ended with 1:\nKeyError: 'tokens'")
    return measured(name, 4.5, "a note")


@pytest.fixture
def herd(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(train, "MEASURES", dict.fromkeys(TARGETS, quick))
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    return app


def call(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "train", *arguments], env={"HERD_BENCH_PEERS": sys.executable})


def test_every_row_has_a_target_and_a_measure() -> None:
    assert sorted(train.MEASURES) == sorted(TARGETS)


def test_the_table_has_a_line_for_each_row(herd: typer.Typer) -> None:
    result = call(herd)
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in TARGETS)


def test_rows_are_json_and_go_to_a_file_too(herd: typer.Typer, tmp_path: Path) -> None:
    result = call(herd, "--json", "--out", str(tmp_path / "made" / "rows.json"))
    made = json.loads(result.stdout)
    assert json.loads((tmp_path / "made" / "rows.json").read_text()) == made
    rows = {row["name"]: row for row in made["rows"]}
    assert [rows[name]["ok"] for name in ("step/d384-fp32", "loss/memory", "loss/time", "restart/torchrun")] == [
        True, False, False, None,
    ]  # fmt: skip
    assert (rows["gpu/1b-fp8"]["value"], rows["gpu/1b-fp8"]["note"]) == (None, "not measured: no CUDA device")
    assert rows["loader/wait"]["note"] == "failed: KeyError: 'tokens'"
    assert made["machine"]["cpu"]


def test_only_takes_rows_and_groups(herd: typer.Typer) -> None:
    rows = json.loads(call(herd, "--json", "--only", "loss,start/rank").stdout)["rows"]
    assert [row["name"] for row in rows] == ["loss/memory", "loss/time", "start/rank"]


def test_a_row_that_there_is_not_is_refused(herd: typer.Typer) -> None:
    result = call(herd, "--only", "moon")
    assert result.exit_code == 2
    assert "--only: moon is no row" in " ".join(result.output.split())
