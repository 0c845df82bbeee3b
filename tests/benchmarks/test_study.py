"""`python -m benchmarks study`: intervals hold, and nothing is found where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.rows import STUDY_TARGETS
from benchmarks.study import MEASURES, StudySession, StudySettings, study_rows

EXPERIMENTS = Path(__file__).parents[2] / "recipes" / "experiments"


def session(*only: str) -> StudySession:
    return StudySession(StudySettings(only, EXPERIMENTS / "ladder-llama3.yaml"))


def herd() -> typer.Typer:
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    return app


def test_every_row_has_a_target_and_a_measure() -> None:
    assert list(MEASURES) == list(STUDY_TARGETS)


@pytest.mark.slow
def test_intervals_hold_and_nothing_is_found_where_nothing_is() -> None:
    rows = [*study_rows(session("alpha", "same", "gain", "scatter"))]
    assert [row.name for row in rows] == [
        name for name in STUDY_TARGETS if name.split("/")[0] in ("alpha", "same", "gain", "scatter")
    ]
    for row in rows:
        assert row.ok, f"{row.name}: {row.value} {row.unit}, {row.target}"
        assert row.name.startswith("scatter") or row.value == int(row.value or 0)


def test_the_published_constants_give_what_is_known_of_them() -> None:
    tokens = [row.detail["tokens"] for row in study_rows(session("constants"))]
    assert tokens == pytest.approx([16.3e12, 10.5e12], rel=5e-3)


def test_rows_are_a_table_or_json() -> None:
    table = CliRunner().invoke(herd(), ["bench", "study", "--only", "constants"])
    assert table.exit_code == 0, table.output
    assert "constants/figure" in table.output
    plain = CliRunner().invoke(herd(), ["bench", "study", "--only", "constants", "--json"])
    assert [row["ok"] for row in json.loads(plain.stdout)["rows"]] == [True, True]


def test_a_ladder_that_is_none_is_refused() -> None:
    ramp = str(EXPERIMENTS / "ramp-cpu.yaml")
    result = CliRunner().invoke(herd(), ["bench", "study", "--only", "alpha/shipped", "--ladder", ramp])
    assert result.exit_code == 2
    assert "is no ladder but a study of kind compare" in " ".join(result.output.split())


def test_a_row_that_there_is_not_is_refused() -> None:
    result = CliRunner().invoke(herd(), ["bench", "study", "--only", "moon"])
    assert result.exit_code == 2
    assert "--only: moon is no row" in " ".join(result.output.split())
