"""Failures of a job: rates by cause from published counts, seeded traces, spare hosts, and the cost of a slow host.

Failures are independent and come at a constant rate (a Poisson process for each cause). Correlated failures and a
fleet's early life are not modeled: no data is published. Interruptions that were planned, or came from a dependency,
scale with hosts: a constant 49 in 54 days would stop a single server daily, where 8-GPU jobs ran 47.7 days (Kokolis).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from scipy.special import pdtr

from herd.llama3.hardware.specs import SourcedFigures, read_description, validate_description
from herd.llama3.parallel.pipeline_schedule import Kind, Times, action_end_times, actions

HOURS = 24.0
NODE_DAY_FAILURES = 6.50e-3
"""Failures of one server (8 GPUs) in a day on RSC-1. Source: Kokolis et al. 2025 (arXiv 2410.21680)."""
RSC1_JOBS = 1 / 47.7
"""The same as RSC-1's jobs of 8 GPUs saw it (same source): 8.9 h for 1,024 GPUs, where 7.9 h were observed."""
RSC1_GPUS = 1_024
"""GPUs of the largest jobs whose time to a failure the source observed."""
MEGASCALE_SLOW = 1.1
"""Slow hosts took about 10 % longer. Source: MegaScale (arXiv 2402.15627), 6."""
MEGASCALE_GAIN = 0.007
"""MFU gained by removing them (same source): in a fleet with few of them, after other remedies."""
Component = Literal["gpu", "host", "switch", "job"]


@dataclass(frozen=True)
class Fleet:
    """How many of each component a job uses."""

    gpus: int
    gpus_per_host: int = 8
    gpus_per_switch: int = 16
    """GPUs below one top-of-rack switch; Llama 3, 3.3.1: two servers."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}: {value} is not a number of GPUs; write 1 or more")

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.gpus_per_host)

    def count(self, component: Component) -> int:
        """Return how many of `component` there are."""
        switches = -(-self.gpus // self.gpus_per_switch) if self.hosts > 1 else 0  # a host alone needs none to train
        return {"gpu": self.gpus, "host": self.hosts, "switch": switches, "job": 1}[component]


class Cause(BaseModel):
    """One reason why a job is interrupted."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    count: int = Field(ge=0)
    """Observed interruptions."""
    component: Component
    """The rate is proportional to their number; `job`: constant."""
    spare: bool = False
    """Takes its host out until it is repaired."""
    hangs: bool = False
    """Only a timeout detects it; others end a process at once."""
    planned: bool = False
    """Scheduled by an operator."""


class FailureModel(SourcedFigures):
    """Observed interruptions of a fleet over some days, and the rates that follow."""

    days: float = Field(gt=0)
    """Length of the observation."""
    fleet_gpus: int = Field(ge=1)
    """GPUs of the observed job, in the servers and racks of `Fleet`."""
    causes: tuple[Cause, ...] = Field(min_length=1)
    """Every cause with its count."""

    @classmethod
    def load(cls, named: str | dict[str, Any] = "failures-llama3", near: Path | None = None) -> FailureModel:
        """Return the model of a preset, a YAML file or a mapping. Raises ValueError if it is invalid."""
        return validate_description(cls, read_description(named, "failures", "causes", near), "failures")

    @property
    def unexpected(self) -> int:
        """Interruptions that were not planned."""
        return sum(cause.count for cause in self.causes if not cause.planned)

    @property
    def total(self) -> int:
        """All interruptions."""
        return sum(cause.count for cause in self.causes)

    def per_hour(self, cause: Cause, fleet: Fleet) -> float:
        """Return the rate of `cause` for a job on `fleet`: count / hours x components here / components there."""
        share = fleet.count(cause.component) / Fleet(self.fleet_gpus).count(cause.component)
        return cause.count / (self.days * HOURS) * share

    def rate(self, fleet: Fleet, *, spare: bool = False, hangs: bool = False) -> float:
        """Return interruptions per hour of all causes, or only of those that take a host out, or that hang."""
        causes = (cause for cause in self.causes if cause.spare >= spare and cause.hangs >= hangs)
        return sum(self.per_hour(cause, fleet) for cause in causes)

    def mtti_s(self, fleet: Fleet) -> float:
        """Return the mean time to interruption of a job on `fleet`, in seconds."""
        return 3600 / self.rate(fleet)

    def hang_share(self, fleet: Fleet) -> float:
        """Return the share of interruptions that only a timeout detects."""
        return self.rate(fleet, hangs=True) / self.rate(fleet)


@dataclass(frozen=True, order=True)
class Failure:
    """One interruption."""

    time_s: float
    """From the beginning of the trace."""
    cause: str
    host: int
    spare: bool
    hangs: bool


Trace = tuple[Failure, ...]
"""In the order of time."""


def make_trace(model: FailureModel, fleet: Fleet, days: float, seed: int) -> Trace:
    """Return the interruptions of a job on `fleet` in `days` days: the same for the same arguments."""
    rng = np.random.default_rng(seed)
    failures: list[Failure] = []
    for cause in model.causes:
        count = int(rng.poisson(model.per_hour(cause, fleet) * days * HOURS))
        times = rng.uniform(0, days * HOURS * 3600, count)
        hosts = rng.integers(fleet.hosts, size=count)
        failures += [
            Failure(float(time), cause.name, int(host), cause.spare, cause.hangs)
            for time, host in zip(times, hosts, strict=True)
        ]
    return tuple(sorted(failures))


def scale_trace(trace: Iterable[Failure], factor: float, until_s: float = float("inf")) -> Trace:
    """Return `trace` with its times multiplied by `factor`, up to `until_s` of the new time."""
    moved = (Failure(**{**asdict(failure), "time_s": failure.time_s * factor}) for failure in trace)
    return tuple(failure for failure in moved if failure.time_s < until_s)


def failures_by_cause(trace: Iterable[Failure]) -> Counter[str]:
    """Return the number of failures by cause."""
    return Counter(failure.cause for failure in trace)


def mttf_by_node_rate(gpus: int, per_node_day: float = NODE_DAY_FAILURES, gpus_per_host: int = 8) -> float:
    """Return hours to the first failure of a job whose servers fail independently: 24 / (servers x rate).

    Kokolis et al. 2025, from one rate per server of a whole cluster. Too long for jobs up to some thousand GPUs: their
    own 1,024-GPU jobs failed after 7.9 h, not 28.8 h.
    """
    return HOURS / (Fleet(gpus, gpus_per_host).hosts * per_node_day)


@cache
def llama3_failures() -> FailureModel:
    """Return the published counts of Llama 3 405B."""
    return FailureModel.load()


# Spare hosts


def mean_hosts_in_repair(model: FailureModel, fleet: Fleet, repair_s: float) -> float:
    """Return how many hosts of `fleet` are in repair at a time, on average. Raises ValueError."""
    if repair_s <= 0:
        raise ValueError(f"repair_s: {repair_s:g} s; write the repair time of a host, above 0")
    return model.rate(fleet, spare=True) * repair_s / 3600


def spare_hosts(model: FailureModel, fleet: Fleet, repair_s: float, sure: float = 0.99) -> int:
    """Return the fewest spares that are enough for a share `sure` of the time, without those that do not pay.

    The number of hosts in repair is Poisson with mean rate x repair time, whatever the distribution of repair times
    (an M/G/infinity queue, Khinchin 1955). One more spare costs 1 / hosts of the job and saves the share of the time in
    which the job would wait for it: with Llama 3's counts and a day of repair none pays below 18 hosts. Hosts that
    break together, such as a rack behind a switch, are not modeled. Raises ValueError.
    """
    if not 0 < sure < 1:
        raise ValueError(f"sure: {sure:g} is not a share of the time; write 0.99 for 99 %")
    mean, enough, spares = mean_hosts_in_repair(model, fleet, repair_s), min(sure, 1 - 1 / fleet.hosts), 0
    while pdtr(spares, mean) < enough:
        spares += 1
    return spares


# Slow hosts: synchronous training waits for the slowest


def step_slowdown(
    pipeline: int, vpp: int, micro_batches: int, slow: Mapping[int, float], exposed: float = 0.0
) -> float:
    """Return the share by which a step gets longer when the pipeline ranks in `slow` take longer by these factors.

    A tensor-parallel group is a host, so a slow host slows every stage of its pipeline rank; the pipeline is simulated
    with the trainer's schedule. `exposed`: share of a step outside the pipeline, which is taken to be as fast as
    before. Raises ValueError for an invalid rank or factor.
    """
    if invalid := [rank for rank, factor in slow.items() if not 0 <= rank < pipeline or factor <= 0]:
        rank = invalid[0]
        raise ValueError(f"slow: rank {rank} at {slow[rank]:g} x; ranks are 0 to {pipeline - 1}, factors above 0")
    if not 0 <= exposed < 1:
        raise ValueError(f"exposed: {exposed:g} is not a share of a step; write 0 to 1")
    kind: Kind = "interleaved" if vpp > 1 else "1f1b"
    schedule = actions(kind, pipeline, vpp, micro_batches)

    def step(factors: Mapping[int, float]) -> float:
        """Return the length of a step, in forward passes of a stage; stages are on the ranks round-robin."""
        stages = tuple(factors.get(stage % pipeline, 1.0) for stage in range(pipeline * vpp))
        return max(action_end_times(schedule, Times(stages=stages)).values())

    return (step(slow) / step({}) - 1) * (1 - exposed)


def slowdown_by_rank(pipeline: int, vpp: int, micro_batches: int, factor: float = MEGASCALE_SLOW) -> list[float]:
    """Return the share by which a step gets longer, for a slow host at each pipeline rank."""
    return [step_slowdown(pipeline, vpp, micro_batches, {rank: factor}) for rank in range(pipeline)]


def slowdown_without_waiting(hosts: int, factor: float = MEGASCALE_SLOW) -> float:
    """Return the lengthening if no host waited for another, the mean over all hosts: an ablation."""
    return (factor - 1) / hosts
