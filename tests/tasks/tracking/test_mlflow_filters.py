"""The filters of the reference find runs as people type them, in MLflow's own search."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from herd.storage.root import Root
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.steps import recipe_params, recipe_points
from tests.llama3.train.train_samples import recipe
from tests.tasks.tracked_run import TrackedRun

FAMILY = "quickstart"


def schedule(peak: float) -> dict[str, Any]:
    return {"peak": peak, "warmup": "4 steps", "cosine": {"to": 1e-6, "over": "20 steps"}}


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> MLflowTracker:
    """Two runs; the second has the better scores, a higher rate, and the only model that was judged."""
    root = Root.parse(tmp_path_factory.mktemp("root"))
    first = TrackedRun(root, name=FAMILY, lr=schedule(5e-4))
    first.evaluate(first.stage(first.context.recipe.schedule.trained[0], first.tokens(), None))
    first.end()
    TrackedRun(root, better=0.5, name=FAMILY, lr=schedule(3e-3)).all()
    return MLflowTracker(root, FAMILY)


def found(tracker: MLflowTracker, query: str) -> list[str]:
    return sorted(run.info.run_name for run in tracker.client.search_runs([tracker.experiment], query))


def test_every_filter_of_the_reference_finds_what_it_says(tracker: MLflowTracker, checkout: Path) -> None:
    text = (checkout / "docs" / "reference" / "metrics.md").read_text()
    lines = re.search(r"Filters.*\n\n((?:    .+\n)+)", text)
    assert lines is not None
    queries = [re.split(r"  +#", line.strip())[0].strip() for line in lines[1].splitlines()]
    assert len(queries) == 6
    assert found(tracker, queries[0]) == ["quickstart-1", "quickstart-2"]
    for query in queries[1:]:
        assert found(tracker, query) == ["quickstart-2"], query


def test_what_people_type_without_quotes_is_not_understood_or_counts_steps_too(tracker: MLflowTracker) -> None:
    """Why the reference has its forms: another MLflow may change it."""
    with pytest.raises(MlflowException, match="Identifier"):
        found(tracker, "metrics.eval/bpb < 1.2")
    with pytest.raises(MlflowException):
        found(tracker, "params.lr.peak > 0.001")
    assert found(tracker, "metrics.`eval/bpb` < 1.2") == ["quickstart-2", "quickstart-2 evaluate-anneal"]


@pytest.mark.parametrize(
    ("peak", "text"), [(3e-3, "3e-3"), (8e-05, "8e-5"), (1.5e-4, "1.5e-4"), (0.0025, "2.5e-3"), (1e-2, 0.01)]
)
def test_a_rate_is_a_parameter_as_people_write_it_and_a_number_beside_it(peak: float, text: object) -> None:
    written = recipe(lr=schedule(peak))
    assert recipe_params(written)["lr.peak"] == text
    points = {point.key: point.value for point in recipe_points(written, "2026-01-01T00:00:00+00:00")}
    assert points["config_lr_peak"] == peak
    assert (points["config_tokens"], points["config_batch_tokens"], points["config_seq_len"]) == (5120, 256, 32)
    assert len(points) == 8
    assert not [key for key in points if re.search(r"\W", key)], "a filter takes them without quotes"
