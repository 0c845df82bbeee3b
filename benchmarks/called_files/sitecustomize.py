"""Records the files with a called function; Python imports this file when a process starts (see `first_step`).

Every `def` of the packages gets a first statement that names its file, so that a run is about as fast as without. What
numba compiles is left alone. A path is written when it is first named: a process that is killed or forked loses none.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from types import CodeType

FOLDER, LAST = os.environ["CALLED_FILES_FOLDER"], os.environ["CALLED_FILES_LAST"]
PACKAGES = tuple(os.environ["CALLED_FILES_PACKAGES"].split(os.pathsep))
ENDED = os.path.join(FOLDER, "ended")
"""Made when the function LAST is called; no process records anything after that."""
NAME = "record_called_file"
seen: set[str] = set()


def record(path: str, function: str) -> None:
    if path not in seen and not os.path.exists(ENDED):
        seen.add(path)
        with open(os.path.join(FOLDER, f"{os.getpid()}.files"), "a") as file:
            file.write(path + "\n")
    if function == LAST:
        open(ENDED, "w").close()


class Recorded(ast.NodeTransformer):
    """Makes each function name its file first, after its docstring."""

    def __init__(self, path: str) -> None:
        self.path = path

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.generic_visit(node)
            call = ast.parse(f"{NAME}({self.path!r}, {node.name!r})").body
            node.body[bool(ast.get_docstring(node, clean=False)) : 0] = call
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]


class Loader(SourceFileLoader):
    """Compiles from source, never from a cached file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = Recorded(path).visit(ast.parse(self.get_data(path)))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


def find(folder: str) -> FileFinder:
    if not os.path.join(folder, "").startswith(PACKAGES):
        raise ImportError
    return FileFinder(folder, (Loader, SOURCE_SUFFIXES))


setattr(builtins, NAME, record)
sys.path_hooks.insert(0, find)
