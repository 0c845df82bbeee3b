from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.evaluate.task import TASK_KINDS, TaskKind
from herd.llama3.evaluate.task_yaml import parse_task
from herd.llama3.recipe.base import read_yaml
from tests.llama3.evaluate.suite_samples import TASKS
from tests.llama3.evaluate.task_samples import CHOICE


def test_what_is_left_out_has_defaults() -> None:
    task = parse_task({**CHOICE, "shots": 3}, "t.yaml")
    assert (task.data, task.shots.count, task.version, task.average, task.files) == (
        ["quiz.jsonl"], 3, 1, "items", ["quiz.jsonl"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "riddle"}, "kind: 'riddle': input should be 'choice'"),
        ({"name": "Quiz 1"}, "name: 'Quiz 1'"),
        ({"gold": None}, "gold: is missing; kind choice needs it"),
        ({"tests": "x"}, "tests: has no meaning for kind choice"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"data": []}, "data: []"),
        (
            {"sha256": {"other.jsonl": "00"}},
            "sha256: 'other.jsonl' is not a data file of this task; its files are quiz.jsonl",
        ),
        ({"average": "groups"}, "group: is missing; shots.same_group and average: groups need it"),
        ({"shots": {"same_group": True}}, "group: is missing"),
        ({"shots": -1}, "shots.count: -1"),
        ({"chance": 1.0}, "chance: 1.0"),
        ({"limit": 0}, "limit: 0"),
        ({"kind": "rolling", "choices": None, "gold": None, "context": None, "shots": 2}, "shots: kind rolling"),
        (
            {"kind": "generate", "choices": None, "shots": 2},
            "answer: is missing; the 2 shots need to show one",
        ),
        ({"kind": "generate", "choices": None, "writing": {"k": 2}}, "writing.k: 2 of 1 samples"),
        ({"kind": "generate", "choices": None, "writing": {"samples": 2}}, "writing.samples 2 at temperature 0"),
        ({"kind": "generate", "choices": None, "writing": {"extract": ["[0-9]+"]}}, "has no group"),
        ({"kind": "generate", "choices": None, "writing": {"colour": 1}}, "writing.colour: unknown key"),
    ],
)
def test_faults_name_file_and_field(changes: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in {**CHOICE, **changes}.items() if value is not None}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse_task(fields, "t.yaml")
    assert str(error.value).startswith("t.yaml: ")
    assert message in str(error.value)


def test_files_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.yaml: must be a mapping with the keys name"):
        parse_task(["a"], "t.yaml")
    (tmp_path / "t.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"t\.yaml: is not YAML"):
        read_yaml(tmp_path / "t.yaml")
    with pytest.raises(ValueError, match=r"none\.yaml: cannot be read"):
        read_yaml(tmp_path / "none.yaml")


def test_aliases_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    """A kilobyte of them stands for a billion values; a few are welcome."""
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    (tmp_path / "bomb.yaml").write_text(f"a0: &a0 x\n{levels}")
    with pytest.raises(ValueError, match=r"bomb\.yaml: .*its aliases expand to more than 100,000 values"):
        read_yaml(tmp_path / "bomb.yaml")
    (tmp_path / "self.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(ValueError, match=r"self\.yaml: .*its aliases expand to"):
        read_yaml(tmp_path / "self.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    with pytest.raises(ValueError, match=r"deep\.yaml: .*is n"):
        read_yaml(tmp_path / "deep.yaml")
    (tmp_path / "shared.yaml").write_text("a: &a [1, 2]\nb: *a\n")
    assert read_yaml(tmp_path / "shared.yaml") == {"a": [1, 2], "b": [1, 2]}


def test_every_kind_of_task_is_listed_sampled_and_described(checkout: Path) -> None:
    """A kind that TASK_KINDS forgets is refused in files; one without a sample is in no test of a whole evaluation."""
    kinds, page = [TaskKind], (checkout / "docs/tutorials/write-a-task.md").read_text()
    for kind in kinds:  # grows
        kinds += kind.__subclasses__()
    assert [
        kind for kind in kinds if not inspect.isabstract(kind) and type(TASK_KINDS.get(kind.name)) is not kind
    ] == []
    assert {fields.get("kind", CHOICE["kind"]) for fields in TASKS.values()} == TASK_KINDS.keys()
    assert [name for name in TASK_KINDS if f"\n| `{name}` |" not in page] == []
