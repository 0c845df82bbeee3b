"""Scores: from likelihoods to samples, from samples to a score, and all scores as one Parquet table.

A sample is a numerator and a denominator (bits and bytes; 1 or 0 and 1). A score is a ratio of sums over its samples,
or the mean of that ratio over groups, so two models can be compared sample by sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.evaluate.suite import (
    BPB,
    CORE,
    RESPONSES,
    core_score,
    mean_bits_per_byte,
)
from herd.llama3.evaluate.task import TASK_KINDS, Likelihood, Request, ScoredKind, Task, requests_digest
from herd.llama3.recipe.data_schema import few_held_out
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import Estimate, cluster_effect, mean, proportion, ratio
from herd.llama3.statistics.significance import Z

SCORES_FILE = "scores.parquet"
SAMPLES_FILE = "samples.parquet"
GENERATIONS_FILE = "generations.json"
TASKS_FILE = "tasks.json"
"""What was asked (kind, version, shots, digest, sources), what counts in `eval/core`, what was skipped and why."""
PREFIX = "eval/"
GOLD = f"{PREFIX}gold_nll"
MACRO = "eval/bpb_macro"
LANGUAGE = "eval/bpb_language"
PROSE = (f"{BPB}/general", f"{BPB}/multilingual")
"""Tasks whose documents are in one natural language each; code and formulas count as none."""
UNKNOWN = ("", "und")
BITS = "bits per byte"
"""Unit of the scores that are compared document by document."""

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Score:
    """One number about a model."""

    key: str
    """`eval/bpb/math`, `eval/arithmetic`, ...; also the name of the tracked metric."""
    value: float
    stderr: float
    """Standard error of `value` over documents or questions; NaN with fewer than two."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    n: int
    """Documents or questions."""
    chance: float | None
    """The score of guessing, or None if guessing has no meaning."""
    unit: str
    """`bits per byte`, `accuracy`, `share above chance`."""
    better: Better
    requests: str
    """Digest of the requests; two scores with different digests were measured on different text."""
    shots: int = 0
    """Solved examples before each question."""
    version: int = 1
    """Of the task."""
    unjudged: int = 0
    """Questions that are not among `n` because an answer could not be judged right or wrong."""
    bytes: int = 0
    """Of the texts behind bits per byte; 0 for other scores."""
    clusters: int = 0
    """Web sites, repositories, files or passages behind the `n`; 0: each is its own, 1: not known."""
    design: float = 1.0
    """Design effect: the variance over that of independent documents or questions."""

    @classmethod
    def from_estimate(
        cls,
        key: str,
        estimate: Estimate,
        unit: str,
        better: Better,
        requests: str,
        chance: float | None,
        size: float = 0,
    ) -> Score:
        """Return the score called `key` with the value and spread of `estimate`; `size` bytes of text are behind it."""
        spread = dataclasses.asdict(estimate)
        return cls(key=key, unit=unit, better=better, requests=requests, chance=chance, bytes=round(size), **spread)

    @property
    def amount(self) -> str:
        """Documents or questions, the text of documents, and what errs together: `32 (28.1 kB), 9 clusters x1.8`."""
        text = f"{self.n:,}" + (f" ({self.bytes / 1000:,.1f} kB)" if self.bytes else "")
        return text + (f", {self.clusters:,} clusters x{self.design:.1f}" if self.clusters > 1 else "")

    @property
    def scarce(self) -> str:
        """A line if the documents of a domain are too few to judge a model by; else empty."""
        if not self.bytes or not self.key.startswith((f"{BPB}/", RESPONSES)):
            return ""
        remedy = "raise evaluate.documents or curate.validation_fraction, or add text"
        return few_held_out(self.key, self.n, self.bytes, remedy)

    @property
    def half(self) -> float:
        """Half the width of the published interval, 1.96 sqrt(S (1 - S) / N) for a share (arXiv 2407.21783, 5.1)."""
        return Z * self.stderr  # read by the report's templates

    def interval(self, form: str = ".4g") -> str:
        """Return the 95 % interval as text; empty if there is none (a single document)."""
        return f"{self.low:{form}} to {self.high:{form}}" if math.isfinite(self.stderr) else ""

    @property
    def estimate(self) -> Estimate:
        """Value and spread alone."""
        return Estimate(self.value, self.stderr, self.low, self.high, self.n, self.clusters, self.design)


Scores = Mapping[str, Score]

_TYPES = {
    "str": pa.string(),
    "Better": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "float | None": pa.float64(),
}
_SCHEMA = pa.schema([(field.name, _TYPES[str(field.type)]) for field in dataclasses.fields(Score)])


def write_scores(scores: Scores, folder: Path) -> None:
    """Write `scores` into `folder`, sorted by key."""
    rows = [dataclasses.asdict(scores[key]) for key in sorted(scores)]
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), folder / SCORES_FILE)


def read_scores(folder: Path) -> dict[str, Score]:
    """Return the scores of the evaluation in `folder` by key. Raises ValueError if there are none."""
    path = folder / SCORES_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {SCORES_FILE}; evaluate the model into it first")
    rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
    return {
        row["key"]: Score(**{name: value for name, value in row.items() if value is not None or name == "chance"})
        for row in rows
    }


def read_task_record(folder: Path) -> dict[str, Any]:
    """Return the tasks of the evaluation in `folder`: `suite`, `baselines`, `tasks` and `skipped` ({task: reason}).

    A task has key, kind, version, shots, n, chance, average (`items` or `groups`), digest, sources ({file: SHA-256})
    and baseline, the accuracy that counts as 0 in `eval/core`, or None if it does not count.
    Raises ValueError if the folder holds no evaluation.
    """
    path = folder / TASKS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {TASKS_FILE}; evaluate the model into it first")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


# From likelihoods to samples.


@dataclass(frozen=True)
class Sample:
    """The contribution of one document or question to a score."""

    key: str
    id: str
    numerator: float
    """Bits, or the share of right answers: 1.0 or 0.0 for a single answer."""
    denominator: float
    """UTF-8 bytes, or 1.0."""
    tokens: int
    """Tokens scored, over all choices; 0 for generated answers."""
    picked: int | None
    gold: int | None
    group: str = ""
    cluster: str = ""
    """What errs with it (`Task.clusters`); empty: nothing else."""


def samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return the task's samples in the order of its requests; `likelihoods` are those of the requests.

    Raises ValueError if its kind is no `ScoredKind`.
    """
    kind = TASK_KINDS[task.kind]
    if not isinstance(kind, ScoredKind):
        raise ValueError(f"{task.key}: kind {task.kind} is answered in writing; see herd.llama3.evaluate.evaluate")
    items = []
    pairs = zip(task.requests, likelihoods, strict=True)
    for document, group in groupby(pairs, key=lambda pair: pair[0].document):
        choices = list(group)
        request, tokens = choices[0][0], sum(likelihood.tokens for _, likelihood in choices)
        numerator, denominator, picked = kind.outcome(choices, task.normalize)
        gold = None if picked is None else request.gold
        cluster = task.clusters.get(document, "")
        sizes = numerator, denominator, tokens
        items.append(Sample(request.task, document, *sizes, picked, gold, request.group, cluster))
    return items


def gold_key(key: str) -> str:
    """Return the name of the score that belongs to the accuracy `key`: `eval/gold_nll/arc` for `eval/arc`."""
    return f"{GOLD}/{key.removeprefix(PREFIX)}"


def gold_samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return nats and bytes of each question's gold continuation; `likelihoods` are those of the task's requests.

    It falls linearly in log compute while the accuracy of small models is still at chance, so the scaling forecast uses
    it (arXiv 2407.21783, section 3.2.1; per byte, so that languages and tokenizers compare). Empty for a task that is
    not answered by likelihood, or is bits per byte itself.
    """
    kind = TASK_KINDS[task.kind]
    if not isinstance(kind, ScoredKind) or kind.whole_texts:
        return []
    items, key = [], gold_key(task.key)
    pairs = zip(task.requests, likelihoods, strict=True)
    for document, group in groupby(pairs, key=lambda pair: pair[0].document):
        choices = list(group)
        request, likelihood = choices[choices[0][0].gold]
        nll, size, tokens = likelihood.nll, float(request.bytes), likelihood.tokens
        cluster = task.clusters.get(document, "")
        items.append(Sample(key, document, nll, size, tokens, None, request.gold, request.group, cluster))
    return items


def pass_at(k: int, right: int, answers: int) -> float:
    """Return the chance that `k` answers drawn without replacement from `answers`, `right` of them right, hold one.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= answers and 0 <= right <= answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {right} right in {answers}: needs 1 <= k <= answers and right <= answers")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


# From samples to scores.


def score_samples(task: Task, items: Sequence[Sample]) -> Score:
    """Return the task's score over its samples, with the standard error and interval that fit its kind.

    Bits per byte: the ratio's. One answer a question: Wilson's interval. Several answers a question, or the mean of
    groups: 1.96 standard errors, cut at 0 and 1. Questions without a sample were not judged; the value is NaN if none
    was.
    """
    numerators, denominators = [item.numerator for item in items], [item.denominator for item in items]
    clusters = [item.cluster for item in items]
    unit: str = "accuracy"
    better: Better = "higher"
    if not items:
        estimate = Estimate(math.nan, math.nan, math.nan, math.nan, 0)
    elif TASK_KINDS[task.kind].whole_texts:
        unit, better, estimate = BITS, "lower", ratio(numerators, denominators, clusters)
    elif task.average == "groups":
        estimate = group_mean(items)
    elif task.writing.samples > 1:
        estimate = _within(ratio(numerators, denominators, clusters))
    else:
        successes = sum(numerator == 1 for numerator in numerators)
        estimate = proportion(successes, len(items), cluster_effect(numerators, clusters))
    size = sum(denominators) if unit == BITS else 0
    total = Score.from_estimate(task.key, estimate, unit, better, task.digest, task.chance, size)
    return dataclasses.replace(total, shots=task.shots, version=task.version, unjudged=task.questions - len(items))


def group_mean(items: Sequence[Sample]) -> Estimate:
    """Return the mean of the groups' means of shares (`statistics.mean`), its interval within 0 and 1.

    Without any spread (all right, or all wrong) the interval is Wilson's of all items.
    """
    columns = ([getattr(item, name) for item in items] for name in ("numerator", "group", "cluster"))
    estimate = mean(*columns)
    if estimate.stderr == 0:
        flat = proportion(round(estimate.value * len(items)), len(items))
        return dataclasses.replace(estimate, low=flat.low, high=flat.high)
    return _within(estimate)


def _within(estimate: Estimate) -> Estimate:
    return dataclasses.replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))


def _ratio(items: Sequence[Sample]) -> Estimate:
    columns = ([getattr(item, name) for item in items] for name in ("numerator", "denominator", "cluster"))
    return ratio(*columns)


def gold_score(task: Task, items: Sequence[Sample]) -> Score:
    """Return nats per byte over all of `items`, which are the task's `gold_samples`."""
    estimate = _ratio(items)
    total = Score.from_estimate(gold_key(task.key), estimate, "nats per byte", "lower", task.digest, None)
    return dataclasses.replace(total, shots=task.shots, version=task.version)


def score_table(
    recipe: Recipe | None, tasks: Sequence[Task], by_task: Sequence[Sequence[Sample]], baselines: Mapping[str, float]
) -> tuple[dict[str, Score], list[Sample]]:
    """Return all scores by key, and the samples under the keys of the scores that have their own samples.

    `by_task` has the samples of each task; `baselines` the tasks that count in `eval/core`. `eval/bpb/<domain>` is
    bits of all documents over bytes of all, so long documents weigh more; `eval/bpb_macro` is the mean over documents;
    `eval/bpb_language/<language>` is over the prose in that language. A mean over nothing (no document, no task that
    counts) is left out.
    """
    by_key = dict(zip((task.key for task in tasks), by_task, strict=True))
    scores = {task.key: score_samples(task, by_key[task.key]) for task in tasks}
    all_samples = [item for task in tasks for item in by_key[task.key]]

    def add_bits_per_byte(key: str, items: list[Sample], requests: Sequence[Request]) -> None:
        estimate = _ratio(items)
        size = sum(request.bytes for request in requests)
        scores[key] = Score.from_estimate(key, estimate, BITS, "lower", requests_digest(requests), None, size)
        all_samples.extend(items)

    domains = [task for task in tasks if task.key.startswith(f"{BPB}/")]
    for task in domains:
        key = f"{MACRO}{task.key[len(BPB) :]}"
        macro = [
            dataclasses.replace(item, key=key, numerator=item.numerator / item.denominator, denominator=1.0)
            for item in by_key[task.key]
        ]
        add_bits_per_byte(key, macro, task.requests)
    prose = [task for task in domains if task.key in PROSE]
    items = [item for task in prose for item in by_key[task.key]]
    requests = [request for task in prose for request in task.requests]
    for language in sorted({item.group for item in items} - set(UNKNOWN)):
        key = f"{LANGUAGE}/{re.sub(r'[^a-z0-9_.-]', '-', language.lower())}"
        own = [dataclasses.replace(item, key=key) for item in items if item.group == language]
        add_bits_per_byte(key, own, [request for request in requests if request.group == language])
    for prefix in (BPB, MACRO) if domains else ():
        assert recipe is not None, "the mix by which domains are weighted"
        estimate = mean_bits_per_byte(recipe, {key: each.estimate for key, each in scores.items()}, prefix)
        size = sum(scores[task.key].bytes for task in domains)
        scores[prefix] = Score.from_estimate(prefix, estimate, BITS, "lower", _digest(domains), None, size)
    if counted := [task for task in tasks if task.key in baselines]:
        estimate = core_score([(scores[task.key].estimate, baselines[task.key]) for task in counted])
        total = Score.from_estimate(CORE, estimate, "share above chance", "higher", _digest(counted), 0.0)
        scores[CORE] = dataclasses.replace(total, unjudged=sum(scores[task.key].unjudged for task in counted))
    return scores, all_samples


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256("\n".join(task.digest for task in tasks).encode()).hexdigest()
