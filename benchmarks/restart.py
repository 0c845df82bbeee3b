"""How long a restart takes: from SIGKILL of one rank to the first step after it, on this machine.

Measured from outside, with a real job: the kill, the outcome, the next attempt's processes, the checkpoint, one step.
`torchrun` is measured the same way, as what one would use without an agent; its attempts are fresh launches as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

from herd.llama3.train.job import AttemptResult, TrainJob, last_lines
from herd.storage.processes import die_with_parent
from herd.tasks.cluster import Cluster
from herd.tasks.launch.base import SHUTDOWN_S, Launch, Launcher, trainer_environment
from herd.tasks.launch.local import Agents, LocalLauncher, processor_seconds, rank_process

LONGEST_S = 300.0


@dataclass(frozen=True)
class Restart:
    """Seconds of one restart."""

    first_start: float
    """From the first launch to its first step, with all imports."""
    noticed: float
    """From the kill until the launcher says that the attempt is over."""
    total: float
    """From the kill to the first step of the next attempt."""


def measure_restart(job: Path, processes: int, logs: Path, torchrun: bool = False, steps: int = 4) -> Restart:
    """Train `job` on `processes` ranks, kill the last one after `steps` steps, start again, and stop after a step.

    The job needs more steps than that and a work folder of its own. Raises RuntimeError if nothing comes for minutes.
    """
    cluster, journal = (
        Cluster(processes=processes),
        TrainJob.model_validate_json(job.read_text()).work / "journal.jsonl",
    )
    local = nullcontext(LocalLauncher(cluster, agents := Agents(logs / "agent.log")))
    with agents, TorchrunLauncher(cluster) if torchrun else local as launcher:
        return _measured(launcher, job, processes, logs, lambda: _lines(journal), steps)


def _measured(
    launcher: Launcher, job: Path, processes: int, logs: Path, count: Callable[[], int], steps: int
) -> Restart:
    began = time.monotonic()
    launch = launcher.start(job, processes, logs / "first")
    _await(lambda: count() > 0, launch)
    started = time.monotonic()
    _await(lambda: count() >= steps, launch)
    killed = time.monotonic()
    rank_process(processes - 1).kill()
    _await(lambda: launch.poll() is not None, None)
    noticed, before = time.monotonic(), count()
    again = launcher.start(job, processes, logs / "second")
    _await(lambda: count() > before, again)
    stepped = time.monotonic()
    again.stop()
    return Restart(started - began, noticed - killed, stepped - killed)


def _lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _await(condition: Callable[[], bool], launch: Launch | None) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        ended = launch.poll() if launch is not None else None
        if ended is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the trainer ended, or did nothing for {LONGEST_S:.0f} s: {ended}")
        time.sleep(0.005)


class TorchrunLauncher:
    """The same ranks under torch's own launcher, for comparison only."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.launched: list[TorchrunLaunch] = []

    def __enter__(self) -> TorchrunLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self.launched:
            launch.stop()

    def capacity(self) -> int:
        """Return how many processes were asked for."""
        return self.cluster.processes

    def live(self, job: Path) -> None:
        """Nothing outlives this process: `__exit__` ends it."""

    def start(self, job: Path, processes: int, logs: Path) -> TorchrunLaunch:
        """Start torchrun with a store of its own and no restarts."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
        command += ["--nproc-per-node", str(processes), "-m", "herd.llama3.train.main", str(job)]
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "torchrun.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **trainer_environment(self.cluster.process_threads)},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self.launched.append(TorchrunLaunch(process, logs / "torchrun.log"))
        return self.launched[-1]


class TorchrunLaunch:
    """One torchrun."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log, self.logs = process, log, log.parent
        self.label = f"torchrun, process {process.pid}"

    def poll(self) -> AttemptResult | None:
        """Return how it ended, or None while it runs."""
        status = self.process.poll()
        return None if status is None else AttemptResult(status=status, message=last_lines(self.log) if status else "")

    def waits(self) -> bool:
        """Nothing waits here."""
        return False

    def used_s(self) -> float:
        """Return the processor seconds of torchrun and its ranks."""
        return processor_seconds(self.process.pid)

    def stop(self) -> None:
        """End it with its ranks, which are session leaders of their own."""
        ranks = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()
        try:
            self.process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for rank in ranks:
            with _gone():
                rank.kill()


@contextmanager
def _gone() -> Iterator[None]:
    """Let a process be gone already."""
    try:
        yield
    except psutil.NoSuchProcess:
        return
