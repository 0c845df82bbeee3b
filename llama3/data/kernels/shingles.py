"""Word shingles of documents, their MinHash bands, and the true Jaccard of two shingle sets.

Broder 1997; Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3. Documents whose shingle sets
overlap by Jaccard J have an equal band hash with probability J^rows. A shingle is a 64-bit hash; the minima are taken
over 32 bits, of which a vector register holds twice as many. Unequal minima then coincide in one case in 2^32 by the
number of shingles, which many rows to a band make invisible, and candidates are verified by the sets anyway.
One core takes 240 MB of prose a second for bands of 14 x 8 hashes, mostly to find the words; for sets, which only
candidates need, 100 MB.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from llama3.data.kernels.arrow import Bytes, Hashes, Offsets, hash_lists, text_buffers
from llama3.data.kernels.words import find_words, mixed
from llama3.recipe.data_schema import Dedup

Halves = NDArray[np.uint32]
Sets = tuple[Hashes, Offsets]
_BASE = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0x100000001B3)


def band_hashes(texts: Any, dedup: Dedup) -> pa.LargeListArray:
    """Return the MinHash bands of each text: list<uint64>[dedup.bands]; equal hashes make two texts candidates.

    `texts` is a string column without nulls. The number of the band goes into its hash, so no two bands meet.
    """
    data, offsets = text_buffers(texts)
    salts, factors = _functions(dedup.bands * dedup.rows)
    bands = _band_hashes(data, offsets, dedup.shingle, salts, factors, dedup.rows)
    return hash_lists(bands.reshape(-1), np.arange(len(offsets), dtype=np.int64) * dedup.bands)


def shingle_sets(texts: Any, words_per_shingle: int) -> pa.LargeListArray:
    """Return the set of word shingles of each text: list<uint64>, sorted, each hash once, never empty.

    A text of fewer words is one shingle made of all its words, so that short copies are found too; a text without
    words is one shingle made of its bytes.
    """
    data, offsets = text_buffers(texts)
    values, ends = _shingle_sets(data, offsets, words_per_shingle)
    return hash_lists(values, ends)


def jaccard_pairs(left: Sets, right: Sets, pairs: tuple[Offsets, Offsets]) -> NDArray[np.float64]:
    """Return the Jaccard index of set `pairs[0][i]` of `left` and set `pairs[1][i]` of `right`: float64[len(pairs[0])].

    Both sides are as `list_buffers` returns the column of `shingle_sets`.
    """
    result: NDArray[np.float64] = _jaccard_pairs(*left, *right, *pairs)
    return result


def spread(values: Hashes) -> Hashes:
    """Return keys for `partition.py`: `values` with every bit mixed into all 64; uint64[len(values)]."""
    result: Hashes = _spread(values)
    return result


def _functions(count: int) -> tuple[Halves, Halves]:
    """Return salts and odd factors of `count` hash functions, uint32[count] each."""
    digests = [blake2b(f"minhash {place}".encode(), digest_size=8).digest() for place in range(count)]
    pairs = np.frombuffer(b"".join(digests), dtype="<u4").reshape(count, 2)
    return np.ascontiguousarray(pairs[:, 0]), pairs[:, 1] | np.uint32(1)


@njit(cache=True, nogil=True)
def _room(offsets: Offsets) -> np.int64:
    longest = np.int64(1)
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    return longest


@njit(cache=True, nogil=True)
def _shingles(data: Bytes, start: int, stop: int, width: int, starts: Offsets, stops: Offsets, hashes: Hashes) -> int:
    """Write the shingles of `data[start:stop]` over `hashes`, in the order of the text, and return how many."""
    count = find_words(data, start, stop, starts, stops, hashes)
    if count == 0:
        state = _BASE
        for at in range(start, stop):
            state = (state ^ np.uint64(data[at])) * _PRIME
        hashes[0] = mixed(state)
        return 1
    width = min(width, count)
    top, rolling = np.uint64(1), np.uint64(0)
    for place in range(width):
        top, rolling = top * _BASE, rolling * _BASE + hashes[place]
    for first in range(count - width):
        leaving, entering = hashes[first], hashes[first + width]
        hashes[first] = mixed(rolling + np.uint64(width))
        rolling = rolling * _BASE + entering - leaving * top
    hashes[count - width] = mixed(rolling + np.uint64(width))
    return count - width + 1


@njit(cache=True, nogil=True)
def _smallest(values: Halves, count: int, salt: np.uint32, factor: np.uint32) -> np.uint32:
    """Return the least of (v xor salt) * factor over `values[:count]`; this loop is the one that must vectorise."""
    least = np.uint32(0xFFFFFFFF)
    for i in range(count):
        least = min(least, np.uint32((values[i] ^ salt) * factor))
    return least


@njit(cache=True, nogil=True)
def _band_hashes(data: Bytes, offsets: Offsets, width: int, salts: Halves, factors: Halves, rows: int) -> Hashes:
    texts, bands, room = len(offsets) - 1, len(salts) // rows, _room(offsets)
    starts, stops, hashes = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint64)
    halves = np.empty(room, np.uint32)
    result = np.empty((texts, bands), np.uint64)
    for text in range(texts):
        count = _shingles(data, offsets[text], offsets[text + 1], width, starts, stops, hashes)
        for i in range(count):
            halves[i] = np.uint32(hashes[i] >> np.uint64(32))
        for band in range(bands):
            folded = np.uint64(band + 1)
            for place in range(band * rows, (band + 1) * rows):
                folded = mixed(folded ^ np.uint64(_smallest(halves, count, salts[place], factors[place]))) * _BASE
            result[text, band] = folded
    return result


@njit(cache=True, nogil=True)
def _shingle_sets(data: Bytes, offsets: Offsets, width: int) -> tuple[Hashes, Offsets]:
    texts, room = len(offsets) - 1, _room(offsets)
    starts, stops, hashes = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint64)
    values, ends = np.empty(len(data) + texts, np.uint64), np.zeros(texts + 1, np.int64)
    total = 0
    for text in range(texts):
        count = _shingles(data, offsets[text], offsets[text + 1], width, starts, stops, hashes)
        hashes[:count].sort()
        for i in range(count):
            if i == 0 or hashes[i] != hashes[i - 1]:
                values[total] = hashes[i]
                total += 1
        ends[text + 1] = total
    return values[:total].copy(), ends


@njit(cache=True, nogil=True)
def _jaccard_pairs(
    left: Hashes, left_at: Offsets, right: Hashes, right_at: Offsets, ones: Offsets, twos: Offsets
) -> NDArray[np.float64]:
    result = np.empty(len(ones), np.float64)
    for i in range(len(ones)):
        a, a_end = left_at[ones[i]], left_at[ones[i] + 1]
        b, b_end = right_at[twos[i]], right_at[twos[i] + 1]
        total, shared = a_end - a + b_end - b, 0
        while a < a_end and b < b_end:
            x, y = left[a], right[b]
            shared += x == y
            a += x <= y
            b += y <= x
        result[i] = shared / (total - shared)
    return result


@njit(cache=True, nogil=True)
def _spread(values: Hashes) -> Hashes:
    result = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        result[i] = mixed(values[i])
    return result


# Union-find over arrays (Tarjan 1975), with path halving; the smaller node of two is the root.


@njit(cache=True, nogil=True)
def _root(parents: Offsets, node: int) -> int:
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


@njit(cache=True, nogil=True)
def smallest_connected(count: int, left: Offsets, right: Offsets) -> Offsets:
    """Return the smallest node that each of `count` nodes is connected to by the edges `left[i]` - `right[i]`."""
    parents = np.arange(count)
    for i in range(len(left)):
        one, two = _root(parents, left[i]), _root(parents, right[i])
        if one < two:
            parents[two] = one
        else:
            parents[one] = two
    for node in range(count):  # a parent is never above its child, so it is final when its child looks at it
        parents[node] = parents[parents[node]]
    return parents
