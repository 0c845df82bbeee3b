"""Reading a leaf whose bins are in an object store: pages are brought before their tokens are copied (`storage.lazy`).

A batch takes documents from all over a block, so its first batch asks for most of the block's pages, some 256 MB, and
the next ones for none. Copies therefore go page by page and hold few pages at a time, and while a block is read the
pages of the next are brought by a thread, if the cache has room for sixteen of them (leaves take turns, and pages are
dropped in the order in which they came). What this gives up: a leaf with a share of a hundredth keeps its block for a
hundred blocks of others, so with less room than that (50 GB) its pages are brought more than once an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llama3.tokens.kernels import Ints
from storage.digests import PAGE
from storage.lazy import LazyFolder

ROOM = 16
"""Blocks that must fit in the cache for the next one to be brought ahead."""


class Runs(NamedTuple):
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

    def pieces(self, runs: Runs, itemsize: int) -> Iterator[Runs]:
        """Yield `runs`, cut at the edges of pages, a few pages at a time; these are there until the next is asked for.

        Raises storage.verified.WrongBytes and OSError.
        """
        parts, pages = self._cut(runs, PAGE // itemsize)
        order = np.argsort(pages, kind="stable")
        pages = pages[order]
        distinct = np.unique(pages)
        for first in range(0, len(distinct), self.lazy.piece):
            held = distinct[first : first + self.lazy.piece]
            here = order[slice(*np.searchsorted(pages, [held[0], held[-1] + 1]))]
            with self.lazy.held(held[held >= 0]):
                yield Runs(*(column[here] for column in parts))

    def bring(self, runs: Runs, itemsize: int) -> None:
        """Bring the pages of `runs`, if the cache has room for many times as many. Raises as `pieces`."""
        pages = np.unique(self._cut(runs, PAGE // itemsize)[1])
        pages = pages[pages >= 0]
        if len(pages) * ROOM > self.lazy.limit:
            return
        for first in range(0, len(pages), self.lazy.piece):
            with self.lazy.held(pages[first : first + self.lazy.piece]):
                pass

    def _cut(self, runs: Runs, tokens: int) -> tuple[Runs, Ints]:
        """Return `runs` cut where a page of so many `tokens` ends, and the page of each part."""
        low, high = runs.source // tokens, (runs.source + runs.length - 1) // tokens
        counts = high - low + 1
        of = np.repeat(np.arange(len(counts)), counts)
        page = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + low[of]
        start = np.maximum(runs.source[of], page * tokens)
        stop = np.minimum((runs.source + runs.length)[of], (page + 1) * tokens)
        shard = runs.shard[of]
        parts = Runs(shard, start, stop - start, runs.place[of] + start - runs.source[of])
        return parts, np.where(self._first[shard] < 0, -1, self._first[shard] + page)
