"""Rows and templates become requests; whatever cannot be asked is refused by file, line and field."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate import templates
from herd.llama3.evaluate.render import render
from herd.llama3.evaluate.task import Request, requests_digest
from herd.llama3.evaluate.task_yaml import DataPaths, parse_task
from tests.llama3.evaluate.task_samples import quiz, rendered, write_lines


def test_a_choice_is_asked_after_the_question_with_its_space(tmp_path: Path) -> None:
    task = rendered(tmp_path, quiz(2)).task
    first = task.requests[:3]
    assert {request.context for request in first} == {"Question: What is 0 plus one?\nAnswer:"}
    assert [request.continuation for request in first] == [" 0", " 1", " none of them"]
    assert [request.choice for request in first] == [0, 1, 2]
    assert {request.gold for request in first} == {0}
    assert len({request.document for request in task.requests}) == 2
    assert (task.key, task.kind, task.chance) == ("eval/quiz", "choice", pytest.approx(1 / 3))


@pytest.mark.parametrize("normalize", ["bytes", "characters"])
def test_white_space_is_kept_as_the_task_file_has_it(tmp_path: Path, normalize: str) -> None:
    """Spaces before the answer move from the context to the continuation: tokens begin with them."""
    rows = [{"question": " Who\t? ", "choices": [" me", "you  ", "\nx"], "answer": 0}]
    task = rendered(tmp_path, rows, before_answer=" ", normalize=normalize).task
    assert {request.context for request in task.requests} == {"Question:  Who\t?"}
    assert [request.continuation for request in task.requests] == ["   me", "  you  ", "  \nx"]
    if normalize == "characters":
        assert [request.characters for request in task.requests] == [3, 5, 2]
    shown = rendered(tmp_path, rows * 2 + quiz(1), shots={"count": 1, "choose": "first"}).task.requests[-1].context
    assert shown == "Question:  Who\t? \nAnswer:  me\n\nQuestion: What is 0 plus one?\nAnswer:"
    other = [{**rows[0], "choices": ["me", "you", "x"]}]
    assert rendered(tmp_path, other, before_answer=" ", normalize=normalize).task.digest != task.digest


def test_requests_without_the_count_of_joining_spaces_keep_their_digest_and_length() -> None:
    """Folders that were rendered before the count was kept."""
    old = Request("eval/t", "q", 0, "Question", "  yes ", 0)
    assert (old.characters, replace(old, joined=1).characters) == (3, 5)
    assert requests_digest([old]) == "50bae36356ac0eaf00e3124a4659e13f4c11ae614a22af906428eb3e21253ff3"
    assert requests_digest([replace(old, joined=1)]) != requests_digest([old])


def test_regular_expressions_prepare_texts(tmp_path: Path) -> None:
    rows = [{"question": "A [header] A man [step] runs", "choices": ["[title] On", "he [x]sits"], "answer": 1}]
    fields = {
        "context": r"{{ question | regex_replace('\\[.*?\\] ', '') }}",
        "choices": r"choices | map('regex_replace', '\\[(.*?)\\]', '<\\1>')",
    }
    task = rendered(tmp_path, rows, **fields).task
    assert task.requests[0].context == "A A man runs\nAnswer:"
    assert [request.continuation for request in task.requests] == [" <title> On", " he <x>sits"]
    with pytest.raises(ValueError, match=r"quiz\.jsonl:1: context: missing \)"):
        rendered(tmp_path, rows, context="{{ question | regex_replace('(', '') }}")


LONG = "(a|aa)+$"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"context": f"{{{{ question | regex_replace('{LONG}', '') }}}}"},
            "row 1: its templates take more than 1 s of processor time; write ones that end sooner",
        ),
        *(
            pytest.param({"context": context}, f"{where}: its templates take more than 1 s", marks=pytest.mark.slow)
            for context, where in [
                (LOOPS, "row 1"),
                ("{{ 7 ** (10 ** 9) }}", "quiz"),
                ("{{ (answer + 7) ** (10 ** 9) }}", "row 1"),
            ]
        ),
        ({"context": "{{ 'a' * 10 ** 11 }}"}, "takes too much memory"),
        ({"context": "{{ question * 10 ** 10 }}"}, "quiz.jsonl:1: context: takes too much memory (MemoryError)"),
        ({"context": "{{ question * 10 ** 6 }}"}, "quiz.jsonl:1: its templates give more than 16,777,216 characters"),
        ({"choices": "choices | map('center', 10 ** 10) | list"}, "choices: takes too much memory"),
    ],
)
@pytest.mark.slow
def test_templates_that_never_end_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], message: str
) -> None:
    """Inside C code as well; the next task is filled in as if nothing had been."""
    monkeypatch.setattr(templates, "SECONDS", 1)
    rows = [{**quiz(1)[0], "question": "a" * 40 + "!"}]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        rendered(tmp_path, rows, **fields)
    assert message in str(error.value)
    assert rendered(tmp_path, quiz(2)).task.questions == 2


@pytest.mark.slow
def test_an_expression_that_splits_a_text_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1)
    (tmp_path / "t.txt").write_text("a" * 60 + "!")
    file = parse_task({"name": "t", "kind": "rolling", "data": "t.txt", "split_at": LONG}, "t.yaml")
    with pytest.raises(ValueError, match=r"t\.txt: row 1: its templates take more than 1 s of processor time"):
        render(file, DataPaths(str(tmp_path)))


def test_letters_stand_in_the_question_and_are_scored(tmp_path: Path) -> None:
    task = rendered(tmp_path, quiz(4), kind="letters", shots={"count": 1, "choose": "first"}).task
    shown = "Question: What is 1 plus one?\nA. 1\nB. 2\nC. none of them\nAnswer: B\n\n"
    asked = "Question: What is 0 plus one?\nA. 0\nB. 1\nC. none of them\nAnswer:"
    assert task.requests[0].context == shown + asked
    assert [request.continuation for request in task.requests[:3]] == [" A", " B", " C"]
    assert (task.kind, task.shots) == ("letters", 1)


def test_a_schema_has_several_beginnings_and_one_ending(tmp_path: Path) -> None:
    rows = [{"options": ["Jim won, so Jim", "Jim won, so Kim"], "end": "was glad.", "gold": 0}] * 2
    fields = {"kind": "schema", "contexts": "options", "continuation": "{{ end }}", "gold": "gold"}
    task = rendered(tmp_path, rows, **fields, context=None, choices=None, before_answer=None).task
    assert [(r.context, r.continuation, r.gold) for r in task.requests[:2]] == [
        ("Jim won, so Jim", " was glad.", 0),
        ("Jim won, so Kim", " was glad.", 0),
    ]
    first, second = task.requests[0].document, task.requests[2].document
    assert second == f"{first}-2", "a repeated question is a question of its own"


def test_cloze_and_rolling(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"choices": None, "gold": None, "before_answer": None}
    rows = [{"c": "I don't care about ", "w": "signs"}]
    cloze = rendered(tmp_path, rows, **fields, kind="cloze", context="{{ c.rstrip() }}", continuation="{{ w }}").task
    assert [(r.context, r.continuation) for r in cloze.requests] == [("I don't care about", " signs")]
    assert (cloze.kind, cloze.chance) == ("cloze", 0.0)
    write_lines(tmp_path / "t.jsonl", [{"text": " A text.\n"}])
    rolling = rendered(tmp_path, rows, **fields, kind="rolling", context=None, data="t.jsonl").task
    assert [(r.context, r.continuation) for r in rolling.requests] == [("", " A text.\n")]
    assert (rolling.kind, rolling.chance) == ("rolling", None)


def test_the_model_writes_after_the_question(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"kind": "generate", "choices": None, "gold": "choices[answer]"}
    fields |= {"answer": "so it is {{ choices[answer] }}", "shots": {"count": 1, "choose": "first"}}
    task = rendered(tmp_path, quiz(3), **fields).task
    shown = "Question: What is 1 plus one?\nAnswer: so it is 2"
    assert task.prompts[0].context == f"{shown}\n\nQuestion: What is 0 plus one?\nAnswer:"
    assert [prompt.gold for prompt in task.prompts] == [("0",), ("2",), ("none of them",)]
    assert not task.requests


def test_code_keeps_its_white_space_and_knows_what_is_run(tmp_path: Path) -> None:
    rows = [{"prompt": "def f():\n    ", "check": "assert f() == 1"}]
    fields: dict[str, Any] = {"kind": "code", "choices": None, "gold": None, "before_answer": None}
    task = rendered(tmp_path, rows, **fields, context="{{ prompt }}", tests="{{ check }}").task
    (prompt,) = task.prompts
    assert (prompt.context, prompt.program, prompt.tests) == ("def f():\n    ", "def f():\n    ", "assert f() == 1")
    prose = rendered(tmp_path, rows, **fields, context="Write f.", tests="{{ check }}", program="").task
    assert (prose.prompts[0].context, prose.prompts[0].program) == ("Write f.", "")


def test_examples_come_from_the_own_group_and_a_file_of_their_own(tmp_path: Path) -> None:
    write_lines(tmp_path / "dev.jsonl", quiz(20, subjects=4))
    shots = {"count": 5, "data": "dev.jsonl", "choose": "first", "same_group": True}
    preamble = "About {{ subject }}.\n"
    made = rendered(tmp_path, quiz(40, subjects=4)[20:], group="{{ subject }}", shots=shots, preamble=preamble)
    assert sorted(made.sources) == ["dev.jsonl", "quiz.jsonl"]
    for request in made.task.requests:
        assert request.context.startswith(f"About {request.group}.\n")
        numbers = [int(line.split()[3]) for line in request.context.splitlines() if line.startswith("Question")]
        assert numbers[:5] == list(range(int(request.group[1]), 20, 4))


@given(count=st.integers(2, 12), shots=st.integers(0, 8), seed=st.integers(0, 3), first=st.booleans())
def test_examples_are_others_each_once_and_the_same_again(count: int, shots: int, seed: int, first: bool) -> None:
    """Rows are repeated, so the question itself must be known by what it says and not by its place."""
    rows = [*quiz(count), *quiz(count)[:2]]
    fields = {"shots": {"count": shots, "seed": seed, "choose": "first" if first else "seed"}}
    with TemporaryDirectory() as name:
        folder = Path(name)
        if shots > len(rows) - 2:
            with pytest.raises(ValueError, match=rf"quiz: shots\.count: {shots} are asked for and {len(rows) - 2}"):
                rendered(folder, rows, **fields)
            return
        task = rendered(folder, rows, **fields).task
        assert rendered(folder, rows, **fields).task == task
    for request in task.requests:
        *examples, asked = request.context.split("\n\n")
        assert len(examples) == shots
        assert all(not example.startswith(asked) for example in examples)
        places = [example.split()[3] for example in examples]
        assert all(places.count(place) <= (2 if int(place) < 2 else 1) for place in places)


def test_seeds_draw_other_examples(tmp_path: Path) -> None:
    drawn = {rendered(tmp_path, quiz(30), shots={"count": 3, "seed": seed}).task.digest for seed in range(4)}
    assert len(drawn) == 4


def test_a_limit_takes_the_same_questions_from_any_order(tmp_path: Path) -> None:
    rows = quiz(50)
    few = rendered(tmp_path, rows, limit=10).task
    assert few.questions == 10
    shuffled = random.Random(1).sample(rows, len(rows))
    again = rendered(tmp_path, shuffled, most=10).task
    assert {request.document for request in few.requests} == {request.document for request in again.requests}
    assert rendered(tmp_path, rows, most=3, limit=10).task.questions == 3


def test_the_digest_follows_rules_and_text_and_nothing_else(tmp_path: Path) -> None:
    plain = rendered(tmp_path, quiz(6)).task.digest
    assert rendered(tmp_path / "elsewhere", quiz(6)).task.digest == plain
    changes: list[dict[str, Any]] = [
        {"version": 2}, {"normalize": "tokens"}, {"shots": 1}, {"chance": 0.1}, {"group": "{{ subject }}"},
        {"context": "{{ question }}"},
    ]  # fmt: skip
    assert len({plain, *(rendered(tmp_path, quiz(6), **change).task.digest for change in changes)}) == 7


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({}, {"context": "{{ queston }}"}, "context: 'queston' is undefined; the row has question, choices"),
        ({}, {"gold": "anser"}, "gold: 'anser' is undefined; the row has"),
        ({"answer": None}, {}, "gold: is missing; give the place of the right one, 0 to 2"),
        ({"answer": 3}, {}, "gold: 3 must be the place of the right one, a number from 0 to 2"),
        ({"answer": -1}, {}, "gold: -1 must be"),
        ({"answer": True}, {}, "gold: True must be"),
        ({"answer": "1"}, {}, "gold: '1' must be"),
        ({"choices": ["a", " ", "b"]}, {}, "choices: 1 is empty; give a text to score"),
        ({"choices": ["a"]}, {}, "choices: ['a'] must be a list of two or more texts"),
        ({"choices": "ab"}, {}, "choices: 'ab' must be a list"),
        ({"choices": ["a"] * 27}, {"kind": "letters"}, "choices: 27 are more than there are letters"),
        ({}, {"choices": "choices[7]"}, "choices: "),
        ({}, {"context": "{{ question.__class__.__mro__ }}"}, "context: access to attribute '__class__'"),
        ({"w": " "}, {"kind": "cloze", "choices": None, "gold": None, "continuation": "{{ w }}"}, "continuation: is e"),
        ({"answer": []}, {"kind": "generate", "choices": None}, "gold: [] must be a right answer"),
        ({"answer": " "}, {"kind": "generate", "choices": None}, "gold: ' ' must be a right answer"),
        ({"answer": ""}, {"kind": "code", "choices": None, "gold": None, "tests": "{{ answer }}"}, "tests: are empty"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_asked_are_refused(
    tmp_path: Path, row: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    good = {**quiz(1)[0], "w": "word"}
    if fields.get("kind") in ("generate", "code"):
        good["answer"] = "yes"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        rendered(tmp_path, [{**good, **row}], **fields)
    assert str(error.value).startswith(f"{tmp_path}/quiz.jsonl:1: {message}")


def test_a_template_that_is_none_is_refused_before_any_file_is_read(tmp_path: Path) -> None:
    for field, source in (("context", "{{ a"), ("gold", "1 +")):
        with pytest.raises(ValueError, match=f"quiz: {field}: .* is not a template"):
            rendered(tmp_path, [], **{field: source})


def test_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quiz\.jsonl: sha256 is [0-9a-f]{64}, the task was written for 0123"):
        rendered(tmp_path, quiz(3), sha256={"quiz.jsonl": "0123"})


@pytest.mark.parametrize(("name", "questions"), [("arc_easy", 2376), ("arc_challenge", 1172)])
def test_published_questions_are_rendered_whole(shared: Path, name: str, questions: int) -> None:
    fields = {"name": name, "kind": "choice", "data": f"{name}.jsonl", "context": "{{ query }}", "choices": "choices"}
    file = parse_task({**fields, "gold": "gold", "shots": 2}, "t.yaml")
    task = render(file, DataPaths(str(shared / "eval/multiple-choice"))).task
    assert task.questions == questions
    assert task.chance == pytest.approx(0.25, abs=0.001)
