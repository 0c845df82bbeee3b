"""A small process that outlives the process of a run or a study and, if that one is killed, reconciles its record.

It sleeps on a pipe that only the watched process holds (10 MB, no CPU) and imports nothing heavy before that breaks.
"""

# Why it exists: a Prefect worker that is told to stop kills its flow runs with SIGKILL, and so does the kernel without
# memory. Without a watchdog (it dies with its machine) the next reconciler pass after the lease timeout sees the death:
# within 30 s with `herd up` (60 s on an object store), within 5 min with the scheduled flow `reconcile` alone.

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
from uuid import UUID

from herd.storage.processes import PACKAGE_FOLDER
from herd.storage.root import Root

WORKER_S = 2.0
"""Seconds in which a living worker reports the end itself: it knows the reason."""
CANCELLING_S = 15.0
WATCH_S, LOOK_S = 60.0, 2.0
"""Time for the next attempt to begin on a busy machine, and between two looks at it."""
DISMISS = b"over\n"


@contextmanager
def watched(root: Root, work: str, attempt: int) -> Iterator[None]:
    """Watch this process while the block runs, in Prefect attempt `attempt` (0: without Prefect).

    `work` is a record's folder and its lease: `runs/quickstart-3`, `studies/ramp-cpu`. A block that ends by itself, by
    an Exception or by Prefect's Pause dismisses the watchdog: the flow reports those.
    """

    def ignore_signals() -> None:  # a stop of the process group or of a systemd unit must not end the watchdog too
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def dismiss() -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(DISMISS, timeout=5)

    logs = root.file(work, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "watchdog.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "herd.flows.watchdog", root.uri, str(root.local), work, str(attempt)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=ignore_signals,
            cwd=PACKAGE_FOLDER,
        )
    try:
        yield
    except BaseException as error:
        from prefect.exceptions import Pause  # the watchdog itself must not import Prefect

        # After a Pause a quick answer starts the next attempt, which the watchdog would take for the dead one.
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
    """Reconcile the record `work`, whose process is dead, and restart its flow run until the next attempt begins."""
    # imports are inside: they take seconds and are rarely needed
    from prefect.client.orchestration import SyncPrefectClient, get_client
    from prefect.settings import PREFECT_API_URL

    from herd.storage.fenced import FencedRecords
    from herd.tasks.operate.recovery import reconcile_record, restart

    def restart_dead(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
        """Restart the flow run if attempt `attempt` crashed; return whether the next one is still to begin."""
        flow_run = client.read_flow_run(flow_run_id)
        if flow_run.run_count != attempt or flow_run.state is None:
            return False
        return restart(client, flow_run) or flow_run.state.is_scheduled() or flow_run.state.is_pending()

    if attempt and PREFECT_API_URL.value():
        try:
            folder, _, name = work.partition("/")
            record = json.loads(FencedRecords(root, folder).read(name) or b"{}")
            flow_run_id = UUID(str(record["prefect_run"]))
            with get_client(sync_client=True) as client:
                restart_dead(client, flow_run_id)  # before the worker's second report, and before MLflow is imported
                deadline = time.monotonic() + CANCELLING_S  # a living worker cancels it
                while (state := client.read_flow_run(flow_run_id).state) and state.is_cancelling():
                    if time.monotonic() > deadline:
                        break
                    time.sleep(1.0)
                reconcile_record(root, client, work, attempt)
                deadline = time.monotonic() + WATCH_S
                while restart_dead(client, flow_run_id) and time.monotonic() < deadline:
                    time.sleep(LOOK_S)
            return
        except Exception as error:  # the server may have been stopped together with the process
            print(f"Prefect did not take it: {error!r}", flush=True)
    reconcile_record(root, None, work)


if __name__ == "__main__":
    main(sys.argv[1:])
