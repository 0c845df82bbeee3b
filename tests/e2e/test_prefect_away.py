"""The Prefect server dies for good while a run trains: nothing stalls, nothing fails, and the model is promoted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from herd.flows.local_server import await_answer, child, prefect_command
from herd.storage.processes import free_port
from herd.storage.root import Root
from tests.e2e.conftest import Herd, NewHerd, bytes_made, copy_artifacts, record

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
    assert (ended.state, ended.verdict) == ("finished", "promoted"), printed
    assert "champion" in printed
    assert "Traceback" not in printed
    assert process.returncode == 0, printed
    assert "next:" in printed  # the summary
    assert bytes_made(Root.parse(made.root), "tiny-1") == undisturbed
