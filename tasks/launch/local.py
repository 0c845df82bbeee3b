"""Start ranks on this machine: an agent forks those of all stages and the evaluators of a run, and `InferenceRanks`
starts those of a model that generates.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.job import GRACE_S, SETTLE_S, Attempt, AttemptResult, ending, host_name, last_lines
from herd.storage.processes import die_with_parent, free_port
from herd.tasks.cluster import Cluster
from herd.tasks.errors import InferenceFailed, TrainingFailed
from herd.tasks.launch.base import NO_OUTCOME, REAP_S, Excluded, trainer_environment


@dataclass
class Agent:
    """A process that has imported torch and forks ranks from itself; it runs one attempt after the other."""

    process: subprocess.Popen[bytes]
    log: Path
    attempt: Attempt | None = None
    """The last one that it got."""

    def ask(self, attempt: Attempt) -> None:
        self.attempt = attempt
        assert self.process.stdin is not None
        self.process.stdin.write(attempt.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Ask it and its ranks to save and exit; kill what is left after the grace."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.terminate()
        requested = time.time()
        while self.process.poll() is None:
            left = (self.attempt.leave_by(requested) if self.attempt else requested + GRACE_S) + REAP_S - time.time()
            if left <= 0:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(min(max(left, 0.0), 1.0))


class Agents:
    """The agents of this machine, one for each number of threads; they live until this is closed."""

    def __init__(self, log: Path) -> None:
        """The agents' own output, usually nothing, goes to the file `log`."""
        self.log = log
        self.stopped = False
        """Whether jobs of other launchers that a thread waits for must end too."""
        self._agents: dict[int, Agent] = {}

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents; ranks that still run are asked to save. A later `start` starts a new one."""
        while self._agents:
            self._agents.popitem()[1].end()

    def start(self, attempt: Attempt, threads: int) -> LocalLaunch:
        """Start the ranks of `attempt` with `threads` OpenMP threads each."""
        attempt.logs.mkdir(parents=True, exist_ok=True)
        agent = self._agents.get(threads)
        if agent is None or agent.process.poll() is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "herd.llama3.train.launch", "--serve"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **trainer_environment(threads)},
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(signal.SIGTERM),
                )
            agent = self._agents[threads] = Agent(process, self.log)
        attempt.outcome.unlink(missing_ok=True)
        agent.ask(attempt)
        return LocalLaunch(attempt, agent)


class LocalLauncher:
    """Ranks on this machine."""

    def __init__(
        self, cluster: Cluster, agents: Agents, capacity: Callable[[], int] | None = None, excluded: Excluded = dict
    ) -> None:
        """`capacity` returns how many processes this machine can run now; by default its GPUs, if it has any."""
        self.cluster, self.agents, self.excluded = cluster, agents, excluded
        self.capacity = capacity or self._default_capacity

    def _default_capacity(self) -> int:
        gpus = 0 if self.cluster.device == "cpu" else visible_gpus()
        if not gpus and self.cluster.device != "cuda":
            return self.cluster.processes  # processors take any number of processes
        return min(gpus, self.cluster.processes)

    def live(self, job: Path) -> None:
        """Nothing can be left behind: the kernel signals the agent when its supervisor dies, and its ranks save."""

    def start(self, job: Path, processes: int, logs: Path) -> LocalLaunch:
        """Start the ranks. Raises TrainingFailed if this machine is excluded."""
        if fault := excluded_here(self.excluded()):
            raise TrainingFailed(fault)
        return self.agents.start(Attempt(job=job, logs=logs, processes=processes), self.cluster.process_threads)


def launcher(cluster: Cluster, name: str, agents: Agents, excluded: Excluded) -> LocalLauncher:
    return LocalLauncher(cluster, agents, excluded=excluded)


def excluded_here(excluded: Mapping[str, str]) -> str:
    """Return why nothing can be trained on this machine; "" if it can."""
    host = host_name()
    if host not in excluded:
        return ""
    return f"host {host} is excluded: {excluded[host]}; repair it and write herd hosts --clear {host}, or take another"


class LocalLaunch:
    """One attempt on this machine."""

    def __init__(self, attempt: Attempt, agent: Agent) -> None:
        self.attempt, self.agent = attempt, agent
        self.label, self.logs = "trainer on this machine", attempt.logs
        self._outcome = str(attempt.outcome)

    def poll(self) -> AttemptResult | None:
        exited = self.agent.process.poll() is not None  # before the outcome, which is written before the agent exits
        if os.path.exists(self._outcome):  # ten times a second: cheaper than Path.exists
            return AttemptResult.model_validate_json(self.attempt.outcome.read_text())
        if exited:
            status, log = self.agent.process.returncode, self.agent.log
            message = f"the agent ended with status {status}; see {log}:\n{last_lines(log)}"
            return AttemptResult(status=NO_OUTCOME, message=message)
        return None

    def waits(self) -> bool:
        return False  # no queue

    def used_s(self) -> float:
        return processor_seconds(self.agent.process.pid)

    def stop(self) -> None:
        self.agent.end()


class InferenceRanks:
    """The processes of a model that is split, for a `SplitRunner`. They end with this process."""

    def __init__(self, processes: int, threads: int) -> None:
        """Start them with `threads` OpenMP threads each, from a thread that lives as long as they do."""
        self.connections: list[Connection] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="herd-ranks-")
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        for rank in range(processes):
            ours, theirs = socket.socketpair()
            with theirs, self._log(rank).open("wb") as log:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    [sys.executable, "-m", "herd.llama3.evaluate.distributed", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **trainer_environment(threads), **common, **own},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for this process only
                    preexec_fn=lambda: die_with_parent(signal.SIGKILL),
                )
            self._ranks.append(process)
            self.connections.append(Connection(ours.detach()))

    def __enter__(self) -> InferenceRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for rank, connection in zip(self._ranks, self.connections, strict=True):
            rank.wait()
            connection.close()
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        """Whether all run."""
        return all(rank.poll() is None for rank in self._ranks)

    def failure(self) -> InferenceFailed:
        """Return which rank ended first, how, and the end of its log; end the others, which may wait for it."""
        for _ in range(100):  # the driver may clean up after a rank's connection is closed
            if not self.alive:
                break
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        ended = []
        for rank, process in enumerate(self._ranks):
            if (status := process.poll()) is not None:
                # a killed rank is the cause, also if a peer complained earlier
                ended.append((status > 0, self._log(rank).stat().st_mtime, rank, status))
        self._kill()
        if not ended:
            return InferenceFailed("a rank has closed its connection")
        *_, rank, status = min(ended)
        return InferenceFailed("\n".join(filter(None, [f"rank {rank} {ending(status)}", last_lines(self._log(rank))])))

    def _kill(self) -> None:  # they have nothing to save
        for rank in self._ranks:
            rank.kill()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its living descendants."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def visible_gpus() -> int:
    """Return how many GPUs a process here could use, as nvidia-smi counts them; torch would start CUDA."""
    if not shutil.which("nvidia-smi"):
        return 0
    gpus = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    count = sum(line.startswith("GPU ") for line in gpus.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if chosen is None else min(count, len([name for name in chosen.split(",") if name.strip()]))


def gpu_name() -> str:
    """Return the name of the first GPU here as its driver has it; "" if there is none."""
    return query_gpu("name") if visible_gpus() else ""


def query_gpu(field: str) -> str:
    """Return a field of the first GPU here (`name`, `driver_version`, ...) from nvidia-smi; "" without one."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return next(iter(subprocess.run(command, capture_output=True, text=True).stdout.splitlines()), "").strip()


def slow_precision(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Return a warning if `recipe` trains in bf16 on this machine's processor and it has no instructions for bf16."""
    if recipe.precision != "bf16" or cluster.launcher != "local" or cluster.device == "cuda":
        return []
    if cluster.device == "auto" and visible_gpus():
        return []
    features = re.findall(r"^(?:flags|Features)\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if not features or {"avx512_bf16", "amx_bf16", "bf16"} & set(features[0].split()):
        return []
    return ["precision: bf16 takes ten times as long as fp32 on this processor, which has no instructions for it"]


def rank_process(rank: int) -> psutil.Process:
    """Return the process of `rank` among this process's descendants. Raises LookupError."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() == f"herd-rank-{rank}" or process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    raise LookupError(f"no process of rank {rank}")
