"""Checks of a machine, a root and the nodes of a cluster before the first run: `herd doctor`.

A row says what is there and what to do. `fail` means that a run here would fail or silently be wrong, `warn` that it
would be slow or lacks something that only some runs need.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from herd.llama3.data.text.language import detector_fault
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.job import host_name
from herd.storage.filesystem import remote_filesystem
from herd.storage.processes import processors
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.errors import REMEDIES
from herd.tasks.format import FittedTable, format_bytes
from herd.tasks.launch.base import node_runner
from herd.tasks.launch.local import query_gpu, visible_gpus
from herd.tasks.operate.environment import CHECKS, CUDA_BUILD, TRAINING, CheckResult, State, Surroundings, torch_build
from herd.tasks.tracking.moved_root import moved_from

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

COLORS: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
FOLDER = "doctor"
"""Folder of the root for files of the checks; they are removed."""
LOCAL_TRIAL, REMOTE_TRIAL = 64 << 20, 16 << 20
"""Bytes written and read to measure a rate."""
SLOW = {True: 50e6, False: 20e6}
"""Bytes per second below which a local root, or one in an object store, is slow for checkpoints."""
CLOCK_S, CLOCK_REFUSED_S = 30.0, 900.0
"""Offset from the clock of the root's server: a warning; S3 refuses requests signed with a larger one."""
FILES = 4096
"""Open files of a process: ranks, token shards and connections need some thousand."""
SHM = 1 << 30
"""Bytes of /dev/shm: NCCL and data workers share memory there; containers have 64 MiB by default."""
LAST_WORDS = 300
"""Characters of a failed command that are shown."""
PORTS = {"--prefect-port": 4200, "--mlflow-port": 5000}
"""Default ports of `herd up`."""
SETTLES = "herd up settles it within a minute or two, and so does: prefect deployment run reconcile/reconcile"
SHOWN = 5
"""Differences of ledgers that a row names."""
TINY_RUN = (
    "name=doctor",
    *(
        f"sources.{domain}.0.limit={size}"
        for domain, size in zip(DOMAINS, ("600KB", "300KB", "300KB", "200KB"), strict=True)
    ),
    "tokenizer={train: {vocab: 512, sample: 200KB}}",
    "model={layers: 2, dim: 32, ffn: 64, heads: 2, kv_heads: 1, max_seq_len: 64, tied_embeddings: true}",
    "lr={peak: 2e-3, warmup: 4 steps, cosine: {to: 2e-4, over: 24K}}",
    "stages=[{name: main, until: 16K, seq_len: 64, batch: 512 tokens, mix: base},"
    " {name: anneal, for: 8K, seq_len: 64, batch: 512 tokens, mix: annealing, lr: linear to 0}]",
    "evaluate={after: [anneal], documents: 4, questions: 8}",
)
"""The shipped recipe `quickstart`, small."""


def diagnose(root: Root, cluster: Cluster, recipe: Recipe | None = None) -> list[CheckResult]:
    """Return the findings of this machine; a check that cannot be made is a failure."""
    place = Surroundings(cluster, root)
    shared = [(check.rows.__name__.removeprefix("check_"), partial(check.rows, place), check.since) for check in CHECKS]
    checks: list[tuple[str, Callable[[], Iterator[CheckResult]]]] = [
        *((name, rows) for name, rows, since in shared if since == TRAINING),
        ("gpu", lambda: check_gpus(visible_gpus())),
        ("machine", check_limits),
        ("languages", check_languages),
        ("root", lambda: check_root(root)),
        *((name, rows) for name, rows, since in shared if since != TRAINING),
        ("ports", check_ports),
    ]
    if recipe is not None:
        checks.append(("hub", lambda: check_hub(recipe)))
    findings: list[CheckResult] = []
    for name, check in checks:
        try:
            findings += check()
        except PermissionError as error:
            what = f"{error.filename}: {error.strerror}"
            findings.append(CheckResult(name, "fail", what, REMEDIES[error.errno or errno.EACCES]))
        except Exception as error:
            findings.append(CheckResult(name, "fail", f"{type(error).__name__}: {error}", "repair this first"))
    return findings


def check_run() -> CheckResult:
    """Train a tiny model from raw text to its promotion as `herd run` does, in a temporary folder."""
    kept = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL")}
    with tempfile.TemporaryDirectory(prefix="herd-doctor-") as folder:
        command = [sys.executable, "-P", "-m", "herd.flows.cli.main", "run", "quickstart", "--root", f"{folder}/root"]
        command += [word for change in TINY_RUN for word in ("--set", change)]
        began = time.monotonic()
        done = subprocess.run(
            command, env=kept | {"HERD_SCRATCH": f"{folder}/scratch"}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).split())[-LAST_WORDS:]
        return CheckResult(
            "run", "fail", f"a tiny run ended with status {done.returncode}: {last}", "repair this first"
        )
    return CheckResult("run", "ok", f"raw text to a promoted model in {time.monotonic() - began:.0f} s")


def check_gpus(gpus: int) -> Iterator[CheckResult]:
    """Look at the GPUs through torch, if it was built for them: whether it knows them, NCCL, memory, a compiler."""
    build = torch_build()
    if not gpus or not build.cuda:
        return
    import torch

    version = build.version
    if not torch.cuda.is_available():
        todo = "update the NVIDIA driver, or install a torch for an older CUDA"
        driver = query_gpu("driver_version") or "unknown"
        what = f"{driver}; torch {version} (CUDA {build.cuda}) cannot use the {gpus} GPUs"
        yield CheckResult("driver", "fail", what, todo)
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability(0)
    known = [arch for arch in torch.cuda.get_arch_list() if arch.startswith(f"sm_{major}")]
    if not known:
        yield CheckResult(
            "gpu", "fail", f"{names[0]} is sm_{major}{minor}, unknown to torch {version}", "install a newer torch"
        )
    else:
        yield CheckResult("gpu", "ok", f"{len(names)} x {names[0]}, torch {version}, CUDA {build.cuda}")
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield CheckResult("nccl", "ok", nccl)
    else:
        yield CheckResult("nccl", "fail", f"torch {version} has none, so that GPUs cannot communicate", CUDA_BUILD)
    yield check_compiler()
    free, total = torch.cuda.mem_get_info(0)
    if free < 0.9 * total:
        what = f"{format_bytes(free)} of {format_bytes(total)} are free on the first GPU"
        yield CheckResult("gpu", "warn", what, "end the other processes on it (nvidia-smi)")


def check_compiler() -> CheckResult:
    """Look for the C compiler with which Triton builds its launcher on a GPU machine."""
    if compiler := shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang"):
        return CheckResult("C compiler", "ok", compiler)
    what = "none, and Triton needs one for the loss and for `compile: true`"
    return CheckResult("C compiler", "fail", what, "install gcc and libc6-dev, or set CC")


def check_languages() -> Iterator[CheckResult]:
    """Look for a package beside herd that breaks the detection of languages."""
    fault, _, remedy = detector_fault().rpartition("; ")
    yield CheckResult("languages", "fail" if fault else "ok", fault or "can be detected", remedy)


def check_limits() -> Iterator[CheckResult]:
    """Look at memory, /dev/shm and the limit of open files."""
    yield CheckResult(
        "machine", "ok", f"{processors()} processors, {format_bytes(psutil.virtual_memory().total)} of memory"
    )
    shared = shutil.disk_usage("/dev/shm").total
    small = CheckResult(
        "/dev/shm", "warn", f"{format_bytes(shared)}", "docker run --shm-size=8g; on Kubernetes a volume in memory"
    )
    yield CheckResult("/dev/shm", "ok", format_bytes(shared)) if shared >= SHM else small
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= FILES or soft == resource.RLIM_INFINITY:
        yield CheckResult("open files", "ok", f"{soft:,} per process")
    else:
        most = 65536 if hard == resource.RLIM_INFINITY else hard
        todo = f"ulimit -n {most} in the shell of herd"
        if most < FILES:  # the hard limit, which a shell cannot raise
            todo = "docker run --ulimit nofile=65536, or limits.conf"
        yield CheckResult("open files", "warn", f"{soft:,} per process", todo)


def check_root(root: Root) -> Iterator[CheckResult]:
    """Write and read below the root: rights, locks, rate, clock, free space."""
    root.local.mkdir(parents=True, exist_ok=True)
    if before := moved_from(root):
        what = f"{root.uri} was moved or copied from {before[1]}, where paths in its databases still lead"
        yield CheckResult(
            "moved root", "warn", what, "nothing: the next run, or herd up, changes them before it writes"
        )
    size, payload = (LOCAL_TRIAL if root.is_local else REMOTE_TRIAL), os.urandom(1 << 20)
    with _trial(root) as name:
        began = time.time()
        written_s, read_s, stored = _rates(root, name, payload, size)
        ended = time.time()
        write, read = size / written_s, size / read_s
        rates = f"{root.uri}: writes {format_bytes(write)}/s, reads {format_bytes(read)}/s"
        slow = min(write, read) < SLOW[root.is_local]
        todo = "checkpoints take long there; choose a faster root, or cluster.checkpoints" if slow else ""
        yield CheckResult("root", "warn" if slow else "ok", rates, todo)
        offset = max(began - stored, stored - ended, 0.0)
        state: State = "ok" if offset < CLOCK_S else "warn" if root.is_local or offset < CLOCK_REFUSED_S else "fail"
        clock = f"{offset:.0f} s from that of {'the file system' if root.is_local else 'the store'}"
        yield CheckResult("clock", state, clock, "" if state == "ok" else "synchronize it (chrony, ntp)")
        if root.is_local:
            yield _locks(root.file(name))


@contextmanager
def _trial(root: Root) -> Iterator[str]:
    """Yield the name of a document below the root that is removed at the end."""
    name = f"{FOLDER}-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    try:
        yield name
    finally:
        root.remove(name)


def _rates(root: Root, name: str, payload: bytes, size: int) -> tuple[float, float, float]:
    """Write and read `size` bytes; return the seconds of both, and when it was written by the clock of the storage."""
    if not root.is_local:
        began = time.perf_counter()
        root.write(payload * (size // len(payload)), name)
        written_s, stored = time.perf_counter() - began, float(remote_filesystem(root.uri).server_time(root.uri))
        began = time.perf_counter()
        assert root.read(name) is not None
        return written_s, time.perf_counter() - began, stored
    path, began = root.file(name), time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(payload)):
            file.write(payload)
        file.flush()
        os.fsync(file.fileno())
        written_s, stored = time.perf_counter() - began, os.fstat(file.fileno()).st_mtime
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the memory
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(len(payload)):
            pass
    return written_s, time.perf_counter() - began, stored


def _locks(path: Path) -> CheckResult:
    """Check that the file system has flock: leases of runs are made of it."""
    todo = "mount it with locks (NFS version 4, or local_lock=none), or choose another root"
    with path.open("r+b") as first, path.open("r+b") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return CheckResult("locks", "ok", "flock excludes others")
        except OSError as error:
            return CheckResult("locks", "fail", f"the file system has no flock ({error.strerror})", todo)
    return CheckResult("locks", "fail", "the file system lets two holders lock one file", todo)


def check_ports(host: str = "127.0.0.1") -> Iterator[CheckResult]:
    """Look whether the ports of `herd up` are free."""
    for option, port in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                yield CheckResult(f"port {port}", "ok", "free")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                yield CheckResult(f"port {port}", "warn", "taken by another process", f"herd up {option} {port + 1}")


def check_hub(recipe: Recipe) -> Iterator[CheckResult]:
    """Look at name resolution and token of the Hugging Face Hub, if the recipe names something there."""
    from herd.tasks.plan.recipe import remote_addresses

    addresses = [address for address in remote_addresses(recipe) if address.uri.startswith("hf://")]
    if not addresses:
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    host = urlsplit(endpoint).hostname or endpoint
    try:
        socket.getaddrinfo(host, 443)
        yield CheckResult("hub", "ok", f"{host} is known; {len(addresses)} addresses of the recipe are there")
    except OSError as error:
        todo = "check the network and DNS, or fetch on another machine: herd fetch, HERD_FETCHED"
        yield CheckResult("hub", "fail", f"{host}: {error.strerror}", todo)
    from huggingface_hub import get_token

    if get_token():
        yield CheckResult("hub token", "ok", "there is one")
    else:
        todo = "export HF_TOKEN=..., or hf auth login"
        yield CheckResult("hub token", "warn", "none: gated data are refused, and limits are lower", todo)


def check_server(root: Root, client: SyncPrefectClient) -> Iterator[CheckResult]:
    """Yield the rows of `herd doctor` about a Prefect server: queues that do not move, ledgers that do not agree."""
    from herd.tasks.operate.ledgers import ledger_differences
    from herd.tasks.operate.queues import held_slots

    for slot in held_slots(client):
        remedy = SETTLES if slot.verdict != "unknown" else "cancel what has it in Prefect if its machine is gone"
        remedy = remedy if slot.holder else "wait, or start a worker: herd up, python -m herd.flows.worker"
        yield CheckResult(slot.where, "warn" if slot.blocked else "ok", str(slot), remedy if slot.blocked else "")
    differences = ledger_differences(root, client)
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        yield CheckResult("ledgers", "warn", "; ".join(map(str, differences[:SHOWN])) + more, SETTLES)
    else:
        yield CheckResult("ledgers", "ok", "record, MLflow and Prefect agree")


# On the nodes of a cluster: the launcher starts `herd doctor --node FILE` there, and FILE shows that they share a disk.


def diagnose_nodes(root: Root, cluster: Cluster) -> list[CheckResult]:
    """Return the findings of every node that a job of `cluster` would get; the launcher waits for free ones.

    Raises SchedulerRefused, and ValueError if the launcher's commands are missing.
    """
    if cluster.nodes is None:
        return []
    if (run_on_nodes := node_runner(cluster)) is None:
        todo = f"run herd doctor in a job with the image, the volumes and the Python of cluster.{cluster.launcher}"
        return [CheckResult("nodes", "warn", f"{cluster.launcher}: nodes are not looked at from here", todo)]
    folder = root.file(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / f"{uuid.uuid4().hex}.json"
    request.write_text(json.dumps({"root": root.uri, "cluster": cluster.model_dump(mode="json")}))
    try:
        answers, errors = run_on_nodes(cluster, ["-m", "herd.flows.cli.main", "doctor", "--node", str(request)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    findings = [CheckResult(*row) for answer in answers for row in json.loads(answer)]
    silent = cluster.nodes.nodes(cluster.processes) - len(answers)
    if silent:
        todo = f"herd and its Python must be at the same path there, or name {cluster.launcher}.python"
        findings.append(CheckResult("nodes", "fail", f"{silent} did not answer: {errors[-300:] or 'no message'}", todo))
    return findings


def as_on_node(cluster: Cluster) -> Cluster:
    """Return the part of a scheduler's cluster that runs on one of its nodes."""
    assert cluster.nodes is not None
    processes = min(cluster.nodes.processes_per_node, cluster.processes)
    own = {"launcher": "local", "device": cluster.trainer_device, "processes": processes, "layout": Layout()}
    return cluster.model_copy(update=own)


def diagnose_as_node(request: Path) -> list[CheckResult]:
    """Return the findings of this node, which the file `request` of the machine that starts jobs must reach."""
    node = host_name()
    try:
        settings: dict[str, Any] = json.loads(request.read_text())
    except OSError as error:
        what = f"{request.parent.parent} of the machine that starts jobs is not here ({error.strerror})"
        return [CheckResult("shared path", "fail", what, "put the root, or HERD_SCRATCH, on a disk of all nodes", node)]
    shared = CheckResult("shared path", "ok", f"{request.parent.parent} is the same disk")
    python = CheckResult("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    findings = diagnose(Root.parse(settings["root"]), as_on_node(Cluster.model_validate(settings["cluster"])))
    return [
        finding._replace(node=node) for finding in [shared, python, *findings] if not finding.check.startswith("port ")
    ]


def findings_table(findings: Sequence[CheckResult]) -> FittedTable:
    """Return the rows for a terminal."""
    from rich.markup import escape

    table = FittedTable("", ("node", "check", "state", "what", "what to do"))
    for finding in findings:
        state = f"[{COLORS[finding.state]}]{finding.state}[/]"
        table.add_row(finding.node, finding.check, state, escape(finding.what), escape(finding.todo))
    return table
