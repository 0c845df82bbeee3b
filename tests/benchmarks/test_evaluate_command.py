"""`python -m benchmarks evaluate`: what it prints, and one real measurement at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import evaluate
from benchmarks.__main__ import bench
from benchmarks.evaluate import EvaluateSession, EvaluateSettings, differing
from benchmarks.measure import NotMeasured
from benchmarks.rows import EVALUATE_TARGETS as TARGETS
from benchmarks.rows import Row, measured
from tests.llama3.evaluate.tiny_data import write_data


def quick(run: EvaluateSession, name: str) -> Row:
    if name == "lm-eval/imports":
        raise NotMeasured("No module named 'lm_eval'")
    return measured(name, 1.5, "a note")


@pytest.fixture
def herd(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(evaluate, "MEASURES", dict.fromkeys(TARGETS, quick))
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    return app


def call(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "evaluate", *arguments])


def test_every_row_has_a_target_and_a_measure() -> None:
    assert list(evaluate.MEASURES) == list(TARGETS)


def test_rows_are_a_table_or_json(herd: typer.Typer, tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "data"))
    table = call(herd, "--data", data)
    assert table.exit_code == 0, table.output
    assert all(name in table.output for name in TARGETS)
    rows = {row["name"]: row for row in json.loads(call(herd, "--data", data, "--json").stdout)["rows"]}
    assert rows["lm-eval/wall"]["ok"] is False
    assert rows["lm-eval/imports"]["note"] == "not measured: No module named 'lm_eval'"


def test_a_folder_without_tasks_and_a_row_that_there_is_not_are_refused(herd: typer.Typer, tmp_path: Path) -> None:
    result = call(herd, "--data", str(tmp_path))
    assert result.exit_code == 2
    assert "has no file of a task" in " ".join(result.output.split())
    result = call(herd, "--data", str(write_data(tmp_path / "data")), "--only", "moon")
    assert result.exit_code == 2
    assert "--only: moon is no row" in " ".join(result.output.split())


@pytest.mark.slow
def test_our_side_is_measured_with_sharing_and_without(tmp_path: Path) -> None:
    run = EvaluateSession(EvaluateSettings(tmp_path / "work", write_data(tmp_path / "data"), "tiny", limit=8))
    row = evaluate.MEASURES["sharing/wall"](run, "sharing/wall")
    assert row.value is not None
    assert row.value > 0
    whole, shared = (run.ours(share).facts["samples"] for share in (False, True))
    assert differing(shared, whole) == {}
    assert sum(map(len, shared.values())) == 36


def test_samples_differ_in_what_was_decided_or_in_bits() -> None:
    def side(acc: float, nll: float, bits: float) -> dict[str, Any]:
        return {
            "choice": {"0": {"decided": {"acc": acc}, "nats": [2.0, nll]}},
            "bits": {"7": {"decided": {}, "nats": [bits]}},
        }

    assert differing(side(1, 3, 100), side(1, 3.0001, 100.001)) == {}
    assert differing(side(1, 3, 100), side(1, 3.1, 100)) == pytest.approx({"choice/0": 0.1 / 3.1})
    assert differing(side(1, 4, 100), side(0, 5, 102)) == pytest.approx({"choice/0": 0.2, "bits/7": 2 / 102})
    written = [{"code": {"0": {"decided": {}, "passed": 1.0, "text": text}}} for text in ("pass", "return")]
    assert differing(*written) == {"code/0": 0}
    with pytest.raises(RuntimeError, match="different questions"):
        differing(side(1, 3, 100), {"choice": {}})
