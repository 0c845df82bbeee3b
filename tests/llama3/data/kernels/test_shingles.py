from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.kernels.arrow import list_buffers
from herd.llama3.data.kernels.shingles import band_hashes, jaccard_pairs, mix_hashes, shingle_sets
from herd.llama3.data.text.words import split_words
from herd.llama3.recipe.data_schema import Dedup

VOCABULARY = [f"w{i}" for i in range(3000)]
TEXTS = st.lists(st.text("ab B,.\né中文ภ 日1_Я🙂", max_size=40), max_size=6)


def word_tuples(text: str, width: int) -> set[tuple[str, ...]]:
    """Return the shingles of `text` in plain Python; a text without words is its own only one."""
    found = split_words(text) or [f"no words: {text}"]
    width = min(width, len(found))
    return {tuple(found[i : i + width]) for i in range(len(found) - width + 1)}


def sets_of(texts: list[str], width: int) -> list[list[int]]:
    return [[int(one) for one in found] for found in shingle_sets(pa.array(texts, pa.string()), width).to_pylist()]


@given(TEXTS, st.integers(1, 4))
def test_shingle_sets_are_the_different_word_tuples(texts: list[str], width: int) -> None:
    found, truth = sets_of(texts, width), [word_tuples(text, width) for text in texts]
    assert found == [sorted(set(hashes)) for hashes in found]
    assert [len(hashes) for hashes in found] == [len(tuples) for tuples in truth]
    for i, j in combinations(range(len(texts)), 2):
        assert len(set(found[i]) & set(found[j])) == len(truth[i] & truth[j])


def test_the_order_of_words_counts_and_letter_case_does_not() -> None:
    one, two, three, four = sets_of(["a b c d e", "b a c d e", "A b, C d. e", "a b c d e f"], 5)
    assert one == three
    assert not set(one) & set(two)
    assert len(four) == 2
    assert set(one) < set(four)


def test_a_short_text_is_one_shingle_of_another_width() -> None:
    short, same, longer = sets_of(["one two", "One, two!", "one two three"], 5)
    assert short == same
    assert len(short) == len(longer) == 1
    assert short != longer


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1).map(lambda values: sorted(set(values))), min_size=1, max_size=8)
)
def test_jaccard_is_shared_over_all(sets: list[list[int]]) -> None:
    buffers = list_buffers(pa.array(sets, pa.large_list(pa.uint64())))
    ones, twos = (ends.ravel() for ends in np.indices((len(sets), len(sets))))
    found = jaccard_pairs(buffers, buffers, (ones, twos))
    truth = [len({*sets[i]} & {*sets[j]}) / len({*sets[i]} | {*sets[j]}) for i, j in zip(ones, twos, strict=True)]
    assert found.tolist() == truth


def test_bands_are_minima_of_the_shingles() -> None:
    """A band of one row is a function of the least hash alone: the union's is that of one of its halves."""
    halves = [" ".join(VOCABULARY[start : start + 400]) for start in (0, 1000)]
    both = " ".join(halves)
    dedup = Dedup(bands=64, rows=1, shingle=1)
    one, two, union = np.array(band_hashes(pa.array([*halves, both]), dedup).to_pylist(), np.uint64)
    assert np.all((union == one) | (union == two))
    assert 16 < np.sum(union == one) < 48  # about half of 64 come from each


def test_bands_estimate_jaccard() -> None:
    texts = pa.array([" ".join(VOCABULARY[k * 10 : k * 10 + 500]) for k in range(0, 200)])
    hashes = np.array(band_hashes(texts, Dedup(bands=64, rows=1)).to_pylist(), np.uint64)
    assert abs(np.mean(hashes[:-10] == hashes[10:]) - 396 / 596) < 0.01  # 100 of 500 words differ


def test_a_band_needs_all_its_rows() -> None:
    """Two texts of Jaccard J share a band of r rows with probability J^r."""
    texts = pa.array([" ".join(VOCABULARY[k * 10 : k * 10 + 500]) for k in range(0, 240)])
    hashes = np.array(band_hashes(texts, Dedup(bands=64, rows=4)).to_pylist(), np.uint64)
    assert abs(np.mean(hashes[:-4] == hashes[4:]) - (456 / 536) ** 4) < 0.03


def test_bands_do_not_depend_on_the_batch() -> None:
    rng = random.Random(1)
    texts = [" ".join(rng.choices(VOCABULARY, k=rng.choice((0, 1, 3, 20, 700)))) for _ in range(40)]
    dedup = Dedup()
    together = band_hashes(pa.array(texts), dedup).to_pylist()
    assert together == [band_hashes(pa.array([text]), dedup).to_pylist()[0] for text in texts]
    chunks = pa.chunked_array([pa.array(texts[:7], pa.large_string()), pa.array(texts[7:], pa.large_string())])
    assert together == band_hashes(chunks, dedup).to_pylist()
    assert together[3:] == band_hashes(pa.array(texts)[3:], dedup).to_pylist()
    assert shingle_sets(chunks, 5).to_pylist() == sets_of(texts, 5)


def test_no_band_meets_another() -> None:
    texts = pa.array([" ".join(VOCABULARY[i : i + 20]) for i in range(0, 3000, 20)] + ["word"])
    hashes = np.array(band_hashes(texts, Dedup(bands=20, rows=2)).to_pylist(), np.uint64)
    assert len(np.unique(hashes)) == hashes.size


def test_hashes_never_change() -> None:
    """They are in files: another value is another format."""
    texts = pa.array(["the quick brown fox jumps over the lazy dog", "深度学习模型", "?!"])
    assert shingle_sets(texts, 5).to_pylist() == PINNED_SETS
    assert band_hashes(texts, Dedup(bands=2, rows=3)).to_pylist() == PINNED_BANDS


def test_empty_columns() -> None:
    assert band_hashes(pa.array([], pa.string()), Dedup()).to_pylist() == []
    assert shingle_sets(pa.array([], pa.large_string()), 5).to_pylist() == []
    assert len(band_hashes(pa.array([""]), Dedup()).to_pylist()[0]) == Dedup().bands


def test_spread_is_a_bijection_that_fills_the_range() -> None:
    found = mix_hashes(np.arange(4096, dtype=np.uint64))
    assert len(np.unique(found)) == 4096
    counts = np.bincount((found >> np.uint64(60)).astype(np.int64), minlength=16)
    assert counts.min() > 190
    assert counts.max() < 330


PINNED_SETS = [
    [1856342189896074211, 6564454182337776629, 13692391818797284683, 14345536650688916446, 18186710246720323425],
    [4005814083580857950, 10507708490078898587],
    [16583993310762803175],
]
PINNED_BANDS = [
    [12745671840777077925, 3362424686602286259],
    [9970003229133733079, 1325084162518099222],
    [15092058038109020239, 16094587888480844768],
]
