"""The files between a trainer, its launch agent and the supervising task: job, attempt, result, stop estimate."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from herd.llama3.parallel.layout import Backend, Layout
from herd.llama3.recipe.load import to_yaml
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.profiler import Profile

TERMINATED = 128 + signal.SIGTERM
HUNG = 124
"""Status of an attempt that its supervisor stopped because it hung."""
SETTLE_S = 1.0
"""From the first failure to SIGKILL: time for the other ranks to print their errors. A hanging rank never would."""
LAST_LINES = 12
GRACE_S = 15.0
"""From the request to stop to SIGKILL, if steps and saves are short."""
SAVE_TIMEOUT_S = 3600.0
"""How long a process that has written its files of a checkpoint waits for the slowest."""
SLACK = 3.0
"""A save may take this many times as long as the longest before it: a disk is slower when others write too."""
STOP_ESTIMATE = "stop_estimate.json"


Cause = Literal[
    "", "out of memory", "disk full", "preemption", "bad node", "network", "hang", "stopped", "killed", "bug"
]
OUT_OF_MEMORY = "the kernel ended a process because memory ran out"
"""Line of a launch agent whose control group counted one more kill."""
SIGNS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("out of memory", re.compile(rf"{OUT_OF_MEMORY}|OutOfMemory|OUT_OF_ME|MemoryError|OOMKilled|n.t allocate memory")),
    ("disk full", re.compile("No space left on device|Disk quota exceeded")),
    ("preemption", re.compile("PREEMPT|Preempt(ed|ion)|Evict(ed|ion)")),
    ("bad node", re.compile("NODE_FAIL|uncorrectable|Xid|ECC error|hardware error|fallen off the bus|SIGBUS|NodeLost")),
    (
        "network",
        re.compile(
            "Nccl|NCCL error|Connection (reset|refused|closed)|Broken pipe|No route to host|Network is unreachable|"
            "Name or service not known|name resolution|StoreTimeout|Timed out waiting"
        ),
    ),
)
"""How messages of torch, NCCL, the kernel, Slurm and Kubernetes show a cause; the first match counts."""


class PredictedStepTimes(BaseModel):
    """What the planner predicts for a stage, recorded beside the measurements (`plan/*` metrics)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    processes: int
    """Number that the prediction is for; an attempt on another number records none."""
    by_seq: dict[int, dict[str, float]] = {}
    """Sequence length -> metric -> value."""


class HourlyCosts(BaseModel):
    """What an hour of one device costs, and what earlier stages have cost."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    usd: float | None = None
    """Price; None: unknown."""
    watts: float | None = None
    """Average power, with its share of the server and of cooling; None: unknown."""
    basis: str = ""
    """Where the two figures come from."""
    before: dict[str, float] = {}
    """`of` all earlier stages."""

    def of(self, hours: float) -> dict[str, float]:
        """Return `gpu_hours`, `usd` and `kwh` of `hours` device-hours, the last two if they are known."""
        rates = {"gpu_hours": 1.0, "usd": self.usd, "kwh": self.watts and self.watts / 1e3}
        return {name: hours * rate for name, rate in rates.items() if rate is not None}

    def so_far(self, hours: float) -> dict[str, float]:
        """Return `of` all stages, after `hours` of this one."""
        return {name: self.before.get(name, 0.0) + amount for name, amount in self.of(hours).items()}


class TrainJob(BaseModel):
    """The job file of `python -m herd.llama3.train.main`; recipe, stage, data, parent and start decide the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    program: Literal["train"] = "train"
    """Tells the launch agent to run `herd.llama3.train.main`."""
    recipe: Path
    """The resolved recipe, YAML."""
    stage: str
    """Name of the stage to train."""
    tokens: Path
    """Folder of the token shards."""
    conversations: Path | None = None
    """Folder of the packed conversations of a stage of kind `sft`."""
    parent: Path | None = None
    """Training state (`result/state`) of the previous stage; None for the first stage."""
    start: Path | None = None
    """Model folder whose weights the first stage starts from; None: initial weights."""
    work: Path
    """Folder of this stage: journal, checkpoints and, at the end, `result`."""
    checkpoints: str | None = None
    """URI under which checkpoints are kept instead of in `work` (s3://...)."""
    layout: Layout = Layout()
    """How the model is split over the processes."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences per forward pass and process."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    backend: Backend = "auto"
    """Library of collectives; auto: NCCL on GPUs, gloo on processors."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each process."""
    deterministic: bool = False
    """Same bits on any number of data-parallel processes: one sequence at a time, gradients summed in fp64, and
    deterministic operations only. Slower; tensor and context parallelism still regroup sums."""
    profile: Profile | None = None
    """What to profile: a trace of chosen steps, device memory, the last collectives."""
    timeout_s: int = Field(default=600, ge=1)
    """How long a process waits for its peers before it fails."""
    predicted: PredictedStepTimes | None = None
    """What the planner predicts for this stage; None: no prediction."""
    costs: HourlyCosts = HourlyCosts()
    """What the devices cost (`cost/*` metrics)."""
    restart_damaged: bool = False
    """Train the stage again from its start if it has checkpoints and all are damaged; otherwise that is an error."""
    health_s: float = Field(default=0.0, ge=0)
    """Seconds between two samples of a node's health, by its launch agent; 0: none."""
    preflight: bool = False
    """Measure every node before the first step, and fail on one far below the others."""

    @property
    def trained_recipe(self) -> Path:
        """The recipe under which the stage was last trained in this folder."""
        return self.work / "recipe.yaml"

    def trained_under(self, recipe: Recipe) -> bool:
        return self.trained_recipe.exists() and self.trained_recipe.read_text() == to_yaml(recipe)


class Attempt(BaseModel):
    """One start of the ranks of one node."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    job: Path
    """The job file: of `herd.llama3.train.main`, or of the main module of the package that it names as `program`."""
    logs: Path
    """Folder for `rank-<r>.log` and `node-<n>.json`; shared by all nodes."""
    processes: int = Field(default=1, ge=1)
    """Ranks on all nodes."""
    per_node: int = Field(default=0, ge=0)
    """Ranks on a node (the last may have fewer); 0: all ranks are on this node."""
    node: int = Field(default=0, ge=0)
    """Number of this node."""
    address: str = "127.0.0.1"
    """Host of rank 0."""
    port: int = Field(default=0, ge=0)
    """Rank 0's port; 0: any free port (one node only)."""

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        size = self.per_node or self.processes
        return range(min(self.node * size, self.processes), min((self.node + 1) * size, self.processes))

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def leave_by(self, requested: float) -> float:
        """Return when ranks that were asked to stop at `requested` must have ended, in seconds since 1970."""
        return leave_by(self.job, requested)

    @property
    def health(self) -> Path:
        """The file with the samples of this node's health."""
        return self.logs / f"health-{self.node}.jsonl"

    @property
    def outcome(self) -> Path:
        """The file with the AttemptResult of this node's ranks: a file outlives the agent and needs no port."""
        return self.logs / f"node-{self.node}.json"


class AttemptResult(BaseModel):
    """How an attempt ended, on one node or on all nodes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    status: int
    """0: complete; 143: stopped on request; negative: a rank was killed by this signal; else a rank's exit status."""
    message: str = ""
    """Error message: which rank failed first, and the end of its log."""
    time: float = 0.0
    """When the first rank failed, in seconds since 1970."""
    host: str = ""
    """The node on which it failed; empty if the attempt is complete, or the node is not known."""

    @property
    def cause(self) -> Cause:
        """What ended the attempt, by the names of docs/explanations/operating.md; empty if it is complete."""
        if self.status in (0, HUNG):
            return "hang" if self.status else ""
        for cause, pattern in SIGNS:
            if pattern.search(self.message):
                return cause
        if self.status == TERMINATED:
            return "stopped"
        return "killed" if self.status == -signal.SIGKILL else "bug"


class StopEstimate(BaseModel):
    """How long a trainer needs to stop: rank 0 writes it into the stage's folder."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    step_s: float = 0.0
    """The longest step of this attempt."""
    save_s: float = 0.0
    """The longest save of the stage; 0: none has finished yet."""
    saving_since: float = 0.0
    """When the save in progress began, in seconds since 1970; 0: no save is in progress."""

    @classmethod
    def read(cls, work: Path) -> Self:
        """Return the last estimate of the stage in `work`; zeros if there is none."""
        try:
            return cls.model_validate_json((work / STOP_ESTIMATE).read_text())
        except FileNotFoundError:
            return cls()

    def write(self, work: Path) -> None:
        new = work / f"{STOP_ESTIMATE}.new"  # no fsync: a power cut also ends the process that would read it
        new.write_text(self.model_dump_json())
        new.rename(work / STOP_ESTIMATE)


def program_of(job: Path) -> str:
    """Return the package whose main module runs the job file `job`: `train`, `evaluate`."""
    program: str = json.loads(job.read_text()).get("program", "train")
    return program


def health_interval(job: Path) -> float:
    """Return the seconds between two samples of a node's health that the job file `job` asks for; 0: none."""
    return float(json.loads(job.read_text()).get("health_s", 0.0))


def host_name() -> str:
    """Return the name by which the scheduler knows this node."""
    return os.environ.get("HERD_HOST") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def leave_by(job: Path, requested: float) -> float:
    """Return when the program of `job`, asked to stop at `requested`, must have ended, in seconds since 1970.

    A later call may return a later time, because a save has begun.
    """
    try:
        if program_of(job) != "train":  # it has nothing to save
            return requested + GRACE_S
        train_job = TrainJob.model_validate_json(job.read_text())
    except FileNotFoundError:  # the stage is committed, and its folder removed
        return requested + GRACE_S
    estimate = StopEstimate.read(train_job.work)
    deadline = requested + GRACE_S + 2 * estimate.step_s  # the current step, and one on which all ranks have agreed
    save_s = SLACK * estimate.save_s or train_job.timeout_s  # no save of the stage has been measured yet
    return max(deadline, estimate.saving_since + GRACE_S + save_s) if estimate.saving_since else deadline


def first_failure(outcomes: list[AttemptResult]) -> AttemptResult:
    """Return the result of all nodes from those of each: a killed rank, else the first failure."""
    # A peer of a killed rank reports "connection reset" within milliseconds, maybe before the kill is noticed.
    failed = [outcome for outcome in outcomes if outcome.status not in (0, TERMINATED)]
    if failed:
        return min(failed, key=lambda outcome: (outcome.status > 0, outcome.time))
    return max(outcomes, key=lambda outcome: outcome.status)


def read_outcomes(logs: Path) -> list[AttemptResult]:
    """Return the results that the nodes of an attempt have written so far."""
    return [AttemptResult.model_validate_json(path.read_text()) for path in sorted(logs.glob("node-*.json"))]


def ending(status: int) -> str:
    """Return how a process ended, from its exit status; a negative one is a signal's."""
    if status >= 0:
        return f"ended with status {status}"
    name = f"signal {-status}"
    with suppress(ValueError):
        name = signal.Signals(-status).name
    return f"was killed by {name}"


def last_lines(log: Path, lines: int = LAST_LINES) -> str:
    """Return the last lines of a log, which say why the process died."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
