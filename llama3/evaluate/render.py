"""Render a task: data rows and templates become the text of every request or prompt.

Equal files give equal requests. Few-shot examples are drawn per question by a hash of the question, so a question keeps
its examples when `limit` grows. All text of a task is in memory at once, about 50 MB for MMLU with five examples.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise, product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from herd.llama3.evaluate.task import TASK_KINDS, Prompt, RenderedRow, Request, Task, WrittenKind
from herd.llama3.evaluate.task_yaml import DataPaths, Shots, TaskFile, read_bytes
from herd.llama3.evaluate.templates import check_templates, render_rows


@dataclass(frozen=True)
class Rendered:
    task: Task
    sources: dict[str, str]
    """Data file, as the task names it -> SHA-256 (hex) of its bytes."""


def render(file: TaskFile, data_paths: DataPaths, most: int | None = None) -> Rendered:
    """Return the task of `file` over its data files; `most` caps its `limit`.

    Raises MissingFile if a file does not exist, and ValueError naming file, line and field for a row that cannot be
    rendered, a wrong digest, or fewer examples than `shots.count`.
    """
    rows, pool, sources = _read(file, data_paths)
    seen: Counter[str] = Counter()
    questions = []
    for question in rows:  # the second of two equal questions gets the id `<id>-2`, and so on
        seen[question.id] += 1
        repeat = seen[question.id]
        questions.append(question if repeat == 1 else replace(question, id=f"{question.id}-{repeat}"))
    limit = min(filter(None, (file.limit, most)), default=None)
    if limit is not None and limit < len(questions):
        kept = set(sorted(question.id for question in questions)[:limit])
        questions = [question for question in questions if question.id in kept]
    examples = FewShotExamples(file.shots, pool, file.name)
    key = f"eval/{file.name}"
    requests: list[Request] = []
    prompts: list[Prompt] = []
    for question in questions:
        front = question.preamble + "".join(example + file.between_shots for example in examples.before(question))
        if isinstance(TASK_KINDS[file.kind], WrittenKind):
            context = front + question.contexts[0] + file.joint.rstrip(" ")
            prompts.append(
                Prompt(key, question.id, context, question.golds, question.tests, question.program, question.group)
            )
        else:
            requests += _requests(key, file, question, front)
    task = Task(
        key,
        file.kind,
        tuple(requests),
        tuple(prompts),
        version=file.version,
        shots=file.shots.count,
        guess=file.chance,
        normalize=file.normalize,
        average=file.average,
        writing=file.writing,
        clusters=passages({question.id: question.contexts[0] for question in questions}),
    )
    return Rendered(task, sources)


PASSAGE_CHARS = 100
"""Shared beginning of two questions from which they count as being about one passage."""


def passages(contexts: Mapping[str, str]) -> dict[str, str]:
    """Return question -> passage of the questions that share one, given the text of each.

    A passage is a common beginning, PASSAGE_CHARS longer than what a tenth of all questions have in common.
    """
    order = sorted(contexts, key=lambda name: (contexts[name], name))
    if len(order) < 3:
        return {}
    shared = np.array([_common(contexts[one], contexts[other]) for one, other in pairwise(order)])
    many = min(len(shared), max(20, len(order) // 10))
    of_many = sliding_window_view(shared, many).min(axis=1)  # what each `many` + 1 neighbors share
    padded = np.concatenate([of_many[:1].repeat(many - 1), of_many, of_many[-1:].repeat(many - 1)])
    usual = sliding_window_view(padded, many).max(axis=1)
    same = shared - usual >= PASSAGE_CHARS
    found: dict[str, str] = {}
    for place in np.flatnonzero(same).tolist():
        first = found.setdefault(order[place], order[place])
        found[order[place + 1]] = first
    return found


def _requests(key: str, file: TaskFile, question: RenderedRow, front: str) -> Iterator[Request]:
    """Yield one request per context and continuation; spaces between the two belong to the continuation."""
    contexts = [front + context + file.joint for context in question.contexts]
    for index, (whole, ending) in enumerate(product(contexts, question.continuations)):
        context = whole.rstrip(" ")
        joined = len(whole) - len(context)
        counted = joined if file.normalize == "characters" else None
        continuation = whole[len(context) :] + ending
        yield Request(key, question.id, index, context, continuation, question.gold, question.group, counted)


def check_rows(file: TaskFile, data_paths: DataPaths, most: int | None) -> None:
    """Render the first `most` rows of each data file (None: all), without examples, and discard them.

    Raises as `render` does.
    """
    _read(file, data_paths, most)


def _read(
    file: TaskFile, data_paths: DataPaths, most: int | None = None
) -> tuple[list[RenderedRow], list[RenderedRow], dict[str, str]]:
    """Return the questions, the pool of few-shot examples, and the digest of every file."""
    check_templates(file)
    sources: dict[str, str] = {}
    by_name: dict[str, list[RenderedRow]] = {}
    for name in dict.fromkeys(file.files):
        uri, data, sources[name] = read_bytes(name, data_paths, file.sha256.get(name, ""))
        by_name[name] = render_rows(file, uri, data, most)
    questions = [question for name in file.data for question in by_name[name]]
    pool = (by_name[file.shots.data] if file.shots.data else questions) if file.shots.count else []
    return questions, pool, sources


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    length = min(len(one), len(other))
    same = np.array(list(one[:length])) == np.array(list(other[:length]))
    return length if same.all() else int(same.argmin())


class FewShotExamples:
    """Solved examples, chosen by the rules of `shots`."""

    def __init__(self, shots: Shots, pool: Sequence[RenderedRow], task: str) -> None:
        self._shots, self._task = shots, task
        self._by_group: dict[str, list[RenderedRow]] = {}
        for question in pool:
            self._by_group.setdefault(self._group(question), []).append(question)
        self._copies = Counter((self._group(question), _text_hash(question)) for question in pool)

    def before(self, question: RenderedRow) -> list[str]:
        """Return the examples before `question`. Raises ValueError if there are too few."""
        shots, group, own_hash = self._shots.count, self._group(question), _text_hash(question)
        pool = self._by_group.get(group, [])
        available = len(pool) - self._copies[group, own_hash]
        if available < shots:
            of_group = f" of group {group!r}" if group else ""
            raise ValueError(
                f"{self._task}: shots.count: {shots} are asked for and {available}{of_group} are there besides the "
                "question; lower it or give a larger shots.data"
            )
        order = range(len(pool)) if self._shots.choose == "first" else self._drawn(own_hash, len(pool))
        examples = (pool[index].example for index in order if _text_hash(pool[index]) != own_hash)
        return list(islice(examples, shots))

    def _group(self, question: RenderedRow) -> str:
        return question.group if self._shots.same_group else ""

    def _drawn(self, text_hash: str, size: int) -> Iterator[int]:
        """Yield the indices below `size` in an order drawn from seed and question, each once."""
        drawn: set[int] = set()
        for turn in count():
            word = f"{self._shots.seed}\0{text_hash}\0{turn}"
            index = int(hashlib.sha256(word.encode()).hexdigest()[:16], 16) % size
            if index not in drawn:
                drawn.add(index)
                yield index


def _text_hash(question: RenderedRow) -> str:
    """Return the id without the suffix of a repeat."""
    return question.id.partition("-")[0]
