"""A suite with every kind of task, end to end: what is scored, what is said about it, and that it is the same again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from herd.llama3.evaluate.evaluate import evaluate
from herd.llama3.evaluate.sandbox import sandbox_error
from herd.llama3.evaluate.scores import Score, read_scores, read_task_record
from herd.llama3.evaluate.suite import ARITHMETIC, check_suite, render_recipe_suite
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import train_tokenizer
from tests.dist import run
from tests.llama3.evaluate.suite_samples import BASELINES, TASKS, evaluated, evaluated_together, make, recipe_of

FILES = ("scores.parquet", "samples.parquet", "answers.parquet", "tasks.json", "generations.json")
pytestmark = pytest.mark.skipif(bool(sandbox_error()), reason=f"no sandbox here: {sandbox_error()}")


class Room(NamedTuple):
    root: Path
    recipe: Recipe
    facts: dict[str, Any]
    scores: dict[str, Score]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Room:
    root = tmp_path_factory.mktemp("suite")
    recipe = make(root, checkout)
    facts = evaluated(root, recipe, "first")
    return Room(root, recipe, facts, read_scores(root / "first"))


def test_every_score_has_all_that_a_reader_needs(room: Room) -> None:
    """Goal: no row without n, interval, chance level, shots, digest of what was asked and version."""
    assert {f"eval/{name}" for name in TASKS} < room.scores.keys()
    for key, score in room.scores.items():
        assert score.n >= 1
        assert score.low <= score.value <= score.high
        assert score.low < score.high, key
        assert math.isfinite(score.stderr)
        assert len(score.requests) == 64
        assert (score.chance is None) == (score.unit in ("bits per byte", "nats per byte"))
        assert score.version >= 1
        assert score.shots >= 0
    assert (room.scores["eval/letters"].shots, room.scores["eval/letters"].version) == (2, 4)
    assert len({score.requests for score in room.scores.values()}) >= len(TASKS) + 4


def test_values_are_those_of_the_samples(room: Room) -> None:
    rows = pq.read_table(room.root / "first/samples.parquet").to_pylist()
    for name in ("choice", "schema", "cloze", "rolling", "written", "program"):
        mine = [row for row in rows if row["key"] == f"eval/{name}"]
        value = sum(row["numerator"] for row in mine) / sum(row["denominator"] for row in mine)
        assert room.scores[f"eval/{name}"].value == pytest.approx(value)
    assert room.scores["eval/program"].value == 1.0, "a comment is what the model wrote, whatever it says"
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["key"] == "eval/letters":
            groups.setdefault(row["group"], []).append(row["numerator"])
    assert sorted(groups) == ["s0", "s1", "s2"]
    means = [sum(values) / len(values) for values in groups.values()]
    assert room.scores["eval/letters"].value == pytest.approx(sum(means) / 3)


def test_core_is_the_mean_above_the_table_of_baselines(room: Room) -> None:
    above = [(room.scores[f"eval/{name}"].value - base) / (1 - base) for name, base in BASELINES.items()]
    assert room.scores["eval/core"].value == pytest.approx(sum(above) / len(above))
    assert room.facts["baselines"] == "table 3"


def test_what_was_asked_and_left_out_is_written_down(room: Room) -> None:
    assert list(check_suite(room.recipe)) == [f"boolq: {room.facts['skipped']['boolq']}"]
    asked = read_task_record(room.root / "first")
    assert asked["skipped"] == room.facts["skipped"]
    assert "boolq.jsonl: is not a file" in asked["skipped"]["boolq"]
    tasks = {task["key"]: task for task in asked["tasks"]}
    assert {key: task["baseline"] for key, task in tasks.items() if task["baseline"] is not None} == {
        f"eval/{name}": base for name, base in BASELINES.items()
    }
    for key, task in tasks.items():
        assert (f"eval/gold_nll/{key[5:]}" in room.scores) == (task["kind"] in ("choice", "letters", "schema", "cloze"))
        assert (task["digest"], task["n"]) == (room.scores[key].requests, room.scores[key].n)
    assert tasks["eval/letters"]["average"] == "groups"
    assert list(tasks["eval/cloze"]["sources"]) == ["words.jsonl"]
    with pytest.raises(ValueError, match=r"holds no tasks\.json; evaluate the model into it first"):
        read_task_record(room.root)


def test_written_answers_are_kept(room: Room) -> None:
    rows = pq.read_table(room.root / "first/answers.parquet").to_pylist()
    assert [row["key"] for row in rows] == ["eval/program"] * 6 + ["eval/written"] * 12
    assert all(row["right"] or row["reason"] for row in rows)
    assert room.facts["too_long"] == {}


def test_equal_inputs_give_equal_bytes(room: Room) -> None:
    assert evaluated(room.root, room.recipe, "second") == room.facts
    for name in FILES:
        assert (room.root / "first" / name).read_bytes() == (room.root / "second" / name).read_bytes(), name


@pytest.mark.slow
def test_two_processes_write_the_same_report(room: Room, checkout: Path) -> None:
    """The number of processes is no input: every file has the same bytes; each process wrote some of the texts."""
    first, second = run(2, evaluated_together, room.root, checkout, "together")
    *_, texts = (json.loads(path.read_text()) for path in sorted((room.root / "done").iterdir()))
    assert [len(own) for own in texts] == [2, 1]
    assert first == second == json.loads(json.dumps(room.facts))
    for name in FILES:
        assert (room.root / "first" / name).read_bytes() == (room.root / "together" / name).read_bytes(), name


def test_a_model_with_a_tokenizer_of_its_own_refuses_another(room: Room) -> None:
    train_tokenizer(["abab " * 50, "cdcd " * 50], 258).save(room.root / "other")
    model = room.root / "model"
    with pytest.raises(ValueError, match=r"was trained with tokenizer [0-9a-f]{8}, .*other is [0-9a-f]{8}: give the"):
        evaluate(room.recipe, model, room.root / "other", room.root / "curated", room.root / "no")
    assert not (room.root / "no").exists()


@pytest.mark.slow
def test_needles_are_a_built_in_task_of_windows_that_have_room(room: Room, checkout: Path) -> None:
    (room.root / "needle.yaml").write_text("built_in: [bits, needle]\n")
    words = [f"evaluate.suite={room.root / 'needle.yaml'}", "stages.anneal.seq_len=1024", "evaluate.needles=11"]
    model, recipe = room.root / "model", recipe_of(room.root, checkout, *words)
    facts = evaluate(recipe, model, model, room.root / "curated", room.root / "needles", threads=1)
    scores = read_scores(room.root / "needles")
    cells = {f"eval/needle/length_{length:06}" for length in (512, 1024)}
    assert cells | {"eval/needle", "eval/needle/single", "eval/needle/multi-query"} < scores.keys() < facts.keys()
    assert scores["eval/needle"].n == 22
    rows = pq.read_table(room.root / "needles/samples.parquet", filters=[("key", "=", "eval/needle")]).to_pylist()
    assert len(rows) == 22
    assert not {key for key in read_scores(room.root / "first") if key.startswith("eval/needle")}


def test_a_limit_caps_the_tasks_of_files_alone(room: Room, checkout: Path) -> None:
    whole, cut = (
        {task.key: task.questions for task in render_recipe_suite(recipe_of(room.root, checkout, *more), []).tasks}
        for more in ((), ("evaluate.limit=2",))
    )
    assert whole.keys() == cut.keys()
    assert whole[ARITHMETIC] == cut[ARITHMETIC] == 9
    others = whole.keys() - {ARITHMETIC}
    assert max(whole[key] for key in others) > 2
    assert all(cut[key] == min(2, whole[key]) for key in others)
