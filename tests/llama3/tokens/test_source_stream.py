from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.tokens import source_stream
from herd.llama3.tokens.source_stream import EpochOrder, Permutation, shuffled_order, splitmix64

MASK = 2**64 - 1


def slow_mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def slow_permutation(count: int, key: str) -> list[int]:
    """The same Feistel network in plain integers."""
    half = 1
    while 4**half < count:
        half += 1
    digest = hashlib.blake2b(key.encode(), digest_size=48, person=b"document order").digest()
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]
    mapped = []
    for number in range(count):
        value = number
        while True:
            left, right = value >> half, value % 2**half
            for round_key in keys:
                left, right = right, left ^ slow_mixed(right ^ round_key) % 2**half
            value = left << half | right
            if value < count:
                break
        mapped.append(value)
    return mapped


@given(st.integers(1, 3000), st.text(max_size=20))
def test_permutation_is_a_bijection_and_equals_plain_integers(count: int, key: str) -> None:
    mapped = Permutation(count, key)(0, count)
    assert sorted(mapped.tolist()) == list(range(count))
    assert mapped.tolist() == slow_permutation(count, key)


@given(st.integers(2, 2**60), st.data())
def test_permutations_of_any_size_are_read_anywhere(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    stop = min(count, first + data.draw(st.integers(1, 200)))
    permutation = Permutation(count, "key")
    mapped = permutation(first, stop).tolist()
    assert len(set(mapped)) == stop - first
    assert all(0 <= value < count for value in mapped)
    middle = (first + stop) // 2
    assert mapped == permutation(first, middle).tolist() + permutation(middle, stop).tolist()


def test_permutation_is_pinned() -> None:
    """A resumed run must find the order it was started with: these values may never change."""
    assert Permutation(10, "1/general/0")(0, 10).tolist() == [8, 7, 1, 5, 0, 2, 4, 6, 9, 3]


def test_permutation_is_uniform() -> None:
    """Where group 0 of 10 goes over 5,000 keys: chi-square with 9 degrees of freedom, p = 0.001 at 27.9."""
    places = [int(Permutation(10, f"0/general/{epoch}")(0, 1)[0]) for epoch in range(5000)]
    assert ((np.bincount(places, minlength=10) - 500) ** 2 / 500).sum() < 27.9


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2))
def test_blocks_hold_every_document_once(documents: int, group: int, block: int, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_stream, "GROUP", group)
        patch.setattr(source_stream, "BLOCK", block)
        found = EpochOrder(documents, 3, "code", epoch)
        blocks = [found.rows_of(number) for number in range(found.blocks)]
    assert sorted(np.concatenate(blocks).tolist()) == list(range(documents))
    assert all(np.all(np.diff(rows) > 0) for rows in blocks)
    assert all(len(rows) <= group * block for rows in blocks)
    for number, rows in enumerate(blocks):
        assert sorted(found.shuffle(number, len(rows)).tolist()) == list(range(len(rows)))


def test_blocks_differ_by_epoch_seed_and_leaf_and_mix_the_whole_leaf() -> None:
    count = 1_000_000
    keys = [(0, "code", 0), (0, "code", 1), (1, "code", 0), (0, "math", 0)]
    firsts = [EpochOrder(count, *key).rows_of(0) for key in keys]
    assert len({tuple(rows.tolist()) for rows in firsts}) == len(keys)
    for rows in firsts:
        tenths = np.bincount(rows // (count // 10), minlength=10)
        assert tenths.min() > 0.04 * len(rows)  # 256 chunks: 26 expected in each tenth
    assert EpochOrder(count, *keys[0]).shuffle(0, 50).tolist() != EpochOrder(count, *keys[0]).shuffle(1, 50).tolist()


@pytest.mark.parametrize("documents", [1, 255, 256, 257, 65_536])
def test_a_leaf_of_one_block_is_shuffled_as_a_whole(documents: int) -> None:
    found = EpochOrder(documents, 7, "math", 2)
    assert found.blocks == 1
    assert found.rows_of(0).tolist() == list(range(documents))
    assert np.array_equal(found.shuffle(0, documents), shuffled_order(documents, 7, "math", 2))


def test_every_epoch_is_another_permutation() -> None:
    epochs = [tuple(shuffled_order(50, 7, "math", epoch).tolist()) for epoch in range(20)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(epochs)) == 20
    assert shuffled_order(50, 8, "math", 0).tolist() != list(epochs[0])
    assert shuffled_order(50, 7, "code", 0).tolist() != list(epochs[0])


def test_shuffle_is_uniform() -> None:
    """Where document 0 of 10 lands over 5,000 epochs: chi-square with 9 degrees of freedom, p = 0.001 at 27.9."""
    places = [int(np.argmin(shuffled_order(10, 0, "general", epoch))) for epoch in range(5000)]
    assert ((np.bincount(places, minlength=10) - 500) ** 2 / 500).sum() < 27.9


def test_splitmix64_matches_the_published_sequence() -> None:
    """First outputs for seed 1234567 (reference implementation by S. Vigna, prng.di.unimi.it/splitmix64.c)."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * step) % 2**64 for step in (1, 2, 3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_shuffled_order_is_pinned() -> None:
    """A resumed run must find the order it was started with: these values may never change."""
    assert shuffled_order(8, 1, "general", 0).tolist() == [7, 0, 6, 3, 2, 1, 4, 5]
    assert shuffled_order(8, 1, "general", 0, block=1).tolist() == [0, 6, 5, 7, 4, 2, 3, 1]
