"""The endless stream of one leaf: its documents in shuffled order, epoch after epoch, readable at any token.

Token j lies in epoch j // tokens; inside an epoch, a binary search over the documents' ends finds the document, and
its offset finds the bin. Only the epochs being read are in memory. What this gives up: reads touch as many places of
the bins as there are documents, so the bins belong in the page cache or on a fast disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from llama3.tokens.deal import Ints
from llama3.tokens.order import shuffled

EPOCHS_KEPT = 2
"""A read may straddle two epochs; orders of older ones are dropped."""


def ramps(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, ... for each start, `lengths` of them, one after another: int64[sum(lengths)]."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


@dataclass(frozen=True)
class Documents:
    """Consecutive documents of a leaf's stream, int64[documents] each."""

    row: Ints
    """Row in the leaf's documents.parquet."""
    epoch: Ints
    start: Ints
    """First token, counted along the leaf."""


class LeafStream:
    """The stream of the leaf `name`, whose shards are in `folder` with `shards` tokens in each bin."""

    def __init__(self, name: str, folder: Path, shards: list[int], dtype: np.dtype[Any], seed: int) -> None:
        self.name, self.folder, self.seed = name, folder, seed
        self.tokens = sum(shards)
        """Tokens in one epoch."""
        self._dtype = dtype
        self._bounds = np.cumsum([0, *shards])
        self._bins: dict[int, npt.NDArray[Any]] = {}
        self._orders: dict[int, tuple[Ints, Ints]] = {}

    def documents(self, first: int, stop: int) -> Documents:
        """Return the documents that overlap tokens [first, stop) of the stream."""
        parts = []
        for epoch in range(first // self.tokens, (stop - 1) // self.tokens + 1):
            begin = epoch * self.tokens
            order, starts = self._order(epoch)
            low = int(np.searchsorted(starts, max(first - begin, 0), "right")) - 1
            high = int(np.searchsorted(starts, min(stop - begin, self.tokens), "left"))
            parts.append((order[low:high], np.full(high - low, epoch), starts[low:high] + begin))
        row, of_epoch, start = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return Documents(row, of_epoch, start)

    def read(self, first: int, stop: int, documents: Documents) -> npt.NDArray[Any]:
        """Return tokens [first, stop) of the stream, given the `documents` that overlap them."""
        offsets, lengths = self._table
        low = np.maximum(documents.start, first)
        high = np.minimum(documents.start + lengths[documents.row], stop)
        return self._gather(offsets[documents.row] + low - documents.start, high - low)

    def ids(self, rows: Ints) -> list[str]:
        """Return the ids of the documents in `rows`."""
        return [str(identifier) for identifier in self._ids.take(rows).to_pylist()]

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the rows of `epoch` in order, and where each document starts in the epoch."""
        if epoch not in self._orders:
            lengths = self._table[1]
            order = shuffled(len(lengths), self.seed, self.name, epoch)
            starts = np.cumsum(lengths[order]) - lengths[order]
            while len(self._orders) >= EPOCHS_KEPT:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order, starts
        return self._orders[epoch]

    def _gather(self, offsets: Ints, lengths: Ints) -> npt.NDArray[Any]:
        """Return the tokens of the slices [offset, offset + length) of the leaf's bins, one after another."""
        bins = np.searchsorted(self._bounds, offsets, "right") - 1
        used = np.unique(bins)
        if len(used) == 1:
            return self._bin(int(used[0]))[ramps(offsets - self._bounds[used[0]], lengths)]
        tokens = np.empty(int(lengths.sum()), self._dtype)
        places = np.cumsum(lengths) - lengths
        for number in used:
            here = bins == number
            index = ramps(offsets[here] - self._bounds[number], lengths[here])
            tokens[ramps(places[here], lengths[here])] = self._bin(int(number))[index]
        return tokens

    def _bin(self, number: int) -> npt.NDArray[Any]:
        if number not in self._bins:
            file = self.folder / f"tokens-{number:05}.bin"
            self._bins[number] = np.memmap(file, self._dtype, "r").view(np.ndarray)
        return self._bins[number]

    @cached_property
    def _table(self) -> tuple[Ints, Ints]:
        """Offset and length of each document."""
        table = pq.read_table(self.folder / "documents.parquet", columns=["offset", "length"])
        return table["offset"].to_numpy(), table["length"].to_numpy()

    @cached_property
    def _ids(self) -> Any:
        return pq.read_table(self.folder / "documents.parquet", columns=["id"])["id"]
