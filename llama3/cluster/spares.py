"""Spare hosts: how many must wait so that a broken one is replaced at once, nearly always.

Hosts break independently at a constant rate and are away for a repair, so the number that is away has a Poisson
distribution with mean rate x repair time, whatever the distribution of repair times (an M/G/infinity queue, Khinchin
1955). What this gives up: repair crews that are busy, and hosts that break together; a rack's switch takes two at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.special import pdtr, pdtrik

from llama3.cluster.failures import Failure, FailureModel, Fleet


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
