"""The tasks of a recipe, read and rendered, and the means over them.

A recipe names a suite (`evaluate.suite`) and tasks of its own (`evaluate.tasks`). Built-in tasks are made from the
run's held-out documents and from generated problems, so `quick` asks for no data. Where a data file is missing the
suite is refused, or its task is left out and named: a mean over other tasks than last time must not go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from llama3.data.demo.worked_problems import questions
from llama3.evaluate.held_out import ValidationDocument
from llama3.evaluate.render import Rendered, check_rows, render
from llama3.evaluate.requests import continuations, from_documents, from_questions, is_rendered, read_requests, stated
from llama3.evaluate.sandbox import NotContained, check_contained, why_not_contained
from llama3.evaluate.statistics import Estimate, normal, weighted_mean
from llama3.evaluate.task import Prompt, Request, Task
from llama3.evaluate.task_yaml import (
    TASK_NAME,
    MissingFile,
    Places,
    TaskFile,
    faults,
    file_sha256,
    parse_task,
    read_yaml,
)
from llama3.recipe.base import Section
from llama3.recipe.schema import Recipe
from storage.filesystem import is_local

# A suite as YAML: which tasks a model is put to, and which of them count in `eval/core`.
#
# Three ship with herd (`quick`, `core`, `full`); a user's own is a file that lists tasks by name or path, changed
# where wanted, and may include others. All of it is resolved from the recipe alone, before any work: what is
# misspelt, missing or written for another file is found in a second and not after a training run. What this gives
# up: tasks made by code.

LIBRARY = Path(__file__).parent / "library"
BuiltIn = Literal["bits", "arithmetic", "continuation", "needle"]
Model = TypeVar("Model", bound=Section)
YAML = (".yaml", ".yml")
QUESTION_LINES: dict[str, Any] = {
    "kind": "choice",
    "context": "{{ query.rstrip().removesuffix('Answer:').rstrip() }}",
    "choices": "choices",
    "gold": "gold",
    "before_answer": "\nAnswer: ",
}
"""What a JSON-lines file of questions (`query`, `choices`, `gold`) is, as a task."""


class Entry(Section):
    """A task of a suite, and what is different about it here: any field of the task, such as `shots: 5`."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)
    task: str
    """Name of a task of the library, or path of a YAML file or of a folder of rendered requests, from this file."""
    name: str | None = Field(default=None, alias="as", pattern=f"^{TASK_NAME}$")
    """What it is called here, so that one task may be listed twice."""


class SuiteFile(Section):
    version: int = Field(default=1, ge=1)
    include: list[str] = Field(default_factory=list)
    """Other suites, by name or path, whose tasks come first."""
    built_in: list[BuiltIn] = Field(default_factory=list)
    """Tasks made from the run's own documents and from generated problems."""
    tasks: list[str | Entry] = Field(default_factory=list)
    core: str | None = None
    """Table of baselines (name or path): its tasks count in `eval/core`, each above its baseline. None: that of an
    included suite, or else every task that has a chance level counts, above that."""


class Baselines(Section):
    version: int = Field(ge=1)
    """Raised with every change of a number: means by different versions are not compared."""
    baselines: dict[str, float]
    """Task -> accuracy that counts as 0."""


@dataclass(frozen=True)
class SuiteTask:
    """A task that a suite names, found but not read."""

    name: str
    made_of: TaskFile | Path
    """The task, or the folder of its rendered requests."""
    places: Places


@dataclass(frozen=True)
class Suite:
    name: str
    built_in: tuple[BuiltIn, ...]
    planned: tuple[SuiteTask, ...]
    table: str
    """Name of the table of baselines; empty: each task counts above its own chance."""
    baselines: Baselines | None


def read_suite(named: str, data: str | None, more: list[str], questions: int) -> Suite:
    """Return the suite called or stored at `named`, with the tasks `more` of a recipe; data files begin in `data`.

    JSON-lines files of questions among `more` are cut to `questions`. Raises ValueError for what cannot be read and
    for two tasks of one name.
    """
    path = _suite_path(named, Path())
    built_in, planned, table = _gathered(path, data, ())
    planned += [_more(text, data, questions) for text in more]
    taken: set[str] = {"bpb", "core", "bpb_macro", *built_in}
    for one in planned:
        if one.name in taken:
            raise ValueError(
                f"evaluate.tasks: {one.name!r} would be scored as 'eval/{one.name}', which is taken; rename one"
            )
        taken.add(one.name)
    baselines = _validated(Baselines, table) if table else None
    return Suite(named, tuple(dict.fromkeys(built_in)), tuple(planned), table.stem if table else "", baselines)


def library_tasks() -> list[str]:
    """Return the names of the tasks that ship with herd."""
    return sorted(path.stem for path in (LIBRARY / "tasks").glob("*.yaml"))


def planned_of(text: str, data: str | None) -> tuple[SuiteTask, ...]:
    """Return the tasks of the suite, or the one task, that `text` names: of the library, a YAML file or a folder."""
    return suite_named(text, data).planned


def suite_named(text: str, data: str | None) -> Suite:
    """Return the suite that `text` names, or one without a name of the one task that it names.

    A task is one of the library, a YAML file, a folder of rendered requests or a JSON-lines file of questions.
    """
    if Path(text).suffix in YAML:
        content = read_yaml(Path(text))
        is_suite = not (isinstance(content, dict) and "kind" in content)
    else:
        is_suite = (LIBRARY / "suites" / f"{text}.yaml").is_file()
    return read_suite(text, data, [], 0) if is_suite else Suite("", (), (_more(text, data, None),), "", None)


def find_task(text: str, beside: Path, data: str | None) -> SuiteTask:
    """Return the task called or stored at `text`: a name, a YAML file or a folder, as seen from the folder `beside`."""
    return _planned({"task": text}, beside, data, "evaluate.tasks")


def _gathered(
    path: Path, data: str | None, above: tuple[Path, ...]
) -> tuple[list[BuiltIn], list[SuiteTask], Path | None]:
    """Return built-in tasks, tasks and table of a suite and of those that it includes."""
    if path in above:
        raise ValueError(f"{path}: include: the suite includes itself; leave one out")
    file = _validated(SuiteFile, path)
    built_in: list[BuiltIn] = []
    planned: list[SuiteTask] = []
    table: Path | None = None
    for named in file.include:
        more, tasks, included = _gathered(_suite_path(named, path.parent), data, (*above, path))
        built_in, planned, table = built_in + more, planned + tasks, included or table
    entries = [entry.model_dump(by_alias=True) if isinstance(entry, Entry) else {"task": entry} for entry in file.tasks]
    planned += [_planned(entry, path.parent, data, str(path)) for entry in entries]
    return built_in + file.built_in, planned, _table(file.core, path.parent) if file.core else table


def _planned(entry: dict[str, Any], beside: Path, data: str | None, place: str) -> SuiteTask:
    changes = dict(entry)
    text, name = str(changes.pop("task")), changes.pop("as", None)
    path = beside / text
    if is_rendered(path):
        if changes or name:
            raise ValueError(f"{place}: {text}: is a folder of rendered requests, which cannot be changed here")
        return SuiteTask(stated(path)["key"].removeprefix("eval/"), path, Places(data))
    if Path(text).suffix not in YAML:
        path = LIBRARY / "tasks" / f"{text}.yaml"
        if not path.is_file():
            raise ValueError(
                f"{place}: {text!r} is no task of the library ({', '.join(library_tasks())}), no YAML file and no "
                "folder that herd requests wrote"
            )
    made = parse_task(_changed(read_yaml(path), name, changes), str(path))
    return SuiteTask(made.name, made, Places(data, path.parent))


def _changed(task: Any, name: str | None, changes: dict[str, Any]) -> Any:
    """Return the task with fields changed; `shots: 5` changes the count alone, `writing` what it names."""
    if not isinstance(task, dict):
        return task
    made = {**task, **({"name": name} if name else {})}
    for key, value in changes.items():
        before = made.get(key)
        before = {"count": before} if key == "shots" and isinstance(before, int) else before
        value = {"count": value} if key == "shots" and isinstance(value, int) else value
        made[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return made


def _more(text: str, data: str | None, questions: int | None) -> SuiteTask:
    path = Path(text)
    if path.suffix in YAML or not path.suffix or is_rendered(path):
        return find_task(text, Path(), data)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    if not re.fullmatch(TASK_NAME, name):
        raise ValueError(
            f"evaluate.tasks: {text}: {name!r} is not a metric name (a-z, 0-9, _, . and -); rename the file"
        )
    place = str(path.absolute()) if is_local(text) else text
    made = {**QUESTION_LINES, "name": name, "data": [place], "limit": questions}
    return SuiteTask(name, parse_task(made, f"evaluate.tasks: {text}"), Places(data))


def _suite_path(named: str, beside: Path) -> Path:
    if Path(named).suffix in YAML:
        return beside / named
    path = LIBRARY / "suites" / f"{named}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(suite.stem for suite in path.parent.glob("*.yaml")))
        raise ValueError(f"evaluate.suite: {named!r} is none of {known} and no YAML file; name one of them")
    return path


def _table(named: str, beside: Path) -> Path:
    return beside / named if Path(named).suffix in YAML else LIBRARY / "baselines" / f"{named}.yaml"


def _validated(model: type[Model], path: Path) -> Model:
    data = read_yaml(path)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(faults(error, str(path)))) from None


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
class LoadedSuite:
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


def asked_of(recipe: Recipe, documents: Sequence[ValidationDocument]) -> LoadedSuite:
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
    return LoadedSuite(suite, tasks, skipped, sources)


def rendered_task(planned: SuiteTask, most: int | None = None) -> Rendered:
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
) -> LoadedSuite:
    """Return the tasks of the suites and tasks called or stored at `named`, without a recipe.

    `most` caps the questions of each, `shots` replaces the solved examples of each. Built-in tasks of a suite that need
    a run's documents are left out. The suite of the result is the first one that was named, or has no name. Raises
    ValueError for what cannot be asked, or for two tasks of one name.
    """
    suites = [suite_named(text, data) for text in named]
    planned: dict[str, SuiteTask] = {}
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
    return LoadedSuite(first, tasks, skipped, sources)


def with_shots(planned: SuiteTask, count: int) -> SuiteTask:
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


def _built_in(recipe: Recipe, suite: Suite, documents: Sequence[ValidationDocument]) -> Iterator[Task]:
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


def _whole(domain: str, documents: Sequence[ValidationDocument]) -> tuple[Request, ...]:
    return tuple(from_documents(f"{BPB}/{domain}", (d for d in documents if d.domain == domain)))


def is_code(planned: SuiteTask) -> bool:
    """Return whether programs are run to judge the answers to a task."""
    made_of = planned.made_of
    return (stated(made_of)["kind"] if isinstance(made_of, Path) else made_of.kind) == "code"


def _input(planned: SuiteTask) -> str:
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


def _digest(planned: SuiteTask, name: str) -> str:
    try:
        return file_sha256(planned.places.uri(name))
    except MissingFile:
        return "missing"
