"""A small process that outlives the process of a run or a study and, if that one is killed, records how it ended.

Prefect's worker kills the processes of its flow runs with SIGKILL when it is told to stop, and so does the kernel
without memory; Prefect's heartbeats take 75 s to notice. The watchdog sleeps on a pipe that only the watched process
holds: 10 MB and no CPU. It dies with its machine; then Prefect's automation and the flow `reconcile` are left.
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

WORKER_S = 2.0
"""Seconds in which a living worker reports the end itself: it knows the reason."""
CANCELLING_S = 15.0
DISMISS = b"over\n"


@contextmanager
def watched(root: Root, work: str, attempt: int) -> Iterator[None]:
    """Watch this process while the block runs, in Prefect attempt `attempt` (0: without Prefect).

    `work` is a folder of the root with a record in it: `runs/quickstart-3`, `studies/ramp-cpu`. The watchdog is
    dismissed if the block ends by itself, by an Exception or by Prefect's Pause: the flow reports those.
    """

    def ignore_signals() -> None:  # a stop of the group, or of everything that systemd started, must not end it too
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def dismiss() -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(DISMISS, timeout=5)

    logs = root.file(work, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "watchdog.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.watchdog", root.uri, str(root.local), work, str(attempt)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=ignore_signals,
            cwd=Path(__file__).parent.parent,
        )
    try:
        yield
    except BaseException as error:
        from prefect.exceptions import Pause  # the watchdog itself must not import Prefect

        # After a Pause a quick answer starts the next attempt, which the watchdog would take for the one that is gone.
        if isinstance(error, (Exception, Pause)):
            dismiss()
        raise  # after a signal this process may still be killed while it stops: the pipe closes with it
    dismiss()


def main(arguments: list[str]) -> None:
    """Wait for the end of the process that started this one, and record it if that process could not."""
    parent = os.getppid()
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            if os.read(0, len(DISMISS)) == DISMISS:
                return
            break
    time.sleep(WORKER_S)
    record_end(Root(arguments[0], Path(arguments[1])), arguments[2], int(arguments[3]))


def record_end(root: Root, work: str, attempt: int) -> None:
    """Reconcile record, MLflow and Prefect of `work`, whose process is gone, and resume it if nothing else does.

    Imports are inside because they are slow and this is rare.
    """
    from prefect.settings import PREFECT_API_URL

    name = work.partition("/")[2]
    if attempt and PREFECT_API_URL.value():
        try:
            from prefect import get_client

            from flows.crash_recovery import resume, resume_soon

            record = json.loads(root.read(work, "run.json" if work.startswith("runs/") else "study.json") or b"{}")
            flow_run = UUID(str(record["prefect_run"]))
            with get_client(sync_client=True) as client:
                resume_soon(client, flow_run, attempt)  # before the slow imports of the settler
                settler = _settler(root, work, client)
                settler.await_cancellation(name, CANCELLING_S)
                settler.settle(name, attempt=attempt)
                resume(client, flow_run, attempt)
            return
        except Exception as error:  # the server may have been stopped together with the process
            print(f"Prefect did not take it: {error!r}", flush=True)
    _settler(root, work, None).settle(name)


def _settler(root: Root, work: str, client: SyncPrefectClient | None) -> Settler[Any]:
    from tasks.runs.recovery import RunSettler, StudySettler

    return RunSettler(root, client) if work.startswith("runs/") else StudySettler(root, client)


if __name__ == "__main__":
    main(sys.argv[1:])
