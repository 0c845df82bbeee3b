"""From samples to the table of scores: each task's own, and the means over documents, languages and tasks.

`eval/bpb/<domain>` is micro: bits of all documents over bytes of all, so long documents weigh more. `eval/bpb_macro` is
the mean over documents, each as one; `eval/bpb_language/<language>` is micro over the prose in that language. The
samples of these come from the same answers and are stored under their keys, so that two models are compared on them
sample by sample as on everything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from llama3.evaluate.samples import Sample, score
from llama3.evaluate.scores import Score
from llama3.evaluate.statistics import ratio
from llama3.evaluate.suites import BPB, CORE, core, overall
from llama3.evaluate.task import Request, Task, digest
from llama3.recipe.schema import Recipe

MACRO = "eval/bpb_macro"
LANGUAGE = "eval/bpb_language"
PROSE = (f"{BPB}/general", f"{BPB}/multilingual")
"""Tasks whose documents are in one language each; code and formulas are not counted as any."""
UNKNOWN = ("", "und")
_BITS = "bits per byte"


@dataclasses.dataclass(frozen=True)
class Part:
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
    parts = {task.key: Part(score(task, asked[task.key]), list(asked[task.key])) for task in tasks}
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


def _macro(task: Task, items: Sequence[Sample]) -> Part:
    """Return the mean over documents of bits per byte."""
    key = f"{MACRO}{task.key[len(BPB) :]}"
    made = [
        dataclasses.replace(item, key=key, numerator=item.numerator / item.denominator, denominator=1.0)
        for item in items
    ]
    return _ratio(key, made, task.requests)


def _languages(tasks: Sequence[Task], asked: Mapping[str, Sequence[Sample]]) -> dict[str, Part]:
    """Return bits per byte of the documents in each language, whatever their domain."""
    items = [item for task in tasks for item in asked[task.key]]
    requests = [request for task in tasks for request in task.requests]
    made = {}
    for language in sorted({item.group for item in items} - set(UNKNOWN)):
        key = f"{LANGUAGE}/{re.sub(r'[^a-z0-9_.-]', '-', language.lower())}"
        mine = [dataclasses.replace(item, key=key) for item in items if item.group == language]
        made[key] = _ratio(key, mine, [request for request in requests if request.group == language])
    return made


def _ratio(key: str, items: list[Sample], requests: Sequence[Request]) -> Part:
    estimate = ratio([item.numerator for item in items], [item.denominator for item in items])
    return Part(Score.of(key, estimate, _BITS, "lower", digest(requests), None), items)


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256("\n".join(task.digest for task in tasks).encode()).hexdigest()
