"""Compare two evaluated models sample by sample: is a difference more than noise?

Reads two evaluation folders, pairs the samples that both have, and hands arrays to `llama3.evaluate.paired`. Only what
both were asked in the same words is compared: texts are matched by id and length in bytes, so more documents on one
side do not matter, but answers only of tasks with the same digest, because their words depend on shots and version.
What this gives up: a task whose version changed is not compared at all until the champion is evaluated again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from llama3.evaluate.bootstrap import Resampled, combine
from llama3.evaluate.paired import (
    Pairs,
    centred_difference,
    corrected,
    documents_difference,
    losses_difference,
    of_documents,
    questions_difference,
    questions_estimate,
)
from llama3.evaluate.score_table import MACRO
from llama3.evaluate.scores import SAMPLES_FILE, Scores, read_asked, read_scores
from llama3.evaluate.significance import Difference
from llama3.evaluate.suites import BPB, CORE
from llama3.recipe.schema import Recipe

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
) -> dict[str, Pairs]:
    """Return the common samples of each score that both tables have and that can be compared."""
    found = {}
    for key in sorted(ours.keys() & theirs.keys() & scores.keys() & reigning.keys()):
        texts = scores[key].better == "lower" and any(size != 1 for _, size in ours[key])
        common = sorted(ours[key].keys() & theirs[key].keys())
        if common and (texts or scores[key].requests == reigning[key].requests):
            found[key] = Pairs(
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
