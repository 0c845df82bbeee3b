"""Start the trainer on whatever the deployment names, and say how it ended. Here: the contract, and this machine.

Each attempt is a fresh launch: ranks, port and store are new (in-job restarts with gloo fail on stale addresses: 9 of
9 fresh launches recovered, 3 of 12 in-job restarts did). On this machine one agent forks the ranks of all stages and
evaluations of a run, so only the first pays the imports. Output goes to files, never to a pipe, so the trainer cannot
block or die with whoever reads it. What this gives up: a failure stops all ranks, also those that could have gone on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from llama3.recipe.schedule import StageSpan
from llama3.train.attempt import GRACE_S, Attempt, Outcome, last_lines
from storage.filesystem import write_atomic
from storage.processes import die_with_parent
from tasks.cluster import Cluster
from tasks.failures import TrainingFailed

REAP_S = 5.0
"""From the end of the ranks' grace to the end of their agent."""
SHUTDOWN_S = GRACE_S + REAP_S
"""As long as an agent may take whose ranks have nothing to save."""
WATCH_S = 0.1
"""Between two looks at a launch: part of every restart."""
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


def launcher_of(cluster: Cluster, name: str, agents: Agents) -> Launcher:
    """Return the launcher that `cluster` asks for; `name` (see `launch_key`) tells its jobs from those of others.

    On this machine it works through one of `agents`. Raises ValueError if its commands are missing here.
    """
    match cluster.launcher:
        case "local":
            return LocalLauncher(cluster, agents)
        case "slurm":
            from tasks.slurm import SlurmLauncher

            return SlurmLauncher(cluster, name)
        case "kubernetes":
            from tasks.kubernetes import KubernetesLauncher

            return KubernetesLauncher(cluster, name)


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


@dataclass
class Agent:
    """A process that has imported torch and forks ranks from itself; what it is asked it does one after the other."""

    process: subprocess.Popen[bytes]
    log: Path
    attempt: Attempt | None = None
    """What it was asked last."""

    def ask(self, attempt: Attempt) -> None:
        self.attempt = attempt
        assert self.process.stdin is not None
        self.process.stdin.write(attempt.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """End it and its ranks, which are asked to save; kill what is left after the grace."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.terminate()
        asked = time.time()
        while self.process.poll() is None:
            left = (self.attempt.leave_by(asked) if self.attempt else asked + GRACE_S) + REAP_S - time.time()
            if left <= 0:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(min(max(left, 0.0), 1.0))


class Agents:
    """The agents of this machine, one for each number of threads: they live until this is closed."""

    def __init__(self, log: Path) -> None:
        """What the agents themselves print, mostly nothing, goes to the file `log`."""
        self.log = log
        self._agents: dict[int, Agent] = {}

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents; ranks that still run are asked to save. A later `start` begins a new one."""
        while self._agents:
            self._agents.popitem()[1].end()

    def start(self, attempt: Attempt, threads: int) -> LocalLaunch:
        """Start the ranks of `attempt` with `threads` OpenMP threads each."""
        attempt.logs.mkdir(parents=True, exist_ok=True)
        agent = self._agents.get(threads)
        if agent is None or agent.process.poll() is not None:
            agent = self._agents[threads] = _new_agent(self.log, threads)
        attempt.outcome.unlink(missing_ok=True)
        agent.ask(attempt)
        return LocalLaunch(attempt, agent)


def _new_agent(log: Path, threads: int) -> Agent:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "llama3.train.launch", "--serve"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **trainer_environment(threads)},
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    return Agent(process, log)


class LocalLauncher:
    """Ranks on this machine."""

    def __init__(self, cluster: Cluster, agents: Agents, capacity: Callable[[], int] | None = None) -> None:
        """`capacity` says how many processes this machine can run now; by default its GPUs, if it has any."""
        self.cluster, self.agents = cluster, agents
        self.capacity = capacity or self._present

    def live(self, job: Path) -> None:
        """Nothing can be left behind: the kernel tells the agent when its supervisor dies, and its ranks save."""

    def start(self, job: Path, processes: int, logs: Path) -> LocalLaunch:
        """Start `processes` ranks on this machine."""
        return self.agents.start(Attempt(job=job, logs=logs, processes=processes), self.cluster.process_threads)

    def _present(self) -> int:
        gpus = 0 if self.cluster.device == "cpu" else visible_gpus()
        if not gpus and self.cluster.device != "cuda":
            return self.cluster.processes  # processors take any number of processes
        return min(gpus, self.cluster.processes)


class LocalLaunch:
    """One attempt on this machine."""

    def __init__(self, attempt: Attempt, agent: Agent) -> None:
        self.attempt, self.agent = attempt, agent
        self.label, self.logs = "trainer on this machine", attempt.logs
        self._outcome = str(attempt.outcome)

    def poll(self) -> Outcome | None:
        """Return how it ended, or None while it runs."""
        gone = self.agent.process.poll() is not None  # asked first: the outcome is written before the agent leaves
        if os.path.exists(self._outcome):  # asked ten times a second
            return Outcome.model_validate_json(self.attempt.outcome.read_text())
        if gone:
            words = f"the agent ended with status {self.agent.process.returncode}; the end of {self.agent.log}:\n"
            return Outcome(status=AGENT_DIED, words=words + last_lines(self.agent.log))
        return None

    def wait(self) -> Outcome:
        """Return how it ended, once it has; stop it if that is interrupted."""
        try:
            while (outcome := self.poll()) is None:
                time.sleep(WATCH_S)
        except BaseException:
            self.stop()
            raise
        return outcome

    def waits(self) -> bool:
        """Nothing waits here: there is no queue."""
        return False

    def used_s(self) -> float:
        """Return the processor seconds of agent and ranks."""
        return processor_seconds(self.agent.process.pid)

    def stop(self) -> None:
        """Ask the trainer to save and leave; kill what is left after the grace."""
        self.agent.end()


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
