"""The order of a leaf's documents in each epoch: the same on every machine and in every year, in bounded memory.

Documents are numbered as they lie on disk and taken in *chunks* of 256 neighbours; a permutation that is computed and
not stored deals the chunks of the whole leaf into *blocks* of 256 chunks, and the documents of a block are shuffled. So
to find a token one needs the tokens per chunk (8 bytes for 256 documents) and one block's order, not an order of the
leaf: a run over ten million documents resumes anywhere in 0.2 s, and reading a block touches 256 runs of neighbours (a
megabyte each at 1,000 tokens a document) rather than 65,536 places. What this gives up: neighbours on disk stay within
one block of each other; curated documents lie in the order of a hash of their text, so neighbours have nothing in
common. A leaf of up to 65,536 documents is one block: its order is a full shuffle.

numpy's own generators may change their streams between versions, and a resumed run must not.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from llama3.tokens.kernels import Ints, permute

GOLDEN = 0x9E3779B97F4A7C15
CHUNK = 256
"""Documents that are dealt into a block together."""
BLOCK = 256
"""Chunks in a block. Changing either number changes the order of every leaf that is longer than a block."""
ROUNDS = 6
"""Of the Feistel network; four are enough against any test that knows the values only (Luby and Rackoff 1988)."""


def splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's output function of each number (Steele, Lea, Flood 2014), modulo 2^64."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def shuffled(count: int, seed: int, leaf: str, epoch: int, block: int = 0) -> Ints:
    """Return a permutation of range(count) that depends on nothing but the arguments, held in memory.

    Numbers are sorted by SplitMix64, a bijection, so no two tie. Block 0 is keyed like a leaf that is a single block,
    because that is what leaves were before there were blocks.
    """
    text = f"{seed}/{leaf}/{epoch}" + (f"/{block}" if block else "")
    state = np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return np.argsort(splitmix64(state + steps)).astype(np.int64, copy=False)


def chunk_edges(documents: int) -> Ints:
    """Return the first document of each chunk, and `documents`: int64[chunks + 1]."""
    return np.append(np.arange(0, documents, CHUNK), documents)


class Permutation:
    """A pseudo-random permutation of range(count) in constant memory, decided by `count` and `key` alone."""

    def __init__(self, count: int, key: str) -> None:
        self.count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS, person=b"document order").digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, first: int, stop: int) -> Ints:
        """Return what the permutation maps first, ..., stop - 1 to: int64[stop - first]."""
        assert 0 <= first <= stop <= self.count
        mapped: Ints = permute(first, stop, self.count, self._half, self._keys)
        return mapped


class EpochOrder:
    """The blocks of one epoch of a leaf of so many `documents`."""

    def __init__(self, documents: int, seed: int, leaf: str, epoch: int) -> None:
        self.documents, self.chunks = documents, -(-documents // CHUNK)
        self.blocks = -(-self.chunks // BLOCK)
        self._key = seed, leaf, epoch
        self._deal = Permutation(self.chunks, f"{seed}/{leaf}/{epoch}")

    def chunks_of(self, block: int) -> Ints:
        """Return the chunks of `block`, ascending."""
        return np.sort(self._deal(block * BLOCK, min((block + 1) * BLOCK, self.chunks)))

    def rows_of(self, block: int) -> Ints:
        """Return the documents of `block` as they lie on disk, ascending."""
        rows = (self.chunks_of(block)[:, None] * CHUNK + np.arange(CHUNK)).ravel()
        return rows[: int(np.searchsorted(rows, self.documents))]

    def shuffle(self, block: int, count: int) -> Ints:
        """Return the order in which the `count` documents of `block` are read, as places in `rows_of`."""
        return shuffled(count, *self._key, block)
