"""What a judgement waits for, and what it counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from herd.llama3.evaluate.gate import Evidence, MeasuredScore
from herd.llama3.evaluate.scores import Score
from herd.llama3.recipe.sections import Promote
from herd.llama3.statistics.estimates import normal
from herd.storage.root import Root
from herd.tasks.promotion.log import read_log
from herd.tasks.stages.gate import CandidateModel, ChampionModel, Override, decide
from herd.tasks.stages.promote import judge_model
from tests.llama3.train.train_samples import recipe
from tests.tasks.promotion_samples import FAMILY, judged_record


def test_a_judgement_waits_for_mlflow_as_long_as_the_recipe_allows(tmp_path: Path) -> None:
    root, waited = Root.parse(tmp_path), list[float]()
    reach = SimpleNamespace(wait=lambda seconds, say: waited.append(seconds), why="connection refused")
    context: Any = SimpleNamespace(
        recipe=recipe(promote={"mlflow_timeout": "90 s"}),
        tracker=SimpleNamespace(reach=reach, uri="http://mlflow"),
        console=SimpleNamespace(log=None),
        root=root,
    )
    artifact: Any = None
    with pytest.raises(
        ValueError,
        match=r"promote.mlflow_timeout: MLflow at http://mlflow did not answer for 90 s \(connection refused",
    ):
        judge_model.fn(context, artifact, artifact, artifact, Override())
    assert waited == [90]
    assert read_log(root, FAMILY) == []


def test_earlier_decisions_on_the_same_requests_are_counted() -> None:
    def evidence(requests: str) -> Evidence:
        score = MeasuredScore(value=2.5, better="lower", requests=requests)
        return Evidence(rules={}, candidate={"eval/bpb": score})

    kinds = ("r" * 12, "other", "r" * 12, "")
    log = [judged_record(n, evidence=evidence(kind) if kind else None) for n, kind in enumerate(kinds)]
    score = Score.from_estimate("eval/bpb", normal(2.5, 0.1, 9), "bits per byte", "lower", "r" * 64, None)
    candidate = CandidateModel("tiny-9", FAMILY, "checkpoint/tiny-9", "d", 1, {score.key: score}, [])
    record = decide(candidate, ChampionModel("checkpoint/tiny-1", log), Promote(), Override(), "noon")
    assert record.evidence is not None
    assert (record.evidence.used, record.against) == (2, 4)
