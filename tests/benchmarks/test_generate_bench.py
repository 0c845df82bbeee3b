"""`python -m benchmarks generate`: every side writes the same tokens, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import generate
from benchmarks.__main__ import bench
from benchmarks.generate import MEASURES, PROMPT, SIZES, GenerateSession, GenerateSettings, write_models
from benchmarks.generate_side import BYTES, coder, stepper
from benchmarks.measure import NotMeasured
from benchmarks.rows import GENERATE_TARGETS, Row, measured
from benchmarks.train_rounds import Rounds

TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a side is told, for two prompts; what it writes goes beside the weights."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, TINY)
    tokenizer, texts = coder(TINY.vocab), [PROMPT, PROMPT[9:]]
    prompts = [[tokenizer.begin, *tokenizer.encode(text)] for text in texts]
    return {"models": folder, "out": folder, "vocab": TINY.vocab, "texts": texts, "prompts": prompts, "new": 24}


def written(shape: dict[str, Any], side: str, step: Any = stepper) -> list[list[int]]:
    assert step({**shape, "side": side}, False)() == 48
    tokens: list[list[int]] = json.loads((Path(shape["out"]) / f"{side}.json").read_text())
    return tokens


@pytest.mark.slow
def test_our_sides_write_the_same_tokens(shape: dict[str, Any]) -> None:
    tokens = written(shape, "recompute")
    assert [len(row) for row in tokens] == [24, 24]
    assert all(BYTES <= token < TINY.vocab for row in tokens for token in row)
    assert len(set(tokens[0])) > 3
    assert written(shape, "stream") == tokens
    assert written(shape, "answer") == tokens
    assert written({**shape, "stream": False}, "served") == tokens
    assert written({**shape, "stream": True}, "served") == tokens
    assert stepper({**shape, "side": "served", "new": 1, "first": True, "stream": True}, False)() > 0
    assert json.loads((Path(shape["out"]) / "served.json").read_text()) != [row[:1] for row in tokens], "another prompt"


@pytest.mark.slow
def test_transformers_writes_the_same_tokens(shape: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from benchmarks.peers.generate_transformers import stepper as theirs

    assert written(shape, "transformers", theirs) == written(shape, "stream")
    assert written({**shape, "together": True}, "transformers", theirs) == written(shape, "stream")


def test_every_row_has_a_target_and_a_measure() -> None:
    assert sorted(MEASURES) == sorted(GENERATE_TARGETS)


def test_rows_are_made_of_rounds_and_of_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = {"ours": [1.0, 2.0, 4.0], "transformers": [2.0, 4.0, 8.4]}
    monkeypatch.setattr(
        generate, "take_rounds", lambda *_: Rounds(cpu_s, {}, {}, {"ours": "2", "transformers": "5.23"}, {})
    )
    session = GenerateSession(GenerateSettings(tmp_path, "tiny"))
    speed = generate.transformers_speed(session, "transformers/speed")
    assert (speed.value, speed.ok) == (2.0, True)
    for side, tokens in {"stream": [1, 2, 3, 4], "transformers": [1, 2, 9, 4]}.items():
        (tmp_path / "peer" / f"{side}.json").write_text(json.dumps([tokens]))
    equal = generate.transformers_equal(session, "transformers/equal")
    assert (equal.value, equal.ok) == (75.0, False)
    assert session.versions == {"transformers": "5.23"}


def test_rows_of_the_server_tell_speed_and_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s, losses = {"ours": [0.5, 0.5], "transformers": [1.0, 0.8]}, {"ours": [30.0], "transformers": [20.0]}
    monkeypatch.setattr(generate, "take_rounds", lambda *_: Rounds(cpu_s, losses, {}, {}, {}))
    session = GenerateSession(GenerateSettings(tmp_path, "tiny"))
    session.served("serve-batch-8")
    for side, tokens in {"served": [[1, 2], [3, 4]], "transformers": [[1, 2], [3, 5]]}.items():
        (tmp_path / "serve-batch-8" / f"{side}.json").write_text(json.dumps(tokens))
    speed = generate.serve_speed(session, "serve/batch-8")
    assert (speed.value, speed.ok) == (1.8, True)
    assert "75 % equal; transformers 4 tokens/s, ours 8 tokens/s" in speed.note
    first = generate.first_token(session, "serve/first-token")
    assert "prompt of 96 tokens; wall time transformers 20 ms, ours 30 ms" in first.note


def test_texts_that_differ_fail_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Rounds({"ours": [1.0], "anew": [9.0]}, {}, {}, {}, {})
    monkeypatch.setattr(generate, "take_rounds", lambda *_: taken)
    session = GenerateSession(GenerateSettings(tmp_path, "tiny"))
    session.rounds("cache", {}, 1)
    for side, tokens in {"stream": [1, 2], "recompute": [1, 3]}.items():
        (tmp_path / "cache" / f"{side}.json").write_text(json.dumps([tokens]))
    with pytest.raises(RuntimeError, match="the tokens differ"):
        generate.cache_recompute(session, "cache/recompute")


def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        generate, "take_rounds", lambda *_: Rounds({}, {}, {}, {}, {"transformers": "No module named 'transformers'"})
    )
    with pytest.raises(NotMeasured, match="No module named"):
        generate.transformers_speed(GenerateSession(GenerateSettings(tmp_path, "tiny")), "transformers/speed")


def test_rows_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(run: GenerateSession, name: str) -> Row:
        return measured(name, 4.5)

    monkeypatch.setattr(generate, "MEASURES", dict.fromkeys(GENERATE_TARGETS, quick))
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    result = CliRunner().invoke(app, ["bench", "generate", "--json", "--only", "cache,transformers"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row["ok"] for row in json.loads(result.stdout)["rows"]}
    assert rows == {"cache/recompute": False, "transformers/speed": True, "transformers/equal": False}
    assert CliRunner().invoke(app, ["bench", "generate", "--only", "moon"]).exit_code == 2
