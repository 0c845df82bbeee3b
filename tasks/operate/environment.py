"""What a run needs of its surroundings, asked cheaply: devices, torch's build, launcher, MLflow, proxies, disk.

Preflight and `herd doctor` have this list in common. Nothing here imports torch or MLflow: a driver, a package's
metadata, a scheduler's commands and a few files answer.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Literal, NamedTuple

from herd.llama3.model.flops import checkpoint_bytes, parameter_count, recipe_vocab_size
from herd.llama3.recipe.schema import Recipe
from herd.storage.processes import processors
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.format import format_bytes
from herd.tasks.launch.base import LAUNCHERS, launcher_of
from herd.tasks.launch.local import query_gpu, visible_gpus
from herd.tasks.tracking.mlflow_store import SchemaUnknown, check_schema, server_uri

State = Literal["ok", "warn", "fail"]
CUDA_BUILD = "install torch's CUDA build: make install TORCH=cuda, or pip install --force-reinstall torch"
LITTLE, TOO_LITTLE = 20e9, 2e9
"""Free bytes of a disk: a warning, a failure (the alert `disk` of a run)."""
TRAINING = "pretrain"
"""Kind of the steps that need devices and a launcher."""


class CheckResult(NamedTuple):
    """One row."""

    check: str
    state: State
    what: str
    todo: str = ""
    node: str = ""
    """Empty: this machine."""


class Surroundings(NamedTuple):
    """What the checks look at."""

    cluster: Cluster
    root: Root
    recipe: Recipe | None = None
    """None: any recipe."""

    @property
    def promises_gpus(self) -> bool:
        """Whether a trainer without a GPU ends with an error; else it trains on processors, which is slow."""
        return self.cluster.trainer_device == "cuda" or self.cluster.backend in ("nccl", "ncclx")

    @property
    def here(self) -> bool:
        """Whether the trainer runs on this machine."""
        return self.cluster.nodes is None


class TorchBuild(NamedTuple):
    """What torch was built for, from its files."""

    version: str
    cuda: str
    """Version of CUDA, or of HIP; empty: for processors only."""


def torch_build() -> TorchBuild:
    """Return torch's version and build without an import, which takes two seconds. Raises PackageNotFoundError."""
    package = metadata.distribution("torch")
    text = Path(str(package.locate_file("torch/version.py"))).read_text()
    built = re.search(r"^(?:cuda|hip)\b.*= '([\d.]+)", text, re.MULTILINE)
    return TorchBuild(package.version, built[1] if built else "")


def check_devices(place: Surroundings) -> Iterator[CheckResult]:
    """Compare the GPUs here with what the cluster promises, and torch's build with GPUs and driver."""
    cluster, gpus, build = place.cluster, visible_gpus(), torch_build()
    if not place.here:  # a machine that starts jobs needs no GPU
        return
    if not gpus:
        if place.promises_gpus:
            yield CheckResult("gpu", "fail", "none is visible here, and the cluster file promises GPUs",
                              "check the driver (nvidia-smi), the GPUs of the job, CUDA_VISIBLE_DEVICES")  # fmt: skip
        else:
            what = f"none; torch {build.version} trains on {processors()} processors"
            yield CheckResult("gpu", "ok", what)
        return
    if cluster.trainer_device == "cpu":
        return
    if not build.cuda:
        yield CheckResult("gpu", "fail", f"{gpus} here, and torch {build.version} is a CPU build", CUDA_BUILD)
        return
    driver, newest = query_gpu("driver_version") or "unknown", _driver_cuda()
    if newest and newest < int(build.cuda.partition(".")[0]):
        what = f"{driver} is for CUDA {newest}; torch {build.version} (CUDA {build.cuda}) cannot use the {gpus} GPUs"
        yield CheckResult("driver", "fail", what, "update the NVIDIA driver, or install a torch for an older CUDA")
        return
    yield CheckResult("driver", "ok", driver)
    if cluster.processes > gpus:
        state: State = "warn" if gpus >= cluster.layout.model_parallel else "fail"
        yield CheckResult("gpus", state, f"{gpus} here, and cluster.processes is {cluster.processes}",
                          "one process per GPU trains; lower cluster.processes or its layout")  # fmt: skip


def _driver_cuda() -> int:
    """Return the newest major version of CUDA that the driver knows; 0 if NVML does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlSystemGetCudaDriverVersion()) // 1000
    except Exception:  # no such package, no driver, an older one
        return 0


def check_backend(place: Surroundings) -> Iterator[CheckResult]:
    """Look for torchcomms, which `backend: ncclx` needs, where the trainer has this Python."""
    if place.cluster.backend == "ncclx" and not util.find_spec("torchcomms"):
        what = f"cluster.backend: ncclx needs torchcomms with NCCLX, which {socket.gethostname()} does not have"
        yield CheckResult("backend", "fail", what, "install it beside torch, or write nccl")


def check_launcher(place: Surroundings) -> Iterator[CheckResult]:
    """Ask the scheduler what a job of the cluster will need of it."""
    name = place.cluster.launcher
    if place.here:
        return
    try:
        launcher_of(place.cluster, "doctor", None)
        faults = import_module(LAUNCHERS[name]).scheduler_faults(place.cluster)
    except ValueError as error:  # its commands are missing
        what, _, todo = str(error).partition("; ")
        faults = [(what, todo)]
    for what, todo in faults:
        yield CheckResult(name, "fail", what, todo)
    if not faults:
        yield CheckResult(name, "ok", "answers, and has what the cluster file names")


def check_mlflow(place: Surroundings) -> Iterator[CheckResult]:
    """Compare the schema of the root's MLflow database with the MLflow here."""
    if server_uri():
        return
    try:
        check_schema(place.root)
    except SchemaUnknown as error:
        what, _, todo = str(error).partition("; ")
        yield CheckResult("mlflow", "fail", what, todo)


def check_proxy(place: Surroundings) -> Iterator[CheckResult]:
    """Look at the proxy of the environment: whether herd's clients can use it, and which servers they reach by it."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    proxies = {kind: url for kind, url in getproxies().items() if kind in ("http", "https", "all")}
    for kind, url in proxies.items():
        if url.startswith("socks") and not util.find_spec("socksio"):
            scheme = urlsplit(url).scheme
            yield CheckResult("proxy", "fail", f"{kind}_proxy: {scheme}:// needs the package socksio",
                              f"pip install socksio, or unset {kind}_proxy")  # fmt: skip
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL"):
        address = urlsplit(os.environ.get(name, ""))
        if address.hostname and {address.scheme, "all"} & proxies.keys() and not proxy_bypass(address.hostname):
            todo = f"if it is inside your network: export no_proxy=$no_proxy,{address.hostname}"
            yield CheckResult("proxy", "warn", f"{name}: {address.hostname} is reached through the proxy", todo)


def check_disk(place: Surroundings) -> Iterator[CheckResult]:
    """Compare the free space of the root's disk with the checkpoints of the recipe, or with a usual amount."""
    root, recipe, least, why = place.root, place.recipe, TOO_LITTLE, ""
    if recipe is not None:
        kept = 0 if place.cluster.checkpoints or not root.is_local else recipe.checkpoint.keep.last
        size = checkpoint_bytes(parameter_count(recipe.model, recipe_vocab_size(recipe)))
        least, why = (kept + 1) * size, f"; {kept + 1} checkpoints take {format_bytes((kept + 1) * size)}"
    disk = shutil.disk_usage(next(path for path in (root.local, *root.local.parents) if path.exists()))
    state: State = "fail" if disk.free < least else "warn" if disk.free < LITTLE else "ok"
    todo = "" if state == "ok" else "free some, herd gc --delete, or choose another folder"
    what = f"{format_bytes(disk.free)} free of {format_bytes(disk.total)} in {root.local}"
    yield CheckResult("disk", state, what + (why if state == "fail" else ""), todo)


class EnvironmentCheck(NamedTuple):
    """A check, and from which kind of step on a run needs what it looks at; empty: from its start."""

    rows: Callable[[Surroundings], Iterator[CheckResult]]
    since: str = ""


CHECKS = (
    EnvironmentCheck(check_devices, TRAINING),
    EnvironmentCheck(check_backend, TRAINING),
    EnvironmentCheck(check_launcher, TRAINING),
    EnvironmentCheck(check_mlflow, "promote"),
    EnvironmentCheck(check_proxy),
    EnvironmentCheck(check_disk),
)
"""What preflight asks before the first step, and `herd doctor` shows."""
