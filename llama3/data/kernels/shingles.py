"""MinHash kernels: word shingles of documents, their LSH bands, the Jaccard index of shingle sets.

Two documents whose shingle sets have Jaccard J share a band hash with probability J^rows (Broder 1997; Leskovec,
Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3). On one core, 14 x 8 hashes take 240 MB of prose per
second, mostly to find the words; sets, which only candidates need, 100 MB/s.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Bytes, Hashes, Offsets, hash_lists, text_buffers
from herd.llama3.data.kernels.words import find_words, mix64
from herd.llama3.recipe.data_schema import Dedup

Halves = NDArray[np.uint32]
Sets = tuple[Hashes, Offsets]
_BASE = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0x100000001B3)


def band_hashes(texts: Any, dedup: Dedup) -> pa.LargeListArray:
    """Return the MinHash bands of each text: list<uint64>[dedup.bands]; two texts with an equal hash are candidates.

    `texts` is a string column without nulls. The band's index goes into its hash, so different bands never match.
    """
    data, offsets = text_buffers(texts)
    count = dedup.bands * dedup.rows
    digests = [blake2b(f"minhash {position}".encode(), digest_size=8).digest() for position in range(count)]
    pairs = np.frombuffer(b"".join(digests), dtype="<u4").reshape(count, 2)
    salts, factors = np.ascontiguousarray(pairs[:, 0]), pairs[:, 1] | np.uint32(1)  # of the hash functions; odd factors
    bands = _band_hashes(data, offsets, dedup.shingle, salts, factors, dedup.rows)
    return hash_lists(bands.reshape(-1), np.arange(len(offsets), dtype=np.int64) * dedup.bands)


def shingle_sets(texts: Any, words_per_shingle: int) -> pa.LargeListArray:
    """Return the set of word shingles of each text: list<uint64>, sorted, distinct, never empty.

    A text with too few words is one shingle of all its words, so that short copies match too; a text without words is
    one shingle of its bytes.
    """
    data, offsets = text_buffers(texts)
    values, ends = _shingle_sets(data, offsets, words_per_shingle)
    return hash_lists(values, ends)


@njit(cache=True, nogil=True)
def _room(offsets: Offsets) -> np.int64:
    longest = np.int64(1)
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    return longest


@njit(cache=True, nogil=True)
def _shingles(data: Bytes, start: int, stop: int, width: int, starts: Offsets, stops: Offsets, hashes: Hashes) -> int:
    """Write the shingles of `data[start:stop]` to `hashes` in text order and return their number."""
    count = find_words(data, start, stop, starts, stops, hashes)
    if count == 0:
        state = _BASE
        for at in range(start, stop):
            state = (state ^ np.uint64(data[at])) * _PRIME
        hashes[0] = mix64(state)
        return 1
    width = min(width, count)
    top, rolling = np.uint64(1), np.uint64(0)
    for position in range(width):
        top, rolling = top * _BASE, rolling * _BASE + hashes[position]
    for first in range(count - width):
        leaving, entering = hashes[first], hashes[first + width]
        hashes[first] = mix64(rolling + np.uint64(width))
        rolling = rolling * _BASE + entering - leaving * top
    hashes[count - width] = mix64(rolling + np.uint64(width))
    return count - width + 1


@njit(cache=True, nogil=True)
def _smallest(values: Halves, count: int, salt: np.uint32, factor: np.uint32) -> np.uint32:
    """Return the minimum of (v xor salt) * factor over `values[:count]`. This loop must vectorize."""
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
        # Minima over 32 bits: a vector register holds twice as many. Unequal minima then collide once in 2^32 per
        # shingle, which rows per band and verification make irrelevant.
        for i in range(count):
            halves[i] = np.uint32(hashes[i] >> np.uint64(32))
        for band in range(bands):
            folded = np.uint64(band + 1)
            for position in range(band * rows, (band + 1) * rows):
                folded = mix64(folded ^ np.uint64(_smallest(halves, count, salts[position], factors[position]))) * _BASE
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
def jaccard_pairs(left: Sets, right: Sets, pairs: tuple[Offsets, Offsets]) -> NDArray[np.float64]:
    """Return the Jaccard index of set `pairs[0][i]` of `left` and set `pairs[1][i]` of `right`: float64[len(pairs[0])].

    Both sides are as `list_buffers` returns the column of `shingle_sets`.
    """
    left_hashes, left_ends = left
    right_hashes, right_ends = right
    lefts, rights = pairs
    result = np.empty(len(lefts), np.float64)
    for i in range(len(lefts)):
        a, a_end = left_ends[lefts[i]], left_ends[lefts[i] + 1]
        b, b_end = right_ends[rights[i]], right_ends[rights[i] + 1]
        total, shared = a_end - a + b_end - b, 0
        while a < a_end and b < b_end:
            x, y = left_hashes[a], right_hashes[b]
            shared += x == y
            a += x <= y
            b += y <= x
        result[i] = shared / (total - shared)
    return result


@njit(cache=True, nogil=True)
def keep_first(starts: Offsets, neighbors: Offsets) -> Offsets:
    """Return for each node the first kept one among itself and its neighbors; int64[n].

    Nodes are taken in order, and one is kept unless a neighbor is. The larger neighbors of node i are
    `neighbors[starts[i] : starts[i + 1]]`.
    """
    kept = np.full(len(starts) - 1, -1, np.int64)
    for node in range(len(kept)):
        if kept[node] < 0:
            kept[node] = node
            for other in neighbors[starts[node] : starts[node + 1]]:
                if kept[other] < 0:
                    kept[other] = node
    return kept


@njit(cache=True, nogil=True)
def mix_hashes(values: Hashes) -> Hashes:
    """Return shuffle keys: `values` with every bit mixed into all 64; uint64[len(values)]."""
    result = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        result[i] = mix64(values[i])
    return result
