"""Editors find every caller: a language server is asked in a clone called herd, and answers with files of git."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(".venv/pyright/bin/basedpyright-langserver")
FUNCTIONS = {
    "promote_model": "tasks",
    "train_stage": "tasks",
    "load_recipe": "llama3",
    "write_atomic": "storage",
    "chosen_recipe": "flows",
}
"""Function -> the top folder of its definition."""


class LanguageServer:
    """A client of the Language Server Protocol over standard input and output."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.count = 0
        folders = [{"uri": folder.as_uri(), "name": folder.name}]
        self.request("initialize", {"processId": None, "capabilities": {}, "workspaceFolders": folders})
        self.send({"method": "initialized", "params": {}})

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def request(self, method: str, params: dict[str, Any]) -> Any:
        """Return the result; requests of the server are answered with nothing meanwhile."""
        self.count += 1
        self.send({"id": self.count, "method": method, "params": params})
        while True:
            message = self._read()
            if "method" in message and "id" in message:
                items = message.get("params", {}).get("items")
                self.send({"id": message["id"], "result": [None] * len(items) if items else None})
            elif message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        length = 0
        while (line := self.process.stdout.readline().strip()) or not length:
            assert line or self.process.poll() is None, "the language server has ended"
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        return message


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.split("\n")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, with changes that are not committed, in a folder called herd."""
    folder = tmp_path_factory.mktemp("clone").resolve() / "herd"
    for name in filter(None, git("ls-files")):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(Path(name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(clone: Path) -> Iterator[LanguageServer]:
    if not SERVER.exists():
        pytest.skip(f"no language server at {SERVER}; give: make {SERVER}")
    started = LanguageServer([str(SERVER.absolute()), "--stdio"], clone)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def callers(name: str) -> set[str]:
    """Return the files that call the function `name`, read from the source."""
    found = set()
    for path in (Path(file) for file in git("ls-files", "*.py") if Path(file).is_file()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                found.add(str(path))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_language_server_finds_all_callers_in_files_of_git(name: str, server: LanguageServer, clone: Path) -> None:
    defined = [path for path in sorted((clone / FUNCTIONS[name]).rglob("*.py")) if f"def {name}(" in path.read_text()]
    (path,) = defined
    text = path.read_text()
    line = next(number for number, row in enumerate(text.split("\n")) if row.startswith(f"def {name}("))
    document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
    server.send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
    at = {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": len("def ")}}
    answers = server.request("textDocument/references", {**at, "context": {"includeDeclaration": False}})
    files = {str(Path(answer["uri"].removeprefix("file://").split("#")[0]).relative_to(clone)) for answer in answers}
    expected = callers(name)
    assert expected
    assert expected <= files
    assert files <= set(git("ls-files"))


def test_imported_modules_are_files_that_git_names(tmp_path: Path) -> None:
    tracked = set(git("ls-files", "*.py"))
    code = "import herd.flows.recipe_form, herd.api, sys\nfor m in list(sys.modules.values()):\n"
    code += "    if m.__name__.split('.')[0] == 'herd': print(m.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    names = {str(Path(line).relative_to(Path.cwd())) for line in done.stdout.split("\n") if line}
    assert "api.py" in names
    assert names <= tracked
