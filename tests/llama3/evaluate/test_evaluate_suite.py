"""A suite with every kind of task, end to end: what is scored, what is said about it, and that it is the same again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from herd.llama3.evaluate.evaluate import evaluate
from herd.llama3.evaluate.scores import Score, read_scores, read_task_record
from herd.llama3.evaluate.suite import ARITHMETIC, check_suite, render_recipe_suite
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import train_tokenizer
from tests.conftest import needs_sandbox
from tests.dist import run
from tests.llama3.evaluate.suite_samples import BASELINES, TASKS, evaluated, evaluated_together, make, recipe_of

FILES = ("scores.parquet", "samples.parquet", "answers.parquet", "tasks.json", "generations.json")
pytestmark = needs_sandbox


class Workspace(NamedTuple):
    root: Path
    recipe: Recipe
    facts: dict[str, Any]
    scores: dict[str, Score]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Workspace:
    root = tmp_path_factory.mktemp("suite")
    recipe = make(root, checkout)
    facts = evaluated(root, recipe, "first")
    return Workspace(root, recipe, facts, read_scores(root / "first"))


def test_every_score_has_all_that_a_reader_needs(workspace: Workspace) -> None:
    """Goal: no row without n, interval, chance level, shots, digest of what was asked and version."""
    assert {f"eval/{name}" for name in TASKS} < workspace.scores.keys()
    for key, score in workspace.scores.items():
        assert score.n >= 1
        assert score.low <= score.value <= score.high
        assert score.low < score.high, key
        assert math.isfinite(score.stderr)
        assert len(score.requests) == 64
        assert (score.chance is None) == (score.unit in ("bits per byte", "nats per byte"))
        assert score.version >= 1
        assert score.shots >= 0
    assert (workspace.scores["eval/letters"].shots, workspace.scores["eval/letters"].version) == (2, 4)
    assert len({score.requests for score in workspace.scores.values()}) >= len(TASKS) + 4


def test_values_are_those_of_the_samples(workspace: Workspace) -> None:
    rows = pq.read_table(workspace.root / "first/samples.parquet").to_pylist()
    for name in ("choice", "schema", "cloze", "rolling", "written", "program"):
        mine = [row for row in rows if row["key"] == f"eval/{name}"]
        value = sum(row["numerator"] for row in mine) / sum(row["denominator"] for row in mine)
        assert workspace.scores[f"eval/{name}"].value == pytest.approx(value)
    assert workspace.scores["eval/program"].value == 1.0, "a comment is what the model wrote, whatever it says"
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["key"] == "eval/letters":
            groups.setdefault(row["group"], []).append(row["numerator"])
    assert sorted(groups) == ["s0", "s1", "s2"]
    means = [sum(values) / len(values) for values in groups.values()]
    assert workspace.scores["eval/letters"].value == pytest.approx(sum(means) / 3)


def test_core_is_the_mean_above_the_table_of_baselines(workspace: Workspace) -> None:
    above = [(workspace.scores[f"eval/{name}"].value - base) / (1 - base) for name, base in BASELINES.items()]
    assert workspace.scores["eval/core"].value == pytest.approx(sum(above) / len(above))
    assert workspace.facts["baselines"] == "table 3"


def test_what_was_asked_and_left_out_is_written_down(workspace: Workspace) -> None:
    assert list(check_suite(workspace.recipe)) == [f"boolq: {workspace.facts['skipped']['boolq']}"]
    asked = read_task_record(workspace.root / "first")
    assert asked["skipped"] == workspace.facts["skipped"]
    assert "boolq.jsonl: is not a file" in asked["skipped"]["boolq"]
    tasks = {task["key"]: task for task in asked["tasks"]}
    assert {key: task["baseline"] for key, task in tasks.items() if task["baseline"] is not None} == {
        f"eval/{name}": base for name, base in BASELINES.items()
    }
    for key, task in tasks.items():
        assert (f"eval/gold_nll/{key[5:]}" in workspace.scores) == (
            task["kind"] in ("choice", "letters", "schema", "cloze")
        )
        assert (task["digest"], task["n"]) == (workspace.scores[key].requests, workspace.scores[key].n)
    assert tasks["eval/letters"]["average"] == "groups"
    assert list(tasks["eval/cloze"]["sources"]) == ["words.jsonl"]
    with pytest.raises(ValueError, match=r"holds no tasks\.json; evaluate the model into it first"):
        read_task_record(workspace.root)


def test_written_answers_are_kept(workspace: Workspace) -> None:
    rows = pq.read_table(workspace.root / "first/answers.parquet").to_pylist()
    assert [row["key"] for row in rows] == ["eval/program"] * 6 + ["eval/written"] * 12
    assert all(row["right"] or row["reason"] for row in rows)
    assert workspace.facts["too_long"] == {}


def test_equal_inputs_give_equal_bytes(workspace: Workspace) -> None:
    assert evaluated(workspace.root, workspace.recipe, "second") == workspace.facts
    for name in FILES:
        assert (workspace.root / "first" / name).read_bytes() == (workspace.root / "second" / name).read_bytes(), name


@pytest.mark.slow
def test_two_processes_write_the_same_report(workspace: Workspace, checkout: Path) -> None:
    """The number of processes is no input: every file has the same bytes; each process wrote some of the texts."""
    first, second = run(2, evaluated_together, workspace.root, checkout, "together")
    *_, texts = (json.loads(path.read_text()) for path in sorted((workspace.root / "done").iterdir()))
    assert [len(own) for own in texts] == [2, 1]
    assert first == second == json.loads(json.dumps(workspace.facts))
    for name in FILES:
        assert (workspace.root / "first" / name).read_bytes() == (workspace.root / "together" / name).read_bytes(), name


def test_a_model_with_a_tokenizer_of_its_own_refuses_another(workspace: Workspace) -> None:
    train_tokenizer(["abab " * 50, "cdcd " * 50], 258).save(workspace.root / "other")
    model = workspace.root / "model"
    with pytest.raises(ValueError, match=r"was trained with tokenizer [0-9a-f]{8}, .*other is [0-9a-f]{8}: give the"):
        evaluate(workspace.recipe, model, workspace.root / "other", workspace.root / "curated", workspace.root / "no")
    assert not (workspace.root / "no").exists()


@pytest.mark.slow
def test_needles_are_a_built_in_task_of_windows_that_have_room(workspace: Workspace, checkout: Path) -> None:
    (workspace.root / "needle.yaml").write_text("built_in: [bits, needle]\n")
    words = [f"evaluate.suite={workspace.root / 'needle.yaml'}", "stages.anneal.seq_len=1024", "evaluate.needles=11"]
    model, recipe = workspace.root / "long", recipe_of(workspace.root, checkout, *words)
    shutil.copytree(workspace.root / "model", model)
    (model / "config.json").write_text((model / "config.json").read_text().replace(": 128,", ": 1024,"))
    facts = evaluate(recipe, model, model, workspace.root / "curated", workspace.root / "needles", threads=1)
    scores = read_scores(workspace.root / "needles")
    cells = {f"eval/needle/length_{length:06}" for length in (512, 1024)}
    assert cells | {"eval/needle", "eval/needle/single", "eval/needle/multi-query"} < scores.keys() < facts.keys()
    assert scores["eval/needle"].n == 22
    rows = pq.read_table(workspace.root / "needles/samples.parquet", filters=[("key", "=", "eval/needle")]).to_pylist()
    assert len(rows) == 22
    assert not {key for key in read_scores(workspace.root / "first") if key.startswith("eval/needle")}


def test_a_limit_caps_the_tasks_of_files_alone(workspace: Workspace, checkout: Path) -> None:
    whole, cut = (
        {task.key: task.questions for task in render_recipe_suite(recipe_of(workspace.root, checkout, *more), []).tasks}
        for more in ((), ("evaluate.limit=2",))
    )
    assert whole.keys() == cut.keys()
    assert whole[ARITHMETIC] == cut[ARITHMETIC] == 9
    others = whole.keys() - {ARITHMETIC}
    assert max(whole[key] for key in others) > 2
    assert all(cut[key] == min(2, whole[key]) for key in others)
