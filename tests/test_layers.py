"""The floor plan: imports only go down, and the library knows neither Prefect nor MLflow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "herd."
FLOORS = ["storage", "llama3", "tasks", "flows"]
LINES, FILES = 700, 25
"""The most lines of a file and the most files of a folder."""
ROOMS = ["recipe", "data", "tokens", "model", "parallel", "evaluate", "train", "studies", "planner", "export"]
"""Rooms of llama3, ground floor first; a room imports only from those before it."""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for floor in FLOORS for path in sorted(Path(floor).rglob("*.py"))}


@pytest.fixture(scope="module")
def imports(trees: dict[Path, ast.Module]) -> dict[Path, set[str]]:
    """Return the modules that each file imports."""
    found: dict[Path, set[str]] = {}
    for path, tree in trees.items():
        found[path] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[path] |= {alias.name.removeprefix(PACKAGE) for alias in node.names}
                assert not {alias.name.split(".")[0] for alias in node.names} & {*FLOORS}, f"{path}: import herd.X"
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: write imports from where things are defined, not relative ones"
                source = (node.module or "").removeprefix(PACKAGE)
                assert (node.module or "").split(".")[0] not in FLOORS, f"{path}: import from herd.{node.module}"
                names = {f"{source}.{alias.name}" for alias in node.names}
                files = {name for name in names if Path(*name.split(".")).with_suffix(".py").exists()}
                found[path] |= files or {source}
    return found


def test_imports_only_go_down(imports: dict[Path, set[str]]) -> None:
    assert {path.parts[0] for path in imports} == set(FLOORS)
    for path, names in imports.items():
        floor = FLOORS.index(path.parts[0])
        above = {name for name in names if name.split(".")[0] in FLOORS[floor + 1 :]}
        assert not above, f"{path} is on floor {path.parts[0]} and must not import {above}"


def test_rooms_of_the_library_only_import_down(imports: dict[Path, set[str]]) -> None:
    for path, names in imports.items():
        if path.parts[0] == "llama3":
            room = ROOMS.index(path.parts[1]) if len(path.parts) > 2 else 0
            parts = [name.split(".") for name in names if name.startswith("llama3.")]
            above = {".".join(name) for name in parts if name[1] in ROOMS[room + 1 :]}
            assert not above, f"{path} is in room {path.parts[1]} and must not import {above}"


def test_the_library_knows_no_orchestrator(imports: dict[Path, set[str]]) -> None:
    for path, names in imports.items():
        if path.parts[0] in ("storage", "llama3"):
            assert not {name for name in names if name.split(".")[0] in ("prefect", "mlflow")}, path


def test_the_model_is_not_distributed(imports: dict[Path, set[str]]) -> None:
    for path in Path("llama3/model").rglob("*.py"):
        assert not {name for name in imports[path] if name.startswith("torch.distributed")}, path


def test_mlflow_and_processes_are_known_to_tasks_only(imports: dict[Path, set[str]]) -> None:
    knowing = {path.parts[0] for path, names in imports.items() if "mlflow" in {name.split(".")[0] for name in names}}
    assert knowing == {"tasks"}


def test_no_file_imports_itself_in_a_circle(imports: dict[Path, set[str]]) -> None:
    """Imports inside functions and for type checkers count too: what needs each other belongs into one file."""
    modules = {".".join(path.with_suffix("").parts): path for path in imports}
    graph = {name: sorted(imports[path] & modules.keys()) for name, path in modules.items()}
    done: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for other in graph[name]:
                follow(other, (*path, name))
            done.add(name)

    for name in graph:
        follow(name, ())


def test_nothing_imports_the_benchmarks(imports: dict[Path, set[str]]) -> None:
    for path, names in imports.items():
        assert not {name for name in names if name.split(".")[0] == "benchmarks"}, path


def test_no_two_public_classes_share_a_name(trees: dict[Path, ast.Module]) -> None:
    defined: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(str(path))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_files_and_folders_stay_small_and_say_what_they_do(trees: dict[Path, ast.Module]) -> None:
    folders: dict[Path, int] = {}
    for path, tree in trees.items():
        if tree.body:
            folders[path.parent] = folders.get(path.parent, 0) + 1
            assert ast.get_docstring(tree), f"{path}: open with what it does"
            assert len(path.read_text().splitlines()) <= LINES, f"{path}: split it"
    assert not {folder: files for folder, files in folders.items() if files > FILES}
