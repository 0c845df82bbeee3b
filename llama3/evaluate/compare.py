"""Compare two evaluated models sample by sample: is a difference more than noise?

Reads two evaluation folders, pairs the samples that both have, and hands arrays to `llama3.evaluate.compare`. Only what
both were asked in the same words is compared: texts are matched by id and length in bytes, so more documents on one
side do not matter, but answers only of tasks with the same digest, because their words depend on shots and version.
What this gives up: a task whose version changed is not compared at all until the champion is evaluated again.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.evaluate.scores import MACRO, SAMPLES_FILE, Scores, read_asked, read_scores
from llama3.evaluate.significance import DOCUMENTS, PAIRED, QUESTIONS, Difference, holm, mcnemar, normal_p
from llama3.evaluate.statistics import (
    RESAMPLES,
    Estimate,
    Resampled,
    combine,
    interval,
    mean,
    normal,
    paired_proportions,
    ratio,
    resample,
    weighted_mean,
)
from llama3.evaluate.suite import BPB, CORE
from llama3.recipe.schema import Recipe

# Differences of two models on arrays of their samples: the pure part of a comparison, no files and no recipe.
#
# Both models answered the same documents and questions, so the difference is taken inside each of them, and what
# makes one hard for both cancels. Documents (bits per byte) are compared by a bootstrap, answers that are right or
# wrong by McNemar's test, all else by a normal interval of the differences. What this gives up: documents and
# questions count as independent, which pages of one site or questions on one passage are not.

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PairedSamples:
    """The samples of one score that both models have, in one order."""

    candidate: Array
    """[n] bits, or 1 for a right answer and 0 for a wrong one (or the share of right ones among several)."""
    champion: Array
    """[n]"""
    denominators: Array
    """[n] UTF-8 bytes, or ones."""
    groups: tuple[str, ...] = ()
    """[n] where the score is the mean of the groups' means; else none."""


def of_documents(key: str, pairs: PairedSamples, resamples: int = RESAMPLES) -> Resampled:
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


def questions_difference(pairs: PairedSamples) -> Difference:
    """Return the difference of two shares of right answers: McNemar where each answer is right or wrong."""
    whole = np.isin(pairs.candidate, (0, 1)).all() and np.isin(pairs.champion, (0, 1)).all()
    if pairs.groups or not whole:
        return normal_difference(questions_estimate(pairs))
    gained, lost = int((pairs.candidate > pairs.champion).sum()), int((pairs.candidate < pairs.champion).sum())
    found = paired_proportions(gained, lost, len(pairs.candidate))
    return _difference(found, mcnemar(gained, lost)).model_copy(update={"method": QUESTIONS})


def questions_estimate(pairs: PairedSamples) -> Estimate:
    """Return the mean difference of answers with its standard error."""
    return mean((pairs.candidate - pairs.champion).tolist(), pairs.groups)


def losses_difference(pairs: PairedSamples) -> Difference:
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


BITS = "bits per byte"
"""Unit of the scores that are compared document by document."""
Item = tuple[str, float]
"""Id and denominator of a sample."""
Samples = Mapping[Item, tuple[float, str]]
"""Sample -> (numerator, group)."""


def compare(recipe: Recipe, candidate: Path, champion: Path) -> dict[str, Difference]:
    """Return candidate minus champion, by score, of two evaluation folders.

    A score is left out where the models have no samples in common or were asked differently. The means `eval/bpb`,
    `eval/bpb_macro` and `eval/core` are taken as in `score_table`, over the domains and tasks that are compared.
    Raises ValueError if a folder holds no evaluation.
    """
    scores, reigning = read_scores(candidate), read_scores(champion)
    asked = read_asked(candidate)
    tasks = {task["key"]: task for task in asked["tasks"]}
    by_groups = {key for key, task in tasks.items() if task["average"] == "groups" and task["kind"] != "bits"}
    pairs = _pairs(_read(candidate), _read(champion), scores, reigning, by_groups)
    documents = {key: of_documents(key, found) for key, found in pairs.items() if scores[key].unit == BITS}
    questions = {key: found for key, found in pairs.items() if scores[key].better == "higher"}
    documents |= _means(recipe, documents)
    found = {key: documents_difference(resampled) for key, resampled in documents.items()}
    found |= {key: questions_difference(paired) for key, paired in questions.items()}
    found |= {key: losses_difference(pairs[key]) for key in pairs.keys() - found.keys()}
    counted = [(key, tasks[key]["baseline"]) for key in sorted(questions.keys() & tasks.keys())]
    parts = [(questions_estimate(questions[key]), base) for key, base in counted if base is not None]
    if parts and asked["baselines"] == read_asked(champion)["baselines"]:
        found[CORE] = centred_difference(parts)
    return corrected(found)


def _pairs(
    ours: Mapping[str, Samples],
    theirs: Mapping[str, Samples],
    scores: Scores,
    reigning: Scores,
    by_groups: set[str],
) -> dict[str, PairedSamples]:
    """Return the common samples of each score that both tables have and that can be compared."""
    found = {}
    for key in sorted(ours.keys() & theirs.keys() & scores.keys() & reigning.keys()):
        texts = scores[key].better == "lower" and any(size != 1 for _, size in ours[key])
        common = sorted(ours[key].keys() & theirs[key].keys())
        if common and (texts or scores[key].requests == reigning[key].requests):
            found[key] = PairedSamples(
                candidate=np.array([ours[key][item][0] for item in common]),
                champion=np.array([theirs[key][item][0] for item in common]),
                denominators=np.array([size for _, size in common]),
                groups=tuple(ours[key][item][1] for item in common) if key in by_groups else (),
            )
    return found


def _means(recipe: Recipe, documents: Mapping[str, Resampled]) -> dict[str, Resampled]:
    """Return the means over domains, by the first stage's mix, drawn within each domain."""
    shares = recipe.first_mix
    means = {}
    for prefix in (BPB, MACRO):
        weights = {key: float(share) for domain, share in shares.items() if (key := f"{prefix}/{domain}") in documents}
        if any(weights.values()):
            means[prefix] = combine([documents[key] for key in weights], list(weights.values()))
    return means


def _read(folder: Path) -> dict[str, Samples]:
    found: dict[str, dict[Item, tuple[float, str]]] = {}
    for row in pq.read_table(folder / SAMPLES_FILE).to_pylist():
        found.setdefault(row["key"], {})[row["id"], row["denominator"]] = row["numerator"], row["group"] or ""
    return dict(found)
