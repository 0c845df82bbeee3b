"""The shuffled order of a leaf's documents in each epoch: deterministic, in bounded memory.

Documents are numbered by their order on disk and divided into *chunks* of 256 neighbors. A computed permutation assigns
the chunks to *blocks* of 256 chunks, and the documents of a block are shuffled. So a run over ten million documents
resumes anywhere in 0.2 s, and a block is read in 256 runs (1 MB each at 1,000 tokens per document). Neighbors on disk
stay within a block, which is harmless: curated documents are sorted by a hash of their text.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from llama3.tokens.kernels import Ints, permute

# No numpy random generator: its streams may change between versions, and a resumed run must not.
GOLDEN = 0x9E3779B97F4A7C15
CHUNK = 256
"""Neighboring documents that are assigned to a block together."""
BLOCK = 256
"""Chunks in a block. Changing CHUNK or BLOCK changes the order of every leaf that is longer than a block."""
ROUNDS = 6
"""Rounds of the Feistel network; four are enough against tests that only see values (Luby and Rackoff 1988)."""


def splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's output function of each number (Steele, Lea, Flood 2014), modulo 2^64."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def shuffled(count: int, seed: int, leaf: str, epoch: int, block: int = 0) -> Ints:
    """Return a permutation of range(count), determined by the arguments.

    Numbers are sorted by SplitMix64, a bijection, so there are no ties. The key of block 0 leaves the block out, for
    compatibility with leaves without blocks.
    """
    text = f"{seed}/{leaf}/{epoch}" + (f"/{block}" if block else "")
    state = np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return np.argsort(splitmix64(state + steps)).astype(np.int64, copy=False)


def chunk_edges(documents: int) -> Ints:
    """Return the first document of each chunk, and `documents`: int64[chunks + 1]."""
    return np.append(np.arange(0, documents, CHUNK), documents)


class Permutation:
    """A pseudo-random permutation of range(count) in constant memory, determined by `count` and `key`."""

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
    """The blocks of one epoch of a leaf with `documents` documents."""

    def __init__(self, documents: int, seed: int, leaf: str, epoch: int) -> None:
        self.documents, self.chunks = documents, -(-documents // CHUNK)
        self.blocks = -(-self.chunks // BLOCK)
        self._key = seed, leaf, epoch
        self._deal = Permutation(self.chunks, f"{seed}/{leaf}/{epoch}")

    def chunks_of(self, block: int) -> Ints:
        """Return the chunks of `block`, ascending."""
        return np.sort(self._deal(block * BLOCK, min((block + 1) * BLOCK, self.chunks)))

    def rows_of(self, block: int) -> Ints:
        """Return the indices on disk of the documents of `block`, ascending."""
        rows = (self.chunks_of(block)[:, None] * CHUNK + np.arange(CHUNK)).ravel()
        return rows[: int(np.searchsorted(rows, self.documents))]

    def shuffle(self, block: int, count: int) -> Ints:
        """Return the order in which the `count` documents of `block` are read, as indices in `rows_of`."""
        return shuffled(count, *self._key, block)
