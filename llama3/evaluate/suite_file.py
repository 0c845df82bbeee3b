"""A suite as YAML: which tasks a model is put to, and which of them count in `eval/core`.

Three ship with herd (`quick`, `core`, `full`); a user's own is a file that lists tasks by name or path, changed where
wanted, and may include others. All of it is resolved from the recipe alone, before any work: what is misspelt, missing
or written for another file is found in a second and not after a training run. What this gives up: tasks made by code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from llama3.evaluate.data_rows import Places
from llama3.evaluate.request_files import is_rendered, stated
from llama3.evaluate.task_file import TASK_NAME, TaskFile, faults, parse_task, read_yaml
from llama3.recipe.section import Section
from storage.filesystem import is_local

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
class Planned:
    """A task that a suite names, found but not read."""

    name: str
    made_of: TaskFile | Path
    """The task, or the folder of its rendered requests."""
    places: Places


@dataclass(frozen=True)
class Suite:
    name: str
    built_in: tuple[BuiltIn, ...]
    planned: tuple[Planned, ...]
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


def planned_of(text: str, data: str | None) -> tuple[Planned, ...]:
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


def find_task(text: str, beside: Path, data: str | None) -> Planned:
    """Return the task called or stored at `text`: a name, a YAML file or a folder, as seen from the folder `beside`."""
    return _planned({"task": text}, beside, data, "evaluate.tasks")


def _gathered(
    path: Path, data: str | None, above: tuple[Path, ...]
) -> tuple[list[BuiltIn], list[Planned], Path | None]:
    """Return built-in tasks, tasks and table of a suite and of those that it includes."""
    if path in above:
        raise ValueError(f"{path}: include: the suite includes itself; leave one out")
    file = _validated(SuiteFile, path)
    built_in: list[BuiltIn] = []
    planned: list[Planned] = []
    table: Path | None = None
    for named in file.include:
        more, tasks, included = _gathered(_suite_path(named, path.parent), data, (*above, path))
        built_in, planned, table = built_in + more, planned + tasks, included or table
    entries = [entry.model_dump(by_alias=True) if isinstance(entry, Entry) else {"task": entry} for entry in file.tasks]
    planned += [_planned(entry, path.parent, data, str(path)) for entry in entries]
    return built_in + file.built_in, planned, _table(file.core, path.parent) if file.core else table


def _planned(entry: dict[str, Any], beside: Path, data: str | None, place: str) -> Planned:
    changes = dict(entry)
    text, name = str(changes.pop("task")), changes.pop("as", None)
    path = beside / text
    if is_rendered(path):
        if changes or name:
            raise ValueError(f"{place}: {text}: is a folder of rendered requests, which cannot be changed here")
        return Planned(stated(path)["key"].removeprefix("eval/"), path, Places(data))
    if Path(text).suffix not in YAML:
        path = LIBRARY / "tasks" / f"{text}.yaml"
        if not path.is_file():
            raise ValueError(
                f"{place}: {text!r} is no task of the library ({', '.join(library_tasks())}), no YAML file and no "
                "folder that herd requests wrote"
            )
    made = parse_task(_changed(read_yaml(path), name, changes), str(path))
    return Planned(made.name, made, Places(data, path.parent))


def _changed(task: Any, name: str | None, changes: dict[str, Any]) -> Any:
    """Return the task with fields changed; `shots: 5` changes the count alone, `writing` what it names."""
    if not isinstance(task, dict):
        return task
    made = {**task, **({"name": name} if name else {})}
    for field, value in changes.items():
        before = made.get(field)
        before = {"count": before} if field == "shots" and isinstance(before, int) else before
        value = {"count": value} if field == "shots" and isinstance(value, int) else value
        made[field] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return made


def _more(text: str, data: str | None, questions: int | None) -> Planned:
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
    return Planned(name, parse_task(made, f"evaluate.tasks: {text}"), Places(data))


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
