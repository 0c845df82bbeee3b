"""Spare hosts by the Poisson quantile, against traces that are played."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from herd.llama3.planner.reliability import (
    Failure,
    Fleet,
    llama3_failures,
    make_trace,
    mean_hosts_in_repair,
    spare_hosts,
)

MODEL, FLEET, DAY = llama3_failures(), Fleet(16_384), 86_400.0


def spares_suffice_share(trace: Iterable[Failure], span_s: float, repair_s: float, spares: int) -> float:
    """Return the share of `span_s` in which at most `spares` hosts of a trace are in repair.

    The first repair time is left out, as no host is in repair when a trace begins.
    """
    broken = np.array([failure.time_s for failure in trace if failure.spare and failure.time_s < span_s])
    times = np.concatenate([broken, broken + repair_s])
    changes = np.concatenate([np.ones(len(broken)), -np.ones(len(broken))])
    order = np.argsort(times, kind="stable")
    away = np.concatenate([[0.0], np.cumsum(changes[order])])
    edges = np.clip(np.concatenate([[0.0], times[order], [np.inf]]), repair_s, span_s)
    return float(np.diff(edges)[away <= spares].sum() / (span_s - repair_s))


@pytest.mark.slow
def test_enough_for_99_percent_and_one_fewer_is_not() -> None:
    for repair_days in [0.25, 1.0, 3.0]:
        repair_s = repair_days * DAY
        spares = spare_hosts(MODEL, FLEET, repair_s)
        shares = [
            [spares_suffice_share(_trace(seed), 1000 * DAY, repair_s, n) for seed in range(6)]
            for n in (spares, spares - 1)
        ]
        enough, fewer = (sum(each) / len(each) for each in shares)
        assert enough >= 0.988
        assert fewer < 0.99
        assert fewer < enough


def _trace(seed: int) -> tuple[Failure, ...]:
    return make_trace(MODEL, FLEET, 1000, seed)


def test_only_what_breaks_needs_a_spare() -> None:
    assert mean_hosts_in_repair(MODEL, FLEET, DAY) == pytest.approx((466 - 54 - 7 - 2 - 47) / 54)


def test_more_certainty_more_repair_and_more_gpus_need_more() -> None:
    base = spare_hosts(MODEL, FLEET, DAY)
    assert spare_hosts(MODEL, FLEET, DAY, 0.5) < base < spare_hosts(MODEL, FLEET, DAY, 0.9999)
    assert base < spare_hosts(MODEL, FLEET, 2 * DAY)
    assert base < spare_hosts(MODEL, Fleet(32_768), DAY)


def test_a_spare_that_costs_more_than_waiting_is_not_taken() -> None:
    for gpus in (1, 8, 32, 64, 1_024):
        fleet = Fleet(gpus)
        waiting = mean_hosts_in_repair(MODEL, fleet, DAY)  # share of the time, where it is small
        assert (spare_hosts(MODEL, fleet, DAY) > 0) == (waiting > 1 / fleet.hosts)
    assert spare_hosts(MODEL, Fleet(64), DAY) == 0 < spare_hosts(MODEL, Fleet(64), 10 * DAY)


def test_time_away_is_counted_by_hand() -> None:
    """Repairs of 10 s from 20, 25 and 60: two are away from 25 to 30, the window is 10 to 110."""
    trace = [Failure(time, "x", 0, True, False) for time in (20.0, 25.0, 60.0)]
    trace.append(Failure(50.0, "software", 0, False, False))
    assert spares_suffice_share(trace, 110, 10, 0) == pytest.approx(1 - 25 / 100)
    assert spares_suffice_share(trace, 110, 10, 1) == pytest.approx(1 - 5 / 100)
    assert spares_suffice_share(trace, 110, 10, 2) == 1


def test_mistakes_are_named() -> None:
    for call, words in [
        (lambda: spare_hosts(MODEL, FLEET, 0), "repair_s: 0 s"),
        (lambda: spare_hosts(MODEL, FLEET, DAY, 1), "sure: 1 is not a share"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()  # type: ignore[operator]
