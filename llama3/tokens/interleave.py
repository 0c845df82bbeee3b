"""Assign positions to the datasets of the mix so that every prefix of a phase has the shares of the recipe.

Positions are divided into *units* of equal length. Unit k is computed, not stored, so 15T tokens need no more memory
than 15K. A batch is off its shares by up to about one unit per dataset, but small shares never round to zero (rounding
per batch drops every source below one sequence per batch), and the totals of a phase are exact to the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from herd.llama3.tokens.kernels import Ints, interleave_into
from herd.llama3.tokens.mix import apportion

SHORTEST_BLOCK, LONGEST_BLOCK = 256, 4096
"""Units per block: short blocks are slow to read, long ones slow to order. Neither bound affects exactness."""


@dataclass(frozen=True)
class UnitAssignment:
    """Consecutive units, int64[units] each."""

    dataset: Ints
    first: Ints
    """First token, counted along the dataset."""
    start: Ints
    """Position of that token."""
    size: Ints
    """Tokens."""


@lru_cache(maxsize=64)
def interleave_evenly(counts: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return the dataset of each turn (dataset l has `counts[l]` turns), and its number of earlier turns.

    In every prefix each dataset is less than one turn off its share w: its m-th turn is at floor(m/w) or later, before
    ceil((m+1)/w). Earliest deadline first always succeeds (Baruah et al. 1996, "Proportionate progress: a notion of
    fairness in resource allocation", with one processor).
    """
    turns: Ints = np.empty((2, sum(counts)), np.int64)
    interleave_into(np.array(counts, np.int64), turns)
    return turns[0], turns[1]


class MixtureInterleaver:
    """The units of a phase of `tokens` positions, assigned to datasets with exact `shares` of its tokens.

    Block b holds floor((b+1) x block x share) - floor(b x block x share) units of each dataset, evenly spread; blocks
    are equal if the shares' common denominator divides the block. The remainder after the last whole block continues
    in the same order, and each dataset ends at its exact total (its last unit may be short). A longer phase begins like
    a shorter one, and only units near the end move.
    """

    def __init__(self, shares: Sequence[Fraction], tokens: int, unit: int) -> None:
        self.shares, self.tokens, self.unit = tuple(shares), tokens, unit
        self.totals: Ints = np.array(apportion(tokens, shares), np.int64)
        """Tokens of each dataset in the whole phase."""
        period = math.lcm(*(share.denominator for share in shares))
        self.block = min(period * max(1, SHORTEST_BLOCK // period), LONGEST_BLOCK)
        self.whole_blocks = tokens // (unit * self.block)

    def units(self, start: int, stop: int) -> UnitAssignment:
        """Return the units, whole, that overlap the positions [start, stop) of the phase."""
        block = self._block_at(start)
        blocks = [self._units_of(block)]
        while block < self.whole_blocks and sum(self._units_before(block + 1)) * self.unit < stop:
            block += 1
            blocks.append(self._units_of(block))
        dataset, first, at, size = (
            np.concatenate([getattr(units, name) for units in blocks]) for name in ("dataset", "first", "start", "size")
        )
        chosen = slice(int(np.searchsorted(at, start, "right")) - 1, int(np.searchsorted(at, stop, "left")))
        return UnitAssignment(dataset[chosen], first[chosen], at[chosen], size[chosen])

    def consumed(self, position: int) -> Ints:
        """Return the tokens of each dataset (int64[datasets]) before `position` of the phase."""
        block = self._block_at(position)
        units = self._units_of(block)
        consumed: Ints = np.array(self._units_before(block), np.int64) * self.unit
        np.add.at(consumed, units.dataset, np.clip(position - units.start, 0, units.size))
        return consumed

    @property
    def fixed_positions(self) -> int:
        """Position before which every longer phase has the same units; later units depend on the end of the phase."""
        before, dataset, first = self._order_of(self.whole_blocks)
        if any(self.block % share.denominator for share in self.shares):
            return before * self.unit
        certain = np.array([math.floor(self.tokens * share) for share in self.shares], np.int64)
        short = np.flatnonzero(certain[dataset] - first < self.unit)
        return (before + (int(short[0]) if len(short) else len(dataset))) * self.unit

    def _units_before(self, block: int, rounded: Callable[[Fraction], int] = math.floor) -> list[int]:
        """Return the number of units of each dataset before `block`."""
        return [rounded(block * self.block * share) for share in self.shares]

    def _block_at(self, position: int) -> int:
        """Return the block that contains `position`."""
        # Rounding down makes blocks shorter than `self.block` units, never longer, so the first guess is a lower bound.
        block = min(position // (self.unit * self.block), self.whole_blocks)
        while block < self.whole_blocks and sum(self._units_before(block + 1)) * self.unit <= position:
            block += 1
        return block

    def _units_of(self, block: int) -> UnitAssignment:
        """Return the units of `block`; after the last whole block, of the remainder."""
        before, dataset, first = self._order_of(block)
        size = np.clip(self.totals[dataset] - first, 0, self.unit)
        kept = size > 0
        dataset, first, size = dataset[kept], first[kept], size[kept]
        return UnitAssignment(dataset, first, before * self.unit + np.cumsum(size) - size, size)

    def _order_of(self, block: int) -> tuple[int, Ints, Ints]:
        """Return the number of units before `block`, and dataset and first token of each unit in an endless phase."""
        before = self._units_before(block)
        after = self._units_before(block + 1, math.floor if block < self.whole_blocks else math.ceil)
        dataset, rank = interleave_evenly(tuple(last - first for first, last in zip(before, after, strict=True)))
        return sum(before), dataset, (np.array(before, np.int64)[dataset] + rank) * self.unit
