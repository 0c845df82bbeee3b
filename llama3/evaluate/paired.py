"""Differences of two models on arrays of their samples: the pure part of a comparison, no files and no recipe.

Both models answered the same documents and questions, so the difference is taken inside each of them, and what makes
one hard for both cancels. Documents (bits per byte) are compared by a bootstrap, answers that are right or wrong by
McNemar's test, all else by a normal interval of the differences. What this gives up: documents and questions count as
independent, which pages of one site or questions on one passage are not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama3.evaluate.bootstrap import RESAMPLES, Resampled, combine, interval, resample
from llama3.evaluate.significance import DOCUMENTS, PAIRED, QUESTIONS, Difference, holm, mcnemar, normal_p
from llama3.evaluate.statistics import Estimate, mean, normal, paired_proportions, ratio, weighted_mean

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pairs:
    """The samples of one score that both models have, in one order."""

    candidate: Array
    """[n] bits, or 1 for a right answer and 0 for a wrong one (or the share of right ones among several)."""
    champion: Array
    """[n]"""
    denominators: Array
    """[n] UTF-8 bytes, or ones."""
    groups: tuple[str, ...] = ()
    """[n] where the score is the mean of the groups' means; else none."""


def of_documents(key: str, pairs: Pairs, resamples: int = RESAMPLES) -> Resampled:
    """Return the resampled difference of bits per byte, drawn within groups where there are any.

    The random numbers follow from `key` alone, so which other scores are compared does not matter.
    """
    change, groups = pairs.candidate - pairs.champion, np.asarray(pairs.groups or [""] * len(pairs.candidate))
    parts = []
    for name in sorted(set(groups.tolist())):
        own, seed = groups == name, zlib.crc32(f"{key}/{name}".encode())
        parts.append(resample(change[own], pairs.denominators[own], seed, resamples))
    return combine(parts, [1.0] * len(parts))


def documents_difference(found: Resampled) -> Difference:
    low, high, p = interval(found)
    return Difference(value=found.value, low=low, high=high, p=p, n=found.n, method=DOCUMENTS, better="lower")


def questions_difference(pairs: Pairs) -> Difference:
    """Return the difference of two shares of right answers: McNemar where each answer is right or wrong."""
    whole = np.isin(pairs.candidate, (0, 1)).all() and np.isin(pairs.champion, (0, 1)).all()
    if pairs.groups or not whole:
        return normal_difference(questions_estimate(pairs))
    gained, lost = int((pairs.candidate > pairs.champion).sum()), int((pairs.candidate < pairs.champion).sum())
    found = paired_proportions(gained, lost, len(pairs.candidate))
    return _difference(found, mcnemar(gained, lost)).model_copy(update={"method": QUESTIONS})


def questions_estimate(pairs: Pairs) -> Estimate:
    """Return the mean difference of answers with its standard error."""
    return mean((pairs.candidate - pairs.champion).tolist(), pairs.groups)


def losses_difference(pairs: Pairs) -> Difference:
    """Return the normal difference of a ratio of sums, where lower is better; for many short texts, such as answers."""
    found = ratio((pairs.candidate - pairs.champion).tolist(), pairs.denominators.tolist())
    return normal_difference(found).model_copy(update={"better": "lower"})


def normal_difference(found: Estimate) -> Difference:
    """Return a difference whose interval and p are normal; higher is better."""
    return _difference(found, normal_p(found.value, found.stderr))


def centred_difference(parts: Sequence[tuple[Estimate, float]]) -> Difference:
    """Return the difference of the mean over tasks of (accuracy - baseline) / (1 - baseline), each with its baseline.

    The baselines are the same for both models, so only their scale remains.
    """
    scaled = [normal(part.value / (1 - base), part.stderr / (1 - base), part.n) for part, base in parts]
    return normal_difference(weighted_mean(scaled, [1.0] * len(scaled)))


def _difference(found: Estimate, p: float) -> Difference:
    ends = {"low": found.low, "high": found.high}
    return Difference(value=found.value, **ends, p=p, n=found.n, method=PAIRED, better="higher")


def corrected(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return the differences with Holm's correction over all scores where higher is better."""
    adjusted = holm({key: found.p for key, found in differences.items() if found.better == "higher"})
    return {key: found.model_copy(update={"p_holm": adjusted.get(key)}) for key, found in differences.items()}
