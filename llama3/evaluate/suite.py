"""Suites: which tasks a model is evaluated on, read from YAML and rendered, and the means over tasks.

A recipe names a suite (`evaluate.suite`) and its own tasks (`evaluate.tasks`). The suites of `library/suites` ship with
herd; a user's own is a YAML file. All of it is resolved from the recipe alone, before any work. Built-in tasks use the
run's held-out documents and generated questions, so `quick` needs no data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from jinja2 import Environment, meta
from pydantic import ConfigDict, Field, ValidationError

from herd.llama3.data.demo.word_problems import questions
from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.evaluate.render import Rendered, check_rows, render
from herd.llama3.evaluate.requests import (
    continuation_questions,
    document_requests,
    is_rendered,
    question_requests,
    read_requests,
    read_task_json,
)
from herd.llama3.evaluate.sandbox import SandboxUnavailable, check_sandbox, sandbox_error
from herd.llama3.evaluate.task import TASK_KINDS, ChoiceKind, Prompt, Request, RollingKind, Task
from herd.llama3.evaluate.task_yaml import (
    TASK_NAME,
    DataPaths,
    MissingFile,
    TaskFile,
    file_sha256,
    parse_task,
    validation_errors,
)
from herd.llama3.recipe.base import FrozenModel, read_yaml
from herd.llama3.recipe.data_schema import Benchmark
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import Estimate, normal, weighted_mean
from herd.storage.filesystem import is_local, list_files

BPB = "eval/bpb"
RESPONSES = "eval/sft/bpb"
CORE = "eval/core"
ARITHMETIC = "eval/arithmetic"
CONTINUATION = "eval/continuation"
LIBRARY = Path(__file__).parent / "library"
YAML = (".yaml", ".yml")
QUESTION_SEED = 0
"""Seed of the generated questions: not the recipe's, so that all models answer the same ones."""
ARITHMETIC_QUESTIONS = 100
"""Generated questions if no recipe gives a number."""
CHECKED_ROWS = 20
"""Rows of each data file that a check renders."""
LEFT_OUT = (MissingFile, SandboxUnavailable)
"""Errors for which a task is left out if `evaluate.on_missing_data` is `skip`."""
QUESTION_LINES: dict[str, Any] = {
    "kind": ChoiceKind.name,
    "context": "{{ query.rstrip().removesuffix('Answer:').rstrip() }}",
    "choices": "choices",
    "gold": "gold",
    "before_answer": "\nAnswer: ",
}
"""The task fields of a JSON-lines file of questions (`query`, `choices`, `gold`)."""
BuiltIn = Literal["bits", "arithmetic", "continuation", "needle"]
Model = TypeVar("Model", bound=FrozenModel)


class SuiteEntry(FrozenModel):
    """A task of a suite, and the fields of the task that it changes, such as `shots: 5`."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)
    task: str
    """Name of a task of the library, or path of a YAML file or of a folder of rendered requests, from this file."""
    name: str | None = Field(default=None, alias="as", pattern=f"^{TASK_NAME}$")
    """Name in this suite, so that one task may be listed twice."""


class SuiteFile(FrozenModel):
    version: int = Field(default=1, ge=1)
    include: list[str] = Field(default_factory=list)
    """Other suites, by name or path, whose tasks come first."""
    built_in: list[BuiltIn] = Field(default_factory=list)
    """Tasks made from the run's own documents and from generated questions."""
    tasks: list[str | SuiteEntry] = Field(default_factory=list)
    core: str | None = None
    """Table of baselines (name or path): its tasks count in `eval/core`, each above its baseline. None: that of an
    included suite, or else every task that has a chance level counts, above that."""


class Baselines(FrozenModel):
    version: int = Field(ge=1)
    """Raised with every change of a number: means by different versions are not compared."""
    baselines: dict[str, float]
    """Task -> accuracy that counts as 0."""


@dataclass(frozen=True)
class SuiteTask:
    """A task that a suite names, resolved but not rendered."""

    name: str
    definition: TaskFile | Path
    """The task, or the folder of its rendered requests."""
    data_paths: DataPaths

    @property
    def runs_programs(self) -> bool:
        """Whether programs are run to judge the answers."""
        kind = read_task_json(self.definition)["kind"] if isinstance(self.definition, Path) else self.definition.kind
        return TASK_KINDS[kind].runs_programs


@dataclass(frozen=True)
class Suite:
    name: str
    built_in: tuple[BuiltIn, ...]
    tasks: tuple[SuiteTask, ...]
    table: str
    """Name of the table of baselines; empty: each task counts above its own chance."""
    baselines: Baselines | None


@dataclass(frozen=True)
class LoadedSuite:
    """A suite with the rendered tasks."""

    suite: Suite
    tasks: list[Task]
    skipped: dict[str, str]
    """Task that was left out -> reason."""
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    """Key of a task -> its data files with their SHA-256."""

    def baselines(self) -> dict[str, float]:
        """Return the tasks that count in `eval/core`, by key, with the accuracy that counts as 0."""
        chances = {task.key: task.chance for task in self.tasks if task.chance is not None}
        if self.suite.baselines is None:
            return chances
        table = {f"eval/{name}": baseline for name, baseline in self.suite.baselines.baselines.items()}
        return {key: table[key] for key in chances if key in table}

    @property
    def baselines_name(self) -> str:
        """Name and version of the baseline table behind `eval/core`."""
        table = self.suite.baselines
        return f"{self.suite.table} {table.version}" if table else "chance of each task"

    def add(
        self, planned: Iterable[SuiteTask], missing: str, most: int | None = None, shots: int | None = None
    ) -> None:
        """Render tasks and add them. If `missing` is `skip`, a task without its data or a sandbox is skipped.

        `most` caps the questions of each task, `shots` replaces its solved examples.
        """
        for task in planned:
            try:
                if task.runs_programs:
                    check_sandbox()
                if shots is not None:
                    if isinstance(task.definition, Path):
                        raise ValueError(
                            f"{task.name}: is a folder of rendered requests, whose shots cannot be changed"
                        )
                    fields = task.definition.model_dump(exclude_unset=True)
                    fields["shots"] = {**fields.get("shots", {}), "count": shots}
                    task = replace(task, definition=parse_task(fields, task.name))
                rendered = render_task(task, most)
            except LEFT_OUT as error:
                if missing == "refuse":
                    raise
                self.skipped[task.name] = str(error).partition(";")[0]
                continue
            self.tasks.append(rendered.task)
            self.sources[rendered.task.key] = rendered.sources


# The suite of a recipe.


def stage_suite_name(recipe: Recipe, name: str) -> str:
    """Return the suite for the model of the stage `name`, or for the `champion`."""
    judged = name in (recipe.stages[-1].name, "champion")
    return (recipe.evaluate.final if judged else None) or recipe.evaluate.suite


def with_suite(recipe: Recipe, suite: str) -> Recipe:
    """Return `recipe` with another suite."""
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"suite": suite})})


def recipe_suite(recipe: Recipe) -> Suite:
    """Return the suite that `recipe` names. Raises ValueError if it, or one of its tasks, cannot be read."""
    section = recipe.evaluate
    return read_suite(section.suite, section.data, section.tasks, section.questions)


def all_tasks(recipe: Recipe) -> list[SuiteTask]:
    """Return the tasks of every suite that `recipe` names: for all stages, for the last, and for deferred scores."""
    section = recipe.evaluate
    names = dict.fromkeys(filter(None, (section.suite, section.final, section.deferred_suite)))
    return [task for name in names for task in recipe_suite(with_suite(recipe, name)).tasks]


def with_evaluation_sets(recipe: Recipe) -> Recipe:
    """Return `recipe` with the data files of its suites in place of `evaluated` in `curate.decontaminate`.

    An example is compared by the fields that a task's question and answers are made of. Text files and folders of
    rendered requests are left out, and with `evaluate.on_missing_data: skip` files that do not exist. Raises ValueError
    as `recipe_suite` does.
    """
    if "evaluated" not in recipe.curate.decontaminate:
        return recipe
    skip, benchmarks = recipe.evaluate.on_missing_data == "skip", dict[str, Benchmark]()
    for planned in all_tasks(recipe):
        if isinstance(planned.definition, Path):
            continue
        fields = _fields_of_text(planned.definition)
        for number, file in enumerate(dict.fromkeys(planned.definition.files)):
            uri = planned.data_paths.uri(file)
            if fields and not uri.endswith(".txt") and not (skip and not list_files(uri)):
                label = f"{planned.name}-{number}" if number else planned.name
                benchmarks.setdefault(uri, Benchmark(name=label, uri=uri, fields=fields))
    sets = [one for one in recipe.curate.decontaminate if one != "evaluated"]
    curate = recipe.curate.model_copy(update={"decontaminate": [*sets, *benchmarks.values()]})
    return recipe.model_copy(update={"curate": curate})


def _fields_of_text(task: TaskFile) -> list[str]:
    """Return the fields of a row that the text of a question and its answers is made of, in the order of use."""
    expressions = (f"{{{{ {text} }}}}" for text in (task.contexts, task.choices) if text)
    templates = [task.context, *expressions, task.continuation, task.answer]
    parsed = [meta.find_undeclared_variables(Environment().parse(text)) for text in templates]
    return list(dict.fromkeys(field for names in parsed for field in sorted(names)))


def check_suite(recipe: Recipe, rows: int | None = CHECKED_ROWS) -> list[str]:
    """Return a line for each task that will be left out, after rendering the first `rows` of every file.

    None (before a run): all rows, and a check that this machine contains programs. Raises ValueError, one line per
    fault: a missing or invalid task or suite, a wrong digest, rows that do not fit the templates, and unless
    `evaluate.on_missing_data` is `skip` a missing data file or a machine that cannot run code.
    """
    missing: dict[str, str] = {}
    wrong: list[str] = []
    for planned in recipe_suite(recipe).tasks:
        try:
            if rows is None and planned.runs_programs:
                check_sandbox()
            if isinstance(planned.definition, Path):
                read_requests(planned.definition)
            else:
                check_rows(planned.definition, planned.data_paths, rows)
        except LEFT_OUT as error:
            missing[planned.name] = str(error)
        except ValueError as error:
            wrong.append(str(error))
    skip, section = recipe.evaluate.on_missing_data == "skip", recipe.evaluate
    if section.data is None and any("evaluate.data" in why for why in missing.values()) and not skip:
        wrong.append(
            f"evaluate.data: is not set, and suite {section.suite} reads files of it for {', '.join(missing)}; "
            "name the folder of published sets, or set evaluate.on_missing_data to skip"
        )
    elif not skip:
        wrong += [f"{name}: {why}" for name, why in missing.items()]
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return [f"{name}: {why.partition(';')[0]}" for name, why in missing.items()]


def suite_inputs(recipe: Recipe) -> dict[str, str]:
    """Return digests of the scores' inputs besides model and documents: built-in tasks, needles, baselines, each task.

    That of a task covers its data; a file that does not exist has the digest `missing`, a task whose programs cannot
    run here `not contained`. Raises as `recipe_suite` does.
    """
    suite = recipe_suite(recipe)
    table = suite.baselines.model_dump(mode="json") if suite.baselines else None
    digests = {"suite": _sha256([suite.built_in, table])}
    if "needle" in suite.built_in:
        digests["needles"] = str(recipe.evaluate.needles)
    for planned in suite.tasks:
        definition, files = planned.definition, []
        if planned.runs_programs and sandbox_error():
            digest = "not contained"
        elif isinstance(definition, Path):
            digest = str(read_task_json(definition)["digest"])
        else:
            for name in dict.fromkeys(definition.files):
                try:
                    files.append(file_sha256(planned.data_paths.uri(name)))
                except MissingFile:
                    files.append("missing")
            digest = _sha256([definition.model_dump(mode="json", exclude={"data", "questions"}), files])
        digests[f"task.{planned.name}"] = digest
    return digests


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def render_recipe_suite(recipe: Recipe, documents: Sequence[ValidationDocument]) -> LoadedSuite:
    """Return the recipe's suite with its tasks rendered: built-in ones first, then those of files.

    A built-in task without any request (too few documents for continuations) is left out. Raises ValueError as
    `check_suite` does, for all rows.
    """
    suite, count, tasks = recipe_suite(recipe), recipe.evaluate.questions, []
    if "bits" in suite.built_in:
        for domain in sorted({document.domain for document in documents}):
            key = f"{BPB}/{domain}"
            own = [document for document in documents if document.domain == domain]
            clusters = {document.id: document.cluster for document in own}
            tasks.append(Task(key, RollingKind.name, tuple(document_requests(key, own)), clusters=clusters))
    if "arithmetic" in suite.built_in:
        tasks.append(_arithmetic(count))
    if "continuation" in suite.built_in:
        requests = continuation_questions(CONTINUATION, documents, count)
        clusters = {document.id: document.cluster for document in documents}
        tasks.append(Task(CONTINUATION, ChoiceKind.name, tuple(requests), clusters=clusters))
    loaded = LoadedSuite(suite, [task for task in tasks if task.requests], {})
    loaded.add(suite.tasks, recipe.evaluate.on_missing_data, recipe.evaluate.limit)
    return loaded


def _arithmetic(count: int) -> Task:
    return Task(ARITHMETIC, ChoiceKind.name, tuple(question_requests(ARITHMETIC, questions(QUESTION_SEED, count))))


def render_task(planned: SuiteTask, most: int | None = None) -> Rendered:
    """Return a task with the requests of at most `most` questions: rendered now, or read from its folder."""
    if not isinstance(planned.definition, Path):
        return render(planned.definition, planned.data_paths, most)
    rendered = read_requests(planned.definition)
    task = rendered.task
    if most is None or task.questions <= most:
        return rendered
    items: tuple[Request | Prompt, ...] = task.requests or task.prompts
    kept = set(sorted({item.document for item in items})[:most])  # the smallest ids, as `render` chooses
    requests = tuple(request for request in task.requests if request.document in kept)
    prompts = tuple(prompt for prompt in task.prompts if prompt.document in kept)
    return Rendered(replace(task, requests=requests, prompts=prompts), rendered.sources)


# Suites and tasks named on the command line, without a recipe.


def render_suites(
    named: Sequence[str],
    data: str | None,
    most: int | None = None,
    shots: int | None = None,
    missing: Literal["refuse", "skip"] = "refuse",
) -> LoadedSuite:
    """Return the rendered tasks of the suites and tasks called or stored at `named`, without a recipe.

    `most` caps the questions of each, `shots` replaces the solved examples of each. Built-in tasks of a suite that need
    a run's documents are left out. The suite of the result is the first one that was named, or has no name. Raises
    ValueError for a task that cannot be rendered, or two tasks with one name.
    """
    suites = [find_suite(text, data) for text in named]
    tasks_by_name: dict[str, SuiteTask] = {}
    for planned in (planned for suite in suites for planned in suite.tasks):
        if tasks_by_name.setdefault(planned.name, planned) != planned:
            raise ValueError(
                f"{planned.name}: two tasks are called so; rename one, or evaluate them one after the other"
            )
    built_in: list[str] = [name for suite in suites for name in suite.built_in]
    skipped: dict[str, str] = dict.fromkeys(built_in, "needs the held-out documents of a run, which has the score")
    tasks = [_arithmetic(most or ARITHMETIC_QUESTIONS)] if skipped.pop("arithmetic", None) else []
    first = next((suite for suite in suites if suite.name), Suite("", (), (), "", None))
    loaded = LoadedSuite(first, tasks, skipped)
    try:
        loaded.add(tasks_by_name.values(), missing, most, shots)
    except LEFT_OUT as error:
        raise type(error)(str(error).replace("set evaluate.on_missing_data to", "give --missing")) from None
    return loaded


def suite_tasks(text: str, data: str | None) -> tuple[SuiteTask, ...]:
    """Return the tasks of the suite, or the one task, that `text` names: of the library, a YAML file or a folder."""
    return find_suite(text, data).tasks


def find_suite(text: str, data: str | None) -> Suite:
    """Return the suite that `text` names, or a suite without a name that holds the one task that it names.

    A task is one of the library, a YAML file, a folder of rendered requests or a JSON-lines file of questions.
    """
    if Path(text).suffix in YAML:
        content = read_yaml(Path(text))
        is_suite = not (isinstance(content, dict) and "kind" in content)
    else:
        is_suite = (LIBRARY / "suites" / f"{text}.yaml").is_file()
    return read_suite(text, data, [], 0) if is_suite else Suite("", (), (_recipe_task(text, data, None),), "", None)


def library_tasks() -> list[str]:
    """Return the names of the tasks that ship with herd."""
    return sorted(path.stem for path in (LIBRARY / "tasks").glob("*.yaml"))


# Reading suite files.


def read_suite(named: str, data: str | None, more: list[str], questions: int) -> Suite:
    """Return the suite called or stored at `named`, with the tasks `more` of a recipe; data files begin in `data`.

    JSON-lines files of questions among `more` are cut to `questions`. Raises ValueError for a file that cannot be read
    and for two tasks with one name.
    """
    built_in, planned, table = _read_includes(_suite_path(named, Path()), data, ())
    planned += [_recipe_task(text, data, questions) for text in more]
    taken: set[str] = {"bpb", "core", "bpb_macro", *built_in}
    for task in planned:
        if task.name in taken:
            raise ValueError(
                f"evaluate.tasks: {task.name!r} would be scored as 'eval/{task.name}', which is taken; rename one"
            )
        taken.add(task.name)
    baselines = _validated(Baselines, table) if table else None
    return Suite(named, tuple(dict.fromkeys(built_in)), tuple(planned), table.stem if table else "", baselines)


def _read_includes(
    path: Path, data: str | None, including: tuple[Path, ...]
) -> tuple[list[BuiltIn], list[SuiteTask], Path | None]:
    """Return built-in tasks, tasks and baseline table of a suite and of the suites that it includes."""
    if path in including:
        raise ValueError(f"{path}: include: the suite includes itself; leave one out")
    file = _validated(SuiteFile, path)
    built_in: list[BuiltIn] = []
    planned: list[SuiteTask] = []
    table: Path | None = None
    for named in file.include:
        more, tasks, included = _read_includes(_suite_path(named, path.parent), data, (*including, path))
        built_in, planned, table = built_in + more, planned + tasks, included or table
    for entry in file.tasks:
        fields = entry.model_dump(by_alias=True) if isinstance(entry, SuiteEntry) else {"task": entry}
        planned.append(_entry_task(fields, path.parent, data, str(path)))
    if file.core:
        is_path = Path(file.core).suffix in YAML
        table = path.parent / file.core if is_path else LIBRARY / "baselines" / f"{file.core}.yaml"
    return built_in + file.built_in, planned, table


def _suite_path(named: str, base_folder: Path) -> Path:
    if Path(named).suffix in YAML:
        return base_folder / named
    path = LIBRARY / "suites" / f"{named}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(suite.stem for suite in path.parent.glob("*.yaml")))
        raise ValueError(f"evaluate.suite: {named!r} is none of {known} and no YAML file; name one of them")
    return path


def _validated(model: type[Model], path: Path) -> Model:
    data = read_yaml(path)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(validation_errors(error, str(path)))) from None


def _entry_task(entry: dict[str, Any], base_folder: Path, data: str | None, where: str) -> SuiteTask:
    """Return the task of an entry in the folder `base_folder`: a name, a YAML file or a folder of rendered requests.

    The other fields of the entry change the task: `shots: 5` only the count, `writing` only the keys that it names.
    `where` is the name for error messages.
    """
    changes = dict(entry)
    text, name = str(changes.pop("task")), changes.pop("as", None)
    path = base_folder / text
    if is_rendered(path):
        if changes or name:
            raise ValueError(f"{where}: {text}: is a folder of rendered requests, which cannot be changed here")
        return SuiteTask(read_task_json(path)["key"].removeprefix("eval/"), path, DataPaths(data))
    if Path(text).suffix not in YAML:
        path = LIBRARY / "tasks" / f"{text}.yaml"
        if not path.is_file():
            raise ValueError(
                f"{where}: {text!r} is not a task of the library ({', '.join(library_tasks())}), no YAML file and no "
                "folder that herd eval render wrote"
            )
    content = read_yaml(path)
    if isinstance(content, dict):
        content = {**content, **({"name": name} if name else {})}
        for key, value in changes.items():
            before = content.get(key)
            before = {"count": before} if key == "shots" and isinstance(before, int) else before
            value = {"count": value} if key == "shots" and isinstance(value, int) else value
            content[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    task = parse_task(content, str(path))
    return SuiteTask(task.name, task, DataPaths(data, path.parent))


def _recipe_task(text: str, data: str | None, questions: int | None) -> SuiteTask:
    """Return a task that a recipe or a command names: like an entry of a suite, or a JSON-lines file of questions."""
    path = Path(text)
    if path.suffix in YAML or not path.suffix or is_rendered(path):
        return _entry_task({"task": text}, Path(), data, "evaluate.tasks")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    if not re.fullmatch(TASK_NAME, name):
        raise ValueError(
            f"evaluate.tasks: {text}: {name!r} is not a metric name (a-z, 0-9, _, . and -); rename the file"
        )
    file = str(path.absolute()) if is_local(text) else text
    task = {**QUESTION_LINES, "name": name, "data": [file], "limit": questions}
    return SuiteTask(name, parse_task(task, f"evaluate.tasks: {text}"), DataPaths(data))


# Means over tasks.


def mean_bits_per_byte(recipe: Recipe, estimates: Mapping[str, Estimate], prefix: str = BPB) -> Estimate:
    """Return `eval/bpb` from `eval/bpb/<domain>`: their mean by the first stage's mix.

    The shares of the domains present are scaled to sum to 1. Also averages differences of two models, and other
    `<prefix>/<domain>`.
    """
    shares = recipe.first_mix
    weights = [float(share) for domain, share in shares.items() if f"{prefix}/{domain}" in estimates]
    return weighted_mean(
        [estimates[f"{prefix}/{domain}"] for domain in shares if f"{prefix}/{domain}" in estimates], weights
    )


def core_score(accuracies: Sequence[tuple[Estimate, float]]) -> Estimate:
    """Return `eval/core`: the mean over tasks of (accuracy - baseline) / (1 - baseline), each given with its baseline.

    DCLM (arXiv 2406.11794) calls this the centered accuracy: 0 is guessing, 1 is perfect, below 0 is possible.
    """
    centered = [normal((part.value - base) / (1 - base), part.stderr / (1 - base), part.n) for part, base in accuracies]
    return weighted_mean(centered, [1.0] * len(centered))
