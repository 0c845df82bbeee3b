"""A model scored by one process and by several: the same report, and mistakes in plain words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llama3.recipe.schema import Recipe
from tasks.cluster import Cluster
from tasks.stages.evaluate import run_evaluation
from tests.agents import shared_agents
from tests.llama3.evaluate.suite_samples import make


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def recipe(room: Path, checkout: Path) -> Recipe:
    return make(room, checkout)


def cluster(evaluators: int) -> Cluster:
    """Return a place with one thread for each evaluator: the number of threads may change how sums are rounded."""
    return Cluster(evaluators=evaluators, threads=evaluators, device="cpu")


@pytest.mark.slow
def test_two_evaluators_report_what_one_does(room: Path, recipe: Recipe) -> None:
    one, two = (
        run_evaluation(recipe, room / "model", room / "curated", room / str(n), cluster(n), shared_agents())
        for n in (1, 2)
    )
    assert one == two
    names = sorted(path.name for path in (room / "1").iterdir())
    assert "scores.parquet" in names
    assert names == sorted(path.name for path in (room / "2").iterdir())
    for name in names:
        assert (room / "1" / name).read_bytes() == (room / "2" / name).read_bytes(), name


@pytest.mark.parametrize("evaluators", [1, 2])
def test_a_mistake_is_one_line_on_any_number(room: Path, recipe: Recipe, tmp_path: Path, evaluators: int) -> None:
    shutil.copytree(room / "model", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json: is not a model configuration") as caught:
        run_evaluation(
            recipe, tmp_path / "model", room / "curated", tmp_path / "made", cluster(evaluators), shared_agents()
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
