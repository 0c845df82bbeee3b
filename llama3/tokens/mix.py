"""The mix: what it draws from, and the exact share of each.

A *leaf* is what the mix draws from: a whole domain, or one source of it when its sources carry weights. Shares are
fractions, never floats, so that 17 % of 15.6T tokens is one number and not about one. What this gives up: shares finer
than a domain's sources, such as topics, need sources of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.data_schema import Source
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
    """Name of a source that stands apart: the mix does not draw from it."""


def leaves_of(recipe: Recipe) -> tuple[Leaf, ...]:
    """Return the leaves of `recipe` in the order of DOMAINS and of its sources, whatever the mix."""
    return tuple(leaf for domain in DOMAINS for leaf in _domain_leaves(domain, recipe.sources.get(domain, [])))


def _domain_leaves(domain: Domain, sources: list[Source]) -> list[Leaf]:
    apart = [
        Leaf(f"{domain}.{one.name}", domain, Fraction(1), i, one.name) for i, one in enumerate(sources) if one.name
    ]
    mixed = {i: source.weight for i, source in enumerate(sources) if not source.name}
    weights = {i: Fraction(str(weight)) for i, weight in mixed.items() if weight is not None}
    if weights:
        total = sum(weights.values())
        return [*(Leaf(f"{domain}-{i}", domain, weight / total, i) for i, weight in weights.items()), *apart]
    return [*([Leaf(domain, domain, Fraction(1))] if mixed else []), *apart]


def leaf_shares(
    leaves: Sequence[Leaf], shares: Mapping[Domain, Fraction], added: Mapping[str, Fraction]
) -> tuple[Fraction, ...]:
    """Return the exact share of the tokens of each leaf: `added` of sources that stand apart, the mix the rest."""
    rest = 1 - sum(added.values(), Fraction(0))

    def share(leaf: Leaf) -> Fraction:
        return Fraction(added.get(leaf.apart, 0)) if leaf.apart else rest * shares.get(leaf.domain, 0) * leaf.weight

    return tuple(share(leaf) for leaf in leaves)


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Return whole counts that sum to `total`, each within one of its share (largest remainder, ties to the first)."""
    counts = [math.floor(total * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - total * shares[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
