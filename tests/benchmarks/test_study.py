"""`python -m benchmarks study`: statistical rows, costs of known process trees, equal work on both sides."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.process_tree import tree_cost
from benchmarks.rows import STUDY_TARGETS, Row
from benchmarks.study import MEASURES, StudySession, StudySettings, study_rows
from benchmarks.study_overhead import DATA, NAME, StudyCost, confirm, study_file, variant_recipes
from herd.llama3.recipe.load import digest, load_recipe, resolved
from herd.llama3.studies.checks import check_study
from herd.llama3.studies.expand import load_study

BASE = Path(__file__).parents[2] / "recipes" / "experiments" / "base-cpu.yaml"
BUSY = "import time\nwhile time.process_time() < 0.4: pass\n"


def session(folder: Path, *only: str, code: str = "import sys; sys.exit(3)") -> StudySession:
    settings = StudySettings(
        folder, only, (sys.executable, "-c", code), BASE, ladder=BASE.with_name("ladder-llama3.yaml")
    )
    return StudySession(settings)


def herd() -> typer.Typer:
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    return app


def test_every_row_has_a_target_and_a_measure() -> None:
    assert list(MEASURES) == list(STUDY_TARGETS)


@pytest.mark.slow
def test_intervals_hold_and_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    rows = [*study_rows(session(tmp_path, "alpha", "same", "scatter"))]
    assert [row.name for row in rows] == [
        name for name in STUDY_TARGETS if name.split("/")[0] in ("alpha", "same", "scatter")
    ]
    for row in rows:
        assert row.ok, f"{row.name}: {row.value} {row.unit}, {row.target}"
        assert row.name.startswith("scatter") or row.value == int(row.value or 0)


def test_the_published_constants_give_what_is_known_of_them(tmp_path: Path) -> None:
    tokens = [row.detail["tokens"] for row in study_rows(session(tmp_path, "constants"))]
    assert tokens == pytest.approx([16.3e12, 10.5e12], rel=5e-3)


def test_the_cost_of_a_tree_has_its_grandchildren(tmp_path: Path) -> None:
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}], check=True)\n"
    idle, busy = (tree_cost([sys.executable, "-c", code], tmp_path / "log") for code in ("pass", nested))
    assert busy.cpu_s > idle.cpu_s + 0.3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another than the first process")
def test_the_cost_of_a_tree_has_those_that_outlive_their_parent(tmp_path: Path) -> None:
    slow = f"import time\ntime.sleep(0.3)\n{BUSY}"
    left = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {slow!r}])\n"
    began = time.monotonic()
    cost = tree_cost([sys.executable, "-c", left], tmp_path / "log")
    assert cost.cpu_s > 0.4
    assert 0.6 < cost.wall_s <= time.monotonic() - began


def test_a_command_that_fails_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 3: no such herd"):
        tree_cost([sys.executable, "-c", "import sys; print('no such herd'); sys.exit(3)"], tmp_path / "log")


def test_rows_of_overhead_fail_with_the_command(tmp_path: Path) -> None:
    (row,) = study_rows(session(tmp_path, "overhead/cpu"))
    assert (row.value, row.ok) == (None, False)
    assert "ended with status 3" in row.note


def test_overhead_is_what_the_study_adds(tmp_path: Path) -> None:
    run = session(tmp_path)
    vars(run)["cost"] = StudyCost(104.0, 9.0, {"a 1": 40.0, "b 1": 60.0}, seconds=51.0, variant_seconds=50.0)
    rows: list[Row] = [MEASURES[name](run, name) for name in STUDY_TARGETS if name.startswith("overhead/")]
    assert [row.value for row in rows] == pytest.approx([2.0, 4.0, 9.0])
    assert [row.ok for row in rows] == [True, True, None]


def test_the_study_that_is_run_can_be_run_and_its_arms_alone_are_the_same(tmp_path: Path) -> None:
    expanded = load_study(study_file(BASE, "200K", tmp_path))
    check_study(expanded)
    alone = variant_recipes(expanded, tmp_path)
    assert len(alone) == 4
    assert [digest(resolved(load_recipe(path))) for path in alone.values()] == [run.digest for run in expanded.runs]
    assert {run.recipe.name for run in expanded.runs} == {NAME}


def write_run(root: Path, name: str, steps: dict[str, str]) -> None:
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    record: dict[str, Any] = {"name": name, "steps": {step: {"outcome": done} for step, done in steps.items()}}
    (folder / "run.json").write_text(json.dumps(record))


def test_sides_that_did_other_work_are_not_compared(tmp_path: Path) -> None:
    found = dict.fromkeys(DATA, "reused")
    write_run(tmp_path, "data", dict.fromkeys(DATA, "created"))
    write_run(tmp_path, "one", {**found, "main": "created"})
    confirm(tmp_path, 1)
    with pytest.raises(RuntimeError, match="1 runs trained, not 2"):
        confirm(tmp_path, 2)
    write_run(tmp_path, "two", {**found, "tokenize": "created", "main": "reused"})
    with pytest.raises(RuntimeError, match=r"two in .*: tokenize, main not as expected"):
        confirm(tmp_path, 2)


def test_rows_are_a_table_or_json() -> None:
    table = CliRunner().invoke(herd(), ["bench", "study", "--only", "constants"])
    assert table.exit_code == 0, table.output
    assert "constants/figure" in table.output
    plain = CliRunner().invoke(herd(), ["bench", "study", "--only", "constants", "--json"])
    assert [row["ok"] for row in json.loads(plain.stdout)["rows"]] == [True, True]


def test_a_ladder_that_is_none_is_refused() -> None:
    ramp = str(BASE.with_name("ramp-cpu.yaml"))
    result = CliRunner().invoke(herd(), ["bench", "study", "--only", "alpha/shipped", "--ladder", ramp])
    assert result.exit_code == 2
    assert "is no ladder but a study of kind compare" in " ".join(result.output.split())


def test_a_row_that_there_is_not_is_refused() -> None:
    result = CliRunner().invoke(herd(), ["bench", "study", "--only", "moon"])
    assert result.exit_code == 2
    assert "--only: moon is no row" in " ".join(result.output.split())
