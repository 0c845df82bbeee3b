"""The tasks of a recipe, read and rendered, and the means over them.

A recipe names a suite (`evaluate.suite`) and tasks of its own (`evaluate.tasks`). Built-in tasks are made from the
run's held-out documents and from generated problems, so `quick` asks for no data. Where a data file is missing the
suite is refused, or its task is left out and named: a mean over other tasks than last time must not go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from llama3.data.worked_problems import questions
from llama3.evaluate.data_rows import MissingFile, file_sha256
from llama3.evaluate.held_out import Document
from llama3.evaluate.render import Rendered, check_rows, render
from llama3.evaluate.request_files import read_requests, stated
from llama3.evaluate.requests import continuations, from_documents, from_questions
from llama3.evaluate.sandbox import NotContained, check_contained, why_not_contained
from llama3.evaluate.statistics import Estimate, normal, weighted_mean
from llama3.evaluate.suite_file import Planned, Suite, read_suite, suite_named
from llama3.evaluate.task import Prompt, Request, Task
from llama3.evaluate.task_file import parse_task
from llama3.recipe.schema import Recipe

BPB = "eval/bpb"
CORE = "eval/core"
ARITHMETIC = "eval/arithmetic"
CONTINUATION = "eval/continuation"
QUESTION_SEED = 0
"""Seed of the generated questions: not the recipe's, so that all models answer the same ones."""
LEFT_OUT = (MissingFile, NotContained)
"""Why a task can be left out where `evaluate.missing` is `skip`."""
ARITHMETIC_QUESTIONS = 100
"""Generated questions where no recipe says how many."""
LOOKED_AT = 20
"""Rows of each data file that a check looks at."""


@dataclass(frozen=True)
class Asked:
    """What a model is put to."""

    suite: Suite
    tasks: list[Task]
    skipped: dict[str, str]
    """Task that was left out -> why."""
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    """Key of a task -> its data files with their SHA-256."""

    def baselines(self) -> dict[str, float]:
        """Return the tasks that count in `eval/core`, by key, with the accuracy that counts as 0."""
        chances = {task.key: task.chance for task in self.tasks if task.chance is not None}
        if self.suite.baselines is None:
            return chances
        table = {f"eval/{name}": baseline for name, baseline in self.suite.baselines.baselines.items()}
        return {key: table[key] for key in chances if key in table}


def suite_for(recipe: Recipe, name: str) -> str:
    """Return the suite for the model of the stage `name`, or for the `champion`."""
    judged = name in (recipe.stages[-1].name, "champion")
    return (recipe.evaluate.final if judged else None) or recipe.evaluate.suite


def under(recipe: Recipe, suite: str) -> Recipe:
    """Return `recipe` with another suite."""
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"suite": suite})})


def check_suite(recipe: Recipe, rows: int | None = LOOKED_AT) -> list[str]:
    """Return a line for each task that will be left out, after a look at every file and the first `rows` of each.

    None, before a run: all rows, and whether this machine contains programs. Raises ValueError, one line per fault, for
    what cannot be asked: a task or suite that is not there or not valid, a wrong digest, rows that do not fit the
    templates, and unless `evaluate.missing` is `skip` a missing data file or a machine that cannot run code.
    """
    missing, wrong = _unreadable(suite_of(recipe), rows)
    skip, section = recipe.evaluate.missing == "skip", recipe.evaluate
    if section.data is None and any("evaluate.data" in why for why in missing.values()) and not skip:
        wrong.append(
            f"evaluate.data: is not set, and suite {section.suite} reads files of it for {', '.join(missing)}; "
            "name the folder of published sets, or set evaluate.missing to skip"
        )
    elif not skip:
        wrong += [f"{name}: {why}" for name, why in missing.items()]
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return [f"{name}: {why.partition(';')[0]}" for name, why in missing.items()]


def _unreadable(suite: Suite, rows: int | None) -> tuple[dict[str, str], list[str]]:
    """Return the tasks that can be left out, with why, and what is wrong with others."""
    missing: dict[str, str] = {}
    wrong: list[str] = []
    for planned in suite.planned:
        try:
            if rows is None and is_code(planned):
                check_contained()
            if isinstance(planned.made_of, Path):
                read_requests(planned.made_of)
            else:
                check_rows(planned.made_of, planned.places, rows)
        except LEFT_OUT as error:
            missing[planned.name] = str(error)
        except ValueError as error:
            wrong.append(str(error))
    return missing, wrong


def suite_of(recipe: Recipe) -> Suite:
    """Return the suite that `recipe` asks for. Raises ValueError if it, or one of its tasks, cannot be read."""
    section = recipe.evaluate
    return read_suite(section.suite, section.data, section.tasks, section.questions)


def suite_inputs(recipe: Recipe) -> dict[str, str]:
    """Return digests of what the scores stand on besides model and documents: built-in tasks, baselines, each task.

    That of a task covers its data; a file that is not there has the digest `missing`, a task whose programs cannot run
    here `not contained`. Raises as `suite_of` does.
    """
    suite = suite_of(recipe)
    table = suite.baselines.model_dump(mode="json") if suite.baselines else None
    tasks = {f"task.{planned.name}": _input(planned) for planned in suite.planned}
    return {"suite": _sha256([suite.built_in, table]), **tasks}


def asked_of(recipe: Recipe, documents: Sequence[Document]) -> Asked:
    """Return the tasks of the recipe's suite: built-in ones first, then those of files, each with its requests.

    A built-in task without any request (too few documents for continuations) is left out. Raises ValueError as
    `check_suite` does, for all rows.
    """
    suite, skipped, sources = suite_of(recipe), {}, {}
    tasks = [task for task in _built_in(recipe, suite, documents) if task.requests]
    for planned in suite.planned:
        try:
            if is_code(planned):
                check_contained()
            rendered = rendered_task(planned)
        except LEFT_OUT as error:
            if recipe.evaluate.missing == "refuse":
                raise
            skipped[planned.name] = str(error).partition(";")[0]
            continue
        tasks.append(rendered.task)
        sources[rendered.task.key] = rendered.sources
    return Asked(suite, tasks, skipped, sources)


def rendered_task(planned: Planned, most: int | None = None) -> Rendered:
    """Return a task with its requests, at most those of `most` questions: rendered, or read if it was before."""
    if isinstance(planned.made_of, Path):
        return _cut(read_requests(planned.made_of), most)
    return render(planned.made_of, planned.places, most)


def asked_for(
    named: Sequence[str],
    data: str | None,
    most: int | None = None,
    shots: int | None = None,
    missing: Literal["refuse", "skip"] = "refuse",
) -> Asked:
    """Return the tasks of the suites and tasks called or stored at `named`, without a recipe.

    `most` caps the questions of each, `shots` replaces the solved examples of each. Built-in tasks of a suite that need
    a run's documents are left out. The suite of the result is the first one that was named, or has no name. Raises
    ValueError for what cannot be asked, or for two tasks of one name.
    """
    suites = [suite_named(text, data) for text in named]
    planned: dict[str, Planned] = {}
    for one in (one for suite in suites for one in suite.planned):
        if planned.setdefault(one.name, one) != one:
            raise ValueError(f"{one.name}: two tasks are called so; rename one, or evaluate them one after the other")
    built_in: list[str] = [name for suite in suites for name in suite.built_in]
    skipped: dict[str, str] = dict.fromkeys(built_in, "needs the held-out documents of a run, which has the score")
    tasks, sources = [], {}
    if skipped.pop("arithmetic", None):
        tasks.append(_arithmetic(most or ARITHMETIC_QUESTIONS))
    for one in planned.values():
        try:
            if is_code(one):
                check_contained()
            rendered = rendered_task(one if shots is None else with_shots(one, shots), most)
        except LEFT_OUT as error:
            if missing == "refuse":
                raise type(error)(str(error).replace("set evaluate.missing to", "give --missing")) from None
            skipped[one.name] = str(error).partition(";")[0]
            continue
        tasks.append(rendered.task)
        sources[rendered.task.key] = rendered.sources
    first = next((suite for suite in suites if suite.name), Suite("", (), (), "", None))
    return Asked(first, tasks, skipped, sources)


def with_shots(planned: Planned, count: int) -> Planned:
    """Return a task with `count` solved examples. Raises ValueError if it cannot have any."""
    if isinstance(planned.made_of, Path):
        raise ValueError(f"{planned.name}: is a folder of rendered requests, whose shots cannot be changed")
    task = planned.made_of.model_dump(exclude_unset=True)
    task["shots"] = {**task.get("shots", {}), "count": count}
    return replace(planned, made_of=parse_task(task, planned.name))


def _cut(rendered: Rendered, most: int | None) -> Rendered:
    """Return the questions with the smallest ids, as `render` chooses them."""
    task = rendered.task
    if most is None or task.questions <= most:
        return rendered
    asked: tuple[Request | Prompt, ...] = task.requests or task.prompts
    kept = set(sorted({one.document for one in asked})[:most])
    requests = tuple(one for one in task.requests if one.document in kept)
    prompts = tuple(one for one in task.prompts if one.document in kept)
    return Rendered(replace(task, requests=requests, prompts=prompts), rendered.sources)


def overall(recipe: Recipe, parts: Mapping[str, Estimate], prefix: str = BPB) -> Estimate:
    """Return `eval/bpb` from `eval/bpb/<domain>`: their mean by the first stage's mix.

    The shares of the domains present are scaled to sum to 1. Also averages differences of two models, and what else is
    called `<prefix>/<domain>`.
    """
    shares = recipe.first_mix
    weights = [float(share) for domain, share in shares.items() if f"{prefix}/{domain}" in parts]
    return weighted_mean([parts[f"{prefix}/{domain}"] for domain in shares if f"{prefix}/{domain}" in parts], weights)


def core(accuracies: Sequence[tuple[Estimate, float]]) -> Estimate:
    """Return `eval/core`: the mean over tasks of (accuracy - baseline) / (1 - baseline), each given with its baseline.

    DCLM (arXiv 2406.11794) calls this the centred accuracy: 0 is guessing, 1 is perfect, below 0 is possible.
    """
    centred = [normal((part.value - base) / (1 - base), part.stderr / (1 - base), part.n) for part, base in accuracies]
    return weighted_mean(centred, [1.0] * len(centred))


def _built_in(recipe: Recipe, suite: Suite, documents: Sequence[Document]) -> Iterator[Task]:
    count = recipe.evaluate.questions
    if "bits" in suite.built_in:
        for domain in sorted({document.domain for document in documents}):
            yield Task(f"{BPB}/{domain}", "bits", _whole(domain, documents))
    if "arithmetic" in suite.built_in:
        yield _arithmetic(count)
    if "continuation" in suite.built_in:
        yield Task(CONTINUATION, "choice", tuple(continuations(CONTINUATION, documents, count)))


def _arithmetic(count: int) -> Task:
    return Task(ARITHMETIC, "choice", tuple(from_questions(ARITHMETIC, questions(QUESTION_SEED, count))))


def _whole(domain: str, documents: Sequence[Document]) -> tuple[Request, ...]:
    return tuple(from_documents(f"{BPB}/{domain}", (d for d in documents if d.domain == domain)))


def is_code(planned: Planned) -> bool:
    """Return whether programs are run to judge the answers to a task."""
    made_of = planned.made_of
    return (stated(made_of)["kind"] if isinstance(made_of, Path) else made_of.kind) == "code"


def _input(planned: Planned) -> str:
    if is_code(planned) and why_not_contained():
        return "not contained"
    if isinstance(planned.made_of, Path):
        return str(stated(planned.made_of)["digest"])
    task = planned.made_of.model_dump(mode="json")
    names = dict.fromkeys(planned.made_of.files)
    files = {name: _digest(planned, name) for name in names}
    return _sha256([{**task, "data": None}, list(files.values())])


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(planned: Planned, name: str) -> str:
    try:
        return file_sha256(planned.places.uri(name))
    except MissingFile:
        return "missing"
