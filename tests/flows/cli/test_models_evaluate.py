"""`herd eval`: any model on any tasks, from the command line alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from herd.flows.cli.main import app
from herd.llama3.evaluate import sandbox
from herd.llama3.export.convert import convert
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.conftest import needs_sandbox
from tests.llama3.evaluate.task_samples import CHOICE, quiz, write_lines

TEXTS = [str(row["question"]) for row in quiz(40)]
TAKES_LONGER_THAN_A_LOOK = "import time\nwhile time.process_time() < 0.3: pass"
CONFIG = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=256)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three formats, two tasks and their data."""
    place = tmp_path_factory.mktemp("workspace")
    tokenizer = train_tokenizer(TEXTS * 4, 290)
    weights = build_model(CONFIG, tokenizer.vocab_size, 0, torch.float32, torch.device("cpu")).state_dict()
    save_model(place / "herd", CONFIG, tokenizer.vocab_size, weights)
    tokenizer.save(place / "herd")
    convert(place / "herd", "herd", place / "hf", "hf", "fp32")
    convert(place / "herd", "herd", place / "meta", "meta", "fp32")
    write_lines(place / "data/quiz.jsonl", quiz(30))
    write_lines(place / "data/code.jsonl", [{"word": f"w{n}"} for n in range(4)])
    (place / "quiz.yaml").write_text(yaml.safe_dump(CHOICE))
    code = {
        "name": "code",
        "kind": "code",
        "data": "code.jsonl",
        "context": "x = 1  # {{ word }}",
        "tests": TAKES_LONGER_THAN_A_LOOK,
    }
    writing = {"max_tokens": 2, "until": ["\n", "\r"], "seconds": 2}
    (place / "code.yaml").write_text(yaml.safe_dump({**code, "writing": writing}))
    suite = {"built_in": ["bits", "arithmetic"], "tasks": ["quiz.yaml", "mmlu"]}
    (place / "suite.yaml").write_text(yaml.safe_dump(suite))
    return place


def herd(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments), "--threads", "1", "--device", "cpu"])


def results(*arguments: object) -> dict[str, Any]:
    found = herd(*arguments, "--json")
    assert found.exit_code == 0, found.output
    content: dict[str, Any] = json.loads(found.stdout)
    return content


def test_every_format_of_a_model_gets_the_same_scores(workspace: Path, tmp_path: Path) -> None:
    """No root, no recipe and no server are needed."""
    scores = [
        results(workspace / form, workspace / "quiz.yaml", "--data", workspace / "data", "--root", tmp_path / "none")[
            "scores"
        ]
        for form in ("herd", "hf", "meta")
    ]
    assert scores[0] == scores[1] == scores[2]
    (score,) = scores[0].values()
    assert (score["n"], score["unjudged"], score["unit"], score["shots"]) == (30, 0, "accuracy", 0)
    assert score["chance"] == pytest.approx(1 / 3)
    assert score["low"] < score["value"] < score["high"]
    assert not (tmp_path / "none").exists()


def test_a_table_is_shown_and_a_file_and_tables_are_written(workspace: Path, tmp_path: Path) -> None:
    options = ("--data", workspace / "data", "--limit", 8, "--shots", 2, "--output", tmp_path / "made/out.json")
    found = herd(workspace / "herd", workspace / "quiz.yaml", *options, "--tables", tmp_path / "tables")
    assert found.exit_code == 0, found.output
    head, line = found.stdout.splitlines()
    assert head.split() == ["task", "score", "95", "%", "n", "chance", "shots", "unit", "digest"]
    (score,) = json.loads((tmp_path / "made/out.json").read_text())["scores"].values()
    assert line.split() == [
        "quiz", f"{score['value']:.4g}", f"{score['low']:.4g}", "to", f"{score['high']:.4g}", "8", "0.333", "2",
        "accuracy", score["requests"][:12],
    ]  # fmt: skip
    samples = pq.read_table(tmp_path / "tables/samples.parquet").to_pylist()
    assert math.fsum(sample["numerator"] for sample in samples) / 8 == score["value"]
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        "scores.parquet", "samples.parquet", "answers.parquet", "tasks.json",
    }  # fmt: skip


def test_a_suite_is_scored_without_what_needs_a_run(workspace: Path) -> None:
    arguments = (workspace / "herd", workspace / "suite.yaml", "--data", workspace / "data", "--limit", 5)
    refused = herd(*arguments)
    assert refused.exit_code == 2
    assert "mmlu/test.jsonl: is not a file; put it there, or give --missing skip" in refused.output.replace("\n", " ")
    content = results(*arguments, "--missing", "skip")
    assert sorted(content["scores"]) == ["eval/arithmetic", "eval/core", "eval/quiz"]
    assert sorted(content["skipped"]) == ["bits", "mmlu"]
    assert content["skipped"]["bits"].startswith("needs the held-out documents of a run")


@pytest.mark.slow
@needs_sandbox
def test_what_could_not_be_judged_is_shown(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (workspace / "herd", workspace / "code.yaml", "--data", workspace / "data")
    assert results(*arguments)["scores"]["eval/code"]["unjudged"] == 0
    monkeypatch.setattr(sandbox, "WALL", (0.0, 0.0))
    found = herd(*arguments)
    assert "not judged  eval/code: 4 questions" in found.stderr
    assert results(*arguments)["scores"]["eval/code"]["value"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{workspace}/none", "{workspace}/quiz.yaml"), "run '{workspace}/none'"),
        (("{workspace}/herd", "riddles"), "'riddles' is not a task of the library"),
        (("{workspace}/herd", "{workspace}/quiz.yaml"), "evaluate.data: is not set"),
        (("{workspace}/data", "{workspace}/quiz.yaml", "--data", "{workspace}/data"), "run '{workspace}/data'"),
        (("{workspace}/herd", "wikitext", "--shots", "2"), "shots: kind rolling scores whole texts and takes none"),
    ],
)
def test_mistakes_are_lines_and_status_2(
    workspace: Path, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    found = herd(*(argument.format(workspace=workspace) for argument in arguments), "--root", tmp_path)
    assert found.exit_code == 2
    assert message.format(workspace=workspace) in found.output.replace("\n", " ")


def test_a_model_without_its_tokenizer_is_refused(workspace: Path, tmp_path: Path) -> None:
    for file in (workspace / "hf").iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    arguments = (tmp_path, workspace / "quiz.yaml", "--data", workspace / "data")
    assert "has no tokenizer.json; put the tokenizer of the model there" in herd(*arguments).output.replace("\n", " ")
    Tokenizer([bytes([n]) for n in range(256)]).save(tmp_path)
    assert herd(*arguments).exit_code == 2
