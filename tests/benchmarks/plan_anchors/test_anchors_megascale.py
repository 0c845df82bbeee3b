from __future__ import annotations

import pytest

from benchmarks.plan_anchors import step
from benchmarks.plan_anchors.step import (
    MEGASCALE_FITTED,
    SYSTEMS,
    megascale_anchors,
    megascale_fitted,
    megascale_seconds,
)


def test_fourteen_rows_hold_their_mean_does_and_a_straight_line_misses() -> None:
    *rows, mean, line = megascale_anchors()
    assert len(rows) == 14
    assert {row.verdict for row in (*rows, mean)} == {"ok"}
    assert max(abs(row.error or 0) for row in rows) <= 0.12
    assert mean.predicted == pytest.approx(sum(abs(row.error or 0) for row in rows) / 14)
    assert mean.predicted <= 0.06 < line.predicted
    assert line.ablation
    assert line.verdict == "misses"


def test_the_row_that_was_fitted_is_none_of_them() -> None:
    rows = megascale_anchors()[:14]
    assert not [row for row in rows if f"{MEGASCALE_FITTED:,} GPUs" in row.what]
    assert all(f"fitted on {MEGASCALE_FITTED:,} GPUs" in row.note for row in rows)
    for system in SYSTEMS:
        assert megascale_seconds(MEGASCALE_FITTED, megascale_fitted(system.name), system.pieces) == pytest.approx(
            system.seconds[MEGASCALE_FITTED]
        )


def test_one_constant_each_and_megascale_computes_faster() -> None:
    slow, fast = (megascale_fitted(system.name) for system in SYSTEMS)
    assert slow < fast < 312e12


def test_steps_shrink_but_by_less_than_the_number_of_gpus_grows() -> None:
    """Bubble and gradients do not shrink."""
    rate = megascale_fitted("Megatron-LM")
    for few, many in ((256, 1024), (3072, 12288)):
        ratio = megascale_seconds(few, rate, 1) / megascale_seconds(many, rate, 1)
        assert 1 < ratio < 4


def test_hidden_gradients_and_more_stages_shorten_a_step() -> None:
    rate = megascale_fitted("MegaScale")
    assert megascale_seconds(12_288, rate, 6) < megascale_seconds(12_288, rate, 1)
    assert megascale_seconds(12_288, rate, 6, vpp=6) < megascale_seconds(12_288, rate, 6, vpp=1)


def test_a_wrong_published_figure_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SYSTEMS
    monkeypatch.setattr(step, "SYSTEMS", (first, second._replace(seconds={**second.seconds, 8192: 11.0})))
    wrong = [row for row in megascale_anchors() if not row.ok]
    assert [row.what for row in wrong] == ["MegaScale, 8,192 GPUs"]
