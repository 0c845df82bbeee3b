"""Which leaf of the mix each stretch of positions belongs to, so that every prefix has the shares asked for.

Positions are cut into *units* of equal length and a `Deal` gives each unit of a span to a leaf. It is computed, not
stored: unit k is found by arithmetic, so 15T tokens need no more memory than 15K. What this gives up: a single batch
is on its shares only within about a unit per leaf. In return no small share rounds to zero (rounding in each batch
drops every source below one sequence per batch), and a span's totals are exact to the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from llama3.tokens.kernels import Ints, take_turns
from llama3.tokens.mix import apportion

# The mix: what it draws from, and the exact share of each.
#
# A *leaf* is what the mix draws from: a whole domain, or one source of it when its sources carry weights. Shares
# are fractions, never floats, so that 17 % of 15.6T tokens is one number and not about one. What this gives up:
# shares finer than a domain's sources, such as topics, need sources of their own.


SHORTEST_BLOCK, LONGEST_BLOCK = 256, 4096
"""Units per block: short blocks are slow to read, long ones slow to order. Neither bound affects exactness."""


@dataclass(frozen=True)
class Units:
    """Consecutive units, int64[units] each: whose they are, which of that leaf's tokens they hold, where they lie."""

    leaf: Ints
    first: Ints
    """First token, counted along the leaf."""
    start: Ints
    """Position of that token."""
    size: Ints
    """Tokens."""


@lru_cache(maxsize=64)
def even_order(counts: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return whose turn it is at each place (leaf l `counts[l]` times), and how often it was its turn before.

    Every prefix is less than one turn off each leaf's share w: its m-th turn may come from place floor(m/w) on and must
    come before ceil((m+1)/w); taking the earliest deadline first always succeeds (Baruah et al. 1996, "Proportionate
    progress: a notion of fairness in resource allocation", with one processor).
    """
    turns: Ints = np.empty((2, sum(counts)), np.int64)
    take_turns(np.array(counts, np.int64), turns)
    return turns[0], turns[1]


class MixtureInterleaver:
    """The units of a span of `tokens` positions, dealt to leaves with exact `shares` of its tokens.

    Block b holds floor((b+1) x block x share) - floor(b x block x share) units of each leaf, evenly spread; when the
    shares' common denominator divides the block, all blocks are alike. What is left after the last whole block goes on
    in the same order, each leaf ending at its exact total (its last unit may be short). So a longer span begins as a
    shorter one does, and units only move near the end.
    """

    def __init__(self, shares: Sequence[Fraction], tokens: int, unit: int) -> None:
        self.shares, self.tokens, self.unit = tuple(shares), tokens, unit
        self.totals: Ints = np.array(apportion(tokens, shares), np.int64)
        """Tokens of each leaf in the whole span."""
        period = math.lcm(*(share.denominator for share in shares))
        self.block = min(period * max(1, SHORTEST_BLOCK // period), LONGEST_BLOCK)
        self.whole_blocks = tokens // (unit * self.block)

    def units(self, start: int, stop: int) -> Units:
        """Return the units, whole, that overlap the positions [start, stop) of the span."""
        block = self._block_at(start)
        found = [self._units_of(block)]
        while block < self.whole_blocks and self._before(block + 1) * self.unit < stop:
            block += 1
            found.append(self._units_of(block))
        leaf, first, at, size = (
            np.concatenate([getattr(units, name) for units in found]) for name in ("leaf", "first", "start", "size")
        )
        chosen = slice(int(np.searchsorted(at, start, "right")) - 1, int(np.searchsorted(at, stop, "left")))
        return Units(leaf[chosen], first[chosen], at[chosen], size[chosen])

    def consumed(self, position: int) -> Ints:
        """Return how many tokens of each leaf (int64[leaves]) lie before `position` of the span."""
        block = self._block_at(position)
        units = self._units_of(block)
        consumed: Ints = np.array(self._dealt(block), np.int64) * self.unit
        np.add.at(consumed, units.leaf, np.clip(position - units.start, 0, units.size))
        return consumed

    @property
    def settled(self) -> int:
        """Position before which every longer span is dealt like this one; behind it, the end of this one shows."""
        before, leaf, first = self._order_of(self.whole_blocks)
        if any(self.block % share.denominator for share in self.shares):
            return before * self.unit
        certain = np.array([math.floor(self.tokens * share) for share in self.shares], np.int64)
        short = np.flatnonzero(certain[leaf] - first < self.unit)
        return (before + (int(short[0]) if len(short) else len(leaf))) * self.unit

    def _dealt(self, block: int, rounded: Callable[[Fraction], int] = math.floor) -> list[int]:
        """Return how many units of each leaf lie before `block`."""
        return [rounded(block * self.block * share) for share in self.shares]

    def _before(self, block: int) -> int:
        return sum(self._dealt(block))

    def _block_at(self, position: int) -> int:
        """Return the block that holds `position`. Blocks may fall short, never long: it is at or after the guess."""
        block = min(position // (self.unit * self.block), self.whole_blocks)
        while block < self.whole_blocks and self._before(block + 1) * self.unit <= position:
            block += 1
        return block

    def _units_of(self, block: int) -> Units:
        """Return the units of `block`; after the last whole block, those of the remainder."""
        before, leaf, first = self._order_of(block)
        size = np.clip(self.totals[leaf] - first, 0, self.unit)
        kept = size > 0
        leaf, first, size = leaf[kept], first[kept], size[kept]
        return Units(leaf, first, before * self.unit + np.cumsum(size) - size, size)

    def _order_of(self, block: int) -> tuple[int, Ints, Ints]:
        """Return the units before `block`, then leaf and first token of each of its own, were the span endless."""
        before = self._dealt(block)
        after = self._dealt(block + 1, math.floor if block < self.whole_blocks else math.ceil)
        leaf, rank = even_order(tuple(last - first for first, last in zip(before, after, strict=True)))
        return sum(before), leaf, (np.array(before, np.int64)[leaf] + rank) * self.unit
