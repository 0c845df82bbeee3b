"""Follow the trainer logs of a run, and stop a run: on this machine, by Prefect's worker, on Slurm or Kubernetes.

A stop saves: the trainer gets SIGTERM and writes a checkpoint, and the same command or flow run continues from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

from herd.storage.lease import lease_holder
from herd.storage.root import Root
from herd.tasks.console import Wait
from herd.tasks.launch.base import orphans
from herd.tasks.report.progress import log_folders
from herd.tasks.runs.records import RunRecord, Runs, rerun_command
from herd.tasks.tracking.moved_root import read_access

POLL_S = 0.5
LIVE_S = 10.0
"""Between two looks at the lease of a run whose log is followed."""


def find_log(root: Root, run: str, stage: str = "", rank: int = 0) -> Path:
    """Return the log of a rank in the newest attempt of `stage`, by default the last stage that has logs.

    Raises ValueError naming the runs, stages or ranks that exist.
    """
    record = Runs(root).find(run)
    folders = {name: attempts for name, attempts in log_folders(root, record.name).items() if attempts}
    if not folders:
        where = "" if root.is_local else f"; those of a run on another machine are there, in its folder {root.local}"
        raise ValueError(f"run {run} has no trainer logs in {root.file('runs', run, 'logs')}{where}")
    if stage and stage not in folders:
        raise ValueError(f"--stage: {stage!r} has no logs in run {run}; stages: {', '.join(folders)}")
    attempt = folders[stage or list(folders)[-1]][-1]
    log = attempt / f"rank-{rank}.log"
    if not log.is_file():
        ranks = sorted(int(path.stem.rpartition("-")[2]) for path in attempt.glob("rank-*.log"))
        known = f"ranks: {ranks[0]} to {ranks[-1]}" if ranks else "it has none yet; look again when its processes run"
        raise ValueError(f"--rank: {rank} has no log in {attempt}; {known}")
    return log


def follow_log(root: Root, run: str, stage: str = "", rank: int = 0) -> Iterator[str]:
    """Yield the text of a log as it grows, then that of the next attempts and stages, until no process has the run.

    Raises ValueError as `find_log`, except that a living run may still be about to write its first log.
    """
    log, offset, looked, live = Path(), 0, float("-inf"), True
    while True:
        if time.monotonic() - looked > LIVE_S:
            live, looked = lease_holder(root, f"runs/{run}") is not None, time.monotonic()
        try:
            newest = find_log(root, run, stage, rank)
        except ValueError:
            if not live:
                raise
        else:
            if newest != log:
                yield f"==> {newest} <==\n"
                log, offset = newest, 0
            with log.open("rb") as file:
                file.seek(offset)
                text = file.read()
            offset += len(text)
            if text:
                yield text.decode(errors="replace")
                continue
        if not live:
            return
        time.sleep(POLL_S)


def stop_run(root: Root, name: str, log: Callable[[str], None], patience_s: float = 0.0) -> str:
    """Ask the process of run `name` to save and end; return what happened in a line.

    A flow run of a deployment is cancelled, because its worker would restart what only dies. Waits until the run is
    free, at most `patience_s` (0: as long as it takes). Raises ValueError if it cannot be stopped from here.
    """
    record, lease = Runs(root).find(name), f"runs/{name}"
    holder = lease_holder(root, lease)
    if holder is None:
        return _stop_orphan(root, record, log)
    if holder.holder != name:
        raise ValueError(f"run {name} is used by {holder}, which does not train it; wait until it ends")
    if _cancel(root, record):
        log(f"asked Prefect to cancel {name}; its trainer saves a checkpoint first")
    elif holder.alive():
        os.kill(holder.pid, signal.SIGTERM)
        log(f"asked process {holder.pid} to save and end")
    else:
        raise ValueError(
            f"run {name} works on another machine: {holder}; there, write: herd stop {name}, or: kill {holder.pid}"
        )
    wait, deadline = Wait(f"the end of {name}", log), time.monotonic() + patience_s if patience_s else float("inf")
    while holder := lease_holder(root, lease):
        if time.monotonic() > deadline:
            return f"{name} still saves after {patience_s:.0f} s; herd status {name} shows when it has ended"
        wait.note(f"{holder} still has it")
        time.sleep(POLL_S)
    return f"{name} is stopped; the same command, or: {rerun_command(root, record)}, continues it"


def _stop_orphan(root: Root, record: RunRecord, log: Callable[[str], None]) -> str:
    """End the job of a scheduler that outlived the process of the run."""
    attempts = [attempt for attempts in log_folders(root, record.name).values() for attempt in attempts[-1:]]
    for launch in orphans(attempts):
        log(f"{launch.label} runs without a supervisor; it is asked to save and end")
        launch.stop()
        return f"{record.name} is stopped; the same command continues it"
    return f"{record.name} does not run; its record says {record.state}"


def _cancel(root: Root, record: RunRecord) -> bool:
    """Cancel the flow run of a deployment; return whether there is one. Raises httpx.HTTPStatusError if refused."""
    from httpx import TransportError
    from prefect import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelling

    if not record.prefect_run:
        return False
    with known_server(root) as known:
        if not known:
            return False
        with suppress(ObjectNotFound, TransportError), get_client(sync_client=True) as client:
            flow_run = client.read_flow_run(UUID(record.prefect_run))
            if flow_run.deployment_id is not None:
                client.set_flow_run_state(flow_run.id, Cancelling())
                return True
    return False


@contextmanager
def known_server(root: Root) -> Iterator[bool]:
    """Use the Prefect server of the environment, or that of a `herd up` on this root; yield whether there is one."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    access = {} if PREFECT_API_URL.value() else read_access(root)
    settings = {
        setting: access[setting.name]
        for setting in (PREFECT_API_URL, PREFECT_API_AUTH_STRING)
        if setting.name in access
    }
    with temporary_settings(settings):
        yield bool(PREFECT_API_URL.value())
