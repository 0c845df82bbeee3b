"""The witness of a run or a study: a small process that outlives the one at work by some seconds and says it is gone.

A worker that is told to stop kills the processes of its flow runs at once (SIGKILL, found by running Prefect 3.8.8),
and the kernel kills without asking; then nobody is left to say how the run ended, and heartbeats take 75 s to miss
it. The witness sleeps on a pipe that only that process holds; when it closes without a word the witness settles
record, MLflow and Prefect, and starts the flow run again if its crash is not answered (flows/crash_recovery.py). It
costs 10 MB and no CPU while it sleeps. What this gives up: it dies with its machine; then the automation for zombies
and the flow `reconcile` are left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from storage.root import Root

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from tasks.runs.recovery import Settler

LET_OTHERS_S = 2.0
"""A worker that lives reports the end itself, and knows why."""
CANCELLING_S = 15.0
OVER = b"over\n"


@contextmanager
def witnessed(root: Root, work: str, attempt: int) -> Iterator[None]:
    """Have the end of this process noticed while it is at `work`, in Prefect attempt `attempt` (0: without Prefect).

    `work` is a folder of the root with a record in it: `runs/quickstart-3`, `studies/ramp-cpu`.

    If the block ends by itself, by an Exception or by Prefect's Pause there is nothing to see: the flow reports those.
    A witness of a paused flow run would take the next attempt, begun by a quick answer, for the one that is gone.
    """
    words = [sys.executable, "-m", "flows.watchdog", root.uri, str(root.local), work, str(attempt)]
    logs = root.file(work, "logs")
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
    except BaseException as error:
        from prefect.exceptions import Pause  # the witness itself does without

        if isinstance(error, (Exception, Pause)):
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
        root, work, attempt = Root(words[0], Path(words[1])), words[2], int(words[3])
        time.sleep(LET_OTHERS_S)
        testify(root, work, attempt)


def _wait(parent: int) -> bytes:
    """Return what the parent said when it let go of the pipe, or b"" when it died."""
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            return os.read(0, len(OVER))
    return b""


def testify(root: Root, work: str, attempt: int) -> None:
    """Settle `work`, whose process is gone. Imports what it needs now, because it rarely does."""
    from prefect.settings import PREFECT_API_URL

    if attempt and PREFECT_API_URL.value():
        try:
            _tell_prefect(root, work, attempt)
            return
        except Exception as error:  # the server may have been stopped together with the process
            print(f"Prefect did not take it: {error!r}", flush=True)
    _settler(root, work, None).settle(_name(work))


def _tell_prefect(root: Root, work: str, attempt: int) -> None:
    """Settle `work` and have it started again, if that is wanted and nobody else does it."""
    from prefect import get_client

    from flows.crash_recovery import resume, resume_soon

    name, flow_run = _name(work), UUID(_flow_run(root, work))
    with get_client(sync_client=True) as client:
        resume_soon(client, flow_run, attempt)
        settler = _settler(root, work, client)  # its slow imports come after what is urgent
        settler.await_cancellation(name, CANCELLING_S)
        settler.settle(name, attempt=attempt)
        resume(client, flow_run, attempt)


def _name(work: str) -> str:
    return work.partition("/")[2]


def _flow_run(root: Root, work: str) -> str:
    """Return the flow run that the record of `work` names; whatever else a record holds is not needed for it."""
    file = "run.json" if work.startswith("runs/") else "study.json"
    return str(json.loads(root.read(work, file) or b"{}")["prefect_run"])


def _settler(root: Root, work: str, client: SyncPrefectClient | None) -> Settler[Any]:
    if work.startswith("runs/"):
        from tasks.runs.recovery import RunSettler

        return RunSettler(root, client)
    from tasks.runs.recovery import StudySettler

    return StudySettler(root, client)


if __name__ == "__main__":
    main(sys.argv[1:])
