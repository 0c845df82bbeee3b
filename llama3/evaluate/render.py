"""Rows and templates become a task: every request or prompt as the text that a model will see.

Nothing here depends on time, chance or the order of a dictionary: equal files give equal requests, whose digest says
so. Examples are drawn per question by a hash of the question, so a question keeps its examples when others are added
to `limit`. What this gives up: all text of a task is in memory at once, about 50 MB for MMLU with five examples.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product

from llama3.evaluate.task import Kind, Prompt, Request, Task
from llama3.evaluate.task_yaml import FileKind, Places, Shots, TaskFile, read_bytes
from llama3.evaluate.templates import RenderedRow, check_templates, fill

KINDS: dict[FileKind, Kind] = {
    "choice": "choice",
    "letters": "choice",
    "schema": "choice",
    "cloze": "cloze",
    "rolling": "bits",
    "generate": "generate",
    "code": "code",
}
"""Kind of a task file -> how its requests are scored."""


@dataclass(frozen=True)
class Rendered:
    task: Task
    sources: dict[str, str]
    """Data file, as the task names it -> SHA-256 (hex) of its bytes."""


def render(file: TaskFile, places: Places, most: int | None = None) -> Rendered:
    """Return the task of `file` over its data files; `most` caps its `limit`.

    Raises MissingFile where a file is not there, and ValueError naming file, line and field for a row that cannot be
    asked, a wrong digest, or fewer examples than asked for.
    """
    questions, pool, sources = _read(file, places)
    kept = _limited(_named_apart(questions), min(filter(None, (file.limit, most)), default=None))
    examples = FewShotExamples(file.shots, pool, file.name)
    key = f"eval/{file.name}"
    fronts = ((question, _front(file, question, examples)) for question in kept)
    if file.kind in ("generate", "code"):
        prompts = tuple(_prompt(key, file, question, front) for question, front in fronts)
        return Rendered(_task(file, key, (), prompts), sources)
    requests = tuple(request for question, front in fronts for request in _requests(key, file, question, front))
    return Rendered(_task(file, key, requests, ()), sources)


def check_rows(file: TaskFile, places: Places, most: int | None) -> None:
    """Render the first `most` rows of each data file (None: all), without examples, and forget them.

    Raises as `render` does.
    """
    _read(file, places, most)


class FewShotExamples:
    """Solved examples, by the rules of `shots`."""

    def __init__(self, shots: Shots, pool: Sequence[RenderedRow], task: str) -> None:
        self._shots, self._task = shots, task
        self._by_group: dict[str, list[RenderedRow]] = {}
        for question in pool:
            self._by_group.setdefault(self._group(question), []).append(question)
        self._copies = Counter((self._group(question), _name(question)) for question in pool)

    def of(self, question: RenderedRow) -> list[str]:
        """Return the examples before `question`. Raises ValueError if there are too few."""
        wanted, group = self._shots.count, self._group(question)
        pool = self._by_group.get(group, [])
        there = len(pool) - self._copies[group, _name(question)]
        if there < wanted:
            of = f" of group {group!r}" if group else ""
            raise ValueError(
                f"{self._task}: shots.count: {wanted} are asked for and {there}{of} are there besides the question; "
                "lower it or give a larger shots.data"
            )
        places = range(len(pool)) if self._shots.choose == "first" else self._drawn(question, len(pool))
        others = (pool[place].shown for place in places if _name(pool[place]) != _name(question))
        return list(islice(others, wanted))

    def _group(self, question: RenderedRow) -> str:
        return question.group if self._shots.same_group else ""

    def _drawn(self, question: RenderedRow, size: int) -> Iterator[int]:
        """Yield places below `size` in an order drawn from seed and question, each once."""
        taken: set[int] = set()
        for turn in count():
            word = f"{self._shots.seed}\0{_name(question)}\0{turn}"
            place = int(hashlib.sha256(word.encode()).hexdigest()[:16], 16) % size
            if place not in taken:
                taken.add(place)
                yield place


def _read(
    file: TaskFile, places: Places, most: int | None = None
) -> tuple[list[RenderedRow], list[RenderedRow], dict[str, str]]:
    """Return the questions, what examples are drawn from, and the digest of every file."""
    check_templates(file)
    sources: dict[str, str] = {}
    by_name: dict[str, list[RenderedRow]] = {}
    for name in dict.fromkeys(file.files):
        uri, data, sources[name] = read_bytes(name, places, file.sha256.get(name, ""))
        by_name[name] = fill(file, uri, data, most)
    questions = [question for name in file.data for question in by_name[name]]
    pool = (by_name[file.shots.data] if file.shots.data else questions) if file.shots.count else []
    return questions, pool, sources


def _named_apart(questions: Iterable[RenderedRow]) -> list[RenderedRow]:
    """Return the questions, the second of two equal ones called `<id>-2`, and so on."""
    seen: Counter[str] = Counter()
    named = []
    for question in questions:
        seen[question.id] += 1
        again = seen[question.id]
        named.append(question if again == 1 else replace(question, id=f"{question.id}-{again}"))
    return named


def _name(question: RenderedRow) -> str:
    return question.id.partition("-")[0]


def _limited(questions: list[RenderedRow], most: int | None) -> list[RenderedRow]:
    if most is None or most >= len(questions):
        return questions
    kept = set(sorted(question.id for question in questions)[:most])
    return [question for question in questions if question.id in kept]


def _front(file: TaskFile, question: RenderedRow, examples: FewShotExamples) -> str:
    """Return all that stands before the question's own context."""
    return question.preamble + "".join(shown + file.between_shots for shown in examples.of(question))


def _requests(key: str, file: TaskFile, question: RenderedRow, front: str) -> Iterator[Request]:
    joint = "" if file.kind == "rolling" else file.joint
    before = [front + context + joint for context in question.contexts]
    for place, (whole, ending) in enumerate(product(before, question.continuations)):
        context = whole.rstrip(" ")
        joined = len(whole) - len(context)
        counted = joined if file.normalise == "characters" else None
        continuation = whole[len(context) :] + ending
        yield Request(key, question.id, place, context, continuation, question.gold, question.group, counted)


def _prompt(key: str, file: TaskFile, question: RenderedRow, front: str) -> Prompt:
    context = front + question.contexts[0] + file.joint.rstrip(" ")
    return Prompt(key, question.id, context, question.golds, question.tests, question.program, question.group)


def _task(file: TaskFile, key: str, requests: tuple[Request, ...], prompts: tuple[Prompt, ...]) -> Task:
    return Task(
        key,
        KINDS[file.kind],
        requests,
        prompts,
        version=file.version,
        shots=file.shots.count,
        guess=file.chance,
        normalise=file.normalise,
        average=file.average,
        writing=file.writing,
    )
