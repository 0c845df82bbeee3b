"""The floor plan: imports only go down, and the library knows neither Prefect nor MLflow."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "herd."
FLOORS = ["storage", "llama3", "tasks", "flows"]
LINES, FILES = 700, 25
"""The most lines of a file and the most files of a folder."""
LAYERS = {
    "llama3": [
        "statistics",
        "recipe",
        "data",
        "tokens",
        "model",
        "parallel",
        "evaluate",
        "train",
        "hardware",
        "planner",
        "studies",
        "export",
        "serve",
    ],
    "tasks": [
        "errors",
        "format",
        "html",
        "figures",
        "cluster",
        "console",
        "executors",
        "pipeline_steps",
        "launch",
        "runs",
        "tracking",
        "step",
        "promotion",
        "models",
        "stages",
        "report",
        "plan",
        "study",
        "operate",
    ],
}
"""Folders and modules of a package, lowest first; each imports only from those before it."""
OPTIONAL = (
    *("llama3/planner", "llama3/studies", "llama3/export", "llama3/serve", "tasks/plan", "tasks/study"),
    *("tasks/models/card.py", "tasks/models/export.py", "tasks/models/serve.py", "tasks/models/served_model.py"),
)
"""What a run on one machine may do without. The core, which is all below tasks/promotion, never imports it; promotion,
models and stages do so inside the function that needs it."""
CALLERS = ("promotion", "models", "stages")


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


@pytest.mark.parametrize("package", LAYERS)
def test_folders_of_a_package_only_import_down(package: str, imports: dict[Path, set[str]]) -> None:
    order = LAYERS[package]
    folders = {node_of(path) for path in imports if path.parts[0] == package and path.name != "__init__.py"}
    assert folders == set(order)
    for path, names in imports.items():
        if path.parts[0] == package and path.name != "__init__.py":
            below = order[: order.index(node_of(path)) + 1]
            above = {name for name in names if name.startswith(f"{package}.") and name.split(".")[1] not in below}
            assert not above, f"{path} must not import {above}"


def node_of(path: Path) -> str:
    """Return the folder of a package that holds the file, or the module's name directly below the package."""
    return path.parts[1].removesuffix(".py")


@pytest.mark.parametrize("package", FLOORS)
def test_no_folders_import_each_other_in_a_circle(package: str, imports: dict[Path, set[str]]) -> None:
    graph: dict[str, set[str]] = {}
    for path, names in imports.items():
        if path.parts[0] == package:
            nodes = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
            graph.setdefault(node_of(path), set()).update(nodes - {node_of(path)})
    assert not [order for order in [topological_order(graph)] if order is None], "a circle of folders"


def topological_order(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the nodes, each after those that it needs; None if they need each other."""
    try:
        return [*TopologicalSorter(graph).static_order()]
    except CycleError:
        return None


def test_the_core_imports_nothing_optional(trees: dict[Path, ast.Module]) -> None:
    core = {"tasks": LAYERS["tasks"][: LAYERS["tasks"].index("promotion")]}
    for path, tree in trees.items():
        if str(path).startswith(OPTIONAL) or path.parts[0] == "flows" or path.name == "__init__.py":
            continue
        calls = path.parts[0] == "tasks" and node_of(path) in CALLERS
        if not calls and path.parts[0] in core and node_of(path) not in core[path.parts[0]]:
            continue
        for node in tree.body if calls else ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
                files = {name.removeprefix(PACKAGE).replace(".", "/") + ".py" for name in modules}
                assert not [name for name in files if name.startswith(OPTIONAL)], f"{path}: {files}"


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
