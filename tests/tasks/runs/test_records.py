from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.recipe.load import load_recipe
from herd.storage.root import Root
from herd.tasks.models.lookup import model_folder
from herd.tasks.runs.records import Runs, StudyPart, rerun_command
from tests.dist import forkserver

QUICKSTART = Path("recipes/quickstart.yaml")


def test_runs_are_numbered_within_their_family(tmp_path: Path) -> None:
    runs, recipe = Runs(Root.parse(tmp_path)), load_recipe(QUICKSTART)
    assert [runs.begin(recipe, "abc").name for _ in range(3)] == ["quickstart-1", "quickstart-2", "quickstart-3"]
    assert runs.begin(load_recipe(QUICKSTART, ["name=other"]), "abc").name == "other-1"
    assert runs.recipe("quickstart-2") == recipe


def test_only_the_newest_run_of_the_same_recipe_is_continued(tmp_path: Path) -> None:
    runs, recipe = Runs(Root.parse(tmp_path)), load_recipe(QUICKSTART)
    first = runs.begin(recipe, "abc")
    assert runs.unfinished(load_recipe(QUICKSTART, ["seed=2"])) is None
    assert runs.unfinished(recipe) == first.model_copy(update={"state": "interrupted"}), "until its lease is held"
    first.state = "finished"
    runs.save(first)
    assert runs.unfinished(recipe) is None
    second = runs.begin(recipe, "abc")
    second.state = "failed"
    runs.save(second)
    found = runs.unfinished(recipe)
    assert found is not None
    assert found.name == "quickstart-2"


def test_a_run_is_continued_by_the_same_request_only(tmp_path: Path) -> None:
    runs, recipe = Runs(Root.parse(tmp_path)), load_recipe(QUICKSTART)
    requests: list[dict[str, str]] = [
        {},
        {"until": "main"},
        {"rerun_of": "quickstart-1", "redo_from": "anneal"},
        {"rerun_of": "quickstart-2", "redo_from": "anneal"},
        {"rerun_of": "quickstart-2", "redo_from": "main"},
    ]
    made = [runs.begin(recipe, "c", **request) for request in requests]
    for record, request in zip(made[1:], requests[1:], strict=True):
        found = runs.unfinished(recipe, **request)
        assert found is not None
        assert found.name == record.name
    assert runs.unfinished(recipe, until="anneal") is None
    assert runs.unfinished(recipe, rerun_of="quickstart-1", redo_from="main") is None
    assert [rerun_command(runs.root, record).split()[2:5] for record in made[:2]] == [
        ["quickstart-1", "--root", str(tmp_path)],
        ["quickstart-2", "--until", "main"],
    ]


def test_a_stage_that_is_redone_and_each_variant_of_a_study_have_their_own_work_folder(tmp_path: Path) -> None:
    record = Runs(Root.parse(tmp_path)).begin(load_recipe(QUICKSTART), "c", redo_from="anneal")
    study = StudyPart(study="ramp", variant="long", repeat=1)
    for part, other in ((None, ""), (study, record.recipe_digest)):
        keyed = record.model_copy(update={"study": part})
        assert (keyed.work_dir_key("anneal"), keyed.work_dir_key("main")) == (record.name, other)


def test_an_unknown_run_names_the_known_ones(tmp_path: Path) -> None:
    runs = Runs(Root.parse(tmp_path))
    with pytest.raises(ValueError, match=r"run 'x-1' does not exist .* start one with: herd run"):
        runs.find("x-1")
    runs.begin(load_recipe(QUICKSTART), "abc")
    (tmp_path / "runs/plan-quickstart-h100").mkdir()  # of `herd plan compare`: no run
    with pytest.raises(ValueError, match=r"runs: quickstart-1$"):
        runs.find("quickstart-2")
    with pytest.raises(ValueError, match="has not finished a training stage"):
        model_folder(Root.parse(tmp_path), "quickstart-1")


def test_two_machines_never_begin_the_same_run(tmp_path: Path) -> None:
    with forkserver().Pool(3) as pool:
        names = pool.map(_begin, [tmp_path] * 9)
    assert sorted(names) == sorted({f"quickstart-{number}" for number in range(1, 10)})
    assert {record.name for record in Runs(Root.parse(tmp_path)).all()} == set(names)


def test_a_retry_goes_on_with_the_run_of_its_flow_run(tmp_path: Path) -> None:
    runs, recipe = Runs(Root.parse(tmp_path)), load_recipe(QUICKSTART)
    mine, other = runs.begin(recipe, "code"), runs.begin(recipe, "code")
    mine.prefect_run, other.prefect_run = "one", "two"
    runs.save(mine)
    runs.save(other)
    found = runs.of_flow_run(recipe, "one")
    assert found is not None
    assert found.name == mine.name
    assert runs.of_flow_run(recipe, "three") is None
    assert runs.of_flow_run(recipe, "") is None
    changed = load_recipe(QUICKSTART, ["name=other"])
    assert runs.of_flow_run(changed, "one") is None


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "a/../../b"])
def test_a_name_that_leaves_the_root_is_no_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"does not exist|not a name below a root"):
        Runs(Root.parse(tmp_path)).find(name)


def _begin(folder: Path) -> str:
    return Runs(Root.parse(folder)).begin(load_recipe(QUICKSTART), "code").name
