"""`herd up`: a Prefect server, an MLflow server and one worker on this machine, with the deployments registered.

Everything binds to loopback. The three are child processes of this one; Ctrl-C, SIGTERM or the death of any of them
stops all. What this gives up: it is for one person on one machine (SQLite behind both servers).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

CHECKOUT = Path(__file__).parent.parent
POOL = "local"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 20
console = Console(highlight=False, soft_wrap=True)


def serve(root: Path, prefect_port: int, mlflow_port: int) -> None:
    """Start everything, print the two addresses, and wait until it is stopped. Raises ValueError if a port is taken."""
    for name, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
        _check_free(name, port)
    if not (CHECKOUT / "prefect.yaml").is_file():
        raise ValueError(f"herd up: {CHECKOUT} has no prefect.yaml; run it from a checkout (make run installs one)")
    root.mkdir(parents=True, exist_ok=True)
    prefect_url, mlflow_url = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
    environment = _environment(root, prefect_url, mlflow_url)
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as children:
        started = [
            children.enter_context(child("mlflow", mlflow_command(root, mlflow_port), root, environment)),
            children.enter_context(child("prefect", prefect_command(prefect_port), root, environment)),
        ]
        await_answer(f"{mlflow_url}/health", started[0])
        await_answer(f"{prefect_url}/api/health", started[1])
        register(environment)
        worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--limit", "1"]
        started.append(children.enter_context(child("worker", worker, root, environment)))
        console.print(f"Prefect  {prefect_url}/deployments")
        console.print(f"MLflow   {mlflow_url}/#/experiments?workflowType=machine_learning")
        console.print(f"logs     {root / 'logs'}")
        console.print("Ctrl-C stops all three")
        _wait(started)


def mlflow_command(root: Path, port: int) -> list[str]:
    """Return the command of an MLflow server over the root's database: 1 worker, no job runners (15 processes else)."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{root}/mlflow.db"]
    return [*command, *store, "--artifacts-destination", str(root / "mlflow-artifacts")]


def prefect_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def register(environment: dict[str, str]) -> None:
    """Make the work pool and register every deployment of prefect.yaml. Raises RuntimeError with Prefect's message."""
    for words in (
        ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
        ["--no-prompt", "deploy", "--all"],
    ):
        command = [sys.executable, "-m", "prefect", *words]
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"prefect {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


@contextmanager
def child(name: str, command: list[str], root: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; its output goes to `logs/<name>.log` under the root."""
    (root / "logs").mkdir(exist_ok=True)
    with (root / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=CHECKOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to leave, then end whatever is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until `url` answers. Raises RuntimeError if the server ends or takes longer than two minutes."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{url}: the server ended with status {process.returncode}; see the logs folder")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"{url}: no answer within {START_TIMEOUT_S} s; see the logs folder")


def _environment(root: Path, prefect_url: str, mlflow_url: str) -> dict[str, str]:
    return {
        **os.environ,
        "PREFECT_API_URL": f"{prefect_url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "MLFLOW_TRACKING_URI": mlflow_url,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HERD_ROOT": str(root),
    }


def _check_free(option: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"{option}: port {port} is taken; choose another, such as {option} {port + 1}") from error


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _wait(started: list[subprocess.Popen[bytes]]) -> None:
    try:
        while all(process.poll() is None for process in started):
            time.sleep(0.5)
        console.print("[red]one of the servers ended; stopping the others[/] (see the logs folder)")
    except KeyboardInterrupt:
        console.print("stopping")
