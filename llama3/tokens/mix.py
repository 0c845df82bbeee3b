"""The leaves of the mix and their exact shares.

A *leaf* is a whole domain, or one of its sources if they have weights or a name. Shares are fractions, not floats, so
that 17 % of 15.6T tokens is an exact number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.schema import Recipe


@dataclass(frozen=True)
class Leaf:
    """A domain, or one source of a domain whose sources are weighted."""

    name: str
    domain: Domain
    weight: Fraction
    """Share of the domain's tokens."""
    source: int | None = None
    """Index in `sources.<domain>`; None: all its sources pooled."""
    apart: str = ""
    """Name of a source that only stages draw from (`add`), never a mix."""


def leaves_of(recipe: Recipe) -> tuple[Leaf, ...]:
    """Return the leaves of `recipe` in the order of DOMAINS and of its sources, for any mix."""
    leaves: list[Leaf] = []
    for domain in DOMAINS:
        sources = recipe.sources.get(domain, [])
        pooled = {index: source.weight for index, source in enumerate(sources) if not source.name}
        weights = {index: Fraction(str(weight)) for index, weight in pooled.items() if weight is not None}
        if weights:
            total = sum(weights.values())
            leaves += [Leaf(f"{domain}-{index}", domain, weight / total, index) for index, weight in weights.items()]
        elif pooled:
            leaves.append(Leaf(domain, domain, Fraction(1)))
        for index, source in enumerate(sources):
            if source.name:
                leaves.append(Leaf(f"{domain}.{source.name}", domain, Fraction(1), index, source.name))
    return tuple(leaves)


def leaf_shares(
    leaves: Sequence[Leaf], shares: Mapping[Domain, Fraction], added: Mapping[str, Fraction]
) -> tuple[Fraction, ...]:
    """Return the exact token share of each leaf: named sources have `added`, the mix has the rest."""
    rest = 1 - sum(added.values(), Fraction(0))
    return tuple(
        Fraction(added.get(leaf.apart, 0)) if leaf.apart else rest * shares.get(leaf.domain, 0) * leaf.weight
        for leaf in leaves
    )


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Return whole counts that sum to `total`, each within one of its share (largest remainder, ties to the first)."""
    counts = [math.floor(total * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - total * shares[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
