"""Effective training time of a job under failures: a simulation of seeded traces, and a summary for a plan.

The closed form (`goodput`) gives the checkpoint interval, the simulation the spread. Rates are those of Llama 3 405B's
54 days, scaled to the job; restart and checkpoint costs are assumed, or measured in an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappushpop
from math import floor

import numpy as np

from herd.llama3.planner.goodput import (
    BYTECHECKPOINT,
    CheckpointCosts,
    CheckpointInterval,
    Recovery,
    best_checkpoint_interval,
    effective_time,
    longest_restart,
)
from herd.llama3.planner.reliability import (
    RSC1_GPUS,
    RSC1_JOBS,
    FailureModel,
    Fleet,
    Trace,
    llama3_failures,
    make_trace,
    mttf_by_node_rate,
    spare_hosts,
)

SEEDS = range(64)
RECOVERY = Recovery(notice_s=30.0, timeout_s=600.0, relaunch_s=300.0)
"""Assumed: half a minute to detect a dead process, the timeout of collectives for a hang, five minutes to relaunch."""
LEAST_RELAUNCH_S, RELAUNCH_GPUS = 60.0, 16_384
"""Assumed: a job of one process relaunches in a minute, one of 16,384 in `RECOVERY.relaunch_s`."""
DAYS, UPTIME_SEEDS = 54.0, range(16)
TARGET = 0.90
"""Effective training time that plans aim for (arXiv 2407.21783, section 3.3.4: more than 90 %)."""


def scaled_recovery(gpus: int) -> Recovery:
    """Return the recovery of a job on `gpus`: the more processes find and join each other, the longer it takes."""
    more = (RECOVERY.relaunch_s - LEAST_RELAUNCH_S) * gpus / RELAUNCH_GPUS
    return replace(RECOVERY, relaunch_s=LEAST_RELAUNCH_S + more)


@dataclass(frozen=True)
class SimulatedRun:
    """Wall time of a simulated job by use, in seconds."""

    span_s: float
    useful_s: float
    """Steps that count."""
    lost_s: float
    """Steps that were repeated."""
    blocked_s: float
    """Blocked by saves."""
    down_s: float
    """From failures to the first steps after them, including the wait for hosts."""
    waiting_s: float
    """The part of `down_s` spent waiting for a spare host."""
    failures: int

    @property
    def share(self) -> float:
        """Effective training time: useful over wall time."""
        return self.useful_s / self.span_s


@dataclass(frozen=True)
class MeanAndSpread:
    """Effective time over many traces."""

    mean: float
    error: float
    """Standard error of the mean."""
    low: float
    """5th percentile of the traces."""
    high: float
    """95th percentile of the traces."""

    @classmethod
    def from_shares(cls, shares: Sequence[float]) -> MeanAndSpread:
        """Return the spread of at least two shares."""
        low, high = np.quantile(shares, [0.05, 0.95])
        error = np.std(shares, ddof=1) / np.sqrt(len(shares))
        return cls(float(np.mean(shares)), float(error), float(low), float(high))


class SaveCycle:
    """Work and save in turn: the work done and committed some time after a start."""

    def __init__(self, interval_s: float, costs: CheckpointCosts) -> None:
        """Save after every `interval_s` of work. Raises ValueError if that is not above 0."""
        if interval_s <= 0:
            raise ValueError(f"interval_s: {interval_s:g} s; write a time above 0")
        self.interval_s, self.save_s = interval_s, costs.save_s
        self.period_s = interval_s + costs.blocked_s(interval_s)

    def done_s(self, elapsed_s: float) -> float:
        """Return the work done after `elapsed_s`."""
        whole = floor(elapsed_s / self.period_s)
        return whole * self.interval_s + min(elapsed_s - whole * self.period_s, self.interval_s)

    def committed_s(self, elapsed_s: float) -> float:
        """Return the work in the newest save that is committed after `elapsed_s`; 0 if there is none yet."""
        since_first = elapsed_s - self.save_s - self.interval_s
        return 0.0 if since_first < 0 else (floor(since_first / self.period_s) + 1) * self.interval_s


class SparePool:
    """Spare hosts: a broken host becomes a spare after its repair."""

    def __init__(self, recovery: Recovery) -> None:
        self.repair_s = recovery.repair_s
        self.free: list[float] | None = None if recovery.spares is None else [0.0] * recovery.spares
        """Time from which each spare host is available."""

    def replacement(self, time_s: float) -> float:
        """Return when a host can replace one that breaks at `time_s`."""
        return time_s if self.free is None else max(time_s, heappushpop(self.free, time_s + self.repair_s))


def simulate(
    trace: Trace, span_s: float, interval_s: float, costs: CheckpointCosts, recovery: Recovery
) -> SimulatedRun:
    """Return how a job with the failures of `trace` uses `span_s` seconds.

    A failure is detected (at once or by a timeout), takes a spare host if hardware broke, and restarts the job from the
    newest committed save; a second failure during the recovery restarts it. Not modeled: slow steps, saves that fail,
    notice before planned interruptions, and silent data corruption. Raises ValueError.
    """
    cycle, hosts = SaveCycle(interval_s, costs), SparePool(recovery)
    up_since = ready = useful = lost = running = waiting = 0.0
    failures = [failure for failure in trace if failure.time_s < span_s]
    for failure in failures:
        if failure.time_s > up_since:
            elapsed = failure.time_s - up_since
            kept, done = cycle.committed_s(elapsed), cycle.done_s(elapsed)
            useful, lost, running = useful + kept, lost + done - kept, running + elapsed
        noticed = max(ready, failure.time_s + (recovery.timeout_s if failure.hangs else recovery.notice_s))
        ready = max(noticed, hosts.replacement(failure.time_s)) if failure.spare else noticed
        waiting += min(ready, span_s) - min(noticed, span_s)
        up_since = ready + recovery.relaunch_s + costs.load_s
    elapsed = max(0.0, span_s - up_since)
    useful, running = useful + cycle.done_s(elapsed), running + elapsed
    return SimulatedRun(span_s, useful, lost, running - useful - lost, span_s - running, waiting, len(failures))


def monte_carlo(
    model: FailureModel,
    fleet: Fleet,
    days: float,
    interval_s: float,
    costs: CheckpointCosts,
    recovery: Recovery,
    seeds: Iterable[int] = SEEDS,
) -> MeanAndSpread:
    """Return the effective time of a job on `fleet` over seeded traces of `days` days. Raises ValueError."""
    traces = (make_trace(model, fleet, days, seed) for seed in seeds)
    return MeanAndSpread.from_shares(
        [simulate(trace, days * 86_400, interval_s, costs, recovery).share for trace in traces]
    )


@dataclass(frozen=True)
class Uptime:
    """Reliability of a job."""

    gpus: int
    mtti_s: float
    """Mean time to interruption."""
    restart_s: float
    """From a failure to the first step after it, mean."""
    interval_s: float
    """Between two checkpoints, from the recipe."""
    cadence: CheckpointInterval
    """The best interval."""
    spread: MeanAndSpread
    """Effective training time over seeded traces at `interval_s`."""
    spares: int
    """Spare hosts that save more waiting than they cost (`reliability.spare_hosts`)."""
    restart_budget_s: float | None
    """Longest restart that still gives `TARGET`; None if no restart does, or where the formula is not valid."""
    costs: CheckpointCosts

    @property
    def share(self) -> float:
        """Effective training time."""
        return self.spread.mean

    @property
    def rsc1_mtti_s(self) -> float | None:
        """Mean time to interruption at the rate of RSC-1's jobs, a shared fleet; None for a larger job than those."""
        return 3600 * mttf_by_node_rate(self.gpus, RSC1_JOBS) if self.gpus <= RSC1_GPUS else None

    @property
    def rsc1_share(self) -> float | None:
        """Effective training time at that rate, in closed form; None where the formula is not valid."""
        return self.rsc1_mtti_s and effective_time(self.rsc1_mtti_s, self.restart_s, self.interval_s, self.costs)


def uptime(
    gpus: int,
    interval_s: float,
    costs: CheckpointCosts = BYTECHECKPOINT,
    recovery: Recovery = RECOVERY,
    model: FailureModel | None = None,
    gpus_per_host: int = 8,
) -> Uptime:
    """Return the reliability of a job on `gpus`. Raises ValueError for impossible times."""
    model = model or llama3_failures()
    fleet = Fleet(gpus, gpus_per_host)
    mtti_s = model.mtti_s(fleet)
    restart_s = recovery.restart_s(model.hang_share(fleet), costs)
    return Uptime(
        gpus,
        mtti_s,
        restart_s,
        interval_s,
        best_checkpoint_interval(mtti_s, restart_s, costs),
        monte_carlo(model, fleet, DAYS, interval_s, costs, recovery, UPTIME_SEEDS),
        spare_hosts(model, fleet, recovery.repair_s),
        longest_restart(TARGET, mtti_s, interval_s, costs),
        costs,
    )
