"""Run `herd` as a user does: a process of its own, its own root, its own Prefect home.

One Prefect server serves the session, because starting a temporary one for each run takes seconds; a test that wants
the newcomer's way passes `server=False`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from flows.operate import await_answer, child, prefect_command
from llama3.data.sources import open_source
from llama3.recipe.load import load_recipe

TINY = Path("tests/e2e/tiny.yaml")
"""The tiny recipe on text found on the machine."""


@dataclass
class Herd:
    """The command line on one root."""

    root: Path
    home: Path
    api: str
    recipe: str
    """The tiny recipe on the session's files."""
    printed: str = ""
    """What the first run of the session's root printed."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home),
            "HERD_ROOT": str(self.root),
            "COLUMNS": "200",
            "HERD_THREADS": "1",
        }

    def start(self, *words: str, server: bool = True) -> subprocess.Popen[str]:
        """Start `herd words...` in a process group of its own."""
        api = {"PREFECT_API_URL": self.api} if server else {}
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.environment, **api},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *words: str, status: int = 0, server: bool = True) -> str:
        """Run `herd words...` to its end, check its exit status and return what it printed."""
        process = self.start(*words, server=server)
        printed, _ = process.communicate(timeout=280)
        assert process.returncode == status, printed
        return printed

    def stop_all(self) -> None:
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_api(prefect_home: Path) -> Iterator[str]:
    """A Prefect server on a free port."""
    port = free_port()
    environment = {**os.environ, "PREFECT_HOME": str(prefect_home)}
    with child("prefect", prefect_command(port), prefect_home, environment) as server:
        await_answer(f"http://127.0.0.1:{port}/api/health", server)
        yield f"http://127.0.0.1:{port}/api"


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny recipe on files: what it finds on the machine, written out once, because finding it takes seconds."""
    folder = tmp_path_factory.mktemp("corpus")
    data = yaml.safe_load(TINY.read_text())
    for domain, (source,) in load_recipe(TINY).sources.items():
        texts = [{"text": document.text, "url": document.url} for document in open_source(source, domain, seed=1)]
        (folder / f"{domain}.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
        data["sources"][domain] = [{"uri": str(folder / f"{domain}.jsonl")}]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(data))
    return str(folder / "tiny.yaml")


@pytest.fixture(scope="session")
def new_herd(prefect_home: Path, prefect_api: str, recipe: str) -> Iterator[Callable[[Path], Herd]]:
    """Makes a command line on a root; whatever it leaves running is killed at the end."""
    made: list[Herd] = []

    def make(root: Path) -> Herd:
        made.append(Herd(root, prefect_home, prefect_api, recipe))
        return made[-1]

    yield make
    for herd in made:
        herd.stop_all()


@pytest.fixture(scope="session")
def herd(tmp_path_factory: pytest.TempPathFactory, new_herd: Callable[[Path], Herd]) -> Herd:
    """A root on which the tiny recipe has run once, undisturbed, as `tiny-1`."""
    made = new_herd(tmp_path_factory.mktemp("root"))
    made.printed = made("run", made.recipe)
    return made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
