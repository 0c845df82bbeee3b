"""Run `herd` as a user does: a process of its own, its own root, its own Prefect home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TINY = Path("tests/e2e/tiny.yaml")


@dataclass
class Herd:
    """The command line on one root."""

    root: Path
    home: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home),
            "HERD_ROOT": str(self.root),
            "COLUMNS": "200",
            "HERD_CONSOLE_INTERVAL": "1",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `herd words...` in a process group of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *words: str, status: int = 0) -> str:
        """Run `herd words...` to its end, check its exit status and return what it printed."""
        process = self.start(*words)
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
    """One Prefect database for all runs of the session: its first migration takes seconds."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def herd(tmp_path_factory: pytest.TempPathFactory, prefect_home: Path) -> Iterator[Herd]:
    made = Herd(tmp_path_factory.mktemp("root"), prefect_home)
    yield made
    made.stop_all()
