from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.statistics.estimates import Estimate, mean, paired_proportions, proportion, ratio, weighted_mean


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17:857-872, Table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_equals_the_published_table(successes: int, n: int, low: float, high: float) -> None:
    estimate = proportion(successes, n)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)
    assert estimate.stderr == pytest.approx(math.sqrt(estimate.value * (1 - estimate.value) / n))


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_its_value_and_stays_in_0_to_1(case: tuple[int, int]) -> None:
    successes, n = case
    estimate = proportion(successes, n)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low < estimate.high
    mirrored = proportion(n - successes, n)
    assert mirrored.low == pytest.approx(1 - estimate.high, abs=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_impossible_proportions_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} successes of {n}"):
        proportion(successes, n)


def test_ratio_by_hand() -> None:
    estimate = ratio([2.0, 3.0, 7.0], [1.0, 2.0, 3.0])
    assert estimate.value == 2.0
    # residuals y - 2x: 0, -1, 1; s^2 = 3/2 * 2 / 36
    assert estimate.stderr == pytest.approx(math.sqrt(3 / 36))
    assert estimate.high - estimate.low == pytest.approx(2 * 1.959963984540054 * estimate.stderr)
    assert estimate.n == 3


def test_ratio_of_one_item_has_no_spread() -> None:
    estimate = ratio([3.0], [2.0])
    assert estimate.value == 1.5
    assert math.isnan(estimate.stderr)


@pytest.mark.parametrize(("numerators", "denominators"), [([], []), ([1.0], [0.0]), ([1.0, 2.0], [1.0])])
def test_ratios_without_meaning_are_refused(numerators: list[float], denominators: list[float]) -> None:
    with pytest.raises(ValueError, match="give at least one item"):
        ratio(numerators, denominators)


def test_ratio_interval_covers_the_truth_in_simulation() -> None:
    """Documents of uneven length whose bits per byte varies: 95 % of the intervals over 48 of them hold the truth."""
    random = np.random.default_rng(0)
    lengths = random.integers(100, 2000, (2000, 48)).astype(float)
    bits = lengths * (2.5 + 0.4 * random.standard_normal(lengths.shape))
    estimates = [ratio(y, x) for y, x in zip(bits, lengths, strict=True)]
    covered = np.mean([estimate.low <= 2.5 <= estimate.high for estimate in estimates])
    assert 0.91 <= covered <= 0.97
    spread = np.std([estimate.value for estimate in estimates])
    assert np.mean([estimate.stderr for estimate in estimates]) == pytest.approx(spread, rel=0.06)


def test_a_mean_of_groups_weighs_groups_alike_and_counts_their_spread() -> None:
    values, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], ["law", "law", "art", "art", "art", "law"]
    estimate = mean(values, groups)
    assert estimate.value == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert estimate.stderr == pytest.approx(math.sqrt(2 * (1 / 3) / 3) / 2)
    assert mean([1.0, 0.0, 1.0], ["a", "a", "b"]).value == pytest.approx((0.5 + 1) / 2)
    assert mean([1.0, 0.0, 1.0], ["a", "a", "b"]).stderr == pytest.approx(math.sqrt(0.5 / 2 + 0.5) / 2), "pooled for b"
    assert mean([1.0, 0.0, 1.0], ["a", "b", "c"]) == mean([1.0, 0.0, 1.0]) == ratio([1.0, 0.0, 1.0], [1.0] * 3)
    with pytest.raises(ValueError, match="3 items with 2 groups: give each item its group"):
        mean([1.0, 0.0, 1.0], ["a", "b"])


def test_a_mean_of_groups_covers_the_truth_in_simulation() -> None:
    random, covered = np.random.default_rng(3), 0
    chances = {"law": 0.2, "art": 0.5, "sea": 0.8}
    groups = [name for name, size in zip(chances, (60, 25, 40), strict=True) for _ in range(size)]
    for _ in range(1000):
        estimate = mean((random.random(125) < np.array([chances[name] for name in groups])).tolist(), groups)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 1000 <= 0.97


def test_paired_proportions_by_hand() -> None:
    """14 of 100 newly right, 5 newly wrong."""
    estimate = paired_proportions(14, 5, 100)
    assert (estimate.value, estimate.n) == (0.09, 100)
    assert estimate.stderr == pytest.approx(math.sqrt(19 - 81 / 100) / 100)
    half = 1.959963984540054 * math.sqrt(20 - 81 / 102) / 102
    assert (estimate.low, estimate.high) == pytest.approx((9 / 102 - half, 9 / 102 + half))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 200))
def test_paired_proportions_hold_their_value_and_have_width(gained: int, lost: int, same: int) -> None:
    estimate = paired_proportions(gained, lost, gained + lost + same)
    assert -1 <= estimate.low < estimate.high <= 1
    assert estimate.low <= estimate.value <= estimate.high
    mirrored = paired_proportions(lost, gained, gained + lost + same)
    assert mirrored.low == pytest.approx(-estimate.high)


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 3, 5), (-1, 0, 5)])
def test_impossible_pairs_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"{counts[0]} gained and {counts[1]} lost of {counts[2]} questions"):
        paired_proportions(*counts)


@pytest.mark.parametrize("questions", [20, 100])
def test_paired_proportions_cover_the_truth_in_simulation(questions: int) -> None:
    """Two models that agree on most questions; one of them is better by 0.1."""
    random = np.random.default_rng(2)
    changes = random.choice([1, -1, 0], (2000, questions), p=[0.2, 0.1, 0.7])
    found = [paired_proportions(int((row > 0).sum()), int((row < 0).sum()), questions) for row in changes]
    assert 0.93 <= np.mean([estimate.low <= 0.1 <= estimate.high for estimate in found]) <= 0.98


def test_weighted_mean_scales_weights_and_adds_variances() -> None:
    parts = [Estimate(1.0, 0.3, 0, 0, 10), Estimate(3.0, 0.4, 0, 0, 20)]
    mean = weighted_mean(parts, [2.0, 2.0])
    assert (mean.value, mean.n) == (2.0, 30)
    assert mean.stderr == pytest.approx(0.25)
    assert weighted_mean(parts, [0.25, 0.75]).value == 2.5
    single = Estimate(7.0, math.nan, 0, 0, 1)
    assert weighted_mean([parts[0], single], [2.0, 0.0]).stderr == pytest.approx(0.3), "a weight of 0 adds no noise"
    assert math.isnan(weighted_mean([parts[0], single], [2.0, 1.0]).stderr)
    with pytest.raises(ValueError, match="one weight of 0 or more"):
        weighted_mean(parts, [1.0])
