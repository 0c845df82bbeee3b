"""Where a run executes: number of processes, parallel layout, launcher. Nothing here changes the result of a run.

One model, so that Prefect draws one form and the command line reads one YAML file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from herd.llama3.parallel.layout import Backend, Layout
from herd.llama3.recipe.base import read_yaml
from herd.llama3.recipe.load import fault_lines
from herd.llama3.recipe.units import Bytes
from herd.llama3.train.profiler import Profile
from herd.storage.processes import processors
from herd.storage.secrets import holds_secret, names_secret, refuse_secrets


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} contains a line break or a control character; write one line")
    return text


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"invalid name of a variable {name!r}; use letters, digits and '_', as in NCCL_IB_HCA")
    return name


def _text(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        shown = str(value).lower()
        raise ValueError(f'{shown} is not text, as YAML reads it; write it in quotes: "{shown}"')
    return value


def _value(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _slurm_time(value: Any) -> Any:
    if isinstance(value, int | float):  # YAML 1.1 reads 12:00:00 as 43200, in base 60
        raise ValueError(
            f'{value} is a number, which is also how YAML reads 12:00:00; write it in quotes: "12:00:00", minutes too: '
            '"720"'
        )
    pattern = r"(?i:unlimited|infinite)|\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
    if isinstance(value, str) and not re.fullmatch(pattern, _one_line(value)):
        raise ValueError(
            f"invalid time {value!r}; use days-hours:minutes:seconds, hours:minutes:seconds, minutes:seconds or "
            'minutes, as in "1-00:00:00"'
        )
    return value


def _option(text: str) -> str:
    if not re.fullmatch(r"--[\w-]+(=.*)?|-\w.*", text):
        raise ValueError(f"invalid option {text!r}; leave out #SBATCH, begin with '-' and write '=', as in --qos=high")
    return text


def _quantity(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(rf"\d+(\.\d+)?({'|'.join(QUANTITY_UNITS)})?", value):
        raise ValueError(f"invalid quantity {value!r}; write it as Kubernetes does: 512Gi (2^30 bytes) or 512G (10^9)")
    return value


def quantity_bytes(quantity: str) -> float:
    """Return the bytes of a quantity in Kubernetes' notation: 64Gi."""
    number = quantity.rstrip("kKMGTPEi")
    return float(number) * QUANTITY_UNITS.get(quantity.removeprefix(number), 1)


def _absolute(path: str) -> str:
    if not re.fullmatch(r"/[^:]*", _one_line(path)):
        raise ValueError(f"{path!r} is not an absolute path without ':'; write e.g. /{path.strip('/').split(':')[0]}")
    return path


def _toleration(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        match name:
            case "operator" if value not in ("Exists", "Equal"):
                raise ValueError(f"invalid operator {value!r}; write Exists or Equal")
            case "effect" if value not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
                raise ValueError(f"invalid effect {value!r}; write NoSchedule, PreferNoSchedule or NoExecute")
            case "key" | "value":
                _text(value)
            case "tolerationSeconds" if not isinstance(value, int):
                raise ValueError(f"invalid tolerationSeconds {value!r}; write a whole number of seconds")
            case "operator" | "effect" | "tolerationSeconds":
                pass
            case _:
                keys = "key, operator, value, effect, tolerationSeconds"
                raise ValueError(f"unknown key {name!r}; the keys of a toleration are {keys}")
    if "tolerationSeconds" in given and given.get("effect") != "NoExecute":
        raise ValueError("tolerationSeconds is only for effect: NoExecute; write that, or leave out tolerationSeconds")
    if given.get("operator") == "Exists" and given.get("value"):
        raise ValueError(f"value {given['value']!r} is not for operator: Exists; leave it out, or write Equal")
    if not given.get("key") and given.get("operator") != "Exists":
        raise ValueError("a toleration without key has operator: Exists; write that, or the key of the taint")
    return given


QUANTITY_UNITS = {
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
Line = Annotated[str, AfterValidator(_one_line)]
"""Text for one line of a script: a line break in it would begin a command."""
Variable = Annotated[str, AfterValidator(_variable)]


class Nodes(BaseModel):
    """Common settings of the launchers for several machines."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes_per_node: int = Field(default=8, ge=1)
    """Trainer processes on a node; `cluster.processes` divided by it is the number of nodes requested."""
    gpus: bool = True
    """Request one GPU per process; a process that then sees none ends with an error. If false, `device` decides."""
    cpus_per_process: int = Field(default=8, ge=1)
    """Processors requested per process, and its threads."""
    python: Line = ""
    """Python interpreter on the nodes; empty: the path of this one, which must exist there too."""
    environment: dict[Variable, Annotated[str, BeforeValidator(_value)]] = {}
    """Variables for every process, such as NCCL_SOCKET_IFNAME or NCCL_IB_HCA; they win over those that herd sets. If
    NCCL_SOCKET_IFNAME names one interface (eth0), it is also the default of GLOO_SOCKET_IFNAME. A secret is refused."""
    poll_s: float = Field(default=5.0, gt=0)
    """Seconds between two calls of the scheduler."""
    preflight: bool = True
    """Measure every node for some seconds at the start of an attempt; one far below the others is excluded."""

    @field_validator("environment")
    @classmethod
    def _no_secret(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if names_secret(name) or holds_secret(value):
                raise ValueError(
                    f"{name} holds a secret, and would be written into scripts, manifests and records; for Slurm "
                    "export it before herd run (sbatch passes it on), or source a private file in slurm.setup; on "
                    "Kubernetes name a Secret in kubernetes.secrets"
                )
        return environment

    def nodes(self, processes: int) -> int:
        """Return how many nodes `processes` need."""
        return -(-processes // self.processes_per_node)


class Slurm(Nodes):
    """Settings of `launcher: slurm`. The root, or for a remote root the folder HERD_SCRATCH, must be on a file system
    that all nodes share, with flock."""

    partition: Line = ""
    """Partition; empty: the default one."""
    account: Line = ""
    """Account to charge; empty: the default one."""
    host_file: Line = ""
    """File of hosts in the order of ranks, one a line (`herd plan --hosts`), which a job's hosts follow; those that it
    does not name come last. Names are compared up to their first dot. Empty: Slurm's order."""
    time: Annotated[str, BeforeValidator(_slurm_time)] = "1-00:00:00"
    """Time limit of one job, in quotes: "2-00:00:00", "12:00:00" or minutes. At its end the trainer saves, and the next
    job continues from there."""
    grace_s: int = Field(default=90, ge=20)
    """Seconds before the time limit at which Slurm sends SIGTERM."""
    lines: list[Annotated[Line, AfterValidator(_option)]] = []
    """More `#SBATCH` options: --qos=high, --exclusive, --mem=0 (all memory of a node), --constraint=h100."""
    setup: list[str] = []
    """Shell lines before the start: module load cuda, source /shared/venv/bin/activate."""
    srun: list[Line] = []
    """More options of srun, such as --container-image=/shared/herd.sqsh."""


class Kubernetes(Nodes):
    """Settings of `launcher: kubernetes`. The root, or for a remote root the folder HERD_SCRATCH, must be on the volume
    `claim`, mounted here at the same path."""

    kind: Literal["JobSet", "TrainJob"] = "JobSet"
    """A JobSet (jobset.x-k8s.io), or a TrainJob of Kubeflow Trainer v2, whose controller makes one."""
    image: str = "herd:latest"
    """Image with herd installed."""
    namespace: str = "default"
    """Namespace of the job."""
    claim: str = "herd"
    """Name of the volume claim of the root."""
    mount: Annotated[str, AfterValidator(_absolute)] = "/herd"
    """Where the volume is mounted, an absolute path; the root and the recipe must be below it."""
    queue: str = ""
    """Kueue queue; empty: none."""
    topology: Line = ""
    """Level of Kueue's topology, a label of nodes such as cloud.provider.com/topology-rack: pods get nodes close to
    each other, in the order of ranks; empty: any nodes."""
    memory: Annotated[str, BeforeValidator(_quantity)] = "64Gi"
    """Memory of a node's pod, in Kubernetes' spelling; the pod's /dev/shm counts. A save copies the node's part of the
    training state to it: 12 bytes a parameter, 96 GB for an 8B on one node."""
    gpu: str = "nvidia.com/gpu"
    """Name of the resource that is requested as a GPU."""
    shm: Annotated[str, BeforeValidator(lambda value: value and _quantity(value))] = ""
    """Most memory of the pod's /dev/shm, which NCCL and data loaders use; empty: that of the pod."""
    rdma: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Devices for RDMA per pod, such as `rdma/hca_shared_devices_a: 1` or `vpc.amazonaws.com/efa: 32`; it also gets the
    capability IPC_LOCK."""
    node_selector: dict[str, Annotated[str, BeforeValidator(_text)]] = {}
    """Labels of the nodes to use, such as `nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3`; quote true and numbers."""
    tolerations: list[Annotated[dict[str, str | int], BeforeValidator(_toleration)]] = []
    """Taints that the pods tolerate, as in a pod: `{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}`."""
    image_pull_secrets: list[str] = []
    """Secrets for the registry of the image."""
    secrets: list[str] = []
    """Secrets whose keys become variables of every process: AWS_SECRET_ACCESS_KEY, HF_TOKEN."""
    overlay: dict[str, Any] = {}
    """Strategic merge patch over the JobSet, also a TrainJob's, for everything else: mappings are merged, null deletes
    a key, lists of objects are merged by name, `$patch: delete` deletes an object, `$patch: replace` replaces one."""
    grace_s: int = Field(default=90, ge=20)
    """Seconds between SIGTERM and SIGKILL when a pod is deleted."""

    @field_validator("kind", mode="before")
    @classmethod
    def _maintained(cls, kind: Any) -> Any:
        if kind == "PyTorchJob":
            raise ValueError(
                "PyTorchJob belongs to Kubeflow's training operator v1, which Trainer v2 replaced; write TrainJob, or "
                "JobSet"
            )
        return kind

    @field_validator("shm")
    @classmethod
    def _within_memory(cls, shm: str, info: ValidationInfo) -> str:
        memory = info.data.get("memory")
        if shm and memory and quantity_bytes(shm) > quantity_bytes(memory):
            raise ValueError(f"{shm} is more than memory: {memory}, of which it is a part; raise memory, or lower shm")
        return shm

    @field_validator("overlay")
    @classmethod
    def _own_fields(cls, overlay: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        own = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}
        for path in own:
            value: Any = overlay
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                raise ValueError(f"{'.'.join(path)} is set by herd, which finds its jobs by it; leave it out")
        refuse_values_of_secrets(overlay)
        spec = overlay.get("spec")
        if "kind" not in info.data or not isinstance(spec, dict):
            return overlay
        if unknown := spec.keys() - {*JOB_SET, "$patch"}:
            raise ValueError(f"spec.{min(unknown)} is not a field of a JobSet, whose fields are {', '.join(JOB_SET)}")
        jobs = spec.get("replicatedJobs")
        names = {job["name"] for job in jobs if "name" in job} if isinstance(jobs, list) else set()
        if unknown := names - {"node"}:
            raise ValueError(f"spec.replicatedJobs: {min(unknown)!r} is not in the manifest; write node")
        return overlay


JOB_SET = (
    *("replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator"),
    *("managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies"),
)
"""Fields of the `spec` of a JobSet."""


def refuse_values_of_secrets(patch: Any) -> None:
    """Raise ValueError for a variable of a container that is named like a secret and has a plain value."""
    for value in patch.values() if isinstance(patch, dict) else patch if isinstance(patch, list) else ():
        refuse_values_of_secrets(value)
    if isinstance(patch, dict) and "value" in patch and names_secret(str(patch.get("name", ""))):
        raise ValueError(
            f"{patch['name']} is a secret, and would be written into manifests and records; put it into a Secret of "
            "the cluster and name that in kubernetes.secrets"
        )


class StageCluster(BaseModel):
    """Where one stage executes, if it differs: a long context needs other processes than a short one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes: int | None = Field(default=None, ge=1)
    """Trainer processes of this stage."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Sequences per forward pass and process."""
    layout: Layout | None = None
    """Layout of the stage, complete: it is not merged with `cluster.layout`."""


class EvaluationCluster(BaseModel):
    """Where models are evaluated, by the launcher of the trainer: the suites, and the gates of long contexts."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes: int | None = Field(default=None, ge=1)
    """Processes that evaluate a model together: tp x pp x replicas; null: one replica."""
    layout: Layout | None = None
    """How a replica splits the model, by `tp` and `pp`; null: over the fewest devices that it fits."""

    @field_validator("layout")
    @classmethod
    def _inference(cls, layout: Layout | None) -> Layout | None:
        if layout is not None and layout != Layout(tp=layout.tp, pp=layout.pp):
            raise ValueError("evaluation splits a model by tp and pp only; leave out the other fields")
        return layout

    @model_validator(mode="after")
    def _whole(self) -> EvaluationCluster:
        if self.layout is not None and self.processes is not None:
            self.layout.dp(self.processes)  # raises ValueError if the layout does not divide them
        return self


class Cluster(BaseModel):
    """Where a run executes. Nothing here changes its result, only its speed."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    processes: int = Field(default=1, ge=1)
    """Total trainer processes: tp x cp x pp x dp."""
    threads: int = Field(default_factory=processors, ge=1)
    """Processor threads of this machine for the whole run; trainer processes on it share them."""
    micro_batch: int = Field(default=16, ge=1)
    """Sequences per forward pass and process; a smaller number needs less memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU, else the CPU; an error if `slurm.gpus` or `kubernetes.gpus` requested GPUs."""
    backend: Backend = "auto"
    """Library of collectives: auto is NCCL on GPUs and gloo on processors; ncclx is Meta's, through torchcomms."""
    layout: Layout = Layout()
    """How the model is distributed over the processes."""
    stages: dict[str, StageCluster] = {}
    """Stages with other processes, micro-batch or layout; `herd plan --write` writes them."""
    fabric: str = ""
    """Devices and network for predictions and the memory check: a preset (`herd plan presets`) or a YAML file; empty:
    the devices of this machine."""
    evaluate: EvaluationCluster = EvaluationCluster()
    """Where models are evaluated."""
    gpu_hour_usd: float | None = Field(default=None, ge=0)
    """Price of a device for an hour in USD, for `cost/usd`; null: the planner's assumption for GPUs, none for
    processors."""
    gpu_watts: float | None = Field(default=None, ge=0)
    """Average power of a device with its share of the server and of cooling, for `cost/kwh`; null: the planner's
    assumption for the GPUs of `fabric`."""
    deterministic: bool = False
    """Bitwise the same result on any number of data-parallel processes; slower."""
    checkpoints: str = ""
    """Folder or URI (s3://bucket/herd) of the checkpoints of a stage in progress; empty: `work` of a local root, or
    `in-progress` of a remote one, where another machine finds them."""
    token_cache: str = "200GiB"
    """Most disk space for copies of token shards on a machine that trains from a remote root; the least recently used
    are deleted. A local root has no limit."""
    profile: Profile | None = None
    """Profiling: a trace of chosen steps, device memory, the last collectives."""
    timeout_s: int = Field(default=600, ge=1)
    """How long a process waits for another, at the start and in every collective, before the attempt fails."""
    startup_s: int = Field(default=1800, ge=1)
    """How long a trainer may record no step and write no line of log before its first new step."""
    attempts: int = Field(default=1, ge=1)
    """Attempts in a row without a new step after which the run fails; attempts that make progress do not count."""
    health_s: float = Field(default=30.0, ge=0)
    """Seconds between two samples of every node's health, which can exclude a node (`herd hosts`); 0: none."""
    launcher: Literal["local", "slurm", "kubernetes"] = "local"
    """What starts the trainer: this machine, Slurm, or Kubernetes."""
    slurm: Slurm = Slurm()
    """Settings of the Slurm launcher."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings of the Kubernetes launcher."""
    memory: str = "1GiB"
    """Memory for DuckDB while data is curated, shared by its threads."""
    data: Literal["threads", "dask", "ray"] = "threads"
    """What executes the shards of data steps: threads here, or a cluster that reaches the root, on a disk under one
    path or in an object store."""
    data_address: str = ""
    """Address of the Dask scheduler or Ray head; empty starts a local cluster."""
    data_workers: int = Field(default=2, ge=1)
    """Workers of that cluster; a step is split into a few batches for each."""

    @field_validator("memory", "token_cache")
    @classmethod
    def _size(cls, value: str) -> str:
        Bytes.parse(value)
        return value

    @model_validator(mode="after")
    def _whole(self) -> Cluster:
        self.layout.dp(self.processes)  # raises ValueError if the layout does not divide them
        if self.device == "cpu" and self.backend in ("nccl", "ncclx"):
            raise ValueError(f"backend: {self.backend} needs GPUs, and device is cpu; write gloo, or leave it out")
        for name, overrides in self.stages.items():
            try:
                (overrides.layout or self.layout).dp(overrides.processes or self.processes)
            except ValueError as error:
                raise ValueError(f"stages.{name}: {error}") from None
        return self

    @field_validator("checkpoints", "data_address")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        refuse_secrets(value, "cluster")
        return value

    def for_stage(self, stage: str, span: str = "") -> Cluster:
        """Return the cluster with the settings of `stage`, or of its span `span` if `stages` has an entry for that."""
        overrides = self.stages.get(span) or self.stages.get(stage)
        if overrides is None:
            return self
        own = {name: value for name in StageCluster.model_fields if (value := getattr(overrides, name)) is not None}
        return self.model_copy(update=own)

    @property
    def data_parallel(self) -> int:
        """Copies of the model that train side by side."""
        return self.layout.dp(self.processes)

    @property
    def nodes(self) -> Nodes | None:
        """The settings of the launcher, which have its name; None for this machine."""
        nodes: Nodes | None = getattr(self, self.launcher, None)
        return nodes

    @property
    def trainer_device(self) -> Literal["auto", "cpu", "cuda"]:
        """Device of a trainer process; with requested GPUs `auto` must not fall back to the CPU silently."""
        return "cuda" if self.nodes and self.nodes.gpus and self.device == "auto" else self.device

    @property
    def process_threads(self) -> int:
        """Processor threads of one trainer process."""
        return self.nodes.cpus_per_process if self.nodes else max(1, self.threads // self.processes)


SCHEDULERS = tuple(
    name
    for name, field in Cluster.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Nodes)
)
"""The launchers for several machines: `Cluster` has a field with the settings of each."""


def unused_launchers(cluster: Cluster) -> list[str]:
    """Return a warning if the file of `cluster` has settings of launchers and chooses none."""
    names = [name for name in SCHEDULERS if name in cluster.model_fields_set]
    if cluster.nodes is not None or not names:
        return []
    what = f"cluster.{', cluster.'.join(names)}: {'has' if len(names) == 1 else 'have'} settings, and launcher is local"
    return [f"{what}: the trainer would run on this machine; write launcher: {' or '.join(names)}, or leave them out"]


def load_cluster(path: Path, **changes: Any) -> Cluster:
    """Return the cluster of the YAML file `path`, with `changes` to its fields. Raises ValueError."""
    data = read_yaml(path, f"cluster: {path}") or {}
    if not isinstance(data, dict):
        raise ValueError(f"cluster: {path} is not a mapping; write lines such as processes: 8")
    return make_cluster({**data, **changes}, str(path))


def make_cluster(fields: dict[str, Any], name: str = "") -> Cluster:
    """Return the cluster with these fields, of the file `name` if there is one. Raises ValueError, a line per fault."""
    try:
        return Cluster.model_validate(fields)
    except ValidationError as error:
        raise ValueError(fault_lines(error, Cluster, name, "cluster")) from None


def cluster_reference() -> str:
    """Return the reference of all fields of a cluster file as markdown."""
    from herd.llama3.recipe.reference import describe_sections, sections

    intro = (
        *("# Cluster reference", "", "Written by `herd schema --cluster`; do not edit by hand.", ""),
        "The file of `--cluster`: where a run executes. Nothing in it changes a result, or the key of an artifact. In",
        "an editor: `herd schema --cluster --json > cluster.schema.json`, and as the first line",
        *("`# yaml-language-server: $schema=cluster.schema.json`.", ""),
    )
    return "\n".join([*intro, *describe_sections(sections(Cluster), defaults={"threads": "all"})]).rstrip() + "\n"
