from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_anchors import step
from benchmarks.plan_anchors.step import (
    A100_PEAK,
    FITTED,
    RUNS,
    megatron_anchors,
    megatron_fitted,
    megatron_seconds,
)
from herd.llama3.planner.device_curves import GemmCurve


def test_six_rows_hold_their_mean_does_and_a_flat_curve_misses() -> None:
    *rows, mean, flat = megatron_anchors()
    assert len(rows) == 6
    assert {row.verdict for row in (*rows, mean)} == {"ok"}
    assert flat.ablation
    assert flat.verdict == "misses"
    assert flat.predicted > 0.04 >= mean.predicted
    assert mean.predicted == pytest.approx(sum(abs(row.error or 0) for row in rows) / 6)
    assert max(abs(row.error or 0) for row in rows) <= 0.08
    assert {row.number for row in (*rows, mean, flat)} == {"A4"}


def test_held_out_rows_are_none_that_was_fitted() -> None:
    rows = megatron_anchors()[:6]
    times = {run.present for run in FITTED}
    assert {row.published for row in rows}.isdisjoint(times)
    assert [row.published for row in rows] == [1.42, 18.13, 49.05, 37.83, 94.42, 71.49]
    assert all("fitted on 22B and 175B" in row.note for row in rows)


def test_two_constants_pass_through_two_rows() -> None:
    curve = megatron_fitted()
    assert [megatron_seconds(run, curve, False) for run in FITTED] == pytest.approx(
        [run.present for run in FITTED], rel=1e-3
    )
    assert 0.5 < curve.ceiling < 1
    assert curve.half > 0


def test_full_recomputation_takes_longer_in_every_run() -> None:
    for run in RUNS:
        ratio = megatron_seconds(run, megatron_fitted(), True) / megatron_seconds(run, megatron_fitted(), False)
        assert 1.2 < ratio < 4 / 3 + 0.05  # a forward pass more, less what selective makes again
        assert run.full > run.present


def test_the_pipeline_counts() -> None:
    """The 175B without interleaving waits three times as long: (PP - 1) / (V M)."""
    run = RUNS[1]
    more = megatron_seconds(run._replace(interleave=1), megatron_fitted(), False) / megatron_seconds(
        run, megatron_fitted(), False
    )
    assert more == pytest.approx((1 + 7 / 64) / (1 + 7 / (3 * 64)), rel=0.01)


def test_smaller_matrices_are_slower() -> None:
    """What the second constant is for; without it, only work counts."""
    flat = GemmCurve(A100_PEAK, megatron_fitted().ceiling, 0.0)
    gains = [megatron_seconds(run, megatron_fitted(), False) / megatron_seconds(run, flat, False) for run in RUNS]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1


def test_a_wrong_published_figure_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [run._replace(full=run.full * 1.3) if run.name == "1T" else run for run in RUNS]
    monkeypatch.setattr(step, "RUNS", tuple(changed))
    wrong = [row for row in megatron_anchors() if not row.ok]
    assert [row.what for row in wrong] == ["1T, full recomputation", "mean error of the six"]
    assert wrong[0].verdict == "OUTSIDE"
    assert replace(wrong[0], ok=True).verdict == "ok"
