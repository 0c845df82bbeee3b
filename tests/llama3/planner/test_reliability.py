"""Rates come from the published counts, grow with what they belong to, and traces keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.planner.reliability import (
    FailureModel,
    Fleet,
    failures_by_cause,
    llama3_failures,
    make_trace,
    mttf_by_node_rate,
    scale_trace,
)

MODEL, FLEET = llama3_failures(), Fleet(16_384)


def test_the_published_counts() -> None:
    by_name = {cause.name: cause.count for cause in MODEL.causes}
    assert (MODEL.total, MODEL.unexpected, len(by_name)) == (466, 419, 19)
    assert (by_name["faulty GPU"], by_name["GPU HBM3 memory"], by_name["planned"]) == (148, 72, 47)
    assert MODEL.mtti_s(FLEET) / 3600 == pytest.approx(54 * 24 / 466)
    assert MODEL.hang_share(FLEET) == pytest.approx((35 + 7) / 466)


def test_rates_grow_with_their_component() -> None:
    rates = {cause.name: MODEL.per_hour(cause, Fleet(32_768)) * 54 * 24 for cause in MODEL.causes}
    assert rates["faulty GPU"] == pytest.approx(2 * 148)
    assert rates["planned"] == pytest.approx(2 * 47)
    wide = {cause.name: MODEL.per_hour(cause, Fleet(16_384, 16, 32)) * 54 * 24 for cause in MODEL.causes}
    assert (wide["power supply"], wide["network switch or cable"]) == pytest.approx((1.5, 17.5))
    assert MODEL.rate(FLEET, spare=True) * 54 * 24 == pytest.approx(466 - 54 - 7 - 2 - 47)


def test_small_jobs_are_not_stopped_daily_by_what_was_planned_for_2048_servers() -> None:
    """Kokolis et al.: 8 GPUs ran 47.7 days, 1,024 GPUs 7.9 h. Ours is longer, and less than ten times as long."""
    assert 47.7 < MODEL.mtti_s(Fleet(8)) / 86_400 < 477
    assert 7.9 < MODEL.mtti_s(Fleet(1_024)) / 3600 < 79
    assert MODEL.mtti_s(Fleet(64)) == pytest.approx(256 * MODEL.mtti_s(FLEET))
    assert MODEL.hang_share(Fleet(8)) < 0.02  # no switch between its GPUs


@given(seed=st.integers(0, 2**32 - 1), days=st.floats(0.5, 60), gpus=st.integers(8, 40_000))
def test_traces_are_seeded_and_ordered(seed: int, days: float, gpus: int) -> None:
    fleet = Fleet(gpus)
    trace = make_trace(MODEL, fleet, days, seed)
    assert trace == make_trace(MODEL, fleet, days, seed)
    assert list(trace) == sorted(trace, key=lambda failure: failure.time_s)
    assert all(0 <= failure.time_s < days * 86_400 and 0 <= failure.host < fleet.hosts for failure in trace)


def test_other_seeds_give_other_traces_with_the_same_mean() -> None:
    totals = [len(make_trace(MODEL, FLEET, 54, seed)) for seed in range(60)]
    assert np.mean(totals) == pytest.approx(466, rel=0.02)
    assert np.var(totals) == pytest.approx(466, rel=0.5)  # Poisson: variance = mean


def test_scaled_traces_keep_order_causes_and_hosts() -> None:
    trace = make_trace(MODEL, FLEET, 54, 7)
    short = scale_trace(trace, 0.001, until_s=1000)
    assert 0 < len(short) < len(trace)
    assert [failure.time_s for failure in short] == pytest.approx([f.time_s / 1000 for f in trace[: len(short)]])
    assert failures_by_cause(short) == failures_by_cause(trace[: len(short)])


def test_mean_time_to_failure_is_a_rate_per_server() -> None:
    assert mttf_by_node_rate(16_384) == pytest.approx(1.8, rel=0.03)
    assert mttf_by_node_rate(131_072) == pytest.approx(mttf_by_node_rate(16_384) / 8)
    assert mttf_by_node_rate(1_024) > 3 * 7.9  # what was measured: the known miss


def test_own_counts_replace_the_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndays: 10\nfleet_gpus: 64\ncauses: [{name: fan, count: 5, component: host}]\n")
    assert FailureModel.load(str(path)).rate(Fleet(128)) == pytest.approx(1 / 24)


def test_mistakes_are_named() -> None:
    for call, words in [
        (lambda: Fleet(0), "gpus: 0 is not a number of GPUs; write 1 or more"),
        (lambda: FailureModel.load("failures-2030"), "'failures-2030' is unknown"),
        (lambda: FailureModel.load({"name": "x", "days": -1, "fleet_gpus": 8, "causes": []}), "days"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()  # type: ignore[operator]
