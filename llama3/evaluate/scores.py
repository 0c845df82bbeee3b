"""The score table: what an evaluation hands to the gate, the tracker and the report; and the files beside it.

Every score carries its spread, size, chance level, direction and the digest of the requests it was measured on, so a
reader needs nothing else to compare two of them. One Parquet file, one row per score.
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

from llama3.evaluate.statistics import Estimate, Z, mean, proportion, ratio
from llama3.evaluate.suite import BPB, CORE, core, overall
from llama3.evaluate.task import Normalise, Request, Task, digest
from llama3.recipe.schema import Recipe

SCORES_FILE = "scores.parquet"
SAMPLES_FILE = "samples.parquet"
GENERATIONS_FILE = "generations.json"
TASKS_FILE = "tasks.json"
"""What was asked (kind, version, shots, digest, sources), what counts in `eval/core`, what was left out and why."""

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Score:
    """One number about a model."""

    key: str
    """`eval/bpb/math`, `eval/arithmetic`, ...; also the name of the tracked metric."""
    value: float
    stderr: float
    """Standard error of `value` over documents or questions; NaN where there are fewer than two."""
    low: float
    high: float
    """Ends of the 95 % interval."""
    n: int
    """Documents or questions."""
    chance: float | None
    """What guessing scores, or None where guessing has no meaning."""
    unit: str
    """`bits per byte`, `accuracy`, `share above chance`."""
    better: Better
    requests: str
    """Digest of what was asked; two scores with different digests were measured on different text."""
    shots: int = 0
    """Solved examples before each question."""
    version: int = 1
    """Of the task."""
    unjudged: int = 0
    """Questions that are not among `n` because an answer could not be judged: neither right nor wrong."""

    @classmethod
    def of(cls, key: str, estimate: Estimate, unit: str, better: Better, requests: str, chance: float | None) -> Score:
        """Return the score called `key` whose value and spread are `estimate`."""
        return cls(key=key, unit=unit, better=better, requests=requests, chance=chance, **dataclasses.asdict(estimate))

    @property
    def half(self) -> float:
        """Half the width of the published interval, 1.96 sqrt(S (1 - S) / N) for a share (arXiv 2407.21783, 5.1)."""
        return Z * self.stderr

    def interval(self, form: str = ".4g") -> str:
        """Return the 95 % interval as people read it; nothing where one document gives none."""
        return f"{self.low:{form}} to {self.high:{form}}" if math.isfinite(self.stderr) else ""

    @property
    def estimate(self) -> Estimate:
        """Value and spread alone."""
        return Estimate(self.value, self.stderr, self.low, self.high, self.n)


Scores = Mapping[str, Score]

_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.float64()),
        ("stderr", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("n", pa.int64()),
        ("chance", pa.float64()),
        ("unit", pa.string()),
        ("better", pa.string()),
        ("requests", pa.string()),
        ("shots", pa.int64()),
        ("version", pa.int64()),
        ("unjudged", pa.int64()),
    ]
)


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
    return {row["key"]: Score(**{**row, "unjudged": row["unjudged"] or 0}) for row in rows}


def read_asked(folder: Path) -> dict[str, Any]:
    """Return what the evaluation in `folder` asked: `suite`, `baselines`, `tasks` and `skipped` ({task: why}).

    A task has key, kind, version, shots, n, chance, average (`items` or `groups`), digest, sources ({file: SHA-256})
    and baseline, the accuracy that counts as 0 in `eval/core`, or None where it does not count.
    Raises ValueError if the folder holds no evaluation.
    """
    path = folder / TASKS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {TASKS_FILE}; evaluate the model into it first")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


# What a model says of a continuation: how likely it is. Apart from `scoring`, since reading scores needs no torch.


@dataclass(frozen=True)
class Likelihood:
    nats: float
    tokens: int
    greedy: bool | None = None
    """Whether every scored token is the model's likeliest; None where it was not asked for."""


# How answers become samples, and samples a score.
#
# Bits per byte of whole texts compares models with different tokenizers and moves smoothly while a model learns. A
# multiple choice is answered by the choice with the fewest nats per byte (or what the task divides by) of its
# scored text; noisy on small models, so it may veto a promotion and should not decide one.
#
# A sample is a numerator and a denominator (bits and bytes; 1 or 0 and 1), so a score is a ratio of sums over its
# samples (or the mean of that ratio over groups) and any two models are compared sample by sample.


@dataclass(frozen=True)
class Sample:
    """What one document or question adds to a score."""

    key: str
    id: str
    numerator: float
    """Bits, or the share of right answers: 1.0 or 0.0 where there is one answer."""
    denominator: float
    """UTF-8 bytes, or 1.0."""
    tokens: int
    """Tokens scored, over all choices; 0 where the model writes."""
    picked: int | None
    gold: int | None
    group: str = ""


def samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return the task's samples in the order of its requests; `likelihoods` are those of the requests."""
    pairs = zip(task.requests, likelihoods, strict=True)
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].document)]
    match task.kind:
        case "bits":
            return [_bits(group) for group in groups]
        case "choice":
            return [_answer(group, task.normalise) for group in groups]
        case "cloze":
            return [_cloze(group) for group in groups]
        case _:
            raise ValueError(f"{task.key}: kind {task.kind} is answered in writing; see llama3.evaluate.answers")


def score(task: Task, items: Sequence[Sample]) -> Score:
    """Return the task's score over its samples, with the standard error and interval that fit its kind.

    Bits per byte: the ratio's. One answer a question: Wilson's interval. Several answers a question, or the mean of
    groups: 1.96 standard errors, cut at 0 and 1. Questions without a sample were not judged; the value is NaN if all.
    """
    if not items:
        nothing = Estimate(math.nan, math.nan, math.nan, math.nan, 0)
        made = Score.of(task.key, nothing, "accuracy", "higher", task.digest, task.chance)
        return dataclasses.replace(made, shots=task.shots, version=task.version, unjudged=task.questions)
    numerators, denominators = [item.numerator for item in items], [item.denominator for item in items]
    if task.kind == "bits":
        unit, better, estimate = "bits per byte", "lower", ratio(numerators, denominators)
    elif task.average == "groups":
        unit, better, estimate = "accuracy", "higher", group_mean(items)
    elif task.writing.samples > 1:
        unit, better, estimate = "accuracy", "higher", _within(ratio(numerators, denominators))
    else:
        right = sum(numerator == 1 for numerator in numerators)
        unit, better, estimate = "accuracy", "higher", proportion(right, len(items))
    made = Score.of(task.key, estimate, unit, "lower" if better == "lower" else "higher", task.digest, task.chance)
    return dataclasses.replace(made, shots=task.shots, version=task.version, unjudged=task.questions - len(items))


def group_mean(items: Sequence[Sample]) -> Estimate:
    """Return the mean of the groups' means of shares (`statistics.mean`), its interval within 0 and 1.

    Without any spread (all right, or all wrong) the interval is Wilson's of all items.
    """
    found = mean([item.numerator for item in items], [item.group for item in items])
    if found.stderr == 0:
        flat = proportion(round(found.value * len(items)), len(items))
        return dataclasses.replace(found, low=flat.low, high=flat.high)
    return _within(found)


def pass_at(k: int, right: int, answers: int) -> float:
    """Return the chance that `k` answers drawn without replacement from `answers`, `right` of them right, hold one.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= answers and 0 <= right <= answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {right} right in {answers}: needs 1 <= k <= answers and right <= answers")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def _within(estimate: Estimate) -> Estimate:
    return dataclasses.replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))


def _bits(group: Sequence[tuple[Request, Likelihood]]) -> Sample:
    ((request, likelihood),) = group
    bits = likelihood.nats / math.log(2)
    size, name = float(request.bytes), request.document
    return Sample(request.task, name, bits, size, likelihood.tokens, None, None, request.group)


def _cloze(group: Sequence[tuple[Request, Likelihood]]) -> Sample:
    ((request, likelihood),) = group
    assert likelihood.greedy is not None, f"{request.task}: score_requests was not asked whether tokens are greedy"
    right = float(likelihood.greedy)
    return Sample(request.task, request.document, right, 1.0, likelihood.tokens, None, None, request.group)


def _answer(group: Sequence[tuple[Request, Likelihood]], normalise: Normalise) -> Sample:
    rates = [likelihood.nats / _size(request, likelihood, normalise) for request, likelihood in group]
    request = group[0][0]
    picked = min(range(len(rates)), key=rates.__getitem__)
    tokens = sum(likelihood.tokens for _, likelihood in group)
    right = float(picked == request.gold)
    return Sample(request.task, request.document, right, 1.0, tokens, picked, request.gold, request.group)


def _size(request: Request, likelihood: Likelihood, normalise: Normalise) -> int:
    match normalise:
        case "bytes":
            return request.bytes
        case "characters":
            return request.characters
        case "tokens":
            return likelihood.tokens
        case _:
            return 1


# From samples to the table of scores: each task's own, and the means over documents, languages and tasks.
#
# `eval/bpb/<domain>` is micro: bits of all documents over bytes of all, so long documents weigh more.
# `eval/bpb_macro` is the mean over documents, each as one; `eval/bpb_language/<language>` is micro over the prose
# in that language. The samples of these come from the same answers and are stored under their keys, so that two
# models are compared on them sample by sample as on everything else.

MACRO = "eval/bpb_macro"
LANGUAGE = "eval/bpb_language"
PROSE = (f"{BPB}/general", f"{BPB}/multilingual")
"""Tasks whose documents are in one language each; code and formulas are not counted as any."""
UNKNOWN = ("", "und")
_BITS = "bits per byte"


@dataclasses.dataclass(frozen=True)
class ScorePart:
    """One score and what it was made from."""

    score: Score
    samples: list[Sample]


def score_table(
    recipe: Recipe | None, tasks: Sequence[Task], by_task: Sequence[Sequence[Sample]], baselines: Mapping[str, float]
) -> tuple[dict[str, Score], list[Sample]]:
    """Return all scores by key, and the samples under the keys of the scores that have samples of their own.

    `by_task` has the samples of each task; `baselines` the tasks that count in `eval/core`. A mean over nothing (no
    document, no task that counts) is left out.
    """
    asked = dict(zip((task.key for task in tasks), by_task, strict=True))
    parts = {task.key: ScorePart(score(task, asked[task.key]), list(asked[task.key])) for task in tasks}
    domains = [task for task in tasks if task.key.startswith(f"{BPB}/")]
    parts |= {f"{MACRO}{task.key[len(BPB) :]}": _macro(task, asked[task.key]) for task in domains}
    parts |= _languages([task for task in domains if task.key in PROSE], asked)
    scores = {key: part.score for key, part in parts.items()}
    for prefix in (BPB, MACRO) if domains else ():
        assert recipe is not None, "the mix by which domains are weighted"
        mean = overall(recipe, {key: made.estimate for key, made in scores.items()}, prefix)
        scores[prefix] = Score.of(prefix, mean, _BITS, "lower", _digest(domains), None)
    if counted := [task for task in tasks if task.key in baselines]:
        centred = core([(scores[task.key].estimate, baselines[task.key]) for task in counted])
        made = Score.of(CORE, centred, "share above chance", "higher", _digest(counted), 0.0)
        scores[CORE] = dataclasses.replace(made, unjudged=sum(scores[task.key].unjudged for task in counted))
    return scores, [sample for part in parts.values() for sample in part.samples]


def _macro(task: Task, items: Sequence[Sample]) -> ScorePart:
    """Return the mean over documents of bits per byte."""
    key = f"{MACRO}{task.key[len(BPB) :]}"
    made = [
        dataclasses.replace(item, key=key, numerator=item.numerator / item.denominator, denominator=1.0)
        for item in items
    ]
    return _ratio(key, made, task.requests)


def _languages(tasks: Sequence[Task], asked: Mapping[str, Sequence[Sample]]) -> dict[str, ScorePart]:
    """Return bits per byte of the documents in each language, whatever their domain."""
    items = [item for task in tasks for item in asked[task.key]]
    requests = [request for task in tasks for request in task.requests]
    made = {}
    for language in sorted({item.group for item in items} - set(UNKNOWN)):
        key = f"{LANGUAGE}/{re.sub(r'[^a-z0-9_.-]', '-', language.lower())}"
        mine = [dataclasses.replace(item, key=key) for item in items if item.group == language]
        made[key] = _ratio(key, mine, [request for request in requests if request.group == language])
    return made


def _ratio(key: str, items: list[Sample], requests: Sequence[Request]) -> ScorePart:
    estimate = ratio([item.numerator for item in items], [item.denominator for item in items])
    return ScorePart(Score.of(key, estimate, _BITS, "lower", digest(requests), None), items)


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256("\n".join(task.digest for task in tasks).encode()).hexdigest()


PREFIX = "eval/"


GOLD = f"{PREFIX}gold_nll"


def gold_key(key: str) -> str:
    """Return the name of the score that goes with the accuracy `key`: `eval/gold_nll/arc` for `eval/arc`."""
    return f"{GOLD}/{key.removeprefix(PREFIX)}"


def gold_samples(task: Task, likelihoods: Sequence[Likelihood]) -> list[Sample]:
    """Return nats over bytes of each question's gold continuation; `likelihoods` are those of the task's requests.

    None for a task that is not answered by likelihood, or that is bits per byte already.
    """
    if task.kind not in ("choice", "cloze"):
        return []
    found = []
    pairs = zip(task.requests, likelihoods, strict=True)
    for document, group in groupby(pairs, key=lambda pair: pair[0].document):
        choices = list(group)
        request, likelihood = choices[choices[0][0].gold]
        found.append(
            Sample(
                key=gold_key(task.key),
                id=document,
                numerator=likelihood.nats,
                denominator=float(request.bytes),
                tokens=likelihood.tokens,
                picked=None,
                gold=request.gold,
                group=request.group,
            )
        )
    return found


def gold_score(task: Task, items: Sequence[Sample]) -> Score:
    """Return nats per byte over all of `items`, which are the task's `gold_samples`."""
    estimate = ratio([item.numerator for item in items], [item.denominator for item in items])
    made = Score.of(gold_key(task.key), estimate, "nats per byte", "lower", task.digest, None)
    return dataclasses.replace(made, shots=task.shots, version=task.version)
