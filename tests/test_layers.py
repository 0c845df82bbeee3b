"""Layers of the packages: imports only go down, and the library knows neither Prefect nor MLflow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "herd."
PACKAGES = ["storage", "llama3", "tasks", "flows"]
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
        "launch",
        "runs",
        "tracking",
        "step",
        "promotion",
        "models",
        "stages",
        "pipeline_steps",
        "report",
        "plan",
        "study",
        "operate",
    ],
}
"""Folders and modules of a package, lowest first; each imports only from those before it."""
OPTIONAL = (
    *("llama3/planner", "llama3/studies", "llama3/export", "llama3/serve", "tasks/plan", "tasks/study"),
    *("tasks/models/card.py", "tasks/models/export.py", "tasks/models/openai_api.py", "tasks/models/serve.py"),
    "tasks/models/served_model.py",
)
"""What a run on one machine may do without. The core, which is all below tasks/promotion, never imports it; promotion,
models and stages do so inside the function that needs it."""
CALLERS = ("promotion", "models", "stages")


Trees = dict[Path, ast.Module]
"""Path below the checkout -> its syntax tree."""
Imports = dict[Path, set[str]]
"""Path -> the modules of ours (`tasks.step`) and the names of other libraries that it imports, anywhere in the file."""


def trees_of(folder: Path) -> Trees:
    """Return the source files of the packages in the checkout `folder`."""
    paths = [path for package in PACKAGES for path in sorted((folder / package).rglob("*.py"))]
    return {path.relative_to(folder): ast.parse(path.read_text()) for path in paths}


def imports_of(trees: Trees) -> Imports:
    imports: Imports = {path: set() for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports[path] |= {alias.name.removeprefix(PACKAGE) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = (node.module or "").removeprefix(PACKAGE)
                names = {f"{source}.{alias.name}" for alias in node.names}
                imports[path] |= {name for name in names if file_of(name) in trees} or {source}
    return imports


def file_of(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


def node_of(path: Path) -> str:
    """Return the folder of a package that holds the file, or the module's name directly below the package."""
    return path.parts[1].removesuffix(".py")


def upward_imports(imports: Imports) -> list[str]:
    """Return the imports of a higher package, or in a package of a higher folder, as `tasks/step.py: flows.serve`."""
    upward = []
    for path, names in imports.items():
        package, order = path.parts[0], LAYERS.get(path.parts[0], [])
        above = {*PACKAGES[PACKAGES.index(package) + 1 :]}
        if path.name != "__init__.py" and node_of(path) in order:
            above |= {f"{package}.{node}" for node in order[order.index(node_of(path)) + 1 :]}
        upward += [f"{path}: {name}" for name in sorted(names) if {name.split(".")[0], node_name(name)} & above]
    return upward


def node_name(module: str) -> str:
    return ".".join(module.split(".")[:2])


def folder_cycles(imports: Imports) -> list[set[str]]:
    """Return the sets of folders and top-level modules of one package that import each other in a circle."""
    graph: dict[str, set[str]] = {}
    for path, names in imports.items():
        if path.name != "__init__.py":
            node = f"{path.parts[0]}.{node_of(path)}"
            own = {node_name(name) for name in names if name.startswith(f"{path.parts[0]}.")}
            graph.setdefault(node, set()).update(own - {node})
    return cycles(graph)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach each other: strongly connected components of more than one node."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        reach[start], queue = set(), [start]
        while queue:
            for node in graph.get(queue.pop(), set()) - reach[start]:
                reach[start].add(node)
                queue.append(node)
    circles = {
        frozenset(other for other in reach[node] if node in reach.get(other, ()))
        for node in graph
        if node in reach[node]
    }
    return [set(circle) for circle in sorted(circles, key=sorted)]


def optional_imports(trees: Trees) -> list[str]:
    """Return the files of the core that import what is optional, with an import of each: `tasks/step.py: from ...`."""
    core = {"tasks": LAYERS["tasks"][: LAYERS["tasks"].index("promotion")]}
    importers: dict[Path, str] = {}
    for path, tree in trees.items():
        if str(path).startswith(OPTIONAL) or path.parts[0] == "flows" or path.name == "__init__.py":
            continue
        calls = path.parts[0] == "tasks" and node_of(path) in CALLERS
        if not calls and path.parts[0] in core and node_of(path) not in core[path.parts[0]]:
            continue
        for node in tree.body if calls else ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
                if any(str(file_of(name.removeprefix(PACKAGE))).startswith(OPTIONAL) for name in modules):
                    importers[path] = ast.unparse(node)
    return [f"{path}: {statement}" for path, statement in importers.items()]


@pytest.fixture(scope="module")
def trees() -> Trees:
    return trees_of(Path())


@pytest.fixture(scope="module")
def imports(trees: Trees) -> Imports:
    return imports_of(trees)


def test_imports_name_the_package(trees: Trees) -> None:
    assert {path.parts[0] for path in trees} == set(PACKAGES)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & {*PACKAGES}, f"{path}: import herd.X"
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: write imports from where things are defined, not relative ones"
                assert (node.module or "").split(".")[0] not in PACKAGES, f"{path}: import from herd.{node.module}"


@pytest.mark.parametrize("package", LAYERS)
def test_every_folder_of_a_package_has_its_layer(package: str, trees: Trees) -> None:
    assert {node_of(path) for path in trees if path.parts[0] == package and path.name != "__init__.py"} == set(
        LAYERS[package]
    )


def test_imports_only_go_down(imports: Imports) -> None:
    assert upward_imports(imports) == []


def test_no_folders_import_each_other_in_a_circle(imports: Imports) -> None:
    assert folder_cycles(imports) == []


def test_the_core_imports_nothing_optional(trees: Trees) -> None:
    assert optional_imports(trees) == []


def test_the_library_knows_no_orchestrator(imports: Imports) -> None:
    for path, names in imports.items():
        if path.parts[0] in ("storage", "llama3"):
            assert not {name for name in names if name.split(".")[0] in ("prefect", "mlflow")}, path


def test_the_model_is_not_distributed(imports: Imports) -> None:
    for path in Path("llama3/model").rglob("*.py"):
        assert not {name for name in imports[path] if name.startswith("torch.distributed")}, path


def test_mlflow_and_processes_are_known_to_tasks_only(imports: Imports) -> None:
    knowing = {path.parts[0] for path, names in imports.items() if "mlflow" in {name.split(".")[0] for name in names}}
    assert knowing == {"tasks"}


def test_no_file_imports_itself_in_a_circle(imports: Imports) -> None:
    """Imports inside functions and for type checkers count too: what needs each other belongs into one file."""
    modules = {".".join(path.with_suffix("").parts): names for path, names in imports.items()}
    assert cycles({module: names & modules.keys() for module, names in modules.items()}) == []


def test_nothing_imports_the_benchmarks(imports: Imports) -> None:
    for path, names in imports.items():
        assert not {name for name in names if name.split(".")[0] == "benchmarks"}, path


def test_no_interface_is_cast_to_an_implementation(trees: Trees) -> None:
    """MLflow is the tracker; other monitoring systems read the journal, and a Protocol has all that its callers use."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    interfaces = {node.name for node in classes if "Protocol" in map(ast.unparse, node.bases)}
    assert interfaces
    for path, tree in trees.items():
        assert "mlflow_of" not in path.read_text(), f"{path}: pass the MLflowTracker"
        for function in ast.walk(tree) if path.parts[0] in ("tasks", "flows") else ():
            if isinstance(function, ast.FunctionDef):
                parameters = {
                    argument.arg
                    for argument in (*function.args.args, *function.args.kwonlyargs)
                    if argument.annotation and set() < names_in(argument.annotation) <= interfaces
                }
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in ("isinstance", "cast"):
                        mentioned = names_in(*call.args)
                        assert not mentioned & (parameters | {"MLflowTracker"}), f"{path}:{call.lineno}: a downcast"


def names_in(*nodes: ast.expr) -> set[str]:
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def test_no_two_public_classes_share_a_name(trees: Trees) -> None:
    defined: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(str(path))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_files_and_folders_stay_small_and_say_what_they_do(trees: Trees) -> None:
    folders: dict[Path, int] = {}
    for path, tree in trees.items():
        if tree.body:
            folders[path.parent] = folders.get(path.parent, 0) + 1
            assert ast.get_docstring(tree), f"{path}: open with what it does"
            assert len(path.read_text().splitlines()) <= LINES, f"{path}: split it"
    assert not {folder: files for folder, files in folders.items() if files > FILES}
