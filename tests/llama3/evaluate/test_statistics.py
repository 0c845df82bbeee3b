from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama3.evaluate.statistics import Estimate, paired_difference, proportion, ratio, weighted_mean


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


def test_paired_difference_sees_what_unpaired_intervals_hide() -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(100, 2000, 60).astype(float)
    hardness = 2.5 + 0.5 * random.standard_normal(60)
    champion = lengths * hardness
    candidate = lengths * (hardness - 0.02 + 0.02 * random.standard_normal(60))
    difference = paired_difference(candidate.tolist(), champion.tolist(), lengths.tolist())
    assert difference.high < 0
    ours, theirs = ratio(candidate.tolist(), lengths.tolist()), ratio(champion.tolist(), lengths.tolist())
    assert ours.low < theirs.value < ours.high
    assert difference.value == pytest.approx(ours.value - theirs.value)


def test_paired_difference_of_equal_models_is_seldom_a_finding() -> None:
    random = np.random.default_rng(2)
    findings = 0
    for _ in range(1000):
        answers = random.random((2, 100)) < 0.4
        difference = paired_difference(answers[0].tolist(), answers[1].tolist(), [1.0] * 100)
        findings += not difference.low <= 0 <= difference.high
    assert 20 <= findings <= 80


def test_paired_difference_needs_the_same_items() -> None:
    with pytest.raises(ValueError, match="2 items against 1"):
        paired_difference([1.0, 2.0], [1.0], [1.0, 1.0])


def test_weighted_mean_scales_weights_and_adds_variances() -> None:
    parts = [Estimate(1.0, 0.3, 0, 0, 10), Estimate(3.0, 0.4, 0, 0, 20)]
    mean = weighted_mean(parts, [2.0, 2.0])
    assert (mean.value, mean.n) == (2.0, 30)
    assert mean.stderr == pytest.approx(0.25)
    assert weighted_mean(parts, [0.25, 0.75]).value == 2.5
    with pytest.raises(ValueError, match="one weight of 0 or more"):
        weighted_mean(parts, [1.0])
