from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.statistics.estimates import RESAMPLES, Array, Resampled, combine, interval, ratio, resample
from herd.llama3.statistics.significance import Z


def pairs(random: np.random.Generator, count: int, change: float = 0.0, spread: float = 0.05) -> tuple[Array, Array]:
    """Return differences of bits and bytes of documents of uneven length; short ones differ more per byte."""
    sizes = np.minimum(random.lognormal(6.3, 0.8, count), 2048).round()
    return sizes * (change + spread * (500 / sizes) ** 0.3 * random.standard_normal(count)), sizes


def test_equal_samples_give_equal_numbers() -> None:
    bits, sizes = pairs(np.random.default_rng(0), 64)
    first, again, other = (interval(resample(bits, sizes, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first == pytest.approx(other, rel=0.1), "another seed moves the ends by a few percent of their width"


def test_chunks_of_resamples_are_one_sample() -> None:
    bits, sizes = pairs(np.random.default_rng(0), 400)
    found = resample(bits, sizes, 1)
    assert found.shifts.shape == found.stderrs.shape == (RESAMPLES,)
    assert found.shifts.std() == pytest.approx(found.stderr, rel=0.1)
    assert len(np.unique(found.shifts)) == RESAMPLES


def test_many_documents_give_the_normal_interval() -> None:
    random = np.random.default_rng(4)
    sizes = random.integers(100, 2000, 1000).astype(float)
    found = resample(sizes * (0.01 + 0.05 * random.standard_normal(1000)), sizes, 1)
    low, high, _ = interval(found)
    assert (low, high) == pytest.approx((found.value - Z * found.stderr, found.value + Z * found.stderr), rel=0.03)


@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.slow)])
def test_intervals_cover_the_truth_in_simulation(count: int) -> None:
    """A change of 0.02 bits per byte: each end misses it about 2.5 % of the time, also with few, uneven documents."""
    random = np.random.default_rng(7)
    ends = [interval(resample(*pairs(random, count, 0.02), place, 999))[:2] for place in range(1500)]
    below, above = np.mean([high < 0.02 for _, high in ends]), np.mean([low > 0.02 for low, _ in ends])
    assert 0.012 <= below <= 0.042
    assert 0.012 <= above <= 0.042


def test_false_alarms_between_equal_models() -> None:
    """Goal E6: of 200 comparisons of equal models at most 5 % end with a candidate that is called better."""
    random = np.random.default_rng(11)
    alarms = sum(interval(resample(*pairs(random, 48), place, 1999))[1] < 0 for place in range(200))
    assert alarms <= 10


def test_interval_and_p_agree() -> None:
    random = np.random.default_rng(5)
    for place in range(300):
        low, high, p = interval(resample(*pairs(random, 24, 0.015), place, 499))
        assert (p < 0.05) == (low > 0 or high < 0)


def test_a_mean_over_domains_is_drawn_within_each() -> None:
    """Three quarters of the weight on a domain that varies little: the mean varies little too."""
    random = np.random.default_rng(3)
    quiet, loud = (resample(*pairs(random, 64, 0.01, spread), place) for place, spread in enumerate((0.01, 0.2)))
    both = combine([quiet, loud], [3.0, 1.0])
    assert both.value == pytest.approx(0.75 * quiet.value + 0.25 * loud.value)
    assert both.stderr == pytest.approx(math.hypot(0.75 * quiet.stderr, 0.25 * loud.stderr))
    assert both.n == 128
    low, high, _ = interval(both)
    assert (high - low) / 2 == pytest.approx(Z * both.stderr, rel=0.1)


@pytest.mark.parametrize("count", [2, 3])
def test_a_handful_of_documents_says_nothing(count: int) -> None:
    low, high, p = interval(resample(*pairs(np.random.default_rng(1), count, 0.5), 0))
    assert (low, high) == (-math.inf, math.inf)
    assert p > 0.05


def test_p_counts_resamples_on_both_sides_and_itself() -> None:
    """By hand: 99 resamples, 2 of them as far off as the value, so p = 2 (1 + 2) / 100."""
    t = np.linspace(-1.9, 1.9, 99)
    t[:2] = -2.0
    found = Resampled(-2.0, 1.0, t, np.ones(99), 50)
    low, high, p = interval(found)
    assert p == pytest.approx(0.06)
    assert (low, high) == (-2.0 - np.sort(t)[99 - 2], -2.0 - np.sort(t)[1])
    constant = Resampled(0.5, 0.0, np.zeros(99), np.zeros(99), 50)
    assert interval(constant) == (0.5, 0.5, 1 / 100)
    assert interval(Resampled(0.0, 0.0, np.zeros(99), np.zeros(99), 50)) == (0.0, 0.0, 1.0)


def test_what_has_no_interval() -> None:
    one = interval(resample(np.array([3.0]), np.array([100.0]), 0))
    broken = interval(resample(np.array([3.0, math.nan, 1.0, 2.0]), np.full(4, 100.0), 0))
    assert all(map(math.isnan, one + broken))
    assert interval(resample(np.zeros(5), np.full(5, 100.0), 0)) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="give at least one item"):
        resample(np.array([]), np.array([]), 0)


@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 3000)), min_size=1, max_size=12))
def test_any_samples_have_ordered_ends_and_a_p(items: list[tuple[float, int]]) -> None:
    found = resample(np.array([bits for bits, _ in items]), np.array([float(size) for _, size in items]), 0, 199)
    low, high, p = interval(found)
    if len(items) > 1:
        assert low <= high
        assert 0 < p <= 1


def test_each_resample_has_the_standard_error_of_its_own_documents() -> None:
    bits, sizes = pairs(np.random.default_rng(0), 8)
    found = resample(bits, sizes, 5, 20)
    for place, drawn in enumerate(np.random.default_rng(5).integers(0, 8, (20, 8))):
        again = ratio(bits[drawn].tolist(), sizes[drawn].tolist())
        assert found.value + found.shifts[place] == pytest.approx(again.value)
        assert found.stderrs[place] == pytest.approx(again.stderr)
