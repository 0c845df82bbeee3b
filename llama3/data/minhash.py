"""Word 5-shingles of documents and their MinHash signatures, cut into bands (Broder 1997; Leskovec et al., ch. 3).

Documents whose shingle sets overlap by Jaccard J share a given band with probability J^rows. Everything is NumPy on
64-bit hashes of our own: the hash of the words must not change with a library's version. A compiled kernel would be
about ten times as fast; this one does some 15 MB of text a second on one core, and needs nothing but NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from llama3.data.words import words

Hashes = NDArray[np.uint64]
SHINGLE = 5
"""Words per shingle."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_CHUNK = 1 << 16
"""Shingles hashed at once: the arrays stay in the processor's cache."""


class WordHashes(dict[str, int]):
    """64-bit BLAKE2b hashes of words, each computed once while the table stays below a million words."""

    def __missing__(self, word: str) -> int:
        if len(self) > 1_000_000:
            self.clear()
        value = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = value
        return value


def shingles(text: str, known: WordHashes) -> Hashes:
    """Return the sorted different hashes of the word 5-shingles of `text`; never empty.

    A text of fewer words is one shingle made of all its words, so that short copies are found too; a text without
    words is one shingle made of its characters.
    """
    found = words(text) or [text]
    hashes = np.fromiter(map(known.__getitem__, found), dtype=np.uint64, count=len(found))
    width = min(SHINGLE, len(found))
    count = len(found) - width + 1
    joined = np.full(count, width, dtype=np.uint64)
    for place in range(width):
        joined = (joined + hashes[place : place + count]) * _ODD
        joined ^= joined >> np.uint64(29)
    return np.unique(joined * _MIX)


def band_hashes(sets: Sequence[Hashes], bands: int, rows: int) -> Hashes:
    """Return the band hashes (len(sets), bands) of shingle sets; equal numbers in a column are candidates.

    Every hash function is h(x) = (x xor s) * m, m odd, over 2^64; its minimum is taken per document.
    """
    signatures = np.empty((len(sets), bands * rows), dtype=np.uint64)
    start = 0
    while start < len(sets):
        end, size = start, 0
        while end < len(sets) and (size == 0 or size + len(sets[end]) <= _CHUNK):
            size, end = size + len(sets[end]), end + 1
        signatures[start:end] = _signatures(sets[start:end], bands * rows)
        start = end
    return _folded(signatures.reshape(len(sets), bands, rows))


def _signatures(sets: Sequence[Hashes], count: int) -> Hashes:
    """Return the (len(sets), count) minima of `count` hash functions over each set."""
    flat = np.concatenate(sets)
    starts = np.concatenate(([0], np.cumsum([len(one) for one in sets])[:-1]))
    result = np.empty((len(sets), count), dtype=np.uint64)
    for place, (salt, factor) in enumerate(_functions(count)):
        result[:, place] = np.minimum.reduceat((flat ^ salt) * factor, starts)
    return result


def _functions(count: int) -> list[tuple[np.uint64, np.uint64]]:
    digests = [blake2b(f"minhash {place}".encode(), digest_size=16).digest() for place in range(count)]
    pairs = np.frombuffer(b"".join(digests), dtype="<u8").reshape(count, 2)
    return [(np.uint64(salt), np.uint64(factor) | np.uint64(1)) for salt, factor in pairs]


def _folded(signatures: Hashes) -> Hashes:
    """Return one hash per band; the band's number goes in, so that equal rows in two bands do not meet."""
    documents, bands, rows = signatures.shape
    folded = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (documents, bands)).copy()
    for row in range(rows):
        folded = (folded ^ signatures[:, :, row]) * _ODD
        folded ^= folded >> np.uint64(31)
    return folded
