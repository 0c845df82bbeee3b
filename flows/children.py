"""Servers and workers as children of this process: started with their output in a log, waited for, stopped in the end.

The kernel ends them when this process is killed, so no server is left behind. What this gives up: on other systems than
Linux a killed process leaves its servers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.processes import die_with_parent

CHECKOUT = Path(__file__).parent.parent
LOOPBACK = "127.0.0.1"
POOL = "local"
"""Work pool of the deployments."""
START_TIMEOUT_S = 300
"""A new database and a busy machine: measured 6 to 90 s."""
STOP_TIMEOUT_S = 40
"""A trainer that is told to stop writes a checkpoint first."""
_LOG = "its log is in the folder logs of the root"


class NoServer(RuntimeError):
    """A server that was started here does not answer."""


def prefect_command(port: int, host: str = LOOPBACK) -> list[str]:
    """Return the command of a Prefect server."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]


def worker_command() -> list[str]:
    """Return the command of a worker. The queues limit what works at the same time, never `--limit`.

    With it a Retry within a second or two of the failure ends the worker of Prefect 3.8.8: "this borrower is already
    holding one of this CapacityLimiter's tokens".
    """
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]


@contextmanager
def child(
    name: str,
    command: list[str],
    root: Path,
    environment: dict[str, str],
    patience_s: float = STOP_TIMEOUT_S,
    descriptors: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, which inherits `descriptors`, until the block ends; its output goes to `logs/<name>.log`."""
    (root / "logs").mkdir(parents=True, exist_ok=True)
    with (root / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=CHECKOUT,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    try:
        yield process
    finally:
        _stop(process, patience_s)


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ask the server to leave, then end whatever is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until `url` answers. Raises NoServer if the server ends or takes longer than START_TIMEOUT_S."""
    from urllib.request import urlopen

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NoServer(f"{url}: the server ended with status {process.returncode}; {_LOG}")
        try:
            with urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise NoServer(f"{url}: no answer within {START_TIMEOUT_S} s; {_LOG}")
