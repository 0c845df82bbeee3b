"""Start the trainer as processes of its own, and make sure that none outlives its supervisor.

Each attempt is a fresh launch of torch's elastic launcher with a store of its own: in-job restarts with gloo fail on
stale addresses (9 of 9 fresh launches recovered, 3 of 12 in-job restarts did). The trainer's output goes to a file,
never to a pipe, so it cannot block or die with whoever reads it. What this gives up: a restart costs a start-up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from llama3.recipe.units import Bytes

PR_SET_PDEATHSIG = 1
SHUTDOWN_S = 15


class Cluster(BaseModel):
    """Where a run works. Nothing here changes what is made, only how fast."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes: int = Field(default=1, ge=1)
    """Data-parallel trainer processes on this machine."""
    threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """Processor threads for the whole run; trainer processes share them."""
    micro_batch: int = Field(default=16, ge=1)
    """Sequences per forward pass and process; a smaller number needs less memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory: str = "1GiB"
    """Memory for DuckDB while data is curated, shared by its threads."""
    data: Literal["threads", "dask", "ray"] = "threads"
    """What works on the shards of data steps: threads here, or a cluster that sees the root under the same path."""
    data_address: str = ""
    """Address of the Dask scheduler or Ray head; empty starts a local cluster."""
    data_workers: int = Field(default=2, ge=1)
    """Workers of that cluster; a step is cut into a few batches for each."""

    @field_validator("memory")
    @classmethod
    def _size(cls, value: str) -> str:
        Bytes.parse(value)
        return value


class TrainingFailed(RuntimeError):
    """The trainer died without getting further; the text holds its last words."""


class Launch:
    """A trainer that was started and may still run."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """Ask the trainer to save and leave; kill what is left after the grace."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(SHUTDOWN_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_words(self, lines: int = 12) -> str:
        """Return the end of the trainer's log: why it died."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def launch_local(job: Path, cluster: Cluster, log: Path) -> Launch:
    """Start `cluster.processes` trainers on this machine for the job file `job`; output is appended to `log`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(cluster.processes), "--max-restarts", "0"]
    command += ["-m", "llama3.train.main", str(job)]
    threads = max(1, cluster.threads // cluster.processes)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait slow everything on shared cores
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    return Launch(process, log)


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM to the launcher when the supervisor dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
