"""Which documents really are near-duplicates: all pairs whose word shingles overlap, by plain sets.

The measure for recall and precision, so it shares nothing with what is measured but the definition of a word: shingles
are numbered by a dictionary and compared as sets, never hashed. Candidates are pairs that share a shingle of few
documents; a pair with J >= 0.5 shares half of its shingles, and no text is made of common ones alone. What this gives
up: shingles of more than 64 documents make no candidates, so a text that stands there 65 times is not paired with
itself; and speed (some 300 documents a second).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from herd.llama3.data.text.words import split_words

COMMON = 64
"""A shingle of more documents says nothing about any two of them."""
Pair = tuple[int, int]


def shingle_set(text: str, width: int) -> frozenset[str]:
    """Return the shingles of `text`: `width` words each, or all words of a shorter text."""
    found = split_words(text)
    return frozenset("\0".join(found[at : at + width]) for at in range(max(1, len(found) - width + 1)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the share of what either set has that both have."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def near_pairs(texts: Sequence[str], width: int, least: float = 0.5) -> dict[Pair, float]:
    """Return (i, j) -> Jaccard, i < j, of all pairs of `texts` with at least `least`."""
    sets = [shingle_set(text, width) for text in texts]
    scored = ((pair, jaccard(sets[pair[0]], sets[pair[1]])) for pair in sorted(_candidates(sets)))
    return {pair: score for pair, score in scored if score >= least}


def _candidates(sets: Sequence[frozenset[str]]) -> set[Pair]:
    """Return the pairs that share a shingle of at most COMMON documents."""
    holders: dict[str, list[int]] = defaultdict(list)
    for place, shingles in enumerate(sets):
        for shingle in shingles:
            holders[shingle].append(place)
    groups = {tuple(places) for places in holders.values() if 1 < len(places) <= COMMON}
    return {pair for places in groups for pair in combinations(places, 2)}


def recall(pairs: Mapping[Pair, float], cluster: Sequence[str], least: float) -> tuple[float, int]:
    """Return the share of the pairs with Jaccard >= `least` whose two ends are in one cluster, and their number.

    `cluster[i]` names the cluster that document i is in. 1.0 where there are no such pairs.
    """
    true = [pair for pair, score in pairs.items() if score >= least]
    together = sum(cluster[one] == cluster[other] for one, other in true)
    return (together / len(true) if true else 1.0), len(true)


def precision(texts: Sequence[str], found: Iterable[Pair], width: int, least: float) -> tuple[float, int]:
    """Return the share of the pairs `found` whose true Jaccard is at least `least`, and their number."""
    pairs = list(found)
    right = sum(jaccard(shingle_set(texts[a], width), shingle_set(texts[b], width)) >= least for a, b in pairs)
    return (right / len(pairs) if pairs else 1.0), len(pairs)
