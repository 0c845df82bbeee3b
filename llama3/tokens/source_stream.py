"""The endless stream of one leaf: its documents in shuffled order, epoch after epoch, readable at any token.

Token j lies in epoch j // tokens; a binary search over the epoch's blocks finds the block, another over the documents
of the block the document (see `order.py`), and the shard's index finds its place in the bin. In memory are the tokens
per chunk and the orders of the last few blocks; shards are mapped when they are needed. What this gives up: the bins
are read in as many runs as a block has chunks, so they belong in the page cache, on a disk without a head, or in an
object store from which they come in pages (`paged.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.tokens.kernels import Ints, gather
from llama3.tokens.megatron import IndexedDataset, open_pair
from llama3.tokens.shards import ROW_GROUP, Counts, add_counts
from llama3.tokens.shuffle import BLOCK, CHUNK, EpochOrder, chunk_edges
from storage.digests import PAGE
from storage.page_cache import LazyFolder, brought, lazy_of

# Reading a leaf whose bins are in an object store: pages are brought before their tokens are copied
# (`storage.page_cache`).
#
# A batch takes documents from all over a block, so its first batch asks for most of the block's pages, some 256 MB,
# and the next ones for none. Copies therefore go page by page and hold few pages at a time, and while a block is
# read the pages of the next are brought by a thread, if the cache has room for sixteen of them (leaves take turns,
# and pages are dropped in the order in which they came). What this gives up: a leaf with a share of a hundredth
# keeps its block for a hundred blocks of others, so with less room than that (50 GB) its pages are brought more
# than once an epoch.

ROOM = 16
"""Blocks that must fit in the cache for the next one to be brought ahead."""


class CopyRanges(NamedTuple):
    """Runs of tokens to be copied, int64[runs] each."""

    shard: Ints
    source: Ints
    """First token, counted in the shard."""
    length: Ints
    place: Ints
    """Where the first token goes."""


class PagedBins:
    """The bins of a leaf in a lazy folder, in the order of its shards."""

    def __init__(self, lazy: LazyFolder, bins: Sequence[Path]) -> None:
        self.lazy = lazy
        names = [path.relative_to(lazy.folder).as_posix() for path in bins]
        self._first = np.array([lazy.first.get(name, -1) for name in names], np.int64)
        """First page of each bin; -1: it is small, and here whole once it has been opened."""
        self.pages = sum(lazy.pages_of(name) for name in names)
        """Of all bins."""

    def pieces(self, runs: CopyRanges, itemsize: int) -> Iterator[CopyRanges]:
        """Yield `runs`, cut at the edges of pages, a few pages at a time; these are there until the next is asked for.

        Raises storage.object_artifact.WrongBytes and OSError.
        """
        parts, pages = self._cut(runs, PAGE // itemsize)
        order = np.argsort(pages, kind="stable")
        pages = pages[order]
        distinct = np.unique(pages)
        for first in range(0, len(distinct), self.lazy.piece):
            held = distinct[first : first + self.lazy.piece]
            here = order[slice(*np.searchsorted(pages, [held[0], held[-1] + 1]))]
            with self.lazy.held(held[held >= 0]):
                yield CopyRanges(*(column[here] for column in parts))

    def bring(self, runs: CopyRanges, itemsize: int) -> None:
        """Bring the pages of `runs`, if the cache has room for many times as many. Raises as `pieces`."""
        pages = np.unique(self._cut(runs, PAGE // itemsize)[1])
        pages = pages[pages >= 0]
        if len(pages) * ROOM > self.lazy.limit:
            return
        for first in range(0, len(pages), self.lazy.piece):
            with self.lazy.held(pages[first : first + self.lazy.piece]):
                pass

    def _cut(self, runs: CopyRanges, tokens: int) -> tuple[CopyRanges, Ints]:
        """Return `runs` cut where a page of so many `tokens` ends, and the page of each part."""
        low, high = runs.source // tokens, (runs.source + runs.length - 1) // tokens
        counts = high - low + 1
        of = np.repeat(np.arange(len(counts)), counts)
        page = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + low[of]
        start = np.maximum(runs.source[of], page * tokens)
        stop = np.minimum((runs.source + runs.length)[of], (page + 1) * tokens)
        shard = runs.shard[of]
        parts = CopyRanges(shard, start, stop - start, runs.place[of] + start - runs.source[of])
        return parts, np.where(self._first[shard] < 0, -1, self._first[shard] + page)


EPOCHS_KEPT = 2
"""A read may straddle two epochs."""
BLOCKS_KEPT = 4
"""Orders of blocks in memory, 2.6 MB each."""
SHARDS_KEPT = 1024
"""Shards mapped at a time; Linux maps 65,530 files in a process."""


GROUPS_KEPT = 4096
"""Columns of row groups of the tables in memory, 32 kB each."""


@dataclass(frozen=True)
class Documents:
    """Documents of a leaf's stream in the order of reading, int64[documents] each."""

    row: Ints
    """Number of the document on disk, counted along the leaf's shards."""
    epoch: Ints
    start: Ints
    """First token, counted along the stream."""
    length: Ints
    """Tokens."""
    shard: Ints
    """Place of the document's shard in the leaf."""
    offset: Ints
    """First token, counted in the shard's bin."""

    def __getitem__(self, chosen: Any) -> Documents:
        return Documents(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def joined(cls, parts: list[Documents]) -> Documents:
        """Return documents one after another."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


class _Epoch(NamedTuple):
    order: EpochOrder
    starts: Ints
    """First token of each block, counted in the epoch, and the epoch's tokens: int64[blocks + 1]."""


class LeafStream:
    """The stream of the leaf `name` over its entry `described` in the index; its shards are in `folder`."""

    def __init__(self, name: str, folder: Path, described: dict[str, Any], seed: int) -> None:
        self.name, self.folder, self.seed = name, folder, seed
        self.by: dict[str, Counts] = described["by"]
        """Column -> value -> tokens and documents in one epoch."""
        shards = described["shards"]
        self._numbers: list[int] = shards["number"]
        self._rows = np.cumsum([0, *shards["documents"]])
        """First document of each shard, and the leaf's documents."""
        self._tokens = np.cumsum([0, *shards["tokens"]])
        self.tokens, self.documents = int(self._tokens[-1]), int(self._rows[-1])
        """In one epoch."""
        self._shard = lru_cache(SHARDS_KEPT)(self._open_shard)  # a trainer asks from two threads, these caches allow it
        self._epoch = lru_cache(EPOCHS_KEPT)(self._make_epoch)
        self._block = lru_cache(BLOCKS_KEPT)(self._make_block)
        self._footer = lru_cache(SHARDS_KEPT)(self._read_footer)
        self._values = lru_cache(GROUPS_KEPT)(self._read_values)
        lazy, places = lazy_of(folder), range(len(self._numbers))
        self._bins = PagedBins(lazy, [self._file("tokens", place, ".bin") for place in places]) if lazy else None
        self._ahead = (-1, -1)
        """Epoch and block that are brought ahead of their reading."""

    def blocks(self, first: int, stop: int) -> Iterator[Documents]:
        """Yield, block by block, the documents that overlap tokens [first, stop) of the stream, in its order."""
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
        """Return the documents that overlap tokens [first, stop) of the stream; there must be one."""
        return Documents.joined(list(self.blocks(first, stop)))

    def copy(self, documents: Documents, skipped: Ints, lengths: Ints, places: Ints, out: Ints) -> None:
        """Copy `lengths` tokens of each document, from its token `skipped` on, to `out` at `places`."""
        runs = CopyRanges(documents.shard, documents.offset + skipped, lengths, places)
        if self._bins is None:
            self._gather(runs, out)
            return
        self._bring_ahead(documents)
        for piece in self._bins.pieces(runs, self._itemsize):
            self._gather(piece, out)

    def labels(self, column: str, documents: Documents) -> list[str]:
        """Return the values that `column` of the tables has for `documents`."""
        read = self._read_values if column == "id" else self._values  # ids are 0.4 MB a group
        found = np.empty(len(documents.row), object)
        for shard, group, rows, here in self._row_groups(documents):
            found[here] = read(column, shard, group).take(pa.array(rows)).to_pylist()
        return list(found)

    def tally(self, columns: Sequence[str], first: int, stop: int) -> dict[str, Counts]:
        """Return, by column and value, [tokens, documents] of what lies at tokens [first, stop) of the stream.

        A document counts once per epoch in which some of it is read. Whole epochs come out of the index.
        """
        totals: dict[str, Counts] = {column: {} for column in columns}
        if first == stop:
            return totals
        whole = range(-(-first // self.tokens), stop // self.tokens)
        edges = [(first, whole[0] * self.tokens), (whole[-1] * self.tokens + self.tokens, stop)] if whole else []
        for low, high in edges or [(first, stop)]:
            for documents in self.blocks(low, high) if low < high else ():
                self._count(documents, low, high, totals)
        for column in columns if whole else ():
            for value, counts in self.by[column].items():
                add_counts(totals[column], value, [count * len(whole) for count in counts])
        return totals

    @property
    def block_bytes(self) -> int:
        """Bytes of the pages of one block, if they are brought from a store: 256 runs of neighbours of any length."""
        if self._bins is None or not self.documents:
            return 0
        tokens = self.tokens * min(1.0, CHUNK * BLOCK / self.documents)
        return min(self._bins.pages, int(tokens * self._itemsize) // PAGE + BLOCK) * PAGE

    def _gather(self, runs: CopyRanges, out: Ints) -> None:
        for shard, here in _grouped(runs.shard):
            gather(self._shard(shard).tokens, runs.source[here], runs.place[here], runs.length[here], out)

    def _bring_ahead(self, documents: Documents) -> None:
        """See to it that the tables of `documents` are here, and the block after theirs once it is read."""
        assert self._bins is not None
        self._bring_tables(documents)
        epoch = int(documents.epoch[-1])
        starts = self._epoch(epoch).starts
        after = int(np.searchsorted(starts, documents.start[-1] - epoch * self.tokens, "right"))
        ahead = (epoch, after) if after < len(starts) - 1 else (epoch + 1, 0)
        if ahead != self._ahead:
            self._ahead = ahead
            self._bins.lazy.later(lambda: self._bring_block(*ahead))

    def _bring_block(self, epoch: int, block: int) -> None:
        documents = self._block(epoch, block)
        assert self._bins is not None
        self._bring_tables(documents)
        runs = CopyRanges(documents.shard, documents.offset, documents.length, documents.start)
        self._bins.bring(runs, self._itemsize)

    def _bring_tables(self, documents: Documents) -> None:
        """Bring what counting the sources of `documents` will read; one source is counted without."""
        if self._bins is not None and len(self.by["source"]) > 1:
            places = np.unique(documents.shard).tolist()
            self._bins.lazy.fetch(self._file("documents", place, ".parquet") for place in places)

    def _count(self, documents: Documents, first: int, stop: int, totals: dict[str, Counts]) -> None:
        read = np.minimum(documents.start + documents.length, stop) - np.maximum(documents.start, first)
        for shard, group, rows, here in self._row_groups(documents):
            for column, sums in totals.items():
                values = self._values(column, shard, group)
                codes = values.indices.to_numpy()[rows]
                tokens = np.bincount(codes, read[here]).astype(np.int64)  # fp64 counts exactly to 2^53
                for code, number in enumerate(np.bincount(codes).tolist()):
                    if number:
                        add_counts(sums, values.dictionary[code].as_py(), [int(tokens[code]), number])

    def _row_groups(self, documents: Documents) -> Iterator[tuple[int, int, Ints, Ints]]:
        """Yield shard, row group, rows in the group, and places in `documents` of the documents of each group."""
        local = documents.row - self._rows[documents.shard]
        for key, here in _grouped(documents.shard << 32 | local // ROW_GROUP):
            yield key >> 32, key & 0xFFFFFFFF, local[here] % ROW_GROUP, here

    def _make_epoch(self, epoch: int) -> _Epoch:
        order = EpochOrder(self.documents, self.seed, self.name, epoch)
        tokens = [int(self._chunk_tokens[order.chunks_of(block)].sum()) for block in range(order.blocks)]
        return _Epoch(order, np.cumsum([0, *tokens]))

    def _make_block(self, epoch: int, block: int) -> Documents:
        order, starts = self._epoch(epoch)
        rows = order.rows_of(block)
        edges = np.searchsorted(rows, self._rows).tolist()
        shard, offset, length = (np.empty(len(rows), np.int64) for _ in range(3))
        for place, (low, high) in enumerate(pairwise(edges)):
            if low < high:
                pair, local = self._shard(place), rows[low:high] - self._rows[place]
                shard[low:high], offset[low:high], length[low:high] = place, pair.offsets(local), pair.lengths[local]
        read = order.shuffle(block, len(rows))
        length = length[read]
        start = np.cumsum(length) - length + int(starts[block]) + epoch * self.tokens
        return Documents(rows[read], np.full(len(rows), epoch), start, length, shard[read], offset[read])

    @cached_property
    def _chunk_tokens(self) -> Ints:
        """Tokens of each chunk of documents, the shards' pointers read at the chunks' edges only."""
        edges = chunk_edges(self.documents)
        if self._bins is not None:
            self._bins.lazy.fetch(self._file("tokens", place, ".idx") for place in range(len(self._numbers)))
        before = np.full(len(edges), self.tokens)
        bounds = np.searchsorted(edges, self._rows).tolist()
        for place, (low, high) in enumerate(pairwise(bounds)):
            if low < high:
                local = edges[low:high] - self._rows[place]
                before[low:high] = self._shard(place).offsets(local) + self._tokens[place]
        return np.diff(before)

    @cached_property
    def _itemsize(self) -> int:
        """Bytes of a token."""
        return int(self._shard(0).tokens.itemsize)

    def _file(self, kind: str, place: int, suffix: str) -> Path:
        return self.folder / f"{kind}-{self._numbers[place]:05}{suffix}"

    def _open_shard(self, place: int) -> IndexedDataset:
        return open_pair(self._file("tokens", place, ""))

    def _read_footer(self, place: int) -> Any:
        return pq.read_metadata(brought(self._file("documents", place, ".parquet")))

    def _read_values(self, column: str, place: int, group: int) -> Any:
        """Return a column of a row group of a shard's table, as a dictionary but for the ids."""
        file = brought(self._file("documents", place, ".parquet"))
        repeated = [] if column == "id" else [column]
        with pq.ParquetFile(file, metadata=self._footer(place), read_dictionary=repeated) as table:
            return table.read_row_group(group, [column])[column].unify_dictionaries().combine_chunks()


def _grouped(keys: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each key with the places at which it stands."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order], prepend=-1)).tolist()
    for low, high in pairwise([*edges, len(order)]):
        yield int(keys[order[low]]), order[low:high]
