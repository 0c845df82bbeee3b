"""What a trainer process is told: one stage of one recipe, and where it works."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from llama3.parallel.layout import Layout
from llama3.recipe.load import to_yaml
from llama3.recipe.schema import Recipe
from llama3.train.profiler import Profile

TERMINATED = 128 + signal.SIGTERM


class Predicted(BaseModel):
    """What the planner says of a stage, to be written beside what is measured (`plan/*` metrics)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    processes: int
    """For which it holds; an attempt on fewer has none."""
    by_seq: dict[int, dict[str, float]] = {}
    """Sequence length -> metric -> value."""


class TrainJob(BaseModel):
    """The job file of `python -m llama3.train.main JOB.json`.

    `recipe`, `stage`, `tokens`, `parent` and `start` decide what is made; the rest only where and how fast.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    recipe: Path
    """The resolved recipe, YAML."""
    stage: str
    """Name of the stage to train."""
    tokens: Path
    """Folder of the token shards."""
    parent: Path | None = None
    """Training state (`result/state`) of the stage before; None for the first stage."""
    start: Path | None = None
    """Model folder whose weights the first stage goes on from; None: initial weights."""
    work: Path
    """Folder of this stage: journal, checkpoints and, at the end, `result`."""
    checkpoints: str | None = None
    """URI under which checkpoints are kept instead of in `work` (s3://...)."""
    layout: Layout = Layout()
    """How the model is cut over the processes."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences per forward pass and process."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    threads: int = Field(default=1, ge=1)
    """Processor threads of each process."""
    deterministic: bool = False
    """Same bits on any number of data-parallel processes: one sequence at a time, gradients summed in fp64, and no
    operation that may differ from run to run. Costs speed; tensor and context parallelism still regroup sums."""
    profile: Profile | None = None
    """What to look into while it trains: a trace of chosen steps, device memory, the last collectives."""
    timeout_s: int = Field(default=600, ge=1)
    """How long a process waits for the others before it gives up."""
    predicted: Predicted | None = None
    """What the planner says of this stage; None: nothing is known."""
    restart_damaged: bool = False
    """Train the stage again from its start if it has checkpoints and all are damaged; else that ends the trainer."""

    @property
    def trained_recipe(self) -> Path:
        """The recipe under which the stage's folder was last worked in."""
        return self.work / "recipe.yaml"

    def trained_under(self, recipe: Recipe) -> bool:
        """Return whether that is `recipe`."""
        return self.trained_recipe.exists() and self.trained_recipe.read_text() == to_yaml(recipe)


# What a node's agent is asked, and what it answers: a start of ranks, and how they ended.
#
# The answer is a file beside the logs of the ranks, on every launcher: it outlives the agent, needs no port and no
# accounts of a scheduler. What this gives up: on several nodes the folder must be a shared one.

LAST_LINES = 12
GRACE_S = 15.0
"""From the request to stop to SIGKILL, where neither steps nor saves take long."""
SLACK = 3.0
"""A save may take so many times as long as the longest before it: a disk is slower when somebody else writes too."""


class Attempt(BaseModel):
    """One start of the ranks of one node."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    program: Literal["train", "evaluate"] = "train"
    """What the ranks do: `llama3.train.main` or `llama3.evaluate.main`."""
    job: Path
    """The job file of that program."""
    logs: Path
    """Folder for `rank-<r>.log` and `node-<n>.json`; on several nodes a shared one."""
    processes: int = Field(default=1, ge=1)
    """Ranks on all nodes."""
    per_node: int = Field(default=0, ge=0)
    """Ranks on a node, the last one may have fewer; 0: all on this one."""
    node: int = Field(default=0, ge=0)
    """Number of this node."""
    address: str = "127.0.0.1"
    """Where rank 0 is."""
    port: int = Field(default=0, ge=0)
    """Rank 0's port; 0: a free one, if there is one node."""

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        size = self.per_node or self.processes
        return range(min(self.node * size, self.processes), min((self.node + 1) * size, self.processes))

    def log(self, rank: int) -> Path:
        """Return the file with what `rank` prints."""
        return self.logs / f"rank-{rank}.log"

    def leave_by(self, asked: float) -> float:
        """Return until when the ranks, told at `asked` to stop, may take; an evaluation has nothing to save."""
        return leave_by(self.job, asked) if self.program == "train" else asked + GRACE_S

    @property
    def outcome(self) -> Path:
        """The file that says how this node's ranks ended, once they have."""
        return self.logs / f"node-{self.node}.json"


class AttemptResult(BaseModel):
    """How an attempt ended, on one node or on all."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    status: int
    """0: complete; 143: stopped on request; negative: a rank was killed by this signal; else a rank's exit status."""
    words: str = ""
    """Which rank failed first, and the end of its log."""
    time: float = 0.0
    """When the first rank failed, in seconds since 1970."""


class Pace(BaseModel):
    """How long a trainer needs to leave, as its leading process says in a file of the stage's folder."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    step_s: float = 0.0
    """The longest step of this attempt."""
    save_s: float = 0.0
    """The longest save of the stage; 0: none has ended yet."""
    saving_since: float = 0.0
    """When the save in progress began, in seconds since 1970; 0: there is none."""

    @classmethod
    def read(cls, work: Path) -> Self:
        """Return what was said last of the stage in `work`."""
        try:
            return cls.model_validate_json((work / PACE).read_text())
        except FileNotFoundError:
            return cls()

    def write(self, work: Path) -> None:
        """Say it. It does not wait for the disk: a power cut ends the process that would read it, too."""
        new = work / f"{PACE}.new"
        new.write_text(self.model_dump_json())
        new.rename(work / PACE)


PACE = "pace.json"


def leave_by(job: Path, asked: float) -> float:
    """Return until when the trainer of `job`, told at `asked` to stop, may take; both in seconds since 1970.

    Asked again it may be later: a save that began meanwhile has its own time.
    """
    try:
        told = TrainJob.model_validate_json(job.read_text())
    except FileNotFoundError:  # the stage is committed, and its folder removed
        return asked + GRACE_S
    pace = Pace.read(told.work)
    left = asked + GRACE_S + 2 * pace.step_s  # the step that it is in, and one that all ranks have agreed on
    save_s = SLACK * pace.save_s or told.timeout_s  # the first save of a stage, which nothing was measured of
    return max(left, pace.saving_since + GRACE_S + save_s) if pace.saving_since else left


def first_failure(outcomes: list[AttemptResult]) -> AttemptResult:
    """Return the outcome of all nodes from that of each: what failed first, and a killed rank before any complaint.

    A peer of a killed rank reports "connection reset" within milliseconds, maybe before the killed one is known.
    """
    failed = [outcome for outcome in outcomes if outcome.status not in (0, TERMINATED)]
    if failed:
        return min(failed, key=lambda outcome: (outcome.status > 0, outcome.time))
    return max(outcomes, key=lambda outcome: outcome.status)


def outcomes_in(logs: Path) -> list[AttemptResult]:
    """Return what the nodes of an attempt have said so far."""
    return [AttemptResult.model_validate_json(path.read_text()) for path in sorted(logs.glob("node-*.json"))]


def last_lines(log: Path, lines: int = LAST_LINES) -> str:
    """Return the end of a log: why its writer died."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
