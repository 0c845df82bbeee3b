"""What breaks, how often, and when: rates by cause from published counts, and seeded traces of failures.

A cause belongs to a component, and its rate grows with how many of those a job uses. Failures are independent and come
at a constant rate (a Poisson process for each cause); some hosts may fail more often than others, which leaves the
total as it is. What this gives up: failures that come together (a power line, a bad driver release), early life (known
to be worse, but no curve is published), and whatever the operators of the published run could have prevented.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from scipy.special import pdtr, pdtrik

from llama3.parallel.pipeline_schedule import Kind, Times, actions, finish
from llama3.planner.hardware import Described, read_description, validated

HOURS = 24.0
NODE_DAY_FAILURES = 6.50e-3
"""Failures of one server (8 GPUs) in a day on RSC-1. Source: Kokolis et al. 2025 (arXiv 2410.21680)."""
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
                raise ValueError(f"{name}: {value} is no number of GPUs; write 1 or more")

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.gpus_per_host)

    def count(self, component: Component) -> int:
        """Return how many of `component` there are."""
        switches = -(-self.gpus // self.gpus_per_switch)
        return {"gpu": self.gpus, "host": self.hosts, "switch": switches, "job": 1}[component]


class Cause(BaseModel):
    """One reason why a job is interrupted."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    count: int = Field(ge=0)
    """Interruptions that were counted."""
    component: Component
    """What the rate grows with; `job`: with nothing."""
    spare: bool = False
    """Takes its host out until that is repaired."""
    hangs: bool = False
    """Is noticed by a timeout only; others end a process at once."""
    planned: bool = False
    """Somebody chose the moment."""


class FailureModel(Described):
    """Counted interruptions of a fleet over some days, and the rates that follow."""

    days: float = Field(gt=0)
    """How long was counted."""
    fleet_gpus: int = Field(ge=1)
    """GPUs of the job that was counted, in the servers and racks of `Fleet`."""
    causes: tuple[Cause, ...] = Field(min_length=1)
    """Every cause with its count."""

    @classmethod
    def load(cls, named: str | dict[str, Any] = "failures-llama3", near: Path | None = None) -> FailureModel:
        """Return the model of a preset, a YAML file or a mapping. Raises ValueError if it is none."""
        return validated(cls, read_description(named, "failures", "causes", near), "failures")

    @property
    def unexpected(self) -> int:
        """Interruptions that nobody planned."""
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
        """Return interruptions an hour of all causes, or only of those that take a host out, or that hang."""
        chosen = (each for each in self.causes if each.spare >= spare and each.hangs >= hangs)
        return sum(self.per_hour(cause, fleet) for cause in chosen)

    def mtti_s(self, fleet: Fleet) -> float:
        """Return the mean time to interruption of a job on `fleet`, in seconds."""
        return 3600 / self.rate(fleet)

    def hang_share(self, fleet: Fleet) -> float:
        """Return the share of interruptions that only a timeout finds."""
        return self.rate(fleet, hangs=True) / self.rate(fleet)


@dataclass(frozen=True)
class Offenders:
    """Hosts that fail more often than the others. Assumed: it is known that there are such, not how many."""

    share: float = 0.02
    """Of all hosts."""
    factor: float = 5.0
    """Their rate over that of the others."""

    def __post_init__(self) -> None:
        if not (0 <= self.share < 1 and self.factor >= 1):
            raise ValueError(
                f"offenders: {self.share:g} of the hosts at {self.factor:g} x; write 0 to 1, and 1 or more"
            )

    def avoided(self) -> float:
        """Return the share of failures that goes away when ordinary hosts take their place."""
        extra = self.share * (self.factor - 1)
        return extra / (1 + extra)

    def weights(self, hosts: int, rng: np.random.Generator) -> np.ndarray:
        """Return the chance of each of `hosts` hosts (float64, shape (hosts,), sum 1) to be the one that fails."""
        weights = np.ones(hosts)
        weights[rng.permutation(hosts)[: round(self.share * hosts)]] = self.factor
        return np.asarray(weights / weights.sum())


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


def make_trace(model: FailureModel, fleet: Fleet, days: float, seed: int, offenders: Offenders | None = None) -> Trace:
    """Return the interruptions of a job on `fleet` in `days` days: the same for the same arguments."""
    rng = np.random.default_rng(seed)
    weights = (offenders or Offenders(share=0.0)).weights(fleet.hosts, rng)
    failures: list[Failure] = []
    for cause in model.causes:
        count = int(rng.poisson(model.per_hour(cause, fleet) * days * HOURS))
        times = rng.uniform(0, days * HOURS * 3600, count)
        hosts = rng.choice(fleet.hosts, count, p=weights)
        failures += [
            Failure(float(time), cause.name, int(host), cause.spare, cause.hangs)
            for time, host in zip(times, hosts, strict=True)
        ]
    return tuple(sorted(failures))


def scaled(trace: Iterable[Failure], factor: float, until_s: float = float("inf")) -> Trace:
    """Return `trace` with its times multiplied by `factor`, up to `until_s` of the new time."""
    moved = (Failure(**{**asdict(each), "time_s": each.time_s * factor}) for each in trace)
    return tuple(each for each in moved if each.time_s < until_s)


def counts(trace: Iterable[Failure]) -> Counter[str]:
    """Return how often each cause struck."""
    return Counter(failure.cause for failure in trace)


def repeaters(trace: Iterable[Failure], times: int = 2) -> dict[int, int]:
    """Return the hosts that broke `times` times or more, and how often: candidates for removal."""
    broken = Counter(failure.host for failure in trace if failure.spare)
    return {host: count for host, count in broken.most_common() if count >= times}


def to_json(trace: Sequence[Failure]) -> str:
    """Return `trace` as JSON text."""
    return json.dumps([asdict(failure) for failure in trace], indent=1)


def from_json(text: str) -> Trace:
    """Return the trace of `to_json`. Raises ValueError if the text is none."""
    try:
        return tuple(sorted(Failure(**fields) for fields in json.loads(text)))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"trace: is not a list of failures ({error}); write one with --trace") from None


def mttf_by_node_rate(gpus: int, per_node_day: float = NODE_DAY_FAILURES, gpus_per_host: int = 8) -> float:
    """Return hours to the first failure of a job whose servers fail independently: 24 / (servers x rate).

    Kokolis et al. 2025: from one rate for each server of a whole cluster. Too long for jobs of some thousand GPUs and
    less: their own 1,024-GPU jobs failed after 7.9 h, not 28.8 h.
    """
    return HOURS / (Fleet(gpus, gpus_per_host).hosts * per_node_day)


@cache
def llama3_failures() -> FailureModel:
    """Return the published counts of Llama 3 405B."""
    return FailureModel.load()


# Spare hosts: how many must wait so that a broken one is replaced at once, nearly always.
#
# Hosts break independently at a constant rate and are away for a repair, so the number that is away has a Poisson
# distribution with mean rate x repair time, whatever the distribution of repair times (an M/G/infinity queue,
# Khinchin 1955). What this gives up: repair crews that are busy, and hosts that break together; a rack's switch
# takes two at once.


def away_on_average(model: FailureModel, fleet: Fleet, repair_s: float) -> float:
    """Return how many hosts of `fleet` are being repaired at a time, on average. Raises ValueError."""
    if repair_s <= 0:
        raise ValueError(f"repair_s: {repair_s:g} s; write how long a host is away, above 0")
    return model.rate(fleet, spare=True) * repair_s / 3600


def spare_hosts(model: FailureModel, fleet: Fleet, repair_s: float, sure: float = 0.99) -> int:
    """Return the fewest spares that are enough for a share `sure` of the time. Raises ValueError."""
    if not 0 < sure < 1:
        raise ValueError(f"sure: {sure:g} is no share of the time; write 0.99 for 99 %")
    mean = away_on_average(model, fleet, repair_s)
    guess = max(0, int(pdtrik(sure, mean)) - 1)  # scipy.stats has this too, for half a second of imports
    while pdtr(guess, mean) < sure:
        guess += 1
    return guess


def enough_share(trace: Iterable[Failure], span_s: float, repair_s: float, spares: int) -> float:
    """Return the share of `span_s` in which no more than `spares` hosts of a trace are away.

    The first repair time is left out: no host is away when a trace begins. Raises ValueError if nothing is left.
    """
    if span_s <= repair_s:
        raise ValueError(f"span_s: {span_s:g} s is not longer than a repair, {repair_s:g} s; simulate for longer")
    broken = np.array([failure.time_s for failure in trace if failure.spare and failure.time_s < span_s])
    times = np.concatenate([broken, broken + repair_s])
    changes = np.concatenate([np.ones(len(broken)), -np.ones(len(broken))])
    order = np.argsort(times, kind="stable")
    away = np.concatenate([[0.0], np.cumsum(changes[order])])
    edges = np.clip(np.concatenate([[0.0], times[order], [np.inf]]), repair_s, span_s)
    return float(np.diff(edges)[away <= spares].sum() / (span_s - repair_s))


# What one slow host costs: synchronous training waits for it, so the whole job gets slower by nearly as much.
#
# A tensor-parallel group is a host, so a slow one slows every stage of its pipeline rank. The pipeline is simulated
# with the trainer's own schedule; where the slow rank has to wait anyhow, a part of its slowness hides. The other
# pipelines wait for this one at the reduction of gradients, however many they are. What this gives up: exchange
# between hosts and the optimizer, which are taken to be as fast as before: a share `exposed` of the step.

MEGASCALE_SLOW = 1.1
"""Slow hosts took about 10 % longer. Source: MegaScale (arXiv 2402.15627), 6."""
MEGASCALE_GAIN = 0.007
"""MFU that removing them gave (same source): in a fleet with few of them, after other remedies."""


def lengthening(
    pipeline: int, virtual: int, micro_batches: int, slow: Mapping[int, float], exposed: float = 0.0
) -> float:
    """Return by which share a step gets longer when the pipeline ranks in `slow` take so many times as long.

    `exposed` is the share of a step outside the pipeline. Raises ValueError for a rank or factor that cannot be.
    """
    if odd := [rank for rank, factor in slow.items() if not 0 <= rank < pipeline or factor <= 0]:
        raise ValueError(f"slow: rank {odd[0]} at {slow[odd[0]]:g} x; ranks are 0 to {pipeline - 1}, factors above 0")
    if not 0 <= exposed < 1:
        raise ValueError(f"exposed: {exposed:g} is no share of a step; write 0 to 1")
    even = _step(pipeline, virtual, micro_batches, {})
    return (_step(pipeline, virtual, micro_batches, slow) / even - 1) * (1 - exposed)


def one_slow_host(pipeline: int, virtual: int, micro_batches: int, factor: float = MEGASCALE_SLOW) -> list[float]:
    """Return how much longer a step gets (a share), for a slow host at each pipeline rank."""
    return [lengthening(pipeline, virtual, micro_batches, {rank: factor}) for rank in range(pipeline)]


def without_waiting(hosts: int, factor: float = MEGASCALE_SLOW) -> float:
    """Return the lengthening if nobody waited for anybody: the mean over all hosts. What a model must not say."""
    return (factor - 1) / hosts


def _step(pipeline: int, virtual: int, micro_batches: int, slow: Mapping[int, float]) -> float:
    """Return the length of a step whose stages lie round-robin on the ranks, in forward passes of a stage."""
    kind: Kind = "interleaved" if virtual > 1 else "1f1b"
    factors = tuple(slow.get(stage % pipeline, 1.0) for stage in range(pipeline * virtual))
    lists = actions(kind, pipeline, virtual, micro_batches)
    return max(finish(lists, Times(stages=factors)).values())
