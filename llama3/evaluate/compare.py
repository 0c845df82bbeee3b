"""Compare two evaluated models sample by sample: is a difference more than noise?

Both models answered the same documents and questions, so the difference is taken inside each pair. Bits per byte are
compared by a bootstrap over documents, right and wrong answers by McNemar's test, everything else by a normal interval.
Documents are matched by id and length in bytes; answers only of tasks with the same digest.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from herd.llama3.evaluate.scores import BITS, MACRO, SAMPLES_FILE, Scores, read_scores, read_task_record
from herd.llama3.evaluate.suite import BPB, CORE
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import (
    INDEPENDENT,
    RESAMPLES,
    ClusterEffect,
    Estimate,
    Resampled,
    cluster_effect,
    combine,
    interval,
    mean,
    normal,
    paired_proportions,
    ratio,
    resample,
    weighted_mean,
)
from herd.llama3.statistics.significance import DOCUMENTS, PAIRED, QUESTIONS, Difference, Z, holm, mcnemar, normal_p

Array = NDArray[np.float64]
Item = tuple[str, float]
"""Id and denominator of a sample."""
Samples = Mapping[Item, tuple[float, str, str]]
"""Sample -> (numerator, group, cluster)."""


@dataclass(frozen=True)
class PairedSamples:
    """The samples of one score that both models have, in the same order."""

    candidate: Array
    """[n] bits, or 1 for a right answer and 0 for a wrong one (or the share of right ones among several)."""
    champion: Array
    """[n]"""
    denominators: Array
    """[n] UTF-8 bytes, or ones."""
    groups: tuple[str, ...] = ()
    """[n] if the score is the mean of the groups' means; else empty."""
    clusters: tuple[str, ...] = ()
    """[n] or empty: what errs together, such as the documents of one web site."""


def compare(recipe: Recipe, candidate: Path, champion: Path) -> dict[str, Difference]:
    """Return candidate minus champion, by score, of two evaluation folders.

    A score is left out if the models have no samples in common or were asked different requests. The means `eval/bpb`,
    `eval/bpb_macro` and `eval/core` are taken as in `score_table`, over the domains and tasks that are compared.
    Raises ValueError if a folder holds no evaluation.
    """
    scores, champion_scores = read_scores(candidate), read_scores(champion)
    record = read_task_record(candidate)
    tasks = {task["key"]: task for task in record["tasks"]}
    grouped = {key for key, task in tasks.items() if task["average"] == "groups" and scores[key].unit != BITS}
    pairs = _paired_samples(_read(candidate), _read(champion), scores, champion_scores, grouped)
    documents = {key: difference_of_documents(key, paired) for key, paired in pairs.items() if scores[key].unit == BITS}
    for prefix in (BPB, MACRO):  # means over domains by the first stage's mix, resampled within each domain
        shares = recipe.first_mix.items()
        weights = {key: float(share) for domain, share in shares if (key := f"{prefix}/{domain}") in documents}
        if any(weights.values()):
            documents[prefix] = combine([documents[key] for key in weights], list(weights.values()))
    questions = {key: paired for key, paired in pairs.items() if scores[key].better == "higher"}
    differences = {key: documents_difference(resampled) for key, resampled in documents.items()}
    differences |= {key: difference_of_questions(paired) for key, paired in questions.items()}
    for key in pairs.keys() - differences.keys():  # ratios of sums over many short texts, such as answers
        paired = pairs[key]
        change = (paired.candidate - paired.champion).tolist()
        estimate = ratio(change, paired.denominators.tolist(), paired.clusters)
        differences[key] = difference_from_estimate(estimate).model_copy(update={"better": "lower"})
    counted = [(key, tasks[key]["baseline"]) for key in sorted(questions.keys() & tasks.keys())]
    estimates = [(estimate_of_questions(questions[key]), base) for key, base in counted if base is not None]
    if estimates and record["baselines"] == read_task_record(champion)["baselines"]:
        differences[CORE] = core_difference(estimates)
    return holm_corrected(differences)


def _read(folder: Path) -> dict[str, Samples]:
    samples: dict[str, dict[Item, tuple[float, str, str]]] = {}
    for row in pq.read_table(folder / SAMPLES_FILE).to_pylist():
        values = row["numerator"], row["group"] or "", row["cluster"] or ""
        samples.setdefault(row["key"], {})[row["id"], row["denominator"]] = values
    return dict(samples)


def _paired_samples(
    candidate: Mapping[str, Samples],
    champion: Mapping[str, Samples],
    scores: Scores,
    champion_scores: Scores,
    grouped: set[str],
) -> dict[str, PairedSamples]:
    """Return the common samples of each score that both models have and that can be compared."""
    pairs = {}
    for key in sorted(candidate.keys() & champion.keys() & scores.keys() & champion_scores.keys()):
        ours, theirs = candidate[key], champion[key]
        is_text = scores[key].better == "lower" and any(size != 1 for _, size in ours)
        common = sorted(ours.keys() & theirs.keys())
        if common and (is_text or scores[key].requests == champion_scores[key].requests):
            pairs[key] = PairedSamples(
                candidate=np.array([ours[item][0] for item in common]),
                champion=np.array([theirs[item][0] for item in common]),
                denominators=np.array([size for _, size in common]),
                groups=tuple(ours[item][1] for item in common) if key in grouped else (),
                clusters=tuple(ours[item][2] for item in common),
            )
    return pairs


def difference_of_documents(key: str, pairs: PairedSamples, resamples: int = RESAMPLES) -> Resampled:
    """Return the resampled difference of bits per byte, drawn within groups if there are any.

    The random numbers depend on `key` alone, not on which other scores are compared.
    """
    change, groups = pairs.candidate - pairs.champion, np.asarray(pairs.groups or [""] * len(pairs.candidate))
    by_group = []
    for name in sorted(set(groups.tolist())):
        own, seed = groups == name, zlib.crc32(f"{key}/{name}".encode())
        clusters = np.asarray(pairs.clusters)[own].tolist() if pairs.clusters else ()
        by_group.append(resample(change[own], pairs.denominators[own], seed, resamples, clusters))
    return combine(by_group, [1.0] * len(by_group))


def documents_difference(sample: Resampled) -> Difference:
    low, high, p = interval(sample)
    values = {"value": sample.value, "low": low, "high": high, "p": p, "n": sample.n, "clusters": sample.clusters}
    return Difference.model_validate({**values, "design": sample.design, "method": DOCUMENTS, "better": "lower"})


def difference_of_questions(pairs: PairedSamples) -> Difference:
    """Return the difference of two shares of right answers: McNemar if each answer is right or wrong."""
    binary = np.isin(pairs.candidate, (0, 1)).all() and np.isin(pairs.champion, (0, 1)).all()
    if pairs.groups or not binary:
        return difference_from_estimate(estimate_of_questions(pairs))
    gained, lost = int((pairs.candidate > pairs.champion).sum()), int((pairs.candidate < pairs.champion).sum())
    effect = cluster_effect((pairs.candidate - pairs.champion).tolist(), pairs.clusters)
    return difference_of_answers(gained, lost, len(pairs.candidate), effect)


def difference_of_answers(gained: int, lost: int, n: int, effect: ClusterEffect = INDEPENDENT) -> Difference:
    """Return the difference of right answers to `n` questions, of which only one model answered `gained` and `lost`."""
    estimate, p = paired_proportions(gained, lost, n, effect), mcnemar(gained, lost)
    if effect.width > 1:
        p = max(p, normal_p(estimate.value, estimate.stderr / math.sqrt(effect.design) * effect.width))
    return difference_from_estimate(estimate).model_copy(update={"p": p, "method": QUESTIONS})


def core_difference(estimates: Sequence[tuple[Estimate, float]]) -> Difference:
    """Return the difference of `eval/core` from those of its tasks, each with its baseline.

    It averages (accuracy - baseline) / (1 - baseline); of a difference only the scale 1 - baseline remains.
    """
    scaled = [normal(item.value / (1 - base), item.stderr / (1 - base), item.n) for item, base in estimates]
    return difference_from_estimate(weighted_mean(scaled, [1.0] * len(scaled)))


def estimate_of_questions(pairs: PairedSamples) -> Estimate:
    """Return the mean difference of answers with its standard error."""
    return mean((pairs.candidate - pairs.champion).tolist(), pairs.groups, pairs.clusters)


def difference_from_estimate(estimate: Estimate) -> Difference:
    """Return the difference with the estimate's interval and a normal p; higher is better."""
    p = normal_p(estimate.value, (estimate.high - estimate.low) / (2 * Z) if estimate.clusters else estimate.stderr)
    fields = {name: getattr(estimate, name) for name in ("value", "low", "high", "n", "clusters", "design")}
    return Difference.model_validate({**fields, "p": p, "method": PAIRED, "better": "higher"})


def holm_corrected(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return the differences with Holm's correction over all scores where higher is better."""
    adjusted = holm({key: item.p for key, item in differences.items() if item.better == "higher"})
    return {key: item.model_copy(update={"p_holm": adjusted.get(key)}) for key, item in differences.items()}
