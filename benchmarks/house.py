"""Rows of `python -m benchmarks house`: what keeps a stranger out of the source, each with a target.

Sizes of files and functions have no target: a bound on them is met by merging or by splitting, not by what is easier to
read. `--json` lists what each row counts. `first-step/files` runs the quickstart up to its first step (minutes).
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.first_step import first_step_files
from benchmarks.language_server import FUNCTIONS, SERVER, LanguageServer, copy_tracked, missed_callers
from benchmarks.measure import NotMeasured
from benchmarks.rows import HOUSE_TARGETS, Row, measured, rows_of
from tests.test_layers import Trees, folder_cycles, imports_of, optional_imports, trees_of, upward_imports

EXEMPT_TESTS = ("benchmarks", "cuda", "e2e")
"""Folders of tests that mirror no folder of the source; nor do the tests directly in tests/."""
TRACKER = re.compile(r"Tracker(Group)?$")
"""Names of classes of trackers."""
SHOWN = 5
"""How many of what a row counts its note lists."""


class Registry(NamedTuple):
    """A list of names that one file holds and every other file must derive from it."""

    name: str
    file: str
    variable: str
    """The class with the names as fields, or a regular expression for the assignments that hold them: a string, or the
    elements, keys, first arguments of calls or arguments of a Literal of the outermost list."""
    least: int = 2
    """Names in one place that repeat the list."""
    alone: bool = False
    """Whether only a list that holds nothing else repeats it, and no dict; for names that are usual words."""
    files: tuple[str, ...] = ()
    """Other files that may list them."""


REGISTRIES = (
    Registry("launchers", "tasks/launch/base.py", "LAUNCHERS", files=("tasks/cluster.py",)),
    Registry("decays of the learning rate", "llama3/recipe/lr.py", "key"),
    Registry("steps of a run", "tasks/pipeline_steps.py", "PIPELINE", 3),
    Registry("kinds of artifacts", "llama3/recipe/base.py", r"\w+Kind", 3, True, ("tasks/tracking/steps.py",)),
    Registry("kinds of evaluation tasks", "llama3/evaluate/task.py", "name"),
    Registry("fields of a recipe", "llama3/recipe/schema.py", "Recipe", 3, True, ("llama3/recipe/base.py",)),
    Registry("fields of a stage", "llama3/recipe/sections.py", "Stage", 3, True),
)
UNDERIVED = ("NO_KINDS",)
"""Lists that name what other files define, so that each of them counts while it exists."""


@dataclass(frozen=True)
class HouseSettings:
    """What is measured."""

    only: tuple[str, ...] = ()
    """Names of rows or of their groups; empty: all."""
    folder: Path = Path(__file__).parents[1]
    """The checkout."""
    registries: Sequence[Registry] = REGISTRIES


@dataclass
class HouseSession:
    """The source files of the packages, each parsed once; tests, benchmarks and deploy files do not count."""

    settings: HouseSettings
    trees: Trees = field(init=False)

    def __post_init__(self) -> None:
        self.trees = trees_of(self.settings.folder)


def house_rows(session: HouseSession) -> Iterator[Row]:
    """Yield the rows of `python -m benchmarks house`. Raises ValueError as `rows_of`."""
    listings: dict[str, Callable[[], list[str]]] = {
        "folders/cycles": lambda: [" ".join(sorted(circle)) for circle in folder_cycles(imports_of(session.trees))],
        "folders/upward": lambda: upward_imports(imports_of(session.trees)),
        "folders/optional": lambda: optional_imports(session.trees),
        "tracker/downcasts": lambda: downcasts(session.trees),
        "registries/repeated": lambda: repeated_lists(session.trees, session.settings.registries),
        "tests/misnamed": lambda: misnamed_tests(session.settings.folder),
    }
    measures = {
        **dict.fromkeys(listings, lambda _, name: _count(name, listings[name]())),
        "editor/callers": _callers,
        "first-step/files": _first_step,
        "source/lines": _lines,
    }
    return rows_of(session, HOUSE_TARGETS, measures)


def _count(name: str, items: Sequence[str]) -> Row:
    note = "; ".join(items[:SHOWN])
    return measured(name, len(items), note + f"; {len(items) - SHOWN} more" * (len(items) > SHOWN), items=[*items])


def _callers(session: HouseSession, name: str) -> Row:
    """Count the functions of which the language server finds every caller, each in a file that git names."""
    checkout = session.settings.folder
    if not (checkout / SERVER).exists():
        raise NotMeasured(f"no language server at {SERVER}; give: make {SERVER}")
    with (
        tempfile.TemporaryDirectory(prefix="herd-house-") as folder,
        LanguageServer([str(checkout / SERVER), "--stdio"], copy_tracked(checkout, Path(folder))) as server,
    ):
        missed = {function: missed_callers(server, function, checkout) for function in FUNCTIONS}
    note = "; ".join(f"{function}: {', '.join(files)}" for function, files in missed.items() if files)
    return measured(name, sum(not files for files in missed.values()), note, missed=missed)


def _first_step(session: HouseSession, name: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="herd-house-") as temporary:
        files = first_step_files(session.settings.folder, Path(temporary))
    folders = Counter("/".join(Path(file).parent.parts[:2]) for file in files)
    note = ", ".join(f"{folder} {count}" for folder, count in folders.most_common())
    return measured(name, len(files), note, items=files)


def _lines(session: HouseSession, name: str) -> Row:
    lines = Counter[str]()
    for path in session.trees:
        lines[path.parts[0]] += len((session.settings.folder / path).read_text().splitlines())
    note = ", ".join(f"{package} {count:,}" for package, count in lines.most_common())
    return measured(name, lines.total(), f"{note}; blank lines and docstrings included")


def downcasts(trees: Trees) -> list[str]:
    """Return where one kind of tracker is taken out of a tracker, as `tasks/step.py:12`.

    Counted are calls of `mlflow_of`, and isinstance, cast and cases that name a class such as MLflowTracker.
    """
    places = []
    for path, tree in trees.items():
        lines: set[int] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="mlflow_of")):
                    lines.add(node.lineno)
                case ast.Call(func=ast.Name(id="isinstance" | "cast")):
                    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                    lines |= {node.lineno} if any(map(TRACKER.search, names)) else set()
                case ast.MatchClass(cls=ast.Name(id=name)) if TRACKER.search(name):
                    lines.add(node.lineno)
        places += [f"{path}:{line}" for line in sorted(lines)]
    return places


def repeated_lists(trees: Trees, registries: Sequence[Registry]) -> list[str]:
    """Return the lists outside the file of a registry that repeat its names, as `tasks/step.py:12: launchers`.

    A list is a tuple, list, set, the keys of a dict, a Literal, or the cases of a match. Raises RuntimeError if a
    registry is not where it is said to be.
    """
    repeated = []
    for registry in registries:
        names = registry_names(trees, registry)
        for path, tree in trees.items():
            if str(path) in (registry.file, *registry.files):
                continue
            lines = {
                getattr(node, "lineno", 0)
                for node in ast.walk(tree)
                if len(names & (strings := _strings(node))) >= registry.least
                and not (registry.alone and (strings - names or isinstance(node, ast.Dict)))
            }
            repeated += [f"{path}:{line}: {registry.name}" for line in sorted(lines)]
    for path, tree in trees.items():
        repeated += [
            f"{path}:{node.lineno}: {target.id}"
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in UNDERIVED
        ]
    return repeated


def registry_names(trees: Trees, registry: Registry) -> set[str]:
    """Return the fields of the class, or the names in the assignments. Raises RuntimeError if there are none."""
    names: set[str] = set()
    for node in ast.walk(trees.get(Path(registry.file), ast.Module([], []))):
        if isinstance(node, ast.ClassDef) and node.name == registry.variable:
            fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
            names |= {target.id for target in fields if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            for target, value in _assigned(node):
                if isinstance(target, ast.Name) and re.fullmatch(registry.variable, target.id):
                    outermost = next(filter(None, map(_strings, ast.walk(value))), set())
                    names |= _constants([value]) or outermost
    if not names:
        raise RuntimeError(f"{registry.name}: {registry.file} has no {registry.variable} with names; mend REGISTRIES")
    return names


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with their values, of `key, shape = "cosine", "line"` each with its own."""
    assert node.value is not None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _strings(node: ast.AST) -> set[str]:
    """Return the strings of a list: elements, keys, first arguments of calls, comparisons with `or`, cases."""
    match node:
        case ast.Tuple() | ast.List() | ast.Set():
            return _constants(node.elts)
        case ast.Dict():
            return _constants(key for key in node.keys if key)
        case ast.BoolOp():
            return _constants(
                side for value in node.values if isinstance(value, ast.Compare) for side in value.comparators
            )
        case ast.Match():
            patterns = (each for case in node.cases for each in ast.walk(case.pattern))
            return _constants(each.value for each in patterns if isinstance(each, ast.MatchValue))
        case _:
            return set()


def _constants(nodes: Iterable[ast.expr]) -> set[str]:
    firsts = (node.args[0] if isinstance(node, ast.Call) and node.args else node for node in nodes)
    return {node.value for node in firsts if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def misnamed_tests(checkout: Path) -> list[str]:
    """Return the test files that are not called `test_<module>[_<aspect>].py` by a module that they mirror.

    tests/tasks/launch mirrors the folder tasks/launch: its modules and packages, and the package itself.
    """
    misnamed = []
    for path in sorted((checkout / "tests").rglob("test_*.py")):
        test = path.relative_to(checkout)
        mirrored = Path(*test.parts[1:-1])
        if len(test.parts) == 2 or test.parts[1] in EXEMPT_TESTS:
            continue
        modules = {mirrored.name, *(each.stem for each in (checkout / mirrored).glob("*.py"))}
        modules |= {each.parent.name for each in (checkout / mirrored).glob("*/__init__.py")}
        name = test.stem.removeprefix("test_")
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            misnamed.append(str(test))
    return misnamed
