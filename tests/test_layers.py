"""The floor plan: imports only go down, and the library knows neither Prefect nor MLflow."""

from __future__ import annotations

import ast
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

FLOORS = ["storage", "llama3", "tasks", "flows"]
ROOMS = ["recipe", "data", "tokens", "model", "parallel", "evaluate", "train", "scaling", "cluster", "export", "bench"]
"""Rooms of llama3, ground floor first; a room imports only from those before it."""
INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
FILES = sorted(path for floor in FLOORS for path in Path(floor).rglob("*.py"))


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write imports from where things are defined, not relative ones"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_only_go_down(path: Path) -> None:
    floor = FLOORS.index(path.parts[0])
    above = {name for name in imports(path) if name.split(".")[0] in FLOORS[floor + 1 :]}
    assert not above, f"{path} is on floor {path.parts[0]} and must not import {above}"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "llama3"], ids=str)
def test_rooms_of_the_library_only_import_down(path: Path) -> None:
    room = ROOMS.index(path.parts[1]) if len(path.parts) > 2 else 0
    parts = [name.split(".") for name in imports(path) if name.startswith("llama3.")]
    above = {".".join(name) for name in parts if name[1] in ROOMS[room + 1 :]}
    assert not above, f"{path} is in room {path.parts[1]} and must not import {above}"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "flows" and len(path.parts) == 2], ids=str)
def test_a_flow_s_file_hides_no_package(path: Path) -> None:
    """Prefect puts the folder of a flow before all others to import from: flows/requests.py broke docker's client."""
    assert path.stem == "__init__" or PathFinder.find_spec(path.stem, INSTALLED) is None


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] in ("storage", "llama3")], ids=str)
def test_the_library_knows_no_orchestrator(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("prefect", "mlflow")}


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[:2] == ("llama3", "model")], ids=str)
def test_the_model_is_not_distributed(path: Path) -> None:
    assert not {name for name in imports(path) if name.startswith("torch.distributed")}


def test_mlflow_and_processes_are_known_to_tasks_only() -> None:
    knowing = {path.parts[0] for path in FILES if "mlflow" in {name.split(".")[0] for name in imports(path)}}
    assert knowing == {"tasks"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_small_and_say_what_they_do(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600, f"{path}: split it"
    assert not text or ast.get_docstring(ast.parse(text)), f"{path}: open with what it does"
