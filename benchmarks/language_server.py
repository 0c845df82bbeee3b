"""What an editor finds: the callers of five functions by a language server, in a copy of the checkout called herd.

An editor that finds the callers in the files that git names can rename, blame and stage them. The server is
basedpyright, which Pylance's engine is close to: `make .venv/pyright/bin/basedpyright-langserver` installs it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SERVER = Path(".venv/pyright/bin/basedpyright-langserver")
"""Below the checkout."""
SCAN_S = 120.0
"""For the server to read the folder before it finds nothing."""
FUNCTIONS = {
    "promote_model": "tasks",
    "train_stage": "tasks",
    "load_recipe": "llama3",
    "write_atomic": "storage",
    "chosen_recipe": "flows",
}
"""Function -> the top folder of its definition."""


class LanguageServer:
    """A client of the Language Server Protocol over standard input and output; ends the server when it is closed."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.count = 0
        folders = [{"uri": folder.as_uri(), "name": folder.name}]
        self.request("initialize", {"processId": None, "capabilities": {}, "workspaceFolders": folders})
        self.send({"method": "initialized", "params": {}})

    def __enter__(self) -> LanguageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    def references(self, name: str, package: str) -> set[str]:
        """Return the files that refer to the function `name`, without its definition.

        Raises RuntimeError if `package` does not define it once, outside of classes.
        """
        defined = [
            (path, text, number)
            for path in sorted((self.folder / package).rglob("*.py"))
            for text in [path.read_text()]
            for number, code in enumerate(text.split("\n"))
            if code.startswith(f"def {name}(")
        ]
        if len(defined) != 1:
            raise RuntimeError(f"{name}: {package} defines it {len(defined)} times; mend FUNCTIONS")
        ((path, text, line),) = defined
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
        self.send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        position = {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": len("def ")}}
        answers: list[dict[str, Any]] = []
        deadline = time.monotonic() + SCAN_S
        while not answers and time.monotonic() < deadline:  # it answers before it has read the folder
            answers = self.request("textDocument/references", {**position, "context": {"includeDeclaration": False}})
        paths = (Path(answer["uri"].removeprefix("file://").split("#")[0]) for answer in answers)
        return {str(path.relative_to(self.folder)) for path in paths}

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def request(self, method: str, params: dict[str, Any]) -> Any:
        """Return the result; requests of the server are answered with nothing until it comes."""
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


def tracked_files(checkout: Path) -> set[str]:
    """Return the files that git names and that exist."""
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (checkout / name).is_file()}


def copy_tracked(checkout: Path, folder: Path) -> Path:
    """Copy the tracked files, changes that are not committed included, to `folder`/herd; return that folder."""
    clone = folder.resolve() / "herd"
    for name in tracked_files(checkout):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((checkout / name).read_bytes())
    return clone


def callers(name: str, checkout: Path) -> set[str]:
    """Return the tracked files that call the function `name` or hand it on, read from the source."""
    return {
        file
        for file in tracked_files(checkout)
        if file.endswith(".py")
        for node in ast.walk(ast.parse((checkout / file).read_text()))
        if isinstance(node, ast.Name) and node.id == name
    }


def missed_callers(server: LanguageServer, name: str, checkout: Path) -> list[str]:
    """Return the files of callers that the server does not find, and those it finds that git does not name.

    Raises RuntimeError if nothing calls the function, as `references`.
    """
    files, expected = server.references(name, FUNCTIONS[name]), callers(name, checkout)
    if not expected:
        raise RuntimeError(f"{name}: nothing calls it; mend FUNCTIONS")
    return sorted((expected - files) | (files - tracked_files(checkout)))
