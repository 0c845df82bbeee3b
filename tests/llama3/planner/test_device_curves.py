"""Efficiency curves: their constants are found again, their range is told, and they survive JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan_anchors.published import fitted_h100_curves
from herd.llama3.hardware.specs import load_accelerator
from herd.llama3.planner.device_curves import (
    BACKWARD,
    REALIZED,
    AttentionCurve,
    Curves,
    GemmCurve,
    MemoryCurve,
    derate_for_step,
    fit_gemm,
    prior_curves,
)

PEAK = 989e12
SHAPES = [(rows, k, n) for rows in (2048, 8192) for side in (512, 1024, 4096) for k, n in ((side, side), (side, 8192))]
CURVES = Curves(
    "a device",
    "bf16",
    "measured",
    GemmCurve(PEAK, 0.8, 320.0, ((2048, 8192), (512, 4096), (512, 8192))),
    AttentionCurve((1024, 4096), (300e12, 500e12), (250e12, 400e12), measured=True),
    MemoryCurve(2.6e12),
)
sides = st.integers(64, 65_536)


@given(ceiling=st.floats(0.05, 1.0), half=st.floats(4.0, 6000.0))
def test_the_fit_finds_the_constants_that_made_the_points(ceiling: float, half: float) -> None:
    true = GemmCurve(PEAK, ceiling, half)
    found = fit_gemm(SHAPES, [true.seconds(*shape) for shape in SHAPES], PEAK)
    assert found.ceiling == pytest.approx(ceiling, rel=1e-3)
    assert found.half == pytest.approx(half, rel=1e-2)
    assert found.measured == ((2048, 8192), (512, 4096), (512, 8192))


def test_one_outlier_moves_the_fit_little() -> None:
    true = GemmCurve(PEAK, 0.8, 320.0)
    seconds = [true.seconds(*shape) for shape in SHAPES]
    seconds[3] *= 5
    assert fit_gemm(SHAPES, seconds, PEAK).ceiling == pytest.approx(0.8, rel=0.05)


def test_products_that_never_saturate_get_a_finite_curve() -> None:
    found = fit_gemm(SHAPES, [2.0 * m * k * n / (1e9 * min(k, n)) for m, k, n in SHAPES], PEAK)
    assert found.half == pytest.approx(4 * 4096, rel=1e-3)


def test_one_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one size \(512\)"):
        fit_gemm([(64, 512, 512), (128, 512, 1024), (256, 2048, 512)], [1.0, 2.0, 3.0], PEAK)


@given(rows=sides, inner=sides, columns=sides)
def test_seconds_are_operations_over_peak_and_efficiency(rows: int, inner: int, columns: int) -> None:
    curve = CURVES.gemm
    asked = 2.0 * rows * inner * columns / (PEAK * curve.efficiency(min(inner, columns)))
    assert curve.seconds(rows, inner, columns) == pytest.approx(asked)
    assert curve.efficiency(min(inner, columns)) < curve.ceiling


def test_half_is_where_half_of_the_ceiling_is_reached() -> None:
    assert CURVES.gemm.efficiency(320) == pytest.approx(0.4)


@given(rows=sides, inner=sides, columns=sides)
def test_a_product_outside_of_what_was_measured_says_so(rows: int, inner: int, columns: int) -> None:
    small, large = sorted((inner, columns))
    inside = 2048 <= rows <= 8192 and 512 <= small <= 4096 and 512 <= large <= 8192
    assert (CURVES.gemm.extrapolates(rows, inner, columns) == "") == inside


def test_the_sentence_names_size_and_range() -> None:
    said = CURVES.gemm.extrapolates(16_384, 256, 1024)
    assert said == (
        "product 16,384 x 256 x 1,024: rows 16,384 outside of the measured 2,048 to 8,192, "
        "smaller side 256 outside of the measured 512 to 4,096"
    )


def test_attention_between_two_lengths_goes_by_the_logarithm() -> None:
    curve = CURVES.attention
    assert curve.seconds(400e12, 2048, backward=False) == pytest.approx(1.0)
    assert curve.seconds(325e12, 2048, backward=True) == pytest.approx(BACKWARD)
    assert curve.seconds(1e12, 4096, backward=False) == pytest.approx(1 / 500)


def test_attention_beyond_its_lengths_keeps_the_last_rate_and_says_so() -> None:
    curve = CURVES.attention
    assert curve.seconds(1e12, 131_072, backward=False) == curve.seconds(1e12, 4096, backward=False)
    assert curve.seconds(1e12, 128, backward=False) == curve.seconds(1e12, 1024, backward=False)
    assert curve.extrapolates(131_072) == "attention over 131,072 tokens: outside of the measured 1,024 to 4,096"
    assert [curve.extrapolates(length) for length in (1024, 2000, 4096)] == ["", "", ""]


def test_curves_tell_each_extrapolation_once() -> None:
    said = CURVES.extrapolates([(4096, 1024, 1024), (4096, 128, 1024), (4096, 128, 1024)], [2048, 8192])
    assert [line.split(":")[0] for line in said] == ["product 4,096 x 128 x 1,024", "attention over 8,192 tokens"]


@given(
    rates=st.lists(st.floats(1e9, 1e15), min_size=2, max_size=2),
    half=st.floats(1.0, 1e5),
    measured=st.booleans(),
)
def test_curves_survive_json(rates: list[float], half: float, measured: bool) -> None:
    seen = ((1, 2), (3, 4), (5, 6)) if measured else None
    attention = AttentionCurve((128, 256), (rates[0], rates[1]), (rates[1], rates[0]), measured)
    curves = Curves("é", "bf16", "", GemmCurve(PEAK, 0.5, half, seen), attention, MemoryCurve(rates[0]))
    assert Curves.from_json(curves.as_json()) == curves


def test_priors_are_told_from_measurements() -> None:
    hopper = prior_curves(load_accelerator("h100"))
    assert hopper.source.startswith("assumed")
    assert hopper.gemm.peak_flops == 989e12
    assert hopper.attention.seconds(550e12, 8192, backward=False) == pytest.approx(1.0)
    assert hopper.memory.bytes_per_s == pytest.approx(0.8 * 3.35e12)
    assert not hopper.extrapolates([(1, 1, 1)], [10**9])


def test_priors_of_other_hardware_say_that_they_are_not_validated() -> None:
    own = load_accelerator(
        {"name": "mine", "dense_tflops": 500, "reached_tflops": 400, "memory_gb": 64, "memory_tb_s": 2, "watts": 500}
    )
    assert "not validated" in prior_curves(own).source


def test_unknown_hardware_has_no_prior() -> None:
    with pytest.raises(ValueError, match="unknown hardware, and nothing is guessed"):
        prior_curves(load_accelerator("h9000"))


@given(side=st.integers(1, 10**6), more=st.integers(1, 10**6))
def test_larger_products_are_more_efficient_and_never_faster(side: int, more: int) -> None:
    curve = CURVES.gemm
    assert curve.efficiency(side) < curve.efficiency(side + more) < curve.ceiling
    assert curve.seconds(64, side + more, 10**6) > curve.seconds(64, side, 10**6)


@given(rows=sides, inner=sides, columns=sides)
def test_a_product_takes_as_long_as_its_transpose_and_twice_the_rows_twice_as_long(
    rows: int, inner: int, columns: int
) -> None:
    curve = CURVES.gemm
    assert curve.seconds(rows, inner, columns) == pytest.approx(curve.seconds(rows, columns, inner))
    assert curve.seconds(2 * rows, inner, columns) == pytest.approx(2 * curve.seconds(rows, inner, columns))


@given(seq_len=st.integers(1024, 4096))
def test_attention_between_its_lengths_has_a_rate_between_theirs(seq_len: int) -> None:
    assert 1 / 500 - 1e-12 <= CURVES.attention.seconds(1e12, seq_len, backward=False) <= 1 / 300 + 1e-12


def test_attention_at_one_rate_has_it_at_all_lengths_forward_and_backward() -> None:
    flat = CURVES.with_attention(400e12)
    for seq_len in (1, 1024, 131_072):
        assert flat.attention.seconds(400e12, seq_len, backward=False) == pytest.approx(1)
        assert flat.attention.seconds(400e12, seq_len, backward=True) == pytest.approx(BACKWARD)
    assert not flat.attention.measured
    assert (flat.gemm, flat.memory) == (CURVES.gemm, CURVES.memory)


def test_bytes_take_their_time() -> None:
    assert CURVES.memory.seconds(5.2e12) == pytest.approx(2)


def test_the_prior_of_other_hardware_goes_with_its_peak() -> None:
    hopper = load_accelerator("h100")
    half = hopper.model_copy(update={"driver_name": "", "dense_tflops": 494.5, "reached_tflops": 397.5})
    mine, theirs = prior_curves(half), prior_curves(hopper)
    assert mine.gemm.seconds(4096, 4096, 4096) == pytest.approx(2 * theirs.gemm.seconds(4096, 4096, 4096))
    asked = theirs.attention.seconds(1e12, 8192, backward=True)
    assert mine.attention.seconds(1e12, 8192, backward=True) == pytest.approx(2 * asked)
    assert prior_curves(load_accelerator("h200")).source == theirs.source
    assert prior_curves(load_accelerator("h200")).memory.bytes_per_s == pytest.approx(0.8 * 4.8e12)


def test_the_prior_is_what_fits_table_4() -> None:
    assert prior_curves(load_accelerator("h100")).gemm.ceiling == pytest.approx(
        fitted_h100_curves().gemm.ceiling, rel=0.005
    )


def test_measured_products_reach_less_in_a_step() -> None:
    found = derate_for_step(CURVES)
    assert found.gemm.seconds(4096, 4096, 4096) == pytest.approx(CURVES.gemm.seconds(4096, 4096, 4096) / REALIZED)
    assert (found.attention, found.memory) == (CURVES.attention, CURVES.memory)
    assert "Table 4" in found.source


def test_a_text_that_holds_no_curves_is_refused() -> None:
    for text in ["{", "{}", "[]", CURVES.as_json().replace('"gemm"', '"gem"')]:
        with pytest.raises((ValueError, KeyError, TypeError)):
            Curves.from_json(text)


@given(noise=st.lists(st.floats(-0.02, 0.02), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_a_few_percent_of_noise_move_predictions_by_no_more(noise: list[float]) -> None:
    true = GemmCurve(PEAK, 0.8, 320.0)
    found = fit_gemm(
        SHAPES, [true.seconds(*shape) * (1 + part) for shape, part in zip(SHAPES, noise, strict=True)], PEAK
    )
    for shape in SHAPES:
        assert found.seconds(*shape) == pytest.approx(true.seconds(*shape), rel=0.04)
