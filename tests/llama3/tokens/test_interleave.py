from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from herd.llama3.tokens.interleave import LONGEST_BLOCK, MixtureInterleaver, interleave_evenly
from herd.llama3.tokens.mix import apportion, dataset_shares, mix_datasets
from tests.llama3.tokens.token_samples import BASE, recipe, stage

PERCENT = (Fraction(1, 2), Fraction(1, 4), Fraction(17, 100), Fraction(2, 25))
weights = st.lists(st.integers(0, 10_007), min_size=1, max_size=7).filter(any)
shares = weights.map(lambda parts: tuple(Fraction(part, sum(parts)) for part in parts))


@given(st.integers(0, 10**15), shares)
def test_apportion_is_whole_and_within_one(total: int, parts: tuple[Fraction, ...]) -> None:
    counts = apportion(total, parts)
    assert sum(counts) == total
    assert all(abs(count - total * share) < 1 for count, share in zip(counts, parts, strict=True))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_every_prefix_of_an_even_order_is_less_than_one_off(counts: list[int]) -> None:
    order, rank = interleave_evenly(tuple(counts))
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    for dataset, count in enumerate(counts):
        dealt = np.cumsum(order == dataset)
        ideal = np.arange(1, len(order) + 1) * count / max(1, len(order))
        assert np.all(np.abs(dealt - ideal) < 1)
        assert rank[order == dataset].tolist() == list(range(count))


ODD = tuple(Fraction(part, 5003) for part in (2, 3, 5, 990, 1000, 3003))
"""Their common denominator is longer than a block."""


@given(shares, st.integers(1, 20_000), st.integers(1, 9))
@example(ODD, LONGEST_BLOCK - 1, 1)
@example(ODD, 3 * 5 * LONGEST_BLOCK - 1, 5)
def test_units_tile_the_span_and_end_exact_to_the_token(parts: tuple[Fraction, ...], tokens: int, unit: int) -> None:
    units = MixtureInterleaver(parts, tokens, unit).units(0, tokens)
    assert units.start[0] == 0
    assert np.array_equal(units.start[1:], (units.start + units.size)[:-1])
    assert units.start[-1] + units.size[-1] == tokens
    for dataset, total in enumerate(apportion(tokens, parts)):
        mine = units.dataset == dataset
        assert units.size[mine].sum() == total
        assert np.array_equal(units.first[mine], np.cumsum(units.size[mine]) - units.size[mine])
        assert (units.size[mine] < unit).sum() <= 1


@given(shares, st.integers(1, 20_000), st.integers(1, 9), st.data())
def test_parts_of_a_deal_equal_the_whole(
    parts: tuple[Fraction, ...], tokens: int, unit: int, data: st.DataObject
) -> None:
    interleaver = MixtureInterleaver(parts, tokens, unit)
    whole = interleaver.units(0, tokens)
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    here = (whole.start < stop) & (whole.start + whole.size > start)
    part = interleaver.units(start, stop)
    for name in ("dataset", "first", "start", "size"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[here])
    taken = np.clip(start - whole.start, 0, whole.size)
    assert interleaver.consumed(start).tolist() == [
        int(taken[whole.dataset == dataset].sum()) for dataset in range(len(parts))
    ]
    assert interleaver.consumed(tokens).tolist() == interleaver.totals.tolist()


def errors(interleaver: MixtureInterleaver, positions: range) -> list[float]:
    """Return how far each dataset is from its share at the worst of `positions`, in units."""
    ideal = np.outer(positions, [float(share) for share in interleaver.shares])
    consumed = np.array([interleaver.consumed(position) for position in positions])
    return list(np.abs(consumed - ideal).max(axis=0) / interleaver.unit)


def test_every_prefix_of_a_percent_mix_is_within_a_unit() -> None:
    interleaver = MixtureInterleaver(PERCENT, 64 * 1000, 64)
    assert max(errors(interleaver, range(0, 800 * 64, 7))) < 1
    assert max(errors(interleaver, range(800 * 64, 64_001, 7))) < 1.5


@settings(max_examples=15)
@given(shares)
def test_prefixes_of_any_mix_are_within_a_unit_per_leaf(parts: tuple[Fraction, ...]) -> None:
    """Blocks lack at most datasets - 1 units, which a dataset has too many by its share; the order adds one."""
    interleaver = MixtureInterleaver(parts, 16 * 9000, 16)
    for share, error in zip(parts, errors(interleaver, range(0, 16 * 8000, 997)), strict=True):
        assert error < 1 + max(1, (len(parts) - 1) * share)


def test_a_share_below_one_unit_in_a_million_is_still_dealt() -> None:
    tiny = Fraction(1, 3_000_000)
    interleaver = MixtureInterleaver((1 - tiny, tiny), 30_000_000, 10)
    assert interleaver.consumed(30_000_000).tolist() == [29_999_990, 10]


def test_a_run_of_trillions_is_addressed_like_a_small_one() -> None:
    interleaver = MixtureInterleaver(PERCENT, 14_800_000_000_000, 131_072)
    units = interleaver.units(14_000_000_000_000, 14_000_001_048_576)
    assert units.start[0] <= 14_000_000_000_000 < units.start[0] + 131_072
    ideal = np.array([0.5, 0.25, 0.17, 0.08]) * 14_000_000_000_000
    assert np.abs(interleaver.consumed(14_000_000_000_000) - ideal).max() < 131_072


@given(shares, st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 9))
def test_a_longer_span_begins_as_a_shorter_one(parts: tuple[Fraction, ...], one: int, more: int, unit: int) -> None:
    short, long = MixtureInterleaver(parts, one, unit), MixtureInterleaver(parts, one + more, unit)
    same = min(short.fixed_positions, long.fixed_positions)
    for name in ("dataset", "first", "start", "size"):
        assert same == 0 or np.array_equal(getattr(short.units(0, same), name), getattr(long.units(0, same), name))


def test_only_the_last_units_depend_on_the_end() -> None:
    assert MixtureInterleaver(PERCENT, 64 * 777 + 5, 64).fixed_positions > 64 * (777 - 14)
    assert MixtureInterleaver(ODD, 3 * LONGEST_BLOCK + 100, 1).fixed_positions >= 3 * LONGEST_BLOCK - len(ODD)


def test_weighted_sources_split_their_domain_exactly() -> None:
    asked = recipe([stage("a", 80)], weights={"code": [0.3, 0.1, 0.2]})
    datasets = mix_datasets(asked)
    assert [dataset.name for dataset in datasets] == ["general", "math", "code-0", "code-1", "code-2", "multilingual"]
    domain_shares = {domain: Fraction(share) for domain, share in asked.mix["base"].items()}
    split = dataset_shares(datasets, domain_shares, {})
    assert split[2:5] == (Fraction(17, 200), Fraction(17, 600), Fraction(17, 300))
    assert sum(split) == 1
    assert BASE["code"] == "17%"
