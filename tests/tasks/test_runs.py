from __future__ import annotations

from pathlib import Path

import pytest

from llama3.recipe.load import load_recipe
from tasks.models import model_folder
from tasks.runs import Runs

QUICKSTART = Path("recipes/quickstart.yaml")


def test_runs_are_numbered_within_their_family(tmp_path: Path) -> None:
    runs, recipe = Runs(tmp_path), load_recipe(QUICKSTART)
    assert [runs.begin(recipe, "abc").name for _ in range(3)] == ["quickstart-1", "quickstart-2", "quickstart-3"]
    assert runs.begin(load_recipe(QUICKSTART, ["name=other"]), "abc").name == "other-1"
    assert runs.recipe("quickstart-2") == recipe


def test_only_the_newest_run_of_the_same_recipe_is_continued(tmp_path: Path) -> None:
    runs, recipe = Runs(tmp_path), load_recipe(QUICKSTART)
    first = runs.begin(recipe, "abc")
    assert runs.unfinished(load_recipe(QUICKSTART, ["seed=2"])) is None
    assert runs.unfinished(recipe) == first
    first.state = "finished"
    runs.save(first)
    assert runs.unfinished(recipe) is None
    second = runs.begin(recipe, "abc")
    second.state = "failed"
    runs.save(second)
    found = runs.unfinished(recipe)
    assert found is not None
    assert found.name == "quickstart-2"


def test_an_unknown_run_names_the_known_ones(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with pytest.raises(ValueError, match=r"run 'x-1' does not exist .* start one with: herd run"):
        runs.find("x-1")
    runs.begin(load_recipe(QUICKSTART), "abc")
    with pytest.raises(ValueError, match="runs: quickstart-1"):
        runs.find("quickstart-2")
    with pytest.raises(ValueError, match="has not finished a training stage"):
        model_folder(tmp_path, "quickstart-1")
