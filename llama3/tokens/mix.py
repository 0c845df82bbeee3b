"""The datasets of the mix and their exact shares.

A *dataset* is a whole domain, or one of its sources if they have weights or a name. Shares are fractions, not floats:
17 % of 15.6T tokens is an exact number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schema import Recipe


@dataclass(frozen=True)
class MixDataset:
    """A domain, or one source of a domain whose sources are weighted."""

    name: str
    domain: Domain
    weight: Fraction
    """Share of the domain's tokens."""
    source_index: int | None = None
    """Index in `sources.<domain>`; None: all its sources pooled."""
    source_name: str = ""
    """Name of a source that only stages draw from (`extra_sources`), never a mix."""


def mix_datasets(recipe: Recipe) -> tuple[MixDataset, ...]:
    """Return the datasets of `recipe` in the order of DOMAINS and of its sources, for any mix."""
    datasets: list[MixDataset] = []
    for domain in DOMAINS:
        sources = recipe.sources.get(domain, [])
        pooled = {index: source.weight for index, source in enumerate(sources) if not source.name}
        weights = {index: Fraction(str(weight)) for index, weight in pooled.items() if weight is not None}
        if weights:
            total = sum(weights.values())
            datasets += [
                MixDataset(f"{domain}-{index}", domain, weight / total, index) for index, weight in weights.items()
            ]
        elif pooled:
            datasets.append(MixDataset(domain, domain, Fraction(1)))
        for index, source in enumerate(sources):
            if source.name:
                datasets.append(MixDataset(f"{domain}.{source.name}", domain, Fraction(1), index, source.name))
    return tuple(datasets)


def dataset_shares(
    datasets: Sequence[MixDataset], shares: Mapping[Domain, Fraction], added: Mapping[str, Fraction]
) -> tuple[Fraction, ...]:
    """Return the exact token share of each dataset: named sources have `added`, the mix has the rest."""
    rest = 1 - sum(added.values(), Fraction(0))
    return tuple(
        Fraction(added.get(dataset.source_name, 0))
        if dataset.source_name
        else rest * shares.get(dataset.domain, 0) * dataset.weight
        for dataset in datasets
    )


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Return whole counts that sum to `total`, each within one of its share (largest remainder, ties to the first)."""
    counts = [math.floor(total * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - total * shares[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
