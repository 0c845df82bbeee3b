"""The spans of a run in which the mix stays the same, laid end to end on the axis of positions.

Stages that draw alike form one span, so that a batch ramp or a longer sequence changes nothing in the order of tokens.
A stage that takes a later helping of data is a span of its own: how far on it begins follows from its own need. What
this gives up: a stage's own shares are exact to the token only where its mix ends with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np

from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.section import Domain
from llama3.tokens.deal import Deal
from llama3.tokens.kernels import Ints
from llama3.tokens.mix import Leaf, leaf_shares


@dataclass(frozen=True)
class MixSpan:
    """Consecutive stages that draw alike."""

    start: int
    deal: Deal
    before: Ints
    """Tokens of each leaf that earlier spans took."""
    first: Ints
    """Where the span begins in each leaf's stream: behind what earlier spans took, and what it passes over."""

    @property
    def end(self) -> int:
        return self.start + self.deal.tokens

    def identity(self, leaves: Sequence[Leaf], stop: int) -> dict[str, Any]:
        """Return, as plain data, what decides which tokens lie in the span before the position `stop`."""
        columns = zip(leaves, self.deal.shares, self.first.tolist(), strict=True)
        mix = {leaf.name: {"share": str(share), "from": first} for leaf, share, first in columns if share}
        settled = stop <= self.start + self.deal.settled
        return {"start": self.start, "end": None if settled else self.end, "mix": mix}


def mix_spans(recipe: Recipe, leaves: Sequence[Leaf], unit: int) -> Iterator[MixSpan]:
    """Yield the spans of `recipe`, positions cut in units of `unit` tokens."""
    before: Ints = np.zeros(len(leaves), np.int64)
    ahead: Ints = np.zeros(len(leaves), np.int64)
    for (shares, added, draw, _), group in groupby(Schedule(recipe).spans, key=lambda span: _drawn(recipe, span)):
        stages = list(group)
        deal = Deal(leaf_shares(leaves, shares, added), stages[-1].end - stages[0].start, unit)
        first = ahead + draw * deal.totals
        yield MixSpan(stages[0].start, deal, before, first)
        before, ahead = before + deal.totals, first + deal.totals


def _drawn(recipe: Recipe, span: StageSpan) -> tuple[dict[Domain, Fraction], dict[str, Fraction], int, str]:
    """Return what decides which documents a stage reads: shares of its mix, what it adds, which helping, and whose."""
    stage = span.stage
    shares = {domain: Fraction(share) for domain, share in recipe.mix[stage.mix].items() if share}
    added = {name: Fraction(share) for name, share in stage.add.items() if share}
    return shares, added, stage.draw, stage.name if stage.draw else ""
