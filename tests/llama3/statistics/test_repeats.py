"""The noise of repeats and documents: the formula against its special cases, and its coverage by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from herd.llama3.statistics.repeats import (
    Array,
    RepeatNoise,
    coverage,
    half_width,
    interval,
    repeat_noise,
    two_sided_p,
)


def noise(documents: float, n: float, repeats: float, dof: float) -> tuple[Array, Array, RepeatNoise]:
    """Return the noise of one gain, as the functions take it."""
    return np.array([documents]), np.array([n]), RepeatNoise(np.full((1, 2), repeats), np.full((1, 2), dof))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6).filter(lambda gains: np.std(gains) > 1e-3))
def test_noise_of_repeats_alone_is_the_paired_t_test(gains: list[float]) -> None:
    row = np.array([gains])
    _, p = stats.ttest_1samp(gains, 0)
    p_of_repeats = two_sided_p(row.mean(axis=1), np.zeros(1), np.full(1, 50.0), repeat_noise(row))
    assert p_of_repeats[0] == pytest.approx(max(p, 1e-16), rel=1e-6)


@given(st.floats(1e-3, 1), st.floats(0, 1), st.integers(1, 12), st.floats(-3, 3))
def test_p_is_below_five_percent_exactly_where_the_interval_leaves_zero_out(
    documents: float, repeats: float, dof: int, gain: float
) -> None:
    both = noise(documents, 40.0, repeats, dof)
    low, high = interval(np.array([gain]), *both)
    p = two_sided_p(np.array([gain]), *both)[0]
    assert (p < 0.05) == (low[0] > 0 or high[0] < 0) or abs(p - 0.05) < 1e-9
    assert half_width(np.array([max(p, 1e-12)]), *both)[0] == pytest.approx(abs(gain), abs=1e-5) or p <= 1e-12


@pytest.mark.parametrize(("variants", "repeats"), [(1, 2), (1, 4), (3, 2), (4, 3)])
def test_the_pooled_noise_is_that_of_a_table_of_variants_and_repeats(variants: int, repeats: int) -> None:
    """By least squares with a column for each variant and each repeat, the control among the variants."""
    gains = np.random.default_rng(variants).standard_normal((variants, repeats))
    runs = np.vstack([np.zeros(repeats), gains])
    rows, columns = (place.ravel() for place in np.indices(runs.shape))
    design = np.hstack([rows[:, None] == np.arange(variants + 1), columns[:, None] == np.arange(repeats)])
    fit = design @ np.linalg.lstsq(design.astype(float), runs.ravel(), rcond=None)[0]
    dof = runs.size - np.linalg.matrix_rank(design.astype(float))
    pooled = ((runs.ravel() - fit) ** 2).sum() / dof * 2 / repeats  # of the mean of a difference of two runs
    noise_of_repeats = repeat_noise(gains)
    assert noise_of_repeats.variances[:, 1] == pytest.approx(np.full(variants, pooled))
    assert noise_of_repeats.dof.tolist() == [[repeats - 1, dof]] * variants
    documents, n = np.full(variants, 0.3), np.array([1.0, 12.0, 30.0, 50.0])[-variants:]
    own = stats.t.isf(0.05, repeats - 1) ** 2 * gains.var(axis=1, ddof=1) / repeats
    wider = np.maximum(own, stats.t.isf(0.05, dof) ** 2 * pooled)
    expected = np.sqrt(stats.t.isf(0.05, np.maximum(1, n - 1)) ** 2 * 0.3 + wider)
    half = half_width(np.full(variants, 0.1), documents, n, noise_of_repeats)
    assert half == pytest.approx(np.where(n > 1, expected, np.inf))


def test_a_single_repeat_has_the_interval_of_its_documents_and_no_p() -> None:
    alone = repeat_noise(np.array([[0.5], [0.1]]))
    assert half_width(np.full(2, 0.05), np.full(2, 0.04), np.full(2, 20.0), alone) == pytest.approx(
        stats.t.isf(0.025, 19) * 0.2
    )
    assert np.isnan(two_sided_p(np.array([0.5, 0.1]), np.full(2, 0.04), np.full(2, 20.0), alone)).all()


@pytest.mark.parametrize(("variants", "repeats"), [(4, 3), (8, 2), pytest.param(4, 6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scatter", [pytest.param(1.0, marks=pytest.mark.slow), 5.0])
def test_a_variant_that_scatters_more_than_the_others_is_covered_too(
    variants: int, repeats: int, scatter: float
) -> None:
    """With the pooled quantile on its own variance, 0.862 and 0.791 of the first two hold the truth."""
    assert coverage(variants, repeats, scatter) >= 0.935  # 3 standard errors of 2,000 below 0.95
