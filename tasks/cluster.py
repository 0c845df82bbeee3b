"""Where a run works: how many processes, how the model is cut over them, and who starts them.

One model, so that Prefect draws one form and the command line reads one YAML file. Nothing here changes what is made:
the same recipe and the same trainer run on this machine, on Slurm and on Kubernetes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from llama3.parallel.layout import Layout
from llama3.recipe.base import read_plain
from llama3.recipe.units import Bytes
from llama3.train.profiler import Profile
from storage.processes import processors
from storage.secrets import refuse_secrets


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} holds a line break or a control character; write one line")
    return text


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is no name of a variable; use letters, digits and '_', as in NCCL_IB_HCA")
    return name


Line = Annotated[str, AfterValidator(_one_line)]
"""Text that goes into a line of a script: a line break in it would begin a command."""
Variable = Annotated[str, AfterValidator(_variable)]


class Nodes(BaseModel):
    """What the launchers for many machines share."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes_per_node: int = Field(default=8, ge=1)
    """Trainer processes on a node; as many nodes are asked for as `cluster.processes` need."""
    gpus: bool = True
    """Ask for one GPU per process; a process that then sees none ends with an error. Without, `device` decides."""
    cpus_per_process: int = Field(default=8, ge=1)
    """Processors asked for per process, and its threads."""
    python: Line = ""
    """Interpreter on the nodes; empty: the path of this one, which must then exist there too."""
    environment: dict[Variable, str] = {"NCCL_DEBUG": "WARN"}
    """Variables for every process, such as NCCL_SOCKET_IFNAME or NCCL_IB_HCA."""
    poll_s: float = Field(default=5.0, gt=0)
    """Seconds between two questions to the scheduler."""

    def nodes(self, processes: int) -> int:
        """Return how many nodes `processes` need."""
        return -(-processes // self.processes_per_node)


class Slurm(Nodes):
    """Settings of `launcher: slurm`. The root, or for a remote root the folder HERD_SCRATCH, must be on a file system
    that all nodes see, with flock."""

    partition: Line = ""
    """Partition; empty: the default one."""
    account: Line = ""
    """Account that pays; empty: the default one."""
    time: Line = "1-00:00:00"
    """Longest time of one job. At its end the trainer saves, and the next job goes on from there."""
    grace_s: int = Field(default=90, ge=20)
    """Seconds before that end at which Slurm sends SIGTERM."""
    lines: list[Line] = []
    """More `#SBATCH` lines, without the mark: --qos=high, --exclusive, --constraint=h100."""
    setup: list[str] = []
    """Shell lines before the start: module load cuda, source /shared/venv/bin/activate."""
    srun: list[Line] = []
    """More options of srun, such as --container-image=/shared/herd.sqsh."""


class Kubernetes(Nodes):
    """Settings of `launcher: kubernetes`. The root, or for a remote root the folder HERD_SCRATCH, must be on the volume
    `claim`, mounted here at the same path."""

    kind: Literal["JobSet", "PyTorchJob"] = "JobSet"
    """Which controller the cluster has: JobSet (jobset.x-k8s.io) or Kubeflow's training operator."""
    image: str = "herd:latest"
    """Image with herd installed."""
    namespace: str = "default"
    """Namespace of the job."""
    claim: str = "herd"
    """Name of the volume claim that holds the root."""
    mount: str = "/herd"
    """Where the volume is mounted; the root and the recipe must be below it."""
    queue: str = ""
    """Kueue queue; empty: none."""
    memory: str = "64Gi"
    """Memory of a node's pod, in Kubernetes' spelling; the pod's /dev/shm counts."""
    gpu: str = "nvidia.com/gpu"
    """Name of the resource that is asked for as a GPU."""
    grace_s: int = Field(default=90, ge=20)
    """Seconds between SIGTERM and SIGKILL when a pod is deleted."""


class StagePlace(BaseModel):
    """Where one stage works, as far as it differs: a long context wants other processes than a short one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes: int | None = Field(default=None, ge=1)
    """Trainer processes of this stage."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Sequences per forward pass and process."""
    layout: Layout | None = None
    """How the model is cut; whole, not the difference from the others'."""


class Cluster(BaseModel):
    """Where a run works. Nothing here changes what is made, only how fast."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes: int = Field(default=1, ge=1)
    """Trainer processes in all: tp x cp x pp x dp."""
    threads: int = Field(default_factory=processors, ge=1)
    """Processor threads of this machine for the whole run; trainer processes on it share them."""
    micro_batch: int = Field(default=16, ge=1)
    """Sequences per forward pass and process; a smaller number needs less memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one, and nowhere else where `slurm.gpus` or `kubernetes.gpus` asks for GPUs."""
    layout: Layout = Layout()
    """How the model is cut over the processes."""
    stages: dict[str, StagePlace] = {}
    """Stages that work on other processes, with another micro-batch or another layout; `herd plan --write` makes it."""
    fabric: str = ""
    """Devices and network for predictions and the check of memory: a preset (`herd plan show`), or a YAML file; empty:
    the devices of this machine, and no prediction of other ones."""
    evaluators: int = Field(default=1, ge=1)
    """Processes of this machine that score a model together, each with the whole of it on a device of its own."""
    deterministic: bool = False
    """Same bits on any number of data-parallel processes; slower."""
    checkpoints: str = ""
    """Where checkpoints of a stage in progress are kept, a folder's URI (s3://bucket/herd); empty: with other work of a
    local root, or in `in-progress` below a remote one, where another machine finds them."""
    token_cache: str = "200GiB"
    """Most that copies of token shards may take on a machine while it trains from a remote root; the longest unused
    make room. No limit on what a local root holds."""
    profile: Profile | None = None
    """What to look into while it trains: a trace of chosen steps, device memory, the last collectives."""
    timeout_s: int = Field(default=600, ge=1)
    """How long a process waits for another, at the start and in every exchange, before the attempt is given up."""
    startup_s: int = Field(default=1800, ge=1)
    """How long a trainer may neither record a step nor write a line of log, before its first new step."""
    attempts: int = Field(default=1, ge=1)
    """So many attempts in a row without a new step end the run; attempts that get further do not count."""
    launcher: Literal["local", "slurm", "kubernetes"] = "local"
    """Who starts the trainer: this machine, Slurm, or Kubernetes."""
    slurm: Slurm = Slurm()
    """Settings of the Slurm launcher."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings of the Kubernetes launcher."""
    memory: str = "1GiB"
    """Memory for DuckDB while data is curated, shared by its threads."""
    data: Literal["threads", "dask", "ray"] = "threads"
    """What works on the shards of data steps: threads here, or a cluster that sees the root under the same path."""
    data_address: str = ""
    """Address of the Dask scheduler or Ray head; empty starts a local cluster."""
    data_workers: int = Field(default=2, ge=1)
    """Workers of that cluster; a step is cut into a few batches for each."""

    @field_validator("memory", "token_cache")
    @classmethod
    def _size(cls, value: str) -> str:
        Bytes.parse(value)
        return value

    @model_validator(mode="after")
    def _whole(self) -> Cluster:
        self.layout.dp(self.processes)  # raises ValueError if the layout does not divide them
        for name, place in self.stages.items():
            try:
                (place.layout or self.layout).dp(place.processes or self.processes)
            except ValueError as error:
                raise ValueError(f"stages.{name}: {error}") from None
        return self

    @field_validator("checkpoints", "data_address")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        refuse_secrets(value, "cluster")
        return value

    def at(self, stage: str, part: str = "") -> Cluster:
        """Return where `stage` works, or one of its `part`s, which comes first if it has its own lines."""
        place = self.stages.get(part) or self.stages.get(stage)
        if place is None:
            return self
        own = {name: value for name in StagePlace.model_fields if (value := getattr(place, name)) is not None}
        return self.model_copy(update=own)

    @property
    def data_parallel(self) -> int:
        """Copies of the model that train side by side."""
        return self.layout.dp(self.processes)

    @property
    def trainer_device(self) -> Literal["auto", "cpu", "cuda"]:
        """Device of a trainer process; `auto` where a scheduler was asked for GPUs would train on processors unseen."""
        asked = {"slurm": self.slurm.gpus, "kubernetes": self.kubernetes.gpus}.get(self.launcher, False)
        return "cuda" if asked and self.device == "auto" else self.device

    @property
    def process_threads(self) -> int:
        """Processor threads of one trainer process."""
        match self.launcher:
            case "local":
                return max(1, self.threads // self.processes)
            case "slurm":
                return self.slurm.cpus_per_process
            case "kubernetes":
                return self.kubernetes.cpus_per_process


def load_cluster(path: Path, **changes: Any) -> Cluster:
    """Return the cluster that the YAML file `path` describes, with `changes` to its fields. Raises ValueError."""
    try:
        data = read_plain(path.read_text()) or {}
    except OSError as error:
        raise ValueError(f"cluster: {path} cannot be read ({error.strerror}); name a YAML file") from error
    except yaml.YAMLError as error:
        raise ValueError(f"cluster: {path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"cluster: {path} holds no mapping; write lines such as processes: 8")
    try:
        return Cluster.model_validate({**data, **changes})
    except ValidationError as error:
        faults = (
            (".".join(str(part) for part in fault["loc"]), fault["msg"].removeprefix("Value error, "))
            for fault in error.errors()
        )
        raise ValueError("\n".join(f"cluster.{name}: {words}" if name else words for name, words in faults)) from None
