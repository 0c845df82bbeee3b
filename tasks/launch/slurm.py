"""Start the trainer on Slurm: one job per attempt, one agent per node, a readable batch script.

The job outlives a killed supervisor: the next one finds it by name and follows it. A supervisor that is stopped cancels
it. The agents write how an attempt ended beside the logs, because not every cluster has sacct. On preemption and node
failure Slurm itself requeues the job.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from herd.llama3.train.job import TERMINATED, AttemptResult, first_failure, last_lines, leave_by, read_outcomes
from herd.storage.filesystem import write_atomic
from herd.storage.processes import PACKAGE_FOLDER
from herd.tasks.cluster import Cluster
from herd.tasks.errors import SchedulerRefused
from herd.tasks.launch.base import (
    NO_OUTCOME,
    Excluded,
    Fault,
    agent_command,
    agent_variables,
    answer_of,
    keep_job,
    query,
    same_job,
    trainer_environment,
)
from herd.tasks.launch.local import Agents

QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "RESIZING")
USABLE = "idle,mixed,allocated,completing,reserved,planned"
STOP_S = 60.0
"""Slurm's own grace (KillWait, 30 s by default) and some more."""

SCRIPT = """\
#!/bin/bash
# One attempt at a training stage: an agent on every node, which starts the node's ranks. Written by herd. It can be
# submitted again by hand, with sbatch, and continues from the newest checkpoint.
{directives}

set -u
{setup}
# The ranks meet at the first node; NodeAddr is the address by which Slurm itself reaches it.
{head}
address=$(scontrol show node --oneliner "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$((10000 + SLURM_JOB_ID % 20000))
export HERD_ADDRESS="$address" HERD_PORT="$port"

# One task per node. SIGTERM (time limit, preemption, scancel) goes to the agents: the ranks save and exit, status 143.
# When one agent fails, the others are ended too.
exec srun {srun} bash -c \\
  '{agent} --node {node} --address "$HERD_ADDRESS" --port "$HERD_PORT"'
"""

HOST_ORDER = """
  NR == FNR { host[$1] = $0; name[NR] = $1; nodes = NR; next }
  $1 in host && !($1 in named) { named[$1] = 1; found = 1; print host[$1] }
  END {
    for (i = 1; i <= nodes; i++) if (!(name[i] in named)) print host[name[i]]
    if (!found) print "herd: " FILENAME " names no host of this job; the order is that of Slurm" > "/dev/stderr"
  }"""
"""Program of awk for the hosts of a job and then the host file; a host is known by its name up to the first dot."""


class SlurmLauncher:
    """Submits attempts with sbatch."""

    def __init__(self, cluster: Cluster, name: str, excluded: Excluded = dict) -> None:
        """Jobs are called `herd-<name>`. Raises ValueError if Slurm's commands are not on the PATH."""
        missing = [command for command in ("sbatch", "squeue", "scancel", "sinfo") if not shutil.which(command)]
        if missing:
            raise ValueError(
                f"cluster.launcher: slurm needs {', '.join(missing)} on the PATH; start herd on a login node, or "
                "write local"
            )
        if cluster.slurm.host_file and not Path(cluster.slurm.host_file).is_file():
            raise ValueError(
                f"cluster.slurm.host_file: {cluster.slurm.host_file} does not exist; write it (herd plan --hosts), or "
                "leave the field out"
            )
        self.cluster, self.name, self.excluded = cluster, f"herd-{name}", excluded

    def capacity(self) -> int:
        """Return how many processes the nodes that are up could run, now or when other jobs end."""
        partition = [f"--partition={self.cluster.slurm.partition}"] if self.cluster.slurm.partition else []
        listed = _ask("sinfo", "--Node", "--noheader", "--responding", f"--states={USABLE}", "--format=%N", *partition)
        nodes = len(set(listed.split()) - self.excluded().keys())
        return min(nodes * self.cluster.slurm.processes_per_node, self.cluster.processes)

    def live(self, job: Path) -> SlurmLaunch | None:
        """Return the job of this name that is queued, runs or is ending, or None."""
        launch = self._submitted()
        if launch is not None and not same_job(launch, job):
            launch.stop()
            return None
        return launch

    def _submitted(self) -> SlurmLaunch | None:
        return _job_of(self.name, self.cluster.slurm.poll_s)

    def start(self, job: Path, processes: int, logs: Path) -> SlurmLaunch:
        """Submit `processes` ranks. Raises SchedulerRefused with sbatch's message."""
        logs.mkdir(parents=True, exist_ok=True)
        keep_job(job, logs)
        script, excluded = logs / "job.sbatch", set(self.excluded())
        if excluded:  # sbatch refuses a name that it does not know, as one of another cluster
            excluded &= set(_ask("sinfo", "--Node", "--noheader", "--format=%N").split())
        write_atomic(script, slurm_script(self.cluster, self.name, job, processes, logs, sorted(excluded)))
        try:
            return SlurmLaunch(_ask("sbatch", "--parsable", str(script)).split(";")[0], logs, self.cluster.slurm.poll_s)
        except SchedulerRefused:
            if (launch := self._submitted()) is None:  # a busy controller may take a job and not answer in time
                raise
            return launch
        except BaseException:
            subprocess.run(["scancel", f"--name={self.name}"], start_new_session=True)  # stopped while it submitted
            raise


def launcher(cluster: Cluster, name: str, agents: Agents, excluded: Excluded) -> SlurmLauncher:
    return SlurmLauncher(cluster, name, excluded)


def running_job(logs: Path) -> SlurmLaunch | None:
    """Return the job that was submitted for the attempt with log folder `logs`, if it is queued or runs."""
    script = logs / "job.sbatch"
    if not script.exists() or not shutil.which("squeue"):
        return None
    names = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH --job-name=")]
    launch = _job_of(names[0].partition("=")[2], poll_s=1.0) if names else None
    return launch if launch is not None and launch.logs.resolve() == logs.resolve() else None


def _job_of(name: str, poll_s: float) -> SlurmLaunch | None:
    listed = _squeue(f"--name={name}", "--format=%i %o").splitlines()
    if not listed:
        return None
    job_id, script = listed[0].split(maxsplit=1)
    return SlurmLaunch(job_id, Path(script).parent, poll_s)


class SlurmLaunch:
    """One submitted job."""

    def __init__(self, job_id: str, logs: Path, poll_s: float) -> None:
        self.job_id, self.logs, self.poll_s = job_id, logs, poll_s
        self.label = f"Slurm job {job_id}"
        self.state, self.polled_at = "PENDING", float("-inf")

    def poll(self) -> AttemptResult | None:
        """Return how the job ended, or None while it is queued or runs; calls squeue every `poll_s`."""
        if time.monotonic() - self.polled_at >= self.poll_s:
            self.state, self.polled_at = _state(self.job_id), time.monotonic()
        if self.state:
            return None
        if outcomes := read_outcomes(self.logs):
            worst = first_failure(outcomes)
            if worst.status not in (0, TERMINATED):
                return worst
            script = (self.logs / "job.sbatch").read_text().splitlines()
            nodes = int(next(line for line in script if "--nodes=" in line).split("=")[1])
            if len(outcomes) == nodes:
                return worst
        shown = subprocess.run(["scontrol", "show", "job", "--oneliner", self.job_id], capture_output=True, text=True)
        # without accounting Slurm forgets a job after some minutes
        states = [word.split("=")[1] for word in shown.stdout.split() if word.startswith("JobState=")]
        state, log = states[0] if states else "state unknown", self.logs / "slurm.log"
        message = f"Slurm job {self.job_id} ended ({state}) and not every node said how; see {log}:\n"
        return AttemptResult(status=NO_OUTCOME, message=message + last_lines(log))

    def waits(self) -> bool:
        """Return whether the job is queued, for the first time or again."""
        return self.state in QUEUED

    def used_s(self) -> None:
        return None  # its processes are on other machines

    def stop(self) -> None:
        """Ask the ranks to save and exit, which may take longer than Slurm's grace; then cancel the job."""
        requested = time.time()
        if _state(self.job_id) not in ("", *QUEUED):
            with suppress(SchedulerRefused):  # it ended at this moment
                _ask("scancel", "--signal=TERM", self.job_id)
            job = next(path for path in self.logs.glob("*.json") if not path.name.startswith("node-"))  # see keep_job
            while _state(self.job_id) and time.time() < leave_by(job, requested):
                time.sleep(min(1.0, self.poll_s))
        _ask("scancel", self.job_id)
        deadline = time.monotonic() + STOP_S
        while _state(self.job_id) and time.monotonic() < deadline:
            time.sleep(min(1.0, self.poll_s))


def scheduler_faults(cluster: Cluster) -> list[Fault]:
    """Return what Slurm lacks: an answer, the partition, a node that is up, the account."""
    settings, remedy = cluster.slurm, "ask whoever runs Slurm, or correct the cluster file"
    status, listed, message = answer_of("sinfo", "--noheader", "--format=%R")
    if status:
        return [(f"sinfo: {message}", "check that this machine is a login node, and that slurmctld runs")]
    partitions, faults = set(listed.split()), []
    for partition in filter(None, settings.partition.split(",")):
        if partition not in partitions:
            known = f"there are {', '.join(sorted(partitions))}"
            faults.append((f"cluster.slurm.partition: {partition} is not one of Slurm's", known))
    if not faults:
        try:
            if not SlurmLauncher(cluster, "doctor").capacity():
                where = f"partition {settings.partition}" if settings.partition else "the default partition"
                faults.append((f"no node of {where} is up", remedy))
        except SchedulerRefused as error:
            faults.append((str(error), remedy))
    if settings.account and shutil.which("sacctmgr"):
        query = ["show", "associations", f"user={os.environ.get('USER', '')}", "format=account"]
        status, accounts, _ = answer_of("sacctmgr", "--noheader", "--parsable2", *query)
        if not status and accounts and settings.account not in accounts.split():
            known = f"yours are {', '.join(sorted(set(accounts.split())))}"
            faults.append((f"cluster.slurm.account: {settings.account} is not an account of yours", known))
    return faults


def run_on_nodes(cluster: Cluster, program: list[str]) -> tuple[list[str], str]:
    """Run `python PROGRAM` once on each node that a job of `cluster` would get; waits for free nodes.

    Return the line that each printed, and the error output. Raises SchedulerRefused if none printed any.
    """
    settings, per_node = cluster.slurm, min(cluster.slurm.processes_per_node, cluster.processes)
    nodes = settings.nodes(cluster.processes)
    exports = [f"export {key}={shlex.quote(value)}" for key, value in settings.environment.items()]
    line = "\n".join([*settings.setup, *exports, f"exec {shlex.join([settings.python or sys.executable, *program])}"])
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--label", "--time=10"]
    command += [f"--cpus-per-task={settings.cpus_per_process * per_node}", f"--chdir={PACKAGE_FOLDER}"]
    command += [f"--gpus-per-node={per_node}"] if settings.gpus else []
    command += [f"--{name}={value}" for name in ("partition", "account") if (value := getattr(settings, name))]
    done = subprocess.run(
        [*command, *settings.lines, *settings.srun, "bash", "-c", line], capture_output=True, text=True
    )
    answers = [text.partition(": ")[2] for text in done.stdout.splitlines() if ": [" in text]
    if not answers:
        raise SchedulerRefused(f"srun: {done.stderr.strip()[-600:] or f'status {done.returncode}'}")
    return answers, done.stderr.strip()


def slurm_script(
    cluster: Cluster, name: str, job: Path, processes: int, logs: Path, excluded: Sequence[str] = ()
) -> str:
    """Return the batch script of one attempt, which does not use the `excluded` nodes.

    Raises ValueError for a line break, which would begin a command.
    """
    settings = cluster.slurm
    nodes, per_node = settings.nodes(processes), min(settings.processes_per_node, processes)
    directives = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        *([f"--exclude={','.join(excluded)}"] if excluded else []),
        "--ntasks-per-node=1",
        f"--cpus-per-task={settings.cpus_per_process * per_node}",
        *([f"--gpus-per-node={per_node}"] if settings.gpus else []),
        *([f"--partition={settings.partition}"] if settings.partition else []),
        *([f"--account={settings.account}"] if settings.account else []),
        f"--time={settings.time}",
        f"--signal=TERM@{settings.grace_s}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={PACKAGE_FOLDER}",
        f"--output={logs / 'slurm.log'}",
        *settings.lines,
    ]
    if broken := [line for line in directives if not line.isprintable()]:
        raise ValueError(f"root: {broken[0]!r} contains a line break or a control character; choose another folder")
    variables = {
        **trainer_environment(settings.cpus_per_process, settings.environment),
        **agent_variables(settings.python or sys.executable, job, logs),
    }
    exports = [f"export {key}={shlex.quote(value)}" for key, value in variables.items()]
    # srun does not inherit --cpus-per-task from sbatch (since Slurm 22.05)
    steps = ["--kill-on-bad-exit=1", f"--cpus-per-task={settings.cpus_per_process * per_node}", *settings.srun]
    # quoted for the shell of the script, and inside the single quotes of the agent's command
    hosts, file = 'scontrol show hostnames "$SLURM_JOB_NODELIST"', shlex.quote(settings.host_file)
    head, node = f"head=$({hosts} | head -n 1)", '"$SLURM_NODEID"'
    if settings.host_file:
        head = (
            f"# Nodes are numbered in the order of the host file, those that it does not name last.\nhosts=$({hosts})\n"
            f"export HERD_HOSTS=$(awk -F'[. \\t\\r]' '{HOST_ORDER}' - {file} <<< \"$hosts\")\n"
            'head=$(head -n 1 <<< "$HERD_HOSTS")'
        )
        node = '$(($(grep -nxF "$SLURMD_NODENAME" <<< "$HERD_HOSTS" | cut -d: -f1) - 1))'
    return SCRIPT.format(
        head=head,
        node=node,
        directives="\n".join(f"#SBATCH {shlex.quote(line)}" for line in directives),
        setup="\n".join([*settings.setup, *exports]),
        srun=shlex.join(steps),
        agent=agent_command(processes, per_node),
    )


def _state(job_id: str) -> str:
    """Return the state of a job, or "" if it has ended. Raises SchedulerRefused if Slurm does not answer for LOST_S."""
    return _squeue(f"--jobs={job_id}", "--format=%T")


def _squeue(*options: str) -> str:
    """Return squeue's output, "" for a job that it forgot. Raises SchedulerRefused without an answer for LOST_S."""
    return query("squeue", "--noheader", *options, forgotten="Invalid job id")


def _ask(*command: str) -> str:
    """Return the output of a command; it runs in its own session, so that Ctrl-C does not interrupt it."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise SchedulerRefused(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
