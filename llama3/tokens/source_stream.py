"""The endless stream of one dataset: its documents in shuffled order, epoch after epoch, readable at any token.

Token j is in epoch j // tokens; binary search finds its block (see `Permutation`) and its document in the block. Memory
holds the orders of the last few blocks; tokens per group and shards are mapped on demand. A block is read in up to
256 separate runs, so bins should be in the page cache, on an SSD, or paged from an object store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.tokens.kernels import Ints, gather_tokens, permute
from herd.llama3.tokens.megatron import open_pair
from herd.llama3.tokens.shards import GROUP, GROUPS, ROW_GROUP, Counts, add_counts, group_tokens
from herd.storage.digests import PAGE
from herd.storage.page_cache import LazyFolder, ensure_local, lazy_folder_of

# The shuffled order of a dataset's documents in each epoch: deterministic, in bounded memory.
#
# Documents are numbered by their order on disk and divided into *groups* of 256 neighbors. A computed permutation
# assigns the groups to *blocks* of 256 groups, and the documents of a block are shuffled. So a run over ten million
# documents resumes anywhere in 0.2 s, and a block is read in 256 runs (1 MB each at 1,000 tokens per document).
# Neighbors on disk stay within a block, which is harmless: curated documents are sorted by a hash of their text.

# No numpy random generator: its streams may change between versions, and a resumed run must not.
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 256
"""Groups in a block. Changing GROUP or BLOCK changes the order of every dataset that is longer than a block."""
ROUNDS = 6
"""Rounds of the Feistel network; four are enough against tests that only see values (Luby and Rackoff 1988)."""


def splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's output function of each number (Steele, Lea, Flood 2014), modulo 2^64."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def shuffled_order(count: int, seed: int, dataset: str, epoch: int, block: int = 0) -> Ints:
    """Return a permutation of range(count), determined by the arguments.

    Numbers are sorted by SplitMix64, a bijection, so there are no ties. The key of block 0 omits the block, for
    compatibility with datasets without blocks.
    """
    text = f"{seed}/{dataset}/{epoch}" + (f"/{block}" if block else "")
    state = np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return np.argsort(splitmix64(state + steps)).astype(np.int64, copy=False)


class Permutation:
    """A pseudo-random permutation of range(count) in constant memory, determined by `count` and `key`."""

    def __init__(self, count: int, key: str) -> None:
        self.count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS, person=b"document order").digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, first: int, stop: int) -> Ints:
        """Return the images of first, ..., stop - 1: int64[stop - first]."""
        assert 0 <= first <= stop <= self.count
        mapped: Ints = permute(first, stop, self.count, self._half, self._keys)
        return mapped


class EpochOrder:
    """The blocks of one epoch of a dataset with `documents` documents."""

    def __init__(self, documents: int, seed: int, dataset: str, epoch: int) -> None:
        self.documents, self.groups = documents, -(-documents // GROUP)
        self.blocks = -(-self.groups // BLOCK)
        self._key = seed, dataset, epoch
        self._permutation = Permutation(self.groups, f"{seed}/{dataset}/{epoch}")

    def groups_of(self, block: int) -> Ints:
        """Return the groups of `block`, ascending."""
        return np.sort(self._permutation(block * BLOCK, min((block + 1) * BLOCK, self.groups)))

    def rows_of(self, block: int) -> Ints:
        """Return the indices on disk of the documents of `block`, ascending."""
        rows = (self.groups_of(block)[:, None] * GROUP + np.arange(GROUP)).ravel()
        return rows[: int(np.searchsorted(rows, self.documents))]

    def shuffle(self, block: int, count: int) -> Ints:
        """Return the order in which the `count` documents of `block` are read, as indices in `rows_of`."""
        return shuffled_order(count, *self._key, block)


PREFETCH_ROOM = 16
"""Blocks that must fit in the page cache before the next block is prefetched.

Datasets share the cache and pages are evicted first in, first out: a dataset with 1 % of the mix needs about 100 blocks
(50 GB), or its pages are fetched more than once per epoch.
"""
EPOCHS_KEPT = 2
"""A read may span two epochs."""
BLOCKS_KEPT = 4
"""Orders of blocks in memory, 2.6 MB each."""
SHARDS_KEPT = 1024
"""Shards mapped at a time; Linux maps 65,530 files in a process."""
GROUPS_KEPT = 4096
"""Columns of row groups of the tables in memory, 32 kB each."""


class CopyRanges(NamedTuple):
    """Runs of tokens to copy, int64[runs] each."""

    shard: Ints
    source: Ints
    """First token, counted in the shard."""
    length: Ints
    out_start: Ints
    """Index in the output of the first token."""


class PagedBins:
    """The bins of a dataset in a lazy folder, in shard order; pages are fetched before tokens are copied."""

    def __init__(self, lazy: LazyFolder, bins: Sequence[Path]) -> None:
        self.lazy = lazy
        names = [path.relative_to(lazy.folder).as_posix() for path in bins]
        self._first = np.array([lazy.first.get(name, -1) for name in names], np.int64)
        """First page of each bin; -1: a small bin, fetched whole when it is opened."""
        self.pages = sum(lazy.pages_of(name) for name in names)
        """Pages of all bins."""

    def pieces(self, runs: CopyRanges, itemsize: int) -> Iterator[CopyRanges]:
        """Yield `runs`, cut at page boundaries, a few pages at a time; the pages stay cached until the next iteration.

        Raises herd.storage.object_artifact.WrongBytes and OSError.
        """
        page_runs, pages = self._cut(runs, PAGE // itemsize)
        order = np.argsort(pages, kind="stable")
        pages = pages[order]
        distinct = np.unique(pages)
        for first in range(0, len(distinct), self.lazy.piece):
            batch = distinct[first : first + self.lazy.piece]
            chosen = order[slice(*np.searchsorted(pages, [batch[0], batch[-1] + 1]))]
            with self.lazy.held(batch[batch >= 0]):
                yield CopyRanges(*(column[chosen] for column in page_runs))

    def prefetch(self, runs: CopyRanges, itemsize: int) -> None:
        """Fetch the pages of `runs` if the cache has room for PREFETCH_ROOM times as many. Raises as `pieces`."""
        pages = np.unique(self._cut(runs, PAGE // itemsize)[1])
        pages = pages[pages >= 0]
        if len(pages) * PREFETCH_ROOM > self.lazy.limit:
            return
        for first in range(0, len(pages), self.lazy.piece):
            with self.lazy.held(pages[first : first + self.lazy.piece]):
                pass

    def _cut(self, runs: CopyRanges, tokens: int) -> tuple[CopyRanges, Ints]:
        """Return `runs` cut at the boundaries of pages of `tokens` tokens, and the page of each piece."""
        low, high = runs.source // tokens, (runs.source + runs.length - 1) // tokens
        counts = high - low + 1
        of = np.repeat(np.arange(len(counts)), counts)
        page = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + low[of]
        start = np.maximum(runs.source[of], page * tokens)
        stop = np.minimum((runs.source + runs.length)[of], (page + 1) * tokens)
        shard = runs.shard[of]
        pieces = CopyRanges(shard, start, stop - start, runs.out_start[of] + start - runs.source[of])
        return pieces, np.where(self._first[shard] < 0, -1, self._first[shard] + page)


@dataclass(frozen=True)
class Documents:
    """Documents of a dataset's stream in reading order, int64[documents] each."""

    row: Ints
    """Index of the document on disk, counted along the dataset's shards."""
    epoch: Ints
    start: Ints
    """First token, counted along the stream."""
    length: Ints
    """Tokens."""
    shard: Ints
    """Index of the document's shard in the dataset."""
    offset: Ints
    """First token, counted in the shard's bin."""
    begin: Ints
    """First token, counted in the document: 0, unless chunks are shuffled and this is a piece of a document."""

    def __getitem__(self, chosen: Any) -> Documents:
        return Documents(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def joined(cls, blocks: list[Documents]) -> Documents:
        """Concatenate documents."""
        return cls(*(np.concatenate([getattr(block, field.name) for block in blocks]) for field in fields(cls)))


def shuffle_chunks(documents: Documents, size: int, order: Ints) -> Documents:
    """Return consecutive `documents`, cut into chunks of `size` tokens, which `order` puts in another order.

    The last chunk may be shorter and stays at the end, so that the others begin at multiples of `size` tokens.
    """
    starts, total = documents.start - documents.start[0], int(documents.length.sum())
    edges = np.union1d(starts, np.arange(0, total, size))
    of = np.searchsorted(starts, edges, "right") - 1
    rank = np.append(np.argsort(order), len(order))
    moved = np.argsort(rank[edges // size], kind="stable")
    of, begin, length = of[moved], (edges - starts[of])[moved], np.diff(edges, append=total)[moved]
    pieces = documents[of]
    start = np.cumsum(length) - length + documents.start[0]
    return replace(pieces, start=start, length=length, offset=pieces.offset + begin, begin=begin)


class _Epoch(NamedTuple):
    order: EpochOrder
    starts: Ints
    """First token of each block, counted in the epoch, and the epoch's tokens: int64[blocks + 1]."""


class SourceStream:
    """The stream of the dataset `name`: `described` is its entry in the index, `folder` holds its shards.

    `chunk` is the size, in tokens, of the chunks that are shuffled after the documents of a block; None: not at all.
    """

    def __init__(self, name: str, folder: Path, described: dict[str, Any], seed: int, chunk: int | None = None) -> None:
        self.name, self.folder, self.seed, self.chunk = name, folder, seed, chunk
        self.by: dict[str, Counts] = described["by"]
        """Column -> value -> tokens and documents in one epoch."""
        shards = described["shards"]
        self._numbers: list[int] = shards["number"]
        self._rows = np.cumsum([0, *shards["documents"]])
        """First document of each shard, and the dataset's documents."""
        self.tokens, self.documents = sum(shards["tokens"]), int(self._rows[-1])
        """Tokens and documents of one epoch."""
        # Caches per stream; lru_cache is thread-safe, and a trainer reads from two threads.
        self._shard = lru_cache(SHARDS_KEPT)(lambda shard: open_pair(self._file("tokens", shard, "")))
        self._epoch = lru_cache(EPOCHS_KEPT)(self._make_epoch)
        self._block = lru_cache(BLOCKS_KEPT)(self._make_block)
        self._footer = lru_cache(SHARDS_KEPT)(pq.read_metadata)
        self._values = lru_cache(GROUPS_KEPT)(self._read_values)
        lazy, shard_numbers = lazy_folder_of(folder), range(len(self._numbers))
        self._bins = PagedBins(lazy, [self._file("tokens", shard, ".bin") for shard in shard_numbers]) if lazy else None
        self._ahead = (-1, -1)
        """Epoch and block that were prefetched last."""

    def blocks(self, first: int, stop: int) -> Iterator[Documents]:
        """Yield the documents that overlap tokens [first, stop) of the stream, in order, one block at a time."""
        for epoch in range(first // self.tokens, -(-stop // self.tokens)):
            begin = epoch * self.tokens
            starts = self._epoch(epoch).starts
            low = int(np.searchsorted(starts, max(first - begin, 0), "right")) - 1
            high = int(np.searchsorted(starts, min(stop - begin, self.tokens), "left"))
            for block in range(low, high):
                documents = self._block(epoch, block)
                begun = int(np.searchsorted(documents.start, first, "right")) - 1
                yield documents[max(begun, 0) : int(np.searchsorted(documents.start, stop, "left"))]

    def overlapping(self, first: int, stop: int) -> Documents:
        """Return the documents that overlap tokens [first, stop) of the stream; the range must not be empty."""
        return Documents.joined(list(self.blocks(first, stop)))

    def copy(self, documents: Documents, skipped: Ints, lengths: Ints, out_starts: Ints, out: Ints) -> None:
        """Copy `lengths` tokens of each document, starting at its token `skipped`, to `out` at `out_starts`."""
        runs = CopyRanges(documents.shard, documents.offset + skipped, lengths, out_starts)
        if self._bins is not None:
            self._prefetch_next_block(documents)
        # A batch reads documents from all over a block, so a lazy folder yields few pages at a time.
        for piece in [runs] if self._bins is None else self._bins.pieces(runs, self._itemsize):
            for shard, chosen in _group_indices(piece.shard):
                tokens = self._shard(shard).tokens
                gather_tokens(tokens, piece.source[chosen], piece.out_start[chosen], piece.length[chosen], out)

    def labels(self, column: str, documents: Documents) -> list[str]:
        """Return the values of the tables' `column` for `documents`."""
        read = self._read_values if column == "id" else self._values  # ids are not cached: 0.4 MB per row group
        values = np.empty(len(documents.row), object)
        for shard, group, rows, chosen in self._row_groups(documents):
            values[chosen] = read(column, shard, group).take(pa.array(rows)).to_pylist()
        return list(values)

    def tally(self, columns: Sequence[str], first: int, stop: int) -> dict[str, Counts]:
        """Return [tokens, documents] at tokens [first, stop) of the stream by column and value.

        A document counts once per epoch in which any of it is read. Whole epochs are counted from the index.
        """
        totals: dict[str, Counts] = {column: {} for column in columns}
        if first == stop:
            return totals
        whole = range(-(-first // self.tokens), stop // self.tokens)
        edges = [(first, whole[0] * self.tokens), (whole[-1] * self.tokens + self.tokens, stop)] if whole else []
        for low, high in edges or [(first, stop)]:
            for documents in self.blocks(low, high) if low < high else ():
                read = np.minimum(documents.start + documents.length, high) - np.maximum(documents.start, low)
                for shard, group, rows, chosen in self._row_groups(documents):
                    once = slice(None) if self.chunk is None else np.unique(rows, return_index=True)[1]
                    for column, sums in totals.items():
                        values = self._values(column, shard, group)
                        codes = values.indices.to_numpy()[rows]
                        tokens = np.bincount(codes, read[chosen]).astype(np.int64)  # fp64 counts exactly to 2^53
                        for code, number in enumerate(np.bincount(codes[once]).tolist()):
                            if number:
                                add_counts(sums, values.dictionary[code].as_py(), [int(tokens[code]), number])
        for column in columns if whole else ():
            for value, counts in self.by[column].items():
                add_counts(totals[column], value, [count * len(whole) for count in counts])
        return totals

    @property
    def block_bytes(self) -> int:
        """Bytes of the pages of one block (256 runs of neighboring documents) in a lazy folder; 0 elsewhere."""
        if self._bins is None or not self.documents:
            return 0
        tokens = self.tokens * min(1.0, GROUP * BLOCK / self.documents)
        return min(self._bins.pages, int(tokens * self._itemsize) // PAGE + BLOCK) * PAGE

    def _prefetch_next_block(self, documents: Documents) -> None:
        """Fetch the tables of `documents`, and in a background thread the block that follows them."""
        assert self._bins is not None
        self._fetch_tables(documents)
        epoch = int(documents.epoch[-1])
        starts = self._epoch(epoch).starts
        after = int(np.searchsorted(starts, documents.start[-1] - epoch * self.tokens, "right"))
        ahead = (epoch, after) if after < len(starts) - 1 else (epoch + 1, 0)
        if ahead != self._ahead:
            self._ahead = ahead
            self._bins.lazy.later(lambda: self._prefetch_block(*ahead))

    def _prefetch_block(self, epoch: int, block: int) -> None:
        documents = self._block(epoch, block)
        assert self._bins is not None
        self._fetch_tables(documents)
        runs = CopyRanges(documents.shard, documents.offset, documents.length, documents.start)
        self._bins.prefetch(runs, self._itemsize)

    def _fetch_tables(self, documents: Documents) -> None:
        """Fetch the tables from which the sources of `documents` are counted; a single source needs none."""
        if self._bins is not None and len(self.by["source"]) > 1:
            shards = np.unique(documents.shard).tolist()
            self._bins.lazy.fetch(self._file("documents", shard, ".parquet") for shard in shards)

    def _row_groups(self, documents: Documents) -> Iterator[tuple[int, int, Ints, Ints]]:
        """Yield shard, row group, rows in the group, and indices in `documents` of the documents of each group."""
        local = documents.row - self._rows[documents.shard]
        for key, chosen in _group_indices(documents.shard << 32 | local // ROW_GROUP):
            yield key >> 32, key & 0xFFFFFFFF, local[chosen] % ROW_GROUP, chosen

    def _make_epoch(self, epoch: int) -> _Epoch:
        order = EpochOrder(self.documents, self.seed, self.name, epoch)
        tokens = [int(self._group_tokens[order.groups_of(block)].sum()) for block in range(order.blocks)]
        return _Epoch(order, np.cumsum([0, *tokens]))

    def _make_block(self, epoch: int, block: int) -> Documents:
        order, starts = self._epoch(epoch)
        rows = order.rows_of(block)
        edges = np.searchsorted(rows, self._rows).tolist()
        shard, offset, length = (np.empty(len(rows), np.int64) for _ in range(3))
        for number, (low, high) in enumerate(pairwise(edges)):
            if low < high:
                pair, local = self._shard(number), rows[low:high] - self._rows[number]
                shard[low:high], offset[low:high], length[low:high] = number, pair.offsets(local), pair.lengths[local]
        read = order.shuffle(block, len(rows))
        length = length[read]
        start = np.cumsum(length) - length + int(starts[block]) + epoch * self.tokens
        begin = np.zeros(len(rows), np.int64)
        documents = Documents(rows[read], np.full(len(rows), epoch), start, length, shard[read], offset[read], begin)
        if self.chunk is None:
            return documents
        chunks = int(length.sum()) // self.chunk
        moved = shuffled_order(chunks, self.seed, f"{self.name}/chunks", epoch, block)
        return shuffle_chunks(documents, self.chunk, moved)

    @cached_property
    def _group_tokens(self) -> Ints:
        """Tokens of each group of documents, mapped: at 15T tokens 470 MB, which the processes of a machine share."""
        try:
            return np.load(ensure_local(self.folder / GROUPS), mmap_mode="r").view(np.ndarray)  # type: ignore[no-any-return]
        except FileNotFoundError:  # of shards that an earlier version wrote
            indexes = [self._file("tokens", shard, ".idx") for shard in range(len(self._numbers))]
            if self._bins is not None:
                self._bins.lazy.fetch(indexes)
            return group_tokens([str(ensure_local(path)) for path in indexes], self._rows)

    @cached_property
    def _itemsize(self) -> int:
        """Bytes of a token."""
        return int(self._shard(0).tokens.itemsize)

    def _file(self, kind: str, shard: int, suffix: str) -> Path:
        return self.folder / f"{kind}-{self._numbers[shard]:05}{suffix}"

    def _read_values(self, column: str, shard: int, group: int) -> Any:
        """Return a column of a row group of a shard's table, dictionary-encoded unless it is `id`."""
        file = ensure_local(self._file("documents", shard, ".parquet"))
        repeated = [] if column == "id" else [column]
        with pq.ParquetFile(file, metadata=self._footer(file), read_dictionary=repeated) as table:
            return table.read_row_group(group, [column])[column].unify_dictionaries().combine_chunks()


def _group_indices(keys: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each distinct key with the indices at which it occurs."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order], prepend=-1)).tolist()
    for low, high in pairwise([*edges, len(order)]):
        yield int(keys[order[low]]), order[low:high]
