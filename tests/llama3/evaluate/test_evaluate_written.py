"""Written answers of a real, small model: judged, kept with the reason, the same again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from herd.llama3.evaluate import answer_extraction
from herd.llama3.evaluate import evaluate as answering
from herd.llama3.evaluate import task as tasks
from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.evaluate.evaluate import (
    TOO_LONG,
    GeneratedAnswer,
    answer_samples,
    count_too_long,
    count_unjudged,
    generate_answers,
    write_answers,
)
from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.sandbox import SandboxResult, run_programs
from herd.llama3.evaluate.scores import score_samples
from herd.llama3.evaluate.suite import render_task, suite_tasks
from herd.llama3.evaluate.task import Prompt, Task, answer_program
from herd.llama3.evaluate.task_yaml import DataPaths, read_rows
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.load import load_recipe
from herd.llama3.tokens.tokenizer import Tokenizer
from tests.conftest import needs_sandbox

WINDOW = 64
WRITING = GenerationSettings(max_tokens=6, samples=3, temperature=1.0)


@pytest.fixture(scope="module")
def coder() -> Tokenizer:
    return Tokenizer([bytes([n]) for n in range(256)])


@pytest.fixture(scope="module")
def model(checkout: Path, coder: Tokenizer) -> Transformer:
    config = load_recipe(checkout / "recipes/quickstart.yaml", ["model={preset: tiny}"]).model
    return build_model(config, coder.vocab_size, 0, torch.float32, torch.device("cpu"))


def asked(count: int, gold: str = "never written") -> Task:
    prompts = tuple(Prompt("eval/t", f"q{n}", f"Question {n}", (gold,), group=f"g{n % 2}") for n in range(count))
    return Task("eval/t", "generate", prompts=prompts, writing=WRITING)


def test_answers_are_kept_and_judged(model: Transformer, coder: Tokenizer, tmp_path: Path) -> None:
    """Gold answers are taken from a first round, for two of three samples of one question: pass@1 is 2/3 of it."""
    task = asked(4)
    found = generate_answers(model, coder, task, WINDOW, EvalRanks())
    assert [(one.id, one.sample) for one in found] == [(f"q{n}", k) for n in range(4) for k in range(3)]
    assert not any(one.right for one in found)
    assert {one.reason for one in found} == {"it is not never written"}
    gold = tuple({one.text.strip() for one in found[3:5]})
    task = replace(task, prompts=(task.prompts[0], replace(task.prompts[1], gold=gold), *task.prompts[2:]))
    again = generate_answers(model, coder, task, WINDOW, EvalRanks())
    assert [one.text for one in again] == [one.text for one in found], "equal questions get equal answers"
    shares = [
        sum(one.text.strip() in gold for one in found[3 * n : 3 * n + 3]) / 3 if n == 1 else 0.0 for n in range(4)
    ]
    items = answer_samples(task, again)
    assert [item.numerator for item in items] == pytest.approx(shares)
    assert [item.group for item in items] == ["g0", "g1", "g0", "g1"]
    assert score_samples(task, items).value == pytest.approx(sum(shares) / 4)
    best = answer_samples(replace(task, writing=replace(WRITING, k=3)), again)
    assert [item.numerator for item in best] == [0.0, 1.0, 0.0, 0.0]
    write_answers(again, tmp_path)
    rows = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["text"] for row in rows] == [one.text for one in again]


def test_nothing_found_is_wrong_and_says_so(model: Transformer, coder: Tokenizer) -> None:
    writing = replace(WRITING, extract=("####(never)",))
    found = generate_answers(model, coder, replace(asked(2), writing=writing), WINDOW, EvalRanks())
    assert {(one.right, one.extracted, one.reason) for one in found} == {
        (False, None, "nothing was found in the answer")
    }


def test_questions_longer_than_the_window_count_as_wrong_aloud(model: Transformer, coder: Tokenizer) -> None:
    task = asked(3, gold="")
    long = replace(task.prompts[1], context="x" * (WINDOW - WRITING.max_tokens))
    task = replace(task, prompts=(task.prompts[0], long, task.prompts[2]))
    found = generate_answers(model, coder, task, WINDOW, EvalRanks())
    assert {one.reason for one in found if one.id == "q1"} == {
        f"{TOO_LONG}{WINDOW - 5} positions and 6 to write are more than the model's 64"
    }
    assert all(one.text for one in found if one.id != "q1")
    assert count_too_long(found) == {"eval/t": 1}
    fits = replace(long, context=long.context[1:])
    assert count_too_long(generate_answers(model, coder, replace(task, prompts=(fits,)), WINDOW, EvalRanks())) == {}
    assert len(answer_samples(task, found)) == 3


def test_what_was_not_judged_is_neither_right_nor_wrong(
    model: Transformer, coder: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that this machine could not run, and an expression that takes too long on one answer."""
    verdicts = {
        "one": SandboxResult(True, "passed"),
        "two": SandboxResult(False, "killed", judged=False),
        "six": SandboxResult(False, "x"),
    }
    prompts = tuple(Prompt("eval/c", name, "x = 1", (), name, "x = 1") for name in verdicts)
    task = Task("eval/c", "code", prompts=prompts, writing=GenerationSettings(max_tokens=2))
    monkeypatch.setattr(tasks, "run_programs", lambda programs, *_: [verdicts[p.split()[-1]] for p in programs])
    found = generate_answers(model, coder, task, WINDOW, EvalRanks())
    assert [(one.right, one.judged, one.reason) for one in found] == [
        (True, True, ""), (False, False, "killed"), (False, True, "x"),
    ]  # fmt: skip
    items = answer_samples(task, found)
    assert [(item.id, item.numerator) for item in items] == [("one", 1.0), ("six", 0.0)]
    made = score_samples(task, items)
    assert (made.value, made.n, made.unjudged, count_unjudged(found)) == (0.5, 2, 1, {"eval/c": 1})
    nothing = score_samples(task, [])
    assert (math.isnan(nothing.value), nothing.n, nothing.unjudged) == (True, 0, 3)
    write_answers(found, tmp_path)
    assert pq.read_table(tmp_path / "answers.parquet")["judged"].to_pylist() == [True, True, False]
    monkeypatch.setattr(answer_extraction, "SECONDS", 0.2)
    slow = Task("eval/t", "generate", prompts=(Prompt("eval/t", "q", "a" * 30, ("b",)),), writing=WRITING)
    monkeypatch.setattr(answering, "generate_batch", lambda *_: [["b", "a" * 40 + "!", "c"]])
    for field in ("extract", "ignore"):
        writing = replace(WRITING, **{field: ("((a|aa)+)$", "(.+)") if field == "extract" else ("((a|aa)+)$",)})
        found = generate_answers(model, coder, replace(slow, writing=writing), WINDOW, EvalRanks())
        assert [(one.right, one.judged) for one in found] == [(True, True), (False, False), (False, True)]
        assert "takes more than 0.2 s of processor time" in found[1].reason
        assert answer_samples(replace(slow, writing=writing), found) == []


@needs_sandbox
def test_programs_are_run_behind_what_stands_before_them(model: Transformer, coder: Tokenizer) -> None:
    """What a random model writes is no Python, except behind a comment sign."""
    tests = "assert 1 + 1 == 2"
    prompts = (
        Prompt("eval/c", "comment", "x = 1  # ", (), tests, "x = 1  # "),
        Prompt("eval/c", "wrong", "x = 1  # ", (), "assert x == 2", "x = 1  # "),
        Prompt("eval/c", "unfinished", "def f(", (), tests, "def f(: "),
    )
    task = Task(
        "eval/c",
        "code",
        prompts=prompts,
        writing=GenerationSettings(max_tokens=4, until=("\n", "\r", "\x0c"), seconds=2),
    )
    found = generate_answers(model, coder, task, WINDOW, EvalRanks())
    assert [(one.id, one.right) for one in found] == [("comment", True), ("wrong", False), ("unfinished", False)]
    assert found[0].reason == ""
    assert "AssertionError" in found[1].reason
    assert isinstance(found[2], GeneratedAnswer)
    assert found[2].reason


@needs_sandbox
def test_humaneval_accepts_its_reference_solutions_and_no_stub(shared: Path) -> None:
    """What is run is put together as for a model's answer: program, answer, tests."""
    (planned,) = suite_tasks("humaneval", str(shared / "eval"))
    prompts = render_task(planned).task.prompts[:4]
    rows = read_rows("humaneval/HumanEval.jsonl.gz", DataPaths(str(shared / "eval"))).rows
    right = [
        answer_program(prompt, row.fields["canonical_solution"]) for prompt, row in zip(prompts, rows, strict=False)
    ]
    assert all(verdict.passed for verdict in run_programs(right))
    assert not any(
        verdict.passed for verdict in run_programs([answer_program(prompt, "    return None") for prompt in prompts])
    )
