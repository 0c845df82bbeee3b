"""Rows of one model evaluated by several processes, and of training that offers its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.evaluate import MEASURES, EvaluateSession, EvaluateSettings
from benchmarks.measure import NotMeasured
from benchmarks.split_evaluation import SIZES, SplitSession, check_scores, compared, wall_row

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(("busiest", "ok"), [(12.0, True), (13.0, False)])
def test_a_ratio_is_the_median_of_rounds_and_tells_its_noise(busiest: float, ok: bool) -> None:
    costs = {"one": [10.0, 10.0, 11.0], "replicas": [10.5, 20.0, busiest]}
    row = compared("replicas/cpu", costs, "replicas", "one", "4 ranks", "CPU s")
    assert row.value == pytest.approx(busiest / 11)
    assert row.ok is ok
    assert "one 10 CPU s" in row.note
    assert "noise +-43" in row.note or "noise +-40" in row.note


def test_sides_that_score_differently_are_not_compared() -> None:
    scores = {"one": {"eval/bpb": 2.0, "questions": 3}, "split": {"eval/bpb": 2.0001, "questions": 3}}
    check_scores(scores)
    for wrong in ({"eval/bpb": 2.01, "questions": 3}, {"eval/bpb": 2.0, "questions": 4}):
        with pytest.raises(RuntimeError, match="split: "):
            check_scores({**scores, "split": wrong})


def test_wall_time_is_not_measured_where_ranks_share_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(NotMeasured, match="4 ranks need 4 cores, and there are 2"):
        wall_row(SplitSession(tmp_path, SIZES["tiny"], RECIPE, ()), "replicas/wall")


@pytest.mark.slow
def test_several_processes_and_offers_are_measured(tmp_path: Path) -> None:
    run = EvaluateSession(EvaluateSettings(tmp_path, tmp_path, "tiny", recipe=RECIPE))
    for name in ("replicas/cpu", "split/cpu", "offered/step", "offered/cpu"):
        value = MEASURES[name](run, name).value
        assert value is not None
        assert value > 0
    (never,), (offered,), (scored,) = (run.several.stages[side] for side in ("never", "offered", "scored"))
    assert len(never.step_s) == len(offered.step_s) == len(scored.step_s) > 50
    assert never.cpu_s > 0
    assert [never.offered, never.scored, offered.scored] == [0, 0, 0]
    assert offered.offered > 1
    assert scored.offered > 0
