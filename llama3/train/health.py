"""The health of a node: samples while it trains, faults past the vendors' thresholds, a short test before it trains.

The agent of a node forks a sampler, which writes a line every few seconds to `health-<node>.jsonl` beside the logs, for
the supervisor. A separate process costs the ranks nothing, and a driver that hangs stops only the sampler.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from herd.llama3.train import metrics
from herd.llama3.train.callbacks import log
from herd.llama3.train.job import Attempt, host_name
from herd.llama3.train.journal import Tail

if TYPE_CHECKING:
    import torch

    from herd.llama3.parallel.mesh import Axis, ParallelContext

XIDS = {
    48: "double-bit ECC error",
    63: "a memory row is to be remapped, or a page retired",
    64: "remapping a memory row, or retiring a page, failed",
    74: "NVLink error",
    79: "the GPU fell off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}
"""Xid events after which NVIDIA asks for a reset, a test or a replacement; others are often a bug of the program."""
THROTTLED = 0x8 | 0x40 | 0x80
"""NVML's event reasons HwSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown."""
LOST = "lost, the driver does not reach it"
SYSFS = {
    metrics.MEMORY_ERRORS: ("devices/system/edac/mc/mc*/ue_count",),
    metrics.DISK_ERRORS: ("block/*/device/ioerr_cnt",),
    metrics.NETWORK_ERRORS: (
        "class/net/*/statistics/[rt]x_errors",
        "class/infiniband/*/ports/*/counters/link_downed",
        "class/infiniband/*/ports/*/counters/port_rcv_errors",
        "class/infiniband/*/ports/*/counters/symbol_error",
    ),
}
"""The kernel's counters of errors."""
REDUCED: dict[str, Callable[[list[float]], float]] = {
    metrics.GPU_UTILIZATION: fmean,
    metrics.GPU_TEMPERATURE: max,
    metrics.GPU_POWER: fmean,
    metrics.GPU_CLOCK: min,
    metrics.GPU_THROTTLED: sum,
    metrics.GPU_ECC: sum,
    metrics.GPU_ECC_LIFETIME: sum,
    metrics.GPU_REMAPPED: sum,
    metrics.GPU_XIDS: sum,
    metrics.GPU_PCIE_LANES: min,
    metrics.GPU_PCIE_GENERATION: min,
    metrics.CPU_LOAD: max,
    metrics.MEMORY_PRESSURE: max,
    metrics.IO_PRESSURE: max,
    metrics.MEMORY_ERRORS: sum,
    metrics.DISK_ERRORS: sum,
    metrics.NETWORK_ERRORS: sum,
    metrics.PREFLIGHT_TFLOPS: min,
    metrics.PREFLIGHT_ALL_REDUCE: min,
    metrics.PREFLIGHT_DISK: min,
    metrics.CLOCK_OFFSET: lambda values: max(values, key=abs),
}
"""How values of several GPUs and nodes are reduced to one."""
LOGS = "HERD_LOGS"
"""Environment variable of a rank: the folder of the attempt's logs."""


class HealthSample(BaseModel):
    """One line of `health-<node>.jsonl`."""

    time: float
    """Seconds since 1970."""
    host: str
    node: int | None = None
    """Number of the node in the attempt; None for a line of the preflight."""
    metrics: dict[str, float] = {}
    faults: list[str] = Field(default=[])
    """Why the node should not be used, one sentence each; the same fault always has the same text."""


class Gpus:
    """The GPUs of this node through NVML; none without NVML, or without the package nvidia-ml-py."""

    def __init__(self, judge_lanes: bool) -> None:
        """`judge_lanes`: whether a PCIe link narrower than possible is a fault; in a desktop the slot may be narrow."""
        self.judge_lanes, self.xids = judge_lanes, 0
        self.devices: list[Any] = []
        self.names: list[tuple[str, str]] = []
        self._events: Any = None
        self._seen: dict[str, None] = {}
        """Faults that NVML reports only once, in order."""
        try:
            import pynvml
        except ImportError:
            return
        self.nvml = pynvml
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    device = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = self._ask("nvmlDeviceGetUUID", device) or "no UUID"
                except pynvml.NVMLError as error:
                    if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:  # otherwise it is not for this job
                        self._seen[f"GPU {index}: {LOST}"] = None
                    continue
                self.devices.append(device)
                self.names.append((f"GPU {index}", uuid))
            self._events = pynvml.nvmlEventSetCreate()
            for device in self.devices:
                self._ask("nvmlDeviceRegisterEvents", device, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def sample(self) -> tuple[dict[str, list[float]], list[str]]:
        """Return the values of all GPUs by metric, without those that a GPU or driver does not support, and faults."""
        values: dict[str, list[float]] = defaultdict(list)
        faults = [*self._seen]
        for (name, uuid), device in zip(self.names, self.devices, strict=True):
            try:
                readings, problems = self._read(device)
            except self.nvml.NVMLError:
                readings, problems = {}, [LOST]
            for key, value in readings.items():
                values[key].append(value)
            faults += [f"{name}: {text} ({uuid})" for text in problems]
        if self.devices:
            values[metrics.GPU_XIDS] = [self.xids]
        return values, faults

    def _read(self, device: Any) -> tuple[dict[str, float], list[str]]:
        """Return values and faults of one GPU. Raises NVMLError if the driver has lost it."""
        ask, nvml = self._ask, self.nvml
        utilization, power = ask("nvmlDeviceGetUtilizationRates", device), ask("nvmlDeviceGetPowerUsage", device)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", device)
        remapped = ask("nvmlDeviceGetRemappedRows", device)  # by correctable errors, by others, pending, failed
        lanes, max_lanes = (ask(f"nvmlDeviceGet{which}PcieLinkWidth", device) for which in ("Curr", "Max"))
        volatile, lifetime = (
            ask("nvmlDeviceGetTotalEccErrors", device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
            for counter in (nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC)
        )
        values = {
            metrics.GPU_UTILIZATION: None if utilization is None else utilization.gpu / 100,
            metrics.GPU_TEMPERATURE: ask("nvmlDeviceGetTemperature", device, nvml.NVML_TEMPERATURE_GPU),
            metrics.GPU_POWER: None if power is None else power / 1000,
            metrics.GPU_CLOCK: ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_SM),
            metrics.GPU_THROTTLED: None if reasons is None else bool(reasons & THROTTLED),
            metrics.GPU_ECC: volatile,
            metrics.GPU_ECC_LIFETIME: lifetime,
            metrics.GPU_REMAPPED: None if remapped is None else remapped[1],
            metrics.GPU_PCIE_LANES: lanes,
            metrics.GPU_PCIE_GENERATION: ask("nvmlDeviceGetCurrPcieLinkGeneration", device),
        }
        faults = []
        if volatile:
            faults.append("uncorrectable ECC errors since the driver was loaded")
        if remapped is not None and remapped[2]:
            faults.append("a memory row waits to be remapped: reset the GPU")
        if remapped is not None and remapped[3]:
            faults.append("remapping a memory row failed: replace the GPU")
        if self.judge_lanes and lanes is not None and max_lanes is not None and lanes < max_lanes:
            faults.append(f"PCIe link has {lanes} of {max_lanes} lanes")
        return {key: float(value) for key, value in values.items() if value is not None}, faults

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, or until a GPU reports a critical Xid event; return whether one did."""
        if self._events is not None:
            try:
                event = self.nvml.nvmlEventSetWait_v2(self._events, max(1, int(seconds * 1000)))
            except self.nvml.NVMLError_Timeout:
                return False
            except self.nvml.NVMLError:
                self._events = None  # the driver has lost a GPU, or supports no events
            else:
                number = int(event.eventData)
                self.xids += 1
                if number in XIDS:
                    try:
                        name = f"GPU {self.nvml.nvmlDeviceGetIndex(event.device)}"
                    except self.nvml.NVMLError:  # as after Xid 79
                        name = "a GPU"
                    self._seen[f"{name}: Xid {number}, {XIDS[number]}"] = None
                return True
        time.sleep(seconds)
        return False

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return NVML's answer, or None for what GPU or driver do not support. Raises NVMLError for a lost GPU."""
        try:
            return getattr(self.nvml, name)(*arguments)
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None


class HostCounters:
    """Load, pressure and error counters of this node's kernel; errors are counted from here on."""

    def __init__(self, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self.proc = proc
        self._paths = {key: [path for pattern in globs for path in sysfs.glob(pattern)] for key, globs in SYSFS.items()}
        self._before = {path: _count(path) for paths in self._paths.values() for path in paths}

    def sample(self) -> tuple[dict[str, list[float]], list[str]]:
        """Return the values by metric, without those that this kernel does not have, and faults."""
        values = {metrics.CPU_LOAD: [os.getloadavg()[0] / (os.cpu_count() or 1)]}
        for key, name in ((metrics.MEMORY_PRESSURE, "memory"), (metrics.IO_PRESSURE, "io")):
            with suppress(OSError, IndexError, ValueError):  # some avg10=1.53 avg60=...
                line = (self.proc / "pressure" / name).read_text().splitlines()[0]
                values[key] = [float(line.split()[1].removeprefix("avg10=")) / 100]
        for key, paths in self._paths.items():
            if paths:
                values[key] = [float(max(0, _count(path) - self._before[path])) for path in paths]
        errors = sum(values.get(metrics.MEMORY_ERRORS, ()))
        return values, ["uncorrectable errors of the host's memory"] if errors else []


def _count(path: Path) -> int:
    """Return the number in a file of sysfs, decimal or 0x...; 0 if it cannot be read."""
    with suppress(OSError, ValueError):
        return int(path.read_text(), 0)
    return 0


def watch(attempt: Attempt, every_s: float) -> None:
    """Write a sample of this node every `every_s` and at every Xid event, until this process is killed."""
    gpus, counters, host = Gpus(judge_lanes=attempt.per_node > 0), HostCounters(), host_name()
    with attempt.health.open("ab", buffering=0) as file:
        while True:
            gpu_values, gpu_faults = gpus.sample()
            host_values, host_faults = counters.sample()
            reduced = {key: REDUCED[key](values) for key, values in (gpu_values | host_values).items() if values}
            faults = [*gpu_faults, *host_faults]
            sample = HealthSample(time=time.time(), host=host, node=attempt.node, metrics=reduced, faults=faults)
            file.write(sample.model_dump_json().encode() + b"\n")
            due = time.monotonic() + every_s
            while (left := due - time.monotonic()) > 0 and not gpus.wait(left):
                pass


class HealthTail:
    """Reads the samples of all nodes of an attempt as they are written."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._tails: dict[Path, Tail] = {}
        self._samples: list[HealthSample] = []

    def new(self) -> list[HealthSample]:
        """Return the samples since the previous call."""
        samples = []
        for path in self.logs.glob("health-*.jsonl"):
            samples += _parse(self._tails.setdefault(path, Tail(path)).lines())
        self._samples += samples
        return samples

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all nodes from the samples since the previous call; {} without samples."""
        by_host: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for sample in self._samples:
            for key, value in sample.metrics.items():
                if key in REDUCED:
                    by_host[sample.host][key].append(value)
        self._samples = []
        nodes: dict[str, list[float]] = defaultdict(list)
        for series in by_host.values():
            for key, values in series.items():  # counters grow, so their last value is the largest
                nodes[key].append(max(values) if REDUCED[key] is sum else REDUCED[key](values))
        return {key: REDUCED[key](values) for key, values in nodes.items()}


def _parse(lines: Iterable[bytes]) -> list[HealthSample]:
    samples = []
    for line in lines:
        with suppress(ValidationError):  # a killed sampler may have left a torn line
            samples.append(HealthSample.model_validate_json(line))
    return samples


def new_faults(path: Path) -> list[str]:
    """Return the faults in a node's file of samples that its first sample does not show."""
    samples = _parse(Tail(path).lines())
    faults = dict.fromkeys(fault for sample in samples[1:] for fault in sample.faults)
    return [fault for fault in faults if fault not in samples[0].faults]


# The test of every node before the first step of an attempt: seconds, in the job that is about to train, so that no
# second job waits in the queue.

BURSTS = 3
"""The best of a few short measurements counts: another process may disturb one."""
WRITTEN = 8 * 2**20
CLOCK_S = 5.0
"""A clock may differ from those of the other nodes by this much."""
SLOW_PRODUCT, SLOW_ALL_REDUCE, SLOW_DISK = 0.75, 0.5, 0.05
"""A node is bad below this share of the others' median. GPUs of one kind differ by a few percent."""
SHARED_PROCESSORS = 0.25
"""The share for the rates of processors, whose caches other programs use too."""


class NodeTest(NamedTuple):
    """What one process measured."""

    host: str
    values: dict[str, float]
    error: str = ""


def measure_nodes(world: ParallelContext, work: Path) -> dict[str, str]:
    """Measure every node and return the bad ones with the reason; each process must call it.

    Matrix products, an all-reduce among the processes of a node that communicate, a write into `work`, and the clock
    against that of its file system. Rank 0 writes the figures beside the logs.
    """
    hosts = world.all_gather_object(host_name())
    host = hosts[world.rank]
    values: dict[str, float] = {}
    error = ""
    try:
        values[metrics.PREFLIGHT_TFLOPS] = _product_tflops(world.device)
        if world.rank == hosts.index(host):
            values |= _write(work / f".preflight-{host}")
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    if (axis := _axis_within(world, hosts)) is not None:
        values[metrics.PREFLIGHT_ALL_REDUCE] = _all_reduce_gb_s(world.device, axis)
    tests = world.all_gather_object(NodeTest(host, values, error))
    by_host: dict[str, dict[str, float]] = {}
    for test in tests:
        slowest = by_host.setdefault(test.host, {})
        slowest |= {key: min(value, slowest.get(key, value)) for key, value in test.values.items()}
    bad = judge_nodes(by_host, world.device.type == "cuda")
    bad |= {test.host: f"preflight: {test.error}" for test in tests if test.error}
    if world.is_rank0:
        _report(by_host, bad)
    return bad


def judge_nodes(by_host: Mapping[str, Mapping[str, float]], cuda: bool) -> dict[str, str]:
    """Return the hosts far below the median of the others, or whose clock differs from theirs, and the reason."""
    shares = {
        metrics.PREFLIGHT_TFLOPS: ("TFLOP/s of a matrix product", SLOW_PRODUCT if cuda else SHARED_PROCESSORS),
        metrics.PREFLIGHT_ALL_REDUCE: ("GB/s of an all-reduce", SLOW_ALL_REDUCE if cuda else SHARED_PROCESSORS),
        metrics.PREFLIGHT_DISK: ("MB/s written", SLOW_DISK),
    }
    bad: dict[str, str] = {}
    for host, own in by_host.items():
        others = [values for name, values in by_host.items() if name != host]
        for key, (what, share) in shares.items():
            peers = [values[key] for values in others if key in values]
            if key in own and peers and own[key] < share * median(peers):
                bad.setdefault(host, f"preflight: {own[key]:.3g} {what}, the others {median(peers):.3g}")
        clocks = [values[metrics.CLOCK_OFFSET] for values in others if metrics.CLOCK_OFFSET in values]
        if len(clocks) > 1 and abs(ahead := own.get(metrics.CLOCK_OFFSET, 0.0) - median(clocks)) > CLOCK_S:
            bad.setdefault(host, f"preflight: its clock is {ahead:+.1f} s from those of the others")
    return bad


def _report(by_host: Mapping[str, Mapping[str, float]], bad: Mapping[str, str]) -> None:
    rates = [own[metrics.PREFLIGHT_TFLOPS] for own in by_host.values() if metrics.PREFLIGHT_TFLOPS in own]
    spread = f"{min(rates):.3g} to {max(rates):.3g} TFLOP/s" if rates else "nothing measured"
    log(f"preflight of {len(by_host)} node(s): {spread}; bad: {', '.join(bad) or 'none'}")
    if LOGS not in os.environ:  # started by torchrun
        return
    lines = []
    for host, own in by_host.items():
        faults = [bad[host]] if host in bad else []
        lines.append(HealthSample(time=time.time(), host=host, metrics=dict(own), faults=faults).model_dump_json())
    with (Path(os.environ[LOGS]) / "health-preflight.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")


def _axis_within(world: ParallelContext, hosts: list[str]) -> Axis | None:
    """Return the first axis whose group is on one host, or None."""
    import torch

    for axis in (world.axis("tp"), world.axis("cp"), world.axis("pp")):
        if axis.group is not None:
            ranks = torch.distributed.get_process_group_ranks(axis.group)
            if len({hosts[rank] for rank in ranks}) == 1:
                return axis
    return None


def _best_rate(device: torch.device, amount: float, times: int, do: Callable[[], object]) -> float:
    """Return the most `amount` per second at which `do` ran `times` times."""
    import torch

    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time  # other programs use the processors too
    do()  # allocates, and chooses kernels
    rates = []
    for _ in range(BURSTS):
        if cuda:
            torch.cuda.synchronize(device)
        began = clock()
        for _ in range(times):
            do()
        if cuda:
            torch.cuda.synchronize(device)
        rates.append(times * amount / (clock() - began))
    return max(rates)


def _product_tflops(device: torch.device) -> float:
    """Return the rate of matrix products. Raises RuntimeError if the same product has two results."""
    import torch

    size, times, dtype = (8192, 30, torch.bfloat16) if device.type == "cuda" else (384, 5, torch.float32)
    # Do not draw random numbers: it would shift the generator of the model's weights.
    left = torch.linspace(-1, 1, size * size, device=device).to(dtype).reshape(size, size)
    first, result = left @ left.T, torch.empty(size, size, dtype=dtype, device=device)
    rate = _best_rate(device, 2 * size**3 / 1e12, times, lambda: torch.mm(left, left.T, out=result))
    if not torch.equal(first, result):
        raise RuntimeError("two results of one matrix product differ")
    return rate


def _all_reduce_gb_s(device: torch.device, axis: Axis) -> float:
    """Return bytes of a tensor per second of its all-reduce, in GB/s."""
    import torch

    tensor = torch.zeros(WRITTEN // 4, device=device)
    return _best_rate(device, WRITTEN / 1e9, 2, lambda: torch.distributed.all_reduce(tensor, group=axis.group))


def _write(path: Path) -> dict[str, float]:
    """Return the rate of writes that reach the disk, and by how much the file system's clock is ahead of ours."""
    rates = []
    try:
        for _ in range(BURSTS):
            with path.open("wb", buffering=0) as file:
                began = time.perf_counter()
                file.write(bytes(WRITTEN))
                os.fsync(file.fileno())
                rates.append(WRITTEN / 1e6 / (time.perf_counter() - began))
        os.utime(path)  # by a file server with its own clock
        offset = path.stat().st_mtime - time.time()
    finally:
        path.unlink(missing_ok=True)
    return {metrics.PREFLIGHT_DISK: max(rates), metrics.CLOCK_OFFSET: offset}
