"""The witness of a run: a small process that outlives the run's own by some seconds and says that it is gone.

A worker that is told to stop kills the processes of its flow runs at once (SIGKILL, found by running Prefect 3.8.8),
and the kernel kills without asking; then nobody is left to say how the run ended, and heartbeats take 75 s to miss it.
The witness sleeps on a pipe that only the run's process holds; when that closes without a word it settles the record,
MLflow and Prefect, and starts the run again if its crash is not answered (flows/resume.py). It costs 10 MB and no CPU
while it sleeps. What this gives up: it dies with its machine; then the automation for zombies and the flow `reconcile`
are left.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

from storage.root import Root

LET_OTHERS_S = 2.0
"""A worker that lives reports the end itself, and knows why."""
CANCELLING_S = 15.0
OVER = b"over\n"


@contextmanager
def witnessed(root: Root, run: str, attempt: int) -> Iterator[None]:
    """Have the end of this process noticed while it works on `run` in Prefect attempt `attempt` (0: without Prefect).

    If the block ends by itself or by an Exception there is nothing to see: those are reported by the flow.
    """
    words = [sys.executable, "-m", "flows.witness", root.uri, str(root.local), run, str(attempt)]
    logs = root.file("runs", run, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "witness.log").open("ab") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that it survives a signal to the group, and by _deaf one to everybody
            preexec_fn=_deaf,
            cwd=Path(__file__).parent.parent,
        )
    try:
        yield
    except Exception:
        _dismiss(process)
        raise
    # Anything else (a termination signal) is on its way out and may be killed on it: the pipe closes with the process.
    _dismiss(process)


def _deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _dismiss(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        process.communicate(OVER, timeout=5)


def main(words: list[str]) -> None:
    """Wait for the end of the process that started this one; see to what it could not say."""
    if _wait(os.getppid()) != OVER:
        root, run, attempt = Root(words[0], Path(words[1])), words[2], int(words[3])
        time.sleep(LET_OTHERS_S)
        testify(root, run, attempt)


def _wait(parent: int) -> bytes:
    """Return what the parent said when it let go of the pipe, or b"" when it died."""
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            return os.read(0, len(OVER))
    return b""


def testify(root: Root, run: str, attempt: int) -> None:
    """Settle `run`, whose process is gone. Imports what it needs now, because it rarely does."""
    from prefect.settings import PREFECT_API_URL

    if attempt and PREFECT_API_URL.value():
        try:
            _tell_prefect(root, run, attempt)
            return
        except Exception as error:  # the server may have been stopped together with the run
            print(f"Prefect did not take it: {error!r}", flush=True)
    from tasks.reconcile import Settler

    Settler(root, None).settle(run)


def _tell_prefect(root: Root, run: str, attempt: int) -> None:
    """Settle `run` and have it started again, if that is wanted and nobody else does it."""
    from prefect import get_client

    from flows.resume import resume, resume_soon
    from tasks.runs import Runs

    flow_run = UUID(Runs(root).find(run).prefect_run)
    with get_client(sync_client=True) as client:
        resume_soon(client, flow_run, attempt)
        from tasks.reconcile import Settler  # the slow import comes after what is urgent

        settler = Settler(root, client)
        settler.await_cancellation(run, CANCELLING_S)
        settler.settle(run, attempt=attempt)
        resume(client, flow_run, attempt)


if __name__ == "__main__":
    main(sys.argv[1:])
