"""Servers that do not answer: a run is made to its end without them, and a stop does not wait for them."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from prefect import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from herd.flows.local_server import await_answer, child, prefect_command
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.operate.recovery import reconcile
from tests.e2e.conftest import Herd, NewHerd, bytes_made, copy_artifacts, lies, read_until, record

SLACK_S = 10.0
"""For a machine whose processors others use."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.fault("F16")
def test_a_run_is_made_to_its_end_without_its_prefect_server(
    herd: Herd, undisturbed: dict[str, str], new_herd: NewHerd, tmp_path: Path
) -> None:
    made, port = new_herd(tmp_path / "root"), free_port()
    copy_artifacts(herd, made.root, "checkpoint/tiny-ramp-*")
    made.home = tmp_path / "home"
    made.home.mkdir()
    environment = {**os.environ, "PREFECT_HOME": str(made.home)}
    with child("prefect", prefect_command(port), made.home, environment) as server:
        made.api = f"http://127.0.0.1:{port}/api"
        await_answer(f"{made.api}/health", server)
        process = made.start("run", made.recipe)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ramp -> main"):
                os.killpg(server.pid, signal.SIGKILL)
                break
        printed = process.stdout.read()
        process.wait(timeout=500)
    ended = record(made, "tiny-1")
    assert (ended.state, ended.verdict) == ("finished", "promoted"), f"{printed}{ended.error}"
    assert "champion" in printed
    assert "Traceback" not in printed
    assert process.returncode == 0, printed
    assert "next:" in printed  # the summary
    root = Root.parse(made.root)
    assert bytes_made(root, "tiny-1") == undisturbed
    with child("prefect", prefect_command(port), made.home, environment) as server:
        await_answer(f"{made.api}/health", server)
        with temporary_settings({PREFECT_API_URL: made.api}), get_client(sync_client=True) as client:
            reconcile(root, client)
        assert lies(made) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stop_ends_in_ten_seconds_without_an_answer_of_prefect_and_mlflow(
    number: int, recipe: str, new_herd: NewHerd, tmp_path: Path
) -> None:
    """Its Prefect server hangs and MLflow's database is locked; both are told later."""
    made = new_herd(tmp_path / "root")
    process = made.start("run", recipe, "--until", "curate", server=False)
    read_until(process, "run tiny-1 in")
    read_until(process, "collect")
    server = next(each for each in psutil.Process(process.pid).children() if "uvicorn" in each.cmdline())
    server.suspend()
    try:
        with closing(sqlite3.connect(made.root / "mlflow.db", timeout=60)) as database:
            database.execute("begin exclusive")
            began = time.monotonic()
            process.send_signal(number)
            printed, _ = process.communicate(timeout=60)
            took = time.monotonic() - began
    finally:
        server.resume()
    assert took < 10 + SLACK_S, printed
    assert process.returncode not in (0, 1), printed
    assert "Traceback" not in printed
    ended = record(made, "tiny-1")
    assert ended.state == "interrupted"
    assert ended.error.startswith("stopped by")
