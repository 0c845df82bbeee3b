"""MLflow servers: one for the whole run, and those that a test may kill and start again on the same database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from herd.flows.local_server import await_answer
from herd.storage.processes import die_with_parent, free_port
from herd.storage.root import Root
from herd.tasks.tracking.mlflow_store import database_uri, prepare_database
from tests.servers import one_of


class MlflowServer:
    """One worker, no job runners, as `herd up` starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        place = ["--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *store, *place],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # which MLflow passes on to its worker
            )
        if wait:
            await_answer(f"{self.uri}/health", self.process)

    def signal(self, number: int) -> None:
        """Send a signal to the server and its worker."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it at once, as a lost machine does."""
        if self.process is not None:
            with suppress(ProcessLookupError):  # it never started
                self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def empty_database(folder: Path) -> str:
    """Return the URI of a database without runs, made as a root's is."""
    folder.mkdir()
    prepare_database(Root.parse(folder))
    return database_uri(Root.parse(folder))


@pytest.fixture(scope="session")
def mlflow_uri() -> Iterator[str]:
    """The MLflow server of the whole run: nobody may kill it, and experiments on it have names of their own."""

    @contextmanager
    def start(folder: Path) -> Iterator[dict[str, str]]:
        with mlflow_server(folder) as server:
            yield {"uri": server.uri}

    with one_of("mlflow", start) as found:
        yield found["uri"]


def use(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    """Have trackers made from now on use `uri`, as processes do that are started with it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
