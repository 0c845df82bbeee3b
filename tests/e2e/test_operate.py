"""`herd up`: real servers, a real worker, the deployment of prefect.yaml run by it, and a clean stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tasks.runs import Runs
from tests.e2e.conftest import TINY, Herd, free_port

pytestmark = pytest.mark.slow


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what `process` prints up to the line that holds `text`."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(f"ended without {text!r}:\n{printed}")


def prefect(api: str, home: Path, *words: str) -> str:
    environment = {**os.environ, "PREFECT_API_URL": api, "PREFECT_HOME": str(home)}
    command = [sys.executable, "-m", "prefect", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_up_registers_the_deployment_and_a_worker_runs_it(
    new_herd: Callable[[Path], Herd], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    herd = new_herd(tmp_path / "root")
    herd.home = tmp_path_factory.mktemp("home")
    ports = free_port(), free_port()
    up = herd.start("up", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]), server=False)
    printed = read_until(up, "Ctrl-C stops")
    assert f"http://127.0.0.1:{ports[0]}" in printed
    servers = psutil.Process(up.pid).children(recursive=True)

    api = f"http://127.0.0.1:{ports[0]}/api"
    config = {"recipe": str(TINY), "root": str(herd.root), "cluster": {"threads": 1}}
    params = json.dumps({"config": config})
    prefect(api, herd.home, "deployment", "run", "pipeline/quickstart", "--params", params, "--watch")

    run = Runs(herd.root).find("tiny-1")
    assert (run.state, run.verdict) == ("finished", "promoted")
    mlflow = MlflowClient(f"http://127.0.0.1:{ports[1]}")
    assert mlflow.get_run(run.mlflow_run).data.tags["prefect.flow_run_id"] == run.prefect_run
    with urllib.request.urlopen(f"{api}/flow_runs/{run.prefect_run}", timeout=10) as answer:
        flow_run = json.load(answer)
    assert (flow_run["name"], flow_run["state_type"]) == ("tiny-1", "COMPLETED")

    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    _, alive = psutil.wait_procs(servers, timeout=20)
    assert not alive
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port))


def test_a_taken_port_is_refused(new_herd: Callable[[Path], Herd], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        printed = new_herd(tmp_path / "root")("up", "--prefect-port", str(port), status=2)
    assert f"port {port} is taken; choose another" in printed
