"""Start the trainer on whatever the deployment names, and say how it ended. Here: the contract, and this machine.

Each attempt is a fresh launch: ranks, port and store are new (in-job restarts with gloo fail on stale addresses: 9 of
9 fresh launches recovered, 3 of 12 in-job restarts did). On this machine the agent that forks the ranks lives through
all attempts of a stage, so a restart pays no import. Output goes to files, never to a pipe, so the trainer cannot block
or die with whoever reads it. What this gives up: a failure stops all ranks, also those that could have gone on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from llama3.recipe.schedule import StageSpan
from llama3.train.attempt import GRACE_S, Attempt, Outcome, last_lines, leave_by
from storage.filesystem import write_atomic
from storage.processes import die_with_parent
from tasks.cluster import Cluster
from tasks.failures import TrainingFailed

REAP_S = 5.0
"""From the end of the ranks' grace to the end of their agent."""
SHUTDOWN_S = GRACE_S + REAP_S
"""As long as an agent may take whose ranks have nothing to save."""
AGENT_DIED = -signal.SIGKILL


class Launch(Protocol):
    """A trainer that was started and may still run."""

    @property
    def label(self) -> str:
        """Return what a person would look for: `Slurm job 17`."""
        ...

    @property
    def logs(self) -> Path:
        """Return the folder of this attempt's logs, one file for each rank."""
        ...

    def poll(self) -> Outcome | None:
        """Return how it ended, or None while it waits or runs."""
        ...

    def waits(self) -> bool:
        """Return whether it waits in a queue, so that no step can be expected."""
        ...

    def used_s(self) -> float | None:
        """Return the processor seconds that it has used on this machine; None if it works elsewhere."""
        ...

    def stop(self) -> None:
        """Ask the trainer to save and leave; see to it that nothing is left after the grace."""
        ...


class Launcher(Protocol):
    """What can start the trainer."""

    def capacity(self) -> int:
        """Return how many processes could be started now, at most as many as were asked for."""
        ...

    def live(self, job: Path) -> Launch | None:
        """Return the trainer that a supervisor left behind when it died, or None.

        Whoever holds the lease of the artifact follows it instead of starting another: two trainers would work in one
        folder. One that was started with another job file (a stage made longer, another layout) is told to save and
        leave first. A flow that is cancelled stops its trainer; a supervisor that is killed leaves it running.
        """
        ...

    def start(self, job: Path, processes: int, logs: Path) -> Launch:
        """Start `processes` ranks for the job file `job`, each with its own log in the folder `logs`."""
        ...


def launch_key(job: Path) -> str:
    """Return the name by which a new supervisor finds the trainer of the job file `job`.

    The folder's name says stage and design; the end tells apart equal recipes in two roots, since a scheduler has one
    list of names for all its users.
    """
    return f"{job.parent.name}-{hashlib.sha256(os.path.realpath(job).encode()).hexdigest()[:8]}"


@contextmanager
def launcher_of(cluster: Cluster, name: str) -> Iterator[Launcher]:
    """Yield the launcher that `cluster` asks for; `name` (see `launch_key`) tells its jobs from those of others.

    Raises ValueError if its commands are missing here.
    """
    match cluster.launcher:
        case "local":
            with LocalLauncher(cluster) as local:
                yield local
        case "slurm":
            from tasks.slurm import SlurmLauncher

            yield SlurmLauncher(cluster, name)
        case "kubernetes":
            from tasks.kubernetes import KubernetesLauncher

            yield KubernetesLauncher(cluster, name)


def fitting(span: StageSpan, cluster: Cluster, capacity: int) -> int:
    """Return how many processes to start when `capacity` are there: whole copies of the model that split each batch.

    tp, cp and pp stay as they are and dp shrinks; the stream is a function of the position, so the same data follow.
    Raises TrainingFailed if not even one copy fits.
    """
    copy, replicas = cluster.layout.model_parallel, cluster.layout.replicas
    for dp in range(min(capacity, cluster.processes) // copy, 0, -1):
        if dp % replicas == 0 and all(part.batch % (part.seq * dp) == 0 for part in span.segments):
            return dp * copy
    raise TrainingFailed(
        f"stage {span.name}: {capacity} of {cluster.processes} processes are there, and the layout needs "
        f"{copy * replicas} or a multiple that splits the batch; bring nodes back, or make cluster.layout smaller"
    )


def trainer_environment(threads: int) -> dict[str, str]:
    """Return the variables that every trainer process gets, on whichever machine."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait slow everything on shared cores
        # torch keeps 1,024 products of bf16 by their shapes, and documents have ever new ones: 0.7 GiB on a CPU
        "LRU_CACHE_CAPACITY": "128",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's would start in the agent, before the fork
        "PYTHONUNBUFFERED": "1",
    }


def keep_job(job: Path, logs: Path) -> None:
    """Leave a copy of the job file with the logs: what this attempt was asked to do."""
    write_atomic(logs / job.name, job.read_bytes())


def same_job(launch: Launch, job: Path) -> bool:
    """Return whether an attempt was asked to do what the job file says now."""
    copy = launch.logs / job.name
    return copy.exists() and copy.read_bytes() == job.read_bytes()


def agent_command(processes: int, per_node: int) -> str:
    """Return the shell command of a node's agent, but for the node's number and where rank 0 is.

    What may hold a blank comes from `agent_variables`, so that it stands nowhere in quotes inside quotes.
    """
    counts = f"--processes {processes} --per-node {per_node}"
    return f'exec "$HERD_PYTHON" -m llama3.train.launch "$HERD_JOB" --logs "$HERD_LOGS" {counts}'


def agent_variables(python: str, job: Path, logs: Path) -> dict[str, str]:
    """Return the variables that `agent_command` reads."""
    return {"HERD_PYTHON": python, "HERD_JOB": str(job), "HERD_LOGS": str(logs)}


class LocalLauncher:
    """Ranks on this machine, forked from one agent that lives as long as the launcher."""

    def __init__(self, cluster: Cluster, capacity: Callable[[], int] | None = None) -> None:
        """`capacity` says how many processes this machine can run now; by default its GPUs, if it has any."""
        self.cluster = cluster
        self.capacity = capacity or self._present
        self.agent: subprocess.Popen[bytes] | None = None
        self.job: Path | None = None
        """What the agent was started for last."""

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        """End the agent; ranks that still run are asked to save."""
        if self.agent is not None:
            _end(self.agent, self.job)

    def live(self, job: Path) -> None:
        """Nothing can be left behind: the kernel tells the agent when its supervisor dies, and its ranks save."""

    def start(self, job: Path, processes: int, logs: Path) -> LocalLaunch:
        """Start `processes` ranks on this machine."""
        attempt = Attempt(job=job, logs=logs, processes=processes)
        logs.mkdir(parents=True, exist_ok=True)
        if self.agent is None or self.agent.poll() is not None:
            self.agent = self._agent(logs.parent / "agent.log")
        attempt.outcome.unlink(missing_ok=True)
        self.job = job
        assert self.agent.stdin is not None
        self.agent.stdin.write(attempt.model_dump_json().encode() + b"\n")
        self.agent.stdin.flush()
        return LocalLaunch(attempt, self.agent, logs.parent / "agent.log")

    def _agent(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "llama3.train.launch", "--serve"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **trainer_environment(self.cluster.process_threads)},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def _present(self) -> int:
        gpus = 0 if self.cluster.device == "cpu" else visible_gpus()
        if not gpus and self.cluster.device != "cuda":
            return self.cluster.processes  # processors take any number of processes
        return min(gpus, self.cluster.processes)


class LocalLaunch:
    """One attempt on this machine."""

    def __init__(self, attempt: Attempt, agent: subprocess.Popen[bytes], log: Path) -> None:
        self.attempt, self.agent, self.log = attempt, agent, log
        self.label, self.logs = "trainer on this machine", attempt.logs
        self._outcome = str(attempt.outcome)

    def poll(self) -> Outcome | None:
        """Return how it ended, or None while it runs."""
        gone = self.agent.poll() is not None  # asked first: the outcome is written before the agent leaves
        if os.path.exists(self._outcome):  # asked ten times a second
            return Outcome.model_validate_json(self.attempt.outcome.read_text())
        if gone:
            words = f"the agent ended with status {self.agent.returncode}; the end of {self.log}:\n"
            return Outcome(status=AGENT_DIED, words=words + last_lines(self.log))
        return None

    def waits(self) -> bool:
        """Nothing waits here: there is no queue."""
        return False

    def used_s(self) -> float:
        """Return the processor seconds of agent and ranks."""
        return processor_seconds(self.agent.pid)

    def stop(self) -> None:
        """Ask the trainer to save and leave; kill what is left after the grace."""
        _end(self.agent, self.attempt.job)


def _end(agent: subprocess.Popen[bytes], job: Path | None) -> None:
    """End an agent and the ranks that it started for `job`, whether it works or waits for work."""
    assert agent.stdin is not None
    with suppress(BrokenPipeError):
        agent.stdin.close()
    agent.terminate()
    asked = time.time()
    while agent.poll() is None:
        left = (leave_by(job, asked) if job else asked + GRACE_S) + REAP_S - time.time()
        if left <= 0:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        with suppress(subprocess.TimeoutExpired):
            agent.wait(min(max(left, 0.0), 1.0))


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process and all below it that live."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def visible_gpus() -> int:
    """Return how many GPUs a process here could use, as the driver's tool counts them; torch would start CUDA."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    present = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if chosen is None else min(present, len([name for name in chosen.split(",") if name.strip()]))
