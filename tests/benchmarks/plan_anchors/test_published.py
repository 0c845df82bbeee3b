from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_anchors.published import (
    TABLE_4_BATCH,
    VIRTUAL,
    fitted_h100_curves,
    llama3_model,
    llama_405b_config,
    meta_layout,
    predict_table4_row,
    roce_24k_fabric,
    table4_query,
)
from herd.llama3.parallel.layout import TABLE_4
from herd.llama3.planner.device_curves import prior_curves
from herd.llama3.planner.layout_search import search_layouts


def test_rows_ask_for_what_table_4_says() -> None:
    """Batch over sequence and data-parallel size is the sequences of a rank that the table prints."""
    for row in range(3):
        published, asked, layout = TABLE_4[row], table4_query(row), meta_layout(row)
        assert TABLE_4_BATCH // asked.seq_len // layout.dp(asked.world) == published.sequences
        assert (layout.tp, layout.cp, layout.pp) == (published.layout.tp, published.layout.cp, published.layout.pp)
        assert asked.world == published.world
        layout.check(asked.config, asked.vocab_size, asked.world)


def test_eight_stages_per_rank_give_every_stage_a_layer_but_the_ends() -> None:
    assert meta_layout(0).stages == llama_405b_config().layers + 2 == VIRTUAL * 16


def test_the_one_constant_gives_row_1_and_nothing_else_is_touched() -> None:
    start, found = prior_curves(roce_24k_fabric().accelerator), fitted_h100_curves()
    assert predict_table4_row(0, found).tflops == pytest.approx(TABLE_4[0].tflops, rel=1e-4)
    assert replace(found, gemm=replace(found.gemm, ceiling=start.gemm.ceiling)) == start
    assert 0.4 < found.gemm.ceiling < roce_24k_fabric().accelerator.reached_tflops / 989


def test_the_prior_of_every_other_prediction_is_this_fit() -> None:
    """`curves.REALIZED` is stated as a rounded figure; it must stay the one that row 1 gives."""
    assert prior_curves(roce_24k_fabric().accelerator).gemm.ceiling == pytest.approx(
        fitted_h100_curves().gemm.ceiling, rel=0.002
    )


def test_rows_2_and_3_follow_for_the_reasons_given() -> None:
    """From row 1 to 2 only the bubble's share grows; from 2 to 3 attention does."""
    one, two, three = (predict_table4_row(row, fitted_h100_curves()).time for row in range(3))
    assert two.bubble == pytest.approx(one.bubble)
    assert two.gemm == pytest.approx(one.gemm / 2)
    assert two.bubble / two.total > 1.8 * one.bubble / one.total
    assert three.attention > 10 * two.attention
    assert three.gemm == pytest.approx(two.gemm, rel=0.01)


def test_a_slower_attention_fits_faster_products() -> None:
    slow, fast = (fitted_h100_curves(attention_tflops=rate) for rate in (300.0, 700.0))
    assert slow.gemm.ceiling > fitted_h100_curves().gemm.ceiling > fast.gemm.ceiling
    assert predict_table4_row(0, slow).tflops == pytest.approx(predict_table4_row(0, fast).tflops, rel=1e-4)


def test_metas_layout_is_among_the_fastest_that_fit() -> None:
    """What A7 states, at the limit that this module gives; figures are computed, since memory's model may change."""
    found, published = search_layouts(table4_query(1), llama3_model()), predict_table4_row(1, fitted_h100_curves())
    assert found.fitting[0].time.total <= published.time.total * (1 + 1e-9)
    if published.margin >= 0:
        same = [one for one in found.fitting if one.layout == published.layout and one.load == published.load]
        assert [one.time.total for one in same] == [pytest.approx(published.time.total)]
