"""Rows of `python -m benchmarks house`: how large the source is, and how it is cut into files and functions.

Only the four packages are counted: no tests, no benchmarks, no deploy files, no empty `__init__.py`.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.rows import HOUSE_TARGETS, Row, measured, rows_of

PACKAGES = ("flows", "tasks", "llama3", "storage")
RUN = """
import os, sys, herd.flows.cli.main, herd.flows.pipeline
import herd.llama3.train.launch, herd.llama3.train.main, herd.llama3.train.trainer
print(*(name for name, module in sys.modules.items()
        if name.startswith('herd.') and module.__file__ and os.path.getsize(module.__file__)))
"""
"""Files with code that the processes of a run import: the command, the flow, the agent of a machine, and a rank."""


@dataclass(frozen=True)
class HouseSettings:
    """What is measured."""

    only: tuple[str, ...] = ()
    """Names of rows or of their groups; empty: all."""
    folder: Path = Path(__file__).parents[1]
    """The checkout."""


@dataclass
class HouseSession:
    """The source files, each parsed once."""

    settings: HouseSettings
    texts: dict[Path, str] = field(default_factory=dict)
    trees: dict[Path, ast.Module] = field(default_factory=dict)
    imports: dict[str, set[str]] = field(default_factory=dict)
    """Module -> the modules of ours that it imports, inside functions and for type checkers too."""

    def __post_init__(self) -> None:
        folder = self.settings.folder
        paths = (path for package in PACKAGES for path in sorted((folder / package).rglob("*.py")))
        self.texts = {path.relative_to(folder): text for path in paths if (text := path.read_text()).strip()}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in self.trees}
        for module, path in modules.items():
            self.imports[module] = set()
            for node in ast.walk(self.trees[path]):
                if isinstance(node, ast.ImportFrom) and node.module:
                    source = node.module.removeprefix("herd.")
                    full = {f"{source}.{alias.name}" for alias in node.names}
                    self.imports[module] |= {name if name in modules else source for name in full} & modules.keys()


def house_rows(session: HouseSession) -> Iterator[Row]:
    """Yield the rows of `python -m benchmarks house`. Raises ValueError as `rows_of`."""
    measures = {"files": _files, "functions": _functions, "comments": _comments}
    return rows_of(session, HOUSE_TARGETS, {name: measures[name.split("/")[0]] for name in HOUSE_TARGETS})


def _files(session: HouseSession, name: str) -> Row:
    lines = {str(path): text.count("\n") for path, text in session.texts.items()}
    match name.split("/")[1]:
        case "count":
            return measured(name, len(lines))
        case "lines":
            return measured(name, sum(lines.values()))
        case "longest":
            path = max(lines, key=lines.__getitem__)
            return measured(name, lines[path], path)
        case "one-importer":
            importers = Counter(imported for names in session.imports.values() for imported in names)
            single = sum(count == 1 for count in importers.values())
            return measured(name, 100 * single / len(lines), f"{single} files")
        case "folder":
            ((folder, count),) = Counter(str(path.parent) for path in session.texts).most_common(1)
            return measured(name, count, folder)
        case "cycles":
            cycles = _cycles(session.imports)
            return measured(name, len(cycles), "; ".join(" ".join(sorted(cycle)) for cycle in cycles))
        case "first-step":
            done = subprocess.run(
                [sys.executable, "-c", RUN], cwd=session.settings.folder, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            return measured(name, len(done.stdout.split()))
        case other:
            raise ValueError(other)


def _cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other: strongly connected components of more than one."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        reach[start], waiting = set(), list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in reach[start]:
                reach[start].add(module)
                waiting += graph[module]
    cycles = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]
    }
    return [set(cycle) for cycle in cycles]


def _functions(session: HouseSession, name: str) -> Row:
    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.name}")
        for path, tree in session.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = [length for length, _ in functions]
    match name.split("/")[1]:
        case "median":
            return measured(name, median(lines), f"{len(functions):,} functions")
        case "p90":
            return measured(name, quantiles(lines, n=10)[-1])
        case _:
            return measured(name, *max(functions))


def _comments(session: HouseSession, name: str) -> Row:
    commented, lines = 0, 0
    for text in session.texts.values():
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        commented += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
        lines += text.count("\n")
    return measured(name, 100 * commented / lines)
