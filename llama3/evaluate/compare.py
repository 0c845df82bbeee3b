"""Compare two evaluated models sample by sample: is a difference more than noise?

Both answered the same documents and questions, so the difference is taken inside each of them and what makes one hard
for both cancels. For bits per byte this separates checkpoints that unpaired intervals cannot. No correction for looking
at several scores at once is made: with ten scores, expect one interval in two comparisons to miss its mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from llama3.evaluate.scores import SAMPLES_FILE, Scores, read_scores
from llama3.evaluate.statistics import Estimate, normal, paired_difference, weighted_mean
from llama3.evaluate.suites import BPB, CORE, overall
from llama3.recipe.schema import Recipe

Samples = dict[str, dict[tuple[str, float], float]]


def compare(recipe: Recipe, candidate: Path, champion: Path) -> dict[str, Estimate]:
    """Return candidate minus champion, by score, with its paired 95 % interval, of two evaluation folders.

    Only documents and questions that both were given count (`n` says how many); a score without any is left out.
    `eval/bpb` and `eval/core` are averaged as in `suites`, over the domains and tasks that both have.
    Raises ValueError if a folder holds no evaluation.
    """
    ours, theirs = _read(candidate), _read(champion)
    differences = {}
    for key in sorted(ours.keys() & theirs.keys()):
        common = sorted(ours[key].keys() & theirs[key].keys())
        if common:
            differences[key] = paired_difference(
                [ours[key][item] for item in common],
                [theirs[key][item] for item in common],
                [denominator for _, denominator in common],
            )
    return differences | _means(recipe, differences, read_scores(candidate))


def _means(recipe: Recipe, differences: Mapping[str, Estimate], scores: Scores) -> dict[str, Estimate]:
    """Return the differences of `eval/bpb` and `eval/core`; chance, equal for both models, cancels in the latter."""
    bits = {key: difference for key, difference in differences.items() if key.startswith(f"{BPB}/")}
    choices = [
        normal(difference.value / (1 - chance), difference.stderr / (1 - chance), difference.n)
        for key, difference in differences.items()
        if (chance := scores[key].chance) is not None
    ]
    means = {BPB: overall(recipe, bits)} if bits else {}
    return means | ({CORE: weighted_mean(choices, [1.0] * len(choices))} if choices else {})


def _read(folder: Path) -> Samples:
    """Return key -> (id, denominator) -> numerator."""
    read_scores(folder)
    found: Samples = {}
    for row in pq.read_table(folder / SAMPLES_FILE).to_pylist():
        found.setdefault(row["key"], {})[row["id"], row["denominator"]] = row["numerator"]
    return found
