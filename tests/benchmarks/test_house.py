"""`python -m benchmarks house`: each figure on a small source tree whose answer is known."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import house, language_server
from benchmarks.house import Registry, house_rows
from benchmarks.language_server import SERVER
from benchmarks.rows import Row

SOURCES = {
    "storage/__init__.py": "",
    "storage/base.py": "from herd.storage import disk\nCOLORS = {'red': 1, 'green': 2, 'blue': 3}\n",
    "storage/disk.py": "from herd.llama3.recipe.lr import key\ndef read():\n    from herd.storage.base import COLORS\n",
    "llama3/recipe/lr.py": "from herd.llama3.train import loop\nkey, shape = 'cosine', 'line'\n",
    "llama3/recipe/units.py": "from herd.llama3.data import shards\n",
    "llama3/train/loop.py": "def late():\n    from herd.llama3.planner import days\n",
    "llama3/train/other.py": "from herd.llama3.recipe.lr import key\n",
    "llama3/planner/days.py": "from herd.llama3.train.loop import late\n",
    "tasks/step.py": "def run():\n    pass\n",
    "tasks/models/lookup.py": "import herd\n\n\ndef find():\n    from herd.llama3.planner import days\n",
    "tasks/stages/train.py": "from herd.llama3.planner.days import late\n",
    "flows/run.py": "from herd.llama3.planner.days import late\n",
}


def checkout(folder: Path, sources: dict[str, str] | None = None) -> Path:
    """Return a checkout with SOURCES and `sources`, all known to git."""
    for name, text in (SOURCES | (sources or {})).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run("git init -q && git add .", shell=True, cwd=folder, check=True)
    return folder


def figure(folder: Path, name: str, **settings: Any) -> Row:
    (row,) = house_rows(house.HouseSession(house.HouseSettings((name,), folder, **settings)))
    return row


def test_circles_are_those_of_folders_and_modules_of_a_package(tmp_path: Path) -> None:
    row = figure(checkout(tmp_path), "folders/cycles")
    assert row.detail["items"] == [
        "llama3.planner llama3.recipe llama3.train",
        "storage.base storage.disk",
    ]
    assert (row.value, row.ok) == (2, False)


def test_upward_are_imports_of_higher_packages_and_folders(tmp_path: Path) -> None:
    assert figure(checkout(tmp_path), "folders/upward").detail["items"] == [
        "storage/disk.py: llama3.recipe.lr",
        "llama3/recipe/lr.py: llama3.train.loop",
        "llama3/recipe/units.py: llama3.data",
        "llama3/train/loop.py: llama3.planner.days",
    ]


def test_the_core_counts_with_functions_and_its_callers_without(tmp_path: Path) -> None:
    assert figure(checkout(tmp_path), "folders/optional").detail["items"] == [
        "llama3/train/loop.py: from herd.llama3.planner import days",
        "tasks/stages/train.py: from herd.llama3.planner.days import late",
    ]


def test_downcasts_are_mlflow_of_and_checks_of_a_tracker_s_class(tmp_path: Path) -> None:
    code = """
def own(tracker, text):
    mlflow_of(tracker).page()
    assert isinstance(tracker, MLflowTracker)
    cast(TrackerGroup, tracker).log()
    isinstance(text, str)
    match tracker:
        case MLflowTracker(): return MLflowTracker(text)
"""
    items = figure(checkout(tmp_path, {"tasks/stages/own.py": code}), "tracker/downcasts").detail["items"]
    assert items == [f"tasks/stages/own.py:{line}" for line in (3, 4, 5, 8)]


LISTS = """
PAIR = ("red", "green")
BOTH = Literal["red", "blue", "dark"]
ONE = ["red", "dark"]
CALLS = [Color("red"), Color("blue")]
TABLE = {"green": 1, "blue": "red"}
def choose(color):
    if color == "red" or color == "blue": return 1
    match color:
        case "red": return 2
        case "green" | "dark": return 3
    return color == "red"
"""


def test_lists_that_repeat_a_registry_count_outside_its_file(tmp_path: Path) -> None:
    lists = {"tasks/colors.py": LISTS, "tasks/allowed.py": LISTS, "storage/cleanup.py": "NO_KINDS = {'runs'}\n"}
    folder = checkout(tmp_path, lists)
    colors = Registry("colors", "storage/base.py", "COLORS", files=("tasks/allowed.py",))
    assert figure(folder, "registries/repeated", registries=[colors]).detail["items"] == [
        *(f"tasks/colors.py:{line}: colors" for line in (2, 3, 5, 6, 8, 9)),
        "storage/cleanup.py:1: NO_KINDS",
    ]
    alone = colors._replace(alone=True)
    lines = [item.split(":")[1] for item in figure(folder, "registries/repeated", registries=[alone]).detail["items"]]
    assert lines == ["2", "5", "8", "1"], "a list with other words and a dict do not count"


def test_a_registry_is_an_assignment_or_the_fields_of_a_class(tmp_path: Path) -> None:
    code = "class Stage:\n    name: str\n    seq_len: int = 3\nKINDS = (Kind('a', {'y': 'z'}), Kind('b'))\n"
    code += "AKind = Literal['c', 'd']\nBKind = Literal['e', 'f']\n"
    trees = house.trees_of(checkout(tmp_path, {"llama3/recipe/sections.py": code}))
    for file, variable, names in (
        ("llama3/recipe/sections.py", "Stage", {"name", "seq_len"}),
        ("llama3/recipe/sections.py", "KINDS", {"a", "b"}),
        ("llama3/recipe/sections.py", ".Kind", {"c", "d", "e", "f"}),
        ("llama3/recipe/lr.py", "key", {"cosine"}),
        ("storage/base.py", "COLORS", {"red", "green", "blue"}),
    ):
        assert house.registry_names(trees, Registry("", file, variable)) == names
    for file, variable in (("storage/base.py", "SHAPES"), ("storage/none.py", "COLORS")):
        with pytest.raises(RuntimeError, match=f"colors: {file} has no {variable} with names"):
            house.registry_names(trees, Registry("colors", file, variable))


def test_nothing_in_this_checkout_repeats_a_registry() -> None:
    """A list that must agree with another is derived from it; a registry names the files that may repeat it."""
    assert figure(house.HouseSettings().folder, "registries/repeated").detail["items"] == []


def test_a_registry_that_moved_is_a_row_that_fails(tmp_path: Path) -> None:
    row = figure(checkout(tmp_path), "registries/repeated")
    assert (row.value, row.ok) == (None, False)
    assert "mend REGISTRIES" in row.note


def test_a_test_is_named_by_a_module_or_package_that_it_mirrors(tmp_path: Path) -> None:
    right = ("tasks/test_step", "tasks/test_step_by_step", "tasks/models/test_models", "llama3/test_recipe_keys")
    exempt = ("test_any", "e2e/test_any", "cuda/test_any", "benchmarks/test_any")
    wrong = ("tasks/test_stepping", "tasks/test_lookup", "nowhere/test_any")
    tests = {f"tests/{name}.py": "" for name in (*right, *exempt, *wrong)}
    row = figure(checkout(tmp_path, {"llama3/recipe/__init__.py": "", **tests}), "tests/misnamed")
    assert row.detail["items"] == sorted(f"tests/{name}.py" for name in wrong)


def test_lines_are_those_of_the_packages(tmp_path: Path) -> None:
    row = figure(checkout(tmp_path, {"benchmarks/large.py": "1\n" * 99}), "source/lines")
    assert row.value == sum(text.count("\n") for text in SOURCES.values())
    assert "storage 5" in row.note
    assert row.ok is None


def test_the_five_functions_are_found_if_the_server_names_all_their_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = "read()\nwrite()\nother.remove()\n"
    folder = checkout(tmp_path / "checkout", {"flows/first.py": calls, "flows/second.py": calls})
    answers = {
        "read": {"flows/first.py", "flows/second.py", "api.py"},
        "write": {"flows/first.py"},
        "remove": {"flows/first.py"},
    }

    class Server:
        def __init__(self, command: list[str], clone: Path) -> None:
            assert (clone.name, (clone / "flows/first.py").read_text()) == ("herd", calls)

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None: ...

        def references(self, name: str, package: str) -> set[str]:
            return answers[name]

    monkeypatch.setattr(house, "LanguageServer", Server)
    functions = {"read": "storage", "write": "storage"}
    for module in (house, language_server):
        monkeypatch.setattr(module, "FUNCTIONS", functions)
    assert figure(folder, "editor/callers").note == f"not measured: no language server at {SERVER}; give: make {SERVER}"
    (folder / SERVER).parent.mkdir(parents=True)
    (folder / SERVER).touch()
    row = figure(folder, "editor/callers")
    assert (row.value, row.detail["missed"]) == (0, {"read": ["api.py"], "write": ["flows/second.py"]})
    (folder / "api.py").touch()
    subprocess.run(["git", "add", "api.py"], cwd=folder, check=True)
    assert figure(folder, "editor/callers").value == 1
    functions["remove"] = "storage"
    assert "remove: nothing calls it" in figure(folder, "editor/callers").note


def test_files_up_to_the_first_step_are_counted_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["flows/run.py", "llama3/train/loop.py", "llama3/train/dcp/other.py"]
    monkeypatch.setattr(house, "first_step_files", lambda *_: files)
    row = figure(checkout(tmp_path), "first-step/files")
    assert (row.value, row.note, row.detail["items"]) == (3, "llama3/train 2, flows 1", files)


def test_a_row_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--only: moon is no row"):
        figure(checkout(tmp_path), "moon")
