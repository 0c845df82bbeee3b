"""`python -m benchmarks data`: what it prints, with measurements that take no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import data
from benchmarks.__main__ import bench
from benchmarks.measure import NotMeasured
from benchmarks.rows import TARGETS, Row, measured
from benchmarks.session import Session


def quick(run: Session, name: str) -> Row:
    if name == "minhash/datasketch":
        raise NotMeasured("No module named 'datasketch'")
    if name == "mix/documents":
        raise RuntimeError("ours.mix failed:\nTraceback\nKeyError: 'datasets'")
    return measured(name, 120.5, "a note")


@pytest.fixture
def herd(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(data, "MEASURES", dict.fromkeys(TARGETS, quick))
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    return app


def call(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "data", *arguments], env={"HERD_BENCH_PEERS": sys.executable})


def test_every_row_has_a_target_and_a_measure() -> None:
    assert list(data.MEASURES) == list(TARGETS)


def test_the_table_has_a_line_for_each_row(herd: typer.Typer) -> None:
    result = call(herd)
    assert result.exit_code == 0, result.output
    assert {name for name in TARGETS if name not in result.output} == {name for name in TARGETS if "scale/" in name}
    assert "scale/cpu" in call(herd, "--only", "scale").output
    assert "not measured" in result.output


def test_rows_are_json_and_go_to_a_file_too(herd: typer.Typer, tmp_path: Path) -> None:
    result = call(herd, "--json", "--out", str(tmp_path / "made" / "rows.json"))
    made = json.loads(result.stdout)
    assert json.loads((tmp_path / "made" / "rows.json").read_text()) == made
    rows = {row["name"]: row for row in made["rows"]}
    assert rows["pipeline/datatrove"]["ok"] is True
    assert rows["minhash/datasketch"]["value"] is None
    assert rows["minhash/datasketch"]["ok"] is None
    assert rows["mix/documents"]["note"] == "failed: KeyError: 'datasets'"
    assert made["machine"]["cpu"]


def test_only_takes_rows_and_groups(herd: typer.Typer) -> None:
    rows = json.loads(call(herd, "--json", "--only", "lines,near/recall").stdout)["rows"]
    assert [row["name"] for row in rows] == [
        "near/recall", "lines/datatrove", "lines/datatrove-lines", "lines/exact",
    ]  # fmt: skip


def test_a_row_that_there_is_not_is_refused(herd: typer.Typer) -> None:
    result = call(herd, "--only", "moon")
    assert result.exit_code == 2
    assert "--only: moon is no row" in " ".join(result.output.split())


def test_an_interpreter_that_there_is_not_is_refused(herd: typer.Typer) -> None:
    result = call(herd, "--peers", "no-such-python")
    assert result.exit_code == 2
    assert "no-such-python is no Python interpreter" in " ".join(result.output.split())
