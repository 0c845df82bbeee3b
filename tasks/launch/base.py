"""The interface of launchers: start the processes of a job, training or evaluation, and say how they ended.

Each attempt is a fresh launch with new ranks, port and store: in-job restarts with gloo fail on stale addresses (9 of 9
fresh launches recovered, 3 of 12 in-job restarts). Output goes to files, never to a pipe, so that the trainer does not
block or die with its reader. A failure stops all ranks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.train.job import GRACE_S, AttemptResult
from herd.storage.filesystem import write_atomic
from herd.tasks.cluster import SCHEDULERS, Cluster
from herd.tasks.console import Wait
from herd.tasks.errors import SchedulerRefused, TrainingFailed

REAP_S = 5.0
"""From the end of the ranks' grace to the end of their agent."""
SHUTDOWN_S = GRACE_S + REAP_S
"""Longest shutdown of an agent whose ranks have nothing to save."""
WATCH_S = 0.1
"""Between two polls of a launch: part of every restart."""
LOST_S = 120.0
"""How long a query of a scheduler may fail: Slurm's backup controller takes over after 120 s by default."""
NO_OUTCOME = -signal.SIGKILL
"""Status of an attempt whose agents left no outcome."""


Excluded = Callable[[], Mapping[str, str]]
"""Returns the hosts that must not be used now, each with the reason (`herd.tasks.launch.hosts`)."""


class Launch(Protocol):
    """A trainer that was started and may still run."""

    @property
    def label(self) -> str:
        """Return the name that users see: `Slurm job 17`."""
        ...

    @property
    def logs(self) -> Path:
        """Return the folder of this attempt's logs, one file for each rank."""
        ...

    def poll(self) -> AttemptResult | None:
        """Return how it ended, or None while it waits or runs."""
        ...

    def waits(self) -> bool:
        """Return whether it waits in a queue, so that no step can be expected."""
        ...

    def used_s(self) -> float | None:
        """Return the processor seconds that it has used on this machine; None if it runs elsewhere."""
        ...

    def stop(self) -> None:
        """Ask the trainer to save and exit; kill what is left after the grace."""
        ...


class Launcher(Protocol):
    """Starts trainers."""

    def capacity(self) -> int:
        """Return how many processes could be started now, at most `cluster.processes`."""
        ...

    def live(self, job: Path) -> Launch | None:
        """Return the trainer that an earlier supervisor left behind when it was killed, or None.

        The holder of the artifact's lease follows it instead of starting another: two trainers would write to one
        folder. A trainer that was started with another job file (a longer stage, another layout) is stopped first. A
        flow that is cancelled stops its trainer itself.
        """
        ...

    def start(self, job: Path, processes: int, logs: Path) -> Launch:
        """Start `processes` ranks for the job file `job`, each with its own log in the folder `logs`."""
        ...


def wait(launch: Launch, stopped: Callable[[], bool] = lambda: False) -> AttemptResult:
    """Wait until `launch` has ended and return how; stop it if the wait is interrupted, or `stopped` says so.

    Raises SchedulerRefused as `stopped_on_error` does.
    """
    with stopped_on_error(launch):
        while (outcome := launch.poll()) is None:
            if stopped():
                raise InterruptedError(f"{launch.label} was stopped")
            time.sleep(WATCH_S)
    return outcome


@contextmanager
def stopped_on_error(launch: Launch) -> Iterator[None]:
    """Stop `launch` if the block raises; leave it alone if that is because its scheduler does not answer.

    Raises SchedulerRefused with what to do then.
    """
    try:
        try:
            yield
        except SchedulerRefused:  # the job itself may be well, and the next supervisor finds it
            raise
        except BaseException:
            launch.stop()
            raise
    except SchedulerRefused as error:
        raise SchedulerRefused(
            f"{error}\n{launch.label} was not stopped and may still run; when the scheduler answers, the same command "
            "(in Prefect: Retry) follows it again, and herd stop RUN ends a training job"
        ) from error


def query(*command: str, forgotten: str | None = None) -> str:
    """Return the output of a command that changes nothing, "" if it fails with the message `forgotten`.

    It is repeated while it fails, and runs in its own session, so that Ctrl-C does not interrupt it. Raises
    SchedulerRefused with its error message after LOST_S.
    """
    wait, deadline = Wait(command[0]), time.monotonic() + LOST_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        if done.returncode == 0:
            return done.stdout.strip()
        if forgotten and forgotten in done.stderr:
            return ""
        if time.monotonic() > deadline:
            raise SchedulerRefused(f"{shlex.join(command)}: failed for {LOST_S:.0f} s: {done.stderr.strip()}")
        wait.note(done.stderr.strip() or f"status {done.returncode}")
        time.sleep(1.0)


ANSWER_S = 10
"""How long a command may take that only asks whether a job could start."""
Fault = tuple[str, str]
"""What a scheduler lacks, and what to do."""


def answer_of(*command: str) -> tuple[int, str, str]:
    """Return status, output and the last line of the error output of a command; it may take ANSWER_S."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, start_new_session=True)
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {ANSWER_S} s"
    except OSError as error:
        return 1, "", error.strerror or str(error)
    return done.returncode, done.stdout, next(iter(done.stderr.strip().splitlines()[-1:]), "")


def launch_key(job: Path) -> str:
    """Return the name by which a new supervisor finds the trainer of the job file `job`.

    It starts with the work folder, which names stage and spec. The hash distinguishes equal recipes in two roots,
    since a scheduler has one list of names for all users.
    """
    return f"{job.parent.name}-{hashlib.sha256(os.path.realpath(job).encode()).hexdigest()[:8]}"


def fitting(span: StageSpan, cluster: Cluster, capacity: int) -> int:
    """Return how many processes to start on a `capacity`: whole copies of the model that split each batch.

    tp, cp and pp stay as they are and dp shrinks; the token stream depends on the position only, so the data are the
    same. Raises TrainingFailed if not even one copy fits.
    """
    copy, replicas = cluster.layout.model_parallel, cluster.layout.dp_replicate
    for dp in range(min(capacity, cluster.processes) // copy, 0, -1):
        if dp % replicas == 0 and all(segment.batch % (segment.seq_len * dp) == 0 for segment in span.segments):
            return dp * copy
    if not capacity:
        where = "this machine" if cluster.nodes is None else f"{cluster.launcher}, on its nodes that are up,"
        device = "GPU" if cluster.trainer_device == "cuda" else "place for a process"
        raise TrainingFailed(
            f"stage {span.name}: {where} has no {device}, and cluster.processes is {cluster.processes}; look with "
            "herd doctor --cluster FILE"
        )
    raise TrainingFailed(
        f"stage {span.name}: {capacity} of {cluster.processes} processes are there, and the layout needs "
        f"{copy * replicas} or a multiple that splits the batch; bring nodes back, or make cluster.layout smaller"
    )


def trainer_environment(threads: int, given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the environment variables of every trainer process, on any machine; those `given` win."""
    interface = given.get("NCCL_SOCKET_IFNAME", "")
    # Gloo groups exist beside NCCL's, and without an interface gloo takes the address of the host's name, which may be
    # 127.0.1.1. NCCL also accepts lists and prefixes (eth), gloo only a whole name, and those end with a digit.
    gloo = {"GLOO_SOCKET_IFNAME": interface} if re.fullmatch(r"[A-Za-z][\w.-]*\d", interface) else {}
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that sleep as soon as they wait halve the speed of small models; threads that spin for long take a
        # shared core from other processes (two runs at once: a third of the speed).
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000"),
        # Else glibc returns what a step frees to the kernel: 70,000 page faults a second, an eighth of the time.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**29),
        # torch caches 1,024 bf16 matmuls by shape, and documents always have new shapes: 0.7 GiB on a CPU
        "LRU_CACHE_CAPACITY": "128",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would start in the agent, before the fork
        "PYTHONUNBUFFERED": "1",
        # GPUs: sequences and batches grow within a run, and segments of fixed size would leave holes in the memory
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        **gloo,
        **given,
    }


def keep_job(job: Path, logs: Path) -> None:
    """Copy the job file to the logs, as a record of what this attempt was started with."""
    write_atomic(logs / job.name, job.read_bytes())


def same_job(launch: Launch, job: Path) -> bool:
    """Return whether an attempt was started with the present content of the job file."""
    copy = launch.logs / job.name
    return copy.exists() and copy.read_bytes() == job.read_bytes()


def agent_command(processes: int, per_node: int) -> str:
    """Return the shell command of a node's agent, without the node's number and the address of rank 0.

    Values that may contain a blank come from `agent_variables`, so that no quotes are needed inside quotes.
    """
    counts = f"--processes {processes} --per-node {per_node}"
    return f'exec "$HERD_PYTHON" -m herd.llama3.train.launch "$HERD_JOB" --logs "$HERD_LOGS" {counts}'


def agent_variables(python: str, job: Path, logs: Path) -> dict[str, str]:
    """Return the variables that `agent_command` reads."""
    return {"HERD_PYTHON": python, "HERD_JOB": str(job), "HERD_LOGS": str(logs)}


LAUNCHERS = {
    "local": "herd.tasks.launch.local",
    "slurm": "herd.tasks.launch.slurm",
    "kubernetes": "herd.tasks.launch.kubernetes",
}
"""A new launcher is a module with `launcher` as those of the others, a line here, and its name in `Cluster.launcher`; a
scheduler also has `running_job(logs)`, `run_on_nodes` (see `node_runner`), `scheduler_faults(cluster)`, which lists
what it lacks for a job, and its settings in a field of `Cluster`."""


def launcher_of(cluster: Cluster, name: str, agents: Any, excluded: Excluded = dict) -> Launcher:
    """Return the launcher that `cluster` names; `name` (see `launch_key`) identifies its jobs.

    It starts nothing on the `excluded` hosts. The local one uses `agents` (`herd.tasks.launch.local`). Raises
    ValueError if its commands are missing on this machine.
    """
    launcher: Launcher = import_module(LAUNCHERS[cluster.launcher]).launcher(cluster, name, agents, excluded)
    return launcher


def node_runner(cluster: Cluster) -> Callable[[Cluster, list[str]], tuple[list[str], str]] | None:
    """Return what runs `python PROGRAM` once on each node of a job of the scheduler that `cluster` names.

    It returns the line that each node printed, and the error output. None: it cannot.
    """
    runner: Callable[[Cluster, list[str]], tuple[list[str], str]] | None
    runner = import_module(LAUNCHERS[cluster.launcher]).run_on_nodes
    return runner


def orphans(attempts: Sequence[Path]) -> Iterator[Launch]:
    """Yield the jobs of schedulers that run, with or without a supervisor, of attempts with these log folders."""
    for name in SCHEDULERS:
        find = import_module(LAUNCHERS[name]).running_job
        yield from (launch for logs in attempts if (launch := find(logs)) is not None)
