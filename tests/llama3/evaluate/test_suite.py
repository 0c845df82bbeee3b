"""Suites: what ships with herd is valid and what users write is resolved, checked and digested before any work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.data.decontam.ngrams import check_benchmarks
from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.evaluate.requests import write_requests
from herd.llama3.evaluate.sandbox import sandbox_error
from herd.llama3.evaluate.suite import (
    check_suite,
    library_tasks,
    read_suite,
    render_recipe_suite,
    render_task,
    suite_inputs,
    suite_tasks,
    with_evaluation_sets,
)
from herd.llama3.evaluate.task_yaml import TaskFile
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from tests.llama3.evaluate.task_samples import CHOICE, quiz, rendered, write_lines

DOCUMENTS = [ValidationDocument(f"{n}", "code", f"text number {n}\n" * 40, "") for n in range(3)]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with data, a task and a suite of a user."""
    write_lines(tmp_path / "data/quiz.jsonl", quiz(30, subjects=3))
    (tmp_path / "quiz.yaml").write_text(yaml.safe_dump({**CHOICE, "group": "{{ subject }}"}))
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "built_in": ["bits", "arithmetic"],
                "tasks": ["quiz.yaml", {"task": "quiz.yaml", "as": "quiz_3", "shots": 3, "limit": 5, "version": 2}],
            }
        )
    )
    return tmp_path


def recipe(checkout: Path, workspace: Path, **fields: object) -> Recipe:
    section = {"suite": str(workspace / "mine.yaml"), "data": str(workspace / "data"), **fields}
    return load_recipe(
        checkout / "recipes/quickstart.yaml",
        [f"evaluate.{name}={json.dumps(value)}" for name, value in section.items()],
    )


def test_quick_asks_for_no_data(checkout: Path) -> None:
    plain = load_recipe(checkout / "recipes/quickstart.yaml")
    assert plain.evaluate.suite == "quick"
    assert check_suite(plain) == []
    assert list(suite_inputs(plain)) == ["suite"]
    assert [task.key for task in render_recipe_suite(plain, DOCUMENTS).tasks] == ["eval/bpb/code", "eval/arithmetic"]


def test_training_text_is_searched_for_what_the_suites_ask(checkout: Path, workspace: Path) -> None:
    """Each data file once, in the words of its questions and answers; those of the last suite too."""
    write_lines(workspace / "own.jsonl", [{"text": "some text of nine words that nobody else has"}])
    (workspace / "last.yaml").write_text(yaml.safe_dump({"tasks": ["quiz.yaml", "boolq"]}))
    asked = recipe(checkout, workspace, final=str(workspace / "last.yaml"), tasks=["arc_easy", "wikitext"])
    own = {"name": "own", "uri": str(workspace / "own.jsonl"), "fields": ["text"]}
    curate = asked.curate.model_validate({**asked.curate.model_dump(), "decontaminate": [own, "evaluated"]})
    asked = asked.model_copy(update={"curate": curate})
    found = {one.name: one for one in with_evaluation_sets(asked).curate.benchmarks}
    assert list(found) == ["own", "quiz", "arc_easy", "boolq"]
    assert found["quiz"].uri == str(workspace / "data/quiz.jsonl")
    assert found["quiz"].fields == ["question", "choices"], "and no index of an answer"
    evaluate = asked.evaluate.model_copy(update={"on_missing_data": "skip"})
    skipping = with_evaluation_sets(asked.model_copy(update={"evaluate": evaluate}))
    assert [one.name for one in skipping.curate.benchmarks] == ["own", "quiz"]
    check_benchmarks(skipping.curate.benchmarks)
    plain = recipe(checkout, workspace)
    assert with_evaluation_sets(plain) is plain


def test_published_sets_have_the_fields_that_text_is_searched_for(checkout: Path, shared: Path) -> None:
    data = {"evaluate.data": str(shared / "eval"), "evaluate.tasks": "[gsm8k, humaneval, mmlu]"}
    words = [f"{name}={value}" for name, value in data.items()]
    asked = load_recipe(checkout / "recipes/quickstart.yaml", [*words, "curate.decontaminate=[evaluated]"])
    found = with_evaluation_sets(asked).curate.benchmarks
    check_benchmarks(found)
    assert {one.name: one.fields for one in found} == {
        "gsm8k": ["question", "answer"],
        "gsm8k-1": ["question", "answer"],
        "humaneval": ["prompt"],
        "mmlu": ["question", "choices"],
        "mmlu-1": ["question", "choices"],
    }


def test_every_task_of_the_library_is_valid_and_called_as_its_file() -> None:
    assert len(library_tasks()) == 23
    for name in library_tasks():
        (planned,) = suite_tasks(name, "data")
        assert planned.name == name
        assert isinstance(planned.definition, TaskFile)


def test_core_is_dclms_without_two_and_full_adds_four() -> None:
    core, full = read_suite("core", None, [], 1), read_suite("full", None, [], 1)
    names = [planned.name for planned in core.tasks]
    assert len(names) == 20
    assert len({planned.definition.data[0] for planned in core.tasks if isinstance(planned.definition, TaskFile)}) == 19
    assert core.baselines is not None
    assert sorted(core.baselines.baselines) == sorted(names)
    assert (core.table, core.baselines.version, full.baselines) == ("core", 1, core.baselines)
    assert [planned.name for planned in full.tasks] == [*names, "mmlu", "gsm8k", "humaneval", "wikitext"]
    assert core.built_in == ("bits", "arithmetic", "continuation")
    assert full.built_in == (*core.built_in, "needle")
    shots = {planned.name: planned.definition.shots.count for planned in core.tasks}  # type: ignore[union-attr]
    assert (shots["hellaswag"], shots["hellaswag_zeroshot"], shots["agi_eval_lsat_ar"]) == (10, 0, 3)


def test_a_suite_changes_what_it_lists(checkout: Path, workspace: Path) -> None:
    asked = render_recipe_suite(recipe(checkout, workspace), DOCUMENTS)
    first, second = asked.tasks[-2:]
    assert (first.key, first.questions, first.shots, first.version) == ("eval/quiz", 30, 0, 1)
    assert (second.key, second.questions, second.shots, second.version) == ("eval/quiz_3", 5, 3, 2)
    assert {key: list(files) for key, files in asked.sources.items()} == {
        "eval/quiz": ["quiz.jsonl"], "eval/quiz_3": ["quiz.jsonl"],
    }  # fmt: skip
    assert asked.baselines() == pytest.approx({"eval/arithmetic": 1 / 4, "eval/quiz": 1 / 3, "eval/quiz_3": 1 / 3})


def test_only_tasks_of_the_table_count_in_core(checkout: Path, workspace: Path) -> None:
    (workspace / "table.yaml").write_text("version: 4\nbaselines: {quiz: 0.5, elsewhere: 0.1}\n")
    (workspace / "mine.yaml").write_text("core: table.yaml\nbuilt_in: [arithmetic]\ntasks: [quiz.yaml]\n")
    (workspace / "outer.yaml").write_text("include: [mine.yaml]\n")
    asked = render_recipe_suite(recipe(checkout, workspace, suite=str(workspace / "outer.yaml")), DOCUMENTS)
    assert asked.baselines() == {"eval/quiz": 0.5}
    assert asked.suite.baselines is not None
    assert (asked.suite.table, asked.suite.baselines.version) == ("table", 4)


def test_a_recipe_adds_tasks_of_every_form(checkout: Path, workspace: Path) -> None:
    rows = [{"query": f"Is it {n}? Answer:", "choices": ["yes", "no"], "gold": n % 2} for n in range(40)]
    write_lines(workspace / "old.jsonl", rows)
    write_requests(rendered(workspace / "elsewhere", quiz(4), name="frozen"), workspace / "folder")
    more = [str(workspace / "old.jsonl"), str(workspace / "folder"), str(workspace / "quiz.yaml")]
    chosen = recipe(checkout, workspace, suite="quick", tasks=more, questions=7)
    assert check_suite(chosen) == []
    tasks = {task.key: task for task in render_recipe_suite(chosen, DOCUMENTS).tasks}
    assert {key: tasks[key].questions for key in ("eval/old", "eval/frozen", "eval/quiz")} == {
        "eval/old": 7, "eval/frozen": 4, "eval/quiz": 30,
    }  # fmt: skip
    (asked, _) = tasks["eval/old"].requests[:2]
    assert asked.context.endswith("?\nAnswer:")
    assert asked.context.count("Answer:") == 1
    assert asked.continuation == " yes"


def test_a_missing_file_is_refused_or_its_task_left_out_aloud(checkout: Path, workspace: Path) -> None:
    (workspace / "data/quiz.jsonl").rename(workspace / "data/other.jsonl")
    refusing = recipe(checkout, workspace)
    for work in (check_suite, lambda chosen: render_recipe_suite(chosen, DOCUMENTS)):
        with pytest.raises(
            ValueError, match=r"data/quiz\.jsonl: is not a file; put it there, or set evaluate\.on_missing_data"
        ):
            work(refusing)
    skipping = recipe(checkout, workspace, on_missing_data="skip")
    (first, second) = check_suite(skipping)
    assert first.startswith("quiz: ")
    assert second.startswith("quiz_3: ")
    asked = render_recipe_suite(skipping, DOCUMENTS)
    assert [task.key for task in asked.tasks] == ["eval/bpb/code", "eval/arithmetic"]
    assert list(asked.skipped) == ["quiz", "quiz_3"]
    assert "is not a file" in asked.skipped["quiz"]
    assert set(suite_inputs(skipping)) == {"suite", "task.quiz", "task.quiz_3"}


def test_code_is_refused_or_left_out_where_no_program_can_be_contained(
    checkout: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "code.yaml").write_text("{name: code, kind: code, data: quiz.jsonl, context: 'x = 1 #', tests: 'x'}")
    chosen, skipping = (
        recipe(checkout, workspace, tasks=[str(workspace / "code.yaml")], on_missing_data=missing)
        for missing in ("refuse", "skip")
    )
    if not sandbox_error():
        assert check_suite(chosen, None) == []
        here = suite_inputs(chosen)["task.code"]
        assert len(here) == 64
    sandbox_error.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        assert check_suite(chosen) == [], "a plan may be made anywhere"
        for work in (lambda chosen: check_suite(chosen, None), lambda chosen: render_recipe_suite(chosen, DOCUMENTS)):
            with pytest.raises(
                ValueError, match=r"code: this machine cannot contain .* \(it runs darwin, not Linux\);"
            ):
                work(chosen)
        (line,) = check_suite(skipping, None)
        assert line.startswith("code: code: this machine cannot contain programs")
        asked = render_recipe_suite(skipping, DOCUMENTS)
        assert list(asked.skipped) == ["code"]
        assert "eval/code" not in {task.key for task in asked.tasks}
        assert suite_inputs(skipping)["task.code"] == "not contained", "another artifact than where it can run"
    finally:
        sandbox_error.cache_clear()


def test_a_check_finds_every_fault_of_the_first_rows(checkout: Path, workspace: Path) -> None:
    write_lines(workspace / "data/quiz.jsonl", [{**quiz(1)[0], "answer": 9}])
    (workspace / "other.yaml").write_text(yaml.safe_dump({**CHOICE, "name": "other", "sha256": {"quiz.jsonl": "00"}}))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_suite(recipe(checkout, workspace, tasks=[str(workspace / "other.yaml")]))
    first, second = str(error.value).splitlines()
    assert "quiz.jsonl:1: gold: 9 must be the place" in first
    assert "the task was written for 00" in second


def test_inputs_follow_templates_data_and_baselines(checkout: Path, workspace: Path) -> None:
    chosen = recipe(checkout, workspace)
    before = suite_inputs(chosen)
    assert suite_inputs(chosen) == before
    assert list(before) == ["suite", "task.quiz", "task.quiz_3"]
    write_lines(workspace / "data/quiz.jsonl", quiz(29))
    data = suite_inputs(chosen)
    assert {name for name in before if data[name] != before[name]} == {"task.quiz", "task.quiz_3"}
    (workspace / "quiz.yaml").write_text(yaml.safe_dump({**CHOICE, "version": 2}))
    assert suite_inputs(chosen)["task.quiz"] != data["task.quiz"]
    (workspace / "table.yaml").write_text("version: 1\nbaselines: {quiz: 0.5}\n")
    (workspace / "mine.yaml").write_text("core: table.yaml\ntasks: [quiz.yaml]\n")
    assert suite_inputs(chosen)["suite"] != before["suite"]


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ({"tasks": ["nothing"]}, "'nothing' is not a task of the library (agi_eval_lsat_ar"),
        ({"tasks": ["quiz.yaml", "quiz.yaml"]}, "'quiz' would be scored as 'eval/quiz', which is taken; rename one"),
        ({"tasks": [{"task": "quiz.yaml", "as": "core"}]}, "'core' would be scored as 'eval/core', which is taken"),
        ({"tasks": [{"task": "quiz.yaml", "colour": "red"}]}, "quiz.yaml: colour: unknown key"),
        ({"include": ["mine.yaml"]}, "include: the suite includes itself"),
        ({"include": ["nothing"]}, "'nothing' is none of core, full, full-hub, quick and no YAML file"),
        ({"core": "nothing"}, "nothing.yaml: cannot be read"),
        ({"built_in": ["poems"]}, "mine.yaml: built_in.0: 'poems'"),
        (["quiz.yaml"], "mine.yaml: "),
    ],
)
def test_suites_that_cannot_be_resolved_are_refused(checkout: Path, workspace: Path, suite: Any, message: str) -> None:
    (workspace / "mine.yaml").write_text(yaml.safe_dump(suite))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_suite(recipe(checkout, workspace))
    assert message in str(error.value)


@pytest.mark.slow
def test_the_published_sets_are_asked_as_published(shared: Path) -> None:
    """MMLU has five solved questions of the subject before each, GSM8K eight with their steps."""
    made = {
        planned.name: render_task(planned, 300).task
        for name in ("mmlu", "gsm8k", "humaneval", "wikitext")
        for planned in suite_tasks(name, str(shared / "eval"))
    }
    assert {name: (task.kind, task.questions, task.shots) for name, task in made.items()} == {
        "mmlu": ("letters", 300, 5),
        "gsm8k": ("generate", 300, 8),
        "humaneval": ("code", 164, 0),
        "wikitext": ("rolling", 62, 0),
    }
    for request in made["mmlu"].requests[::4]:
        assert f"about {request.group.replace('_', ' ')}.\n\n" in request.context
        assert request.context.count("\nAnswer: ") == 5
        assert request.context.endswith("\nAnswer:")
    assert all(prompt.context.count("\n#### ") == 8 for prompt in made["gsm8k"].prompts)
    assert all(float(prompt.gold[0]) is not None for prompt in made["gsm8k"].prompts)
