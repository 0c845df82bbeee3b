"""What breaks, how often, and when: rates by cause from published counts, and seeded traces of failures.

A cause belongs to a component, and its rate grows with how many of those a job uses. Failures are independent and come
at a constant rate (a Poisson process for each cause); some hosts may fail more often than others, which leaves the
total as it is. What this gives up: failures that come together (a power line, a bad driver release), early life (known
to be worse, but no curve is published), and whatever the operators of the published run could have prevented.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from llama3.cluster.hardware import Described, read_description, validated

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
