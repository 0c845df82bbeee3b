"""Data steps that end a run which could not be scored or trained later."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from herd.llama3.data.annotate import COLUMNS
from herd.llama3.recipe.load import load_recipe
from herd.tasks.pipeline_steps import pipeline_steps
from herd.tasks.stages import data
from herd.tasks.step import reaches

TINY = Path("tests/e2e/tiny.yaml")


def a_context(until: str, *overrides: str) -> tuple[Any, list[str]]:
    lines: list[str] = []
    recipe = load_recipe(TINY, list(overrides))
    kinds = partial(reaches, pipeline_steps(recipe), until)
    return SimpleNamespace(recipe=recipe, reaches=kinds, console=SimpleNamespace(log=lines.append)), lines


def test_nothing_to_score_ends_a_run_that_evaluates_after_curation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = "math: braces drops 9 of 9 documents"
    facts = {
        "bytes": {"general": 9, "math": 9}, "documents": {"general": 7, "math": 12}, "heavy_rules": [heavy],
    }  # fmt: skip
    none = {"general": 0, "math": 0}
    made: Any = SimpleNamespace(key="a", metadata={**facts, "held_out": none, "held_out_bytes": dict(none)})
    monkeypatch.setattr(data, "ensure_in_scratch", lambda *_: made)
    for until in ("", "promote", "evaluate-anneal", "anneal"):  # main is evaluated too
        with pytest.raises(ValueError, match=r"^curate\.validation_fraction: 5% holds out no document, .*; raise"):
            data.curate_documents.fn(a_context(until)[0], made, made)
    unscored, lines = a_context("main", "curate.validation_fraction=0%")
    data.curate_documents.fn(unscored, made, made)
    assert lines[1:] == [f"  [yellow]curate: {heavy}[/]"], "nothing was to be held out"
    made.metadata["held_out"]["general"], made.metadata["held_out_bytes"]["general"] = 10, 20_000
    context, lines = a_context("")
    data.curate_documents.fn(context, made, made)
    told = "math: no held-out document, so it is not scored; add text or raise curate.validation_fraction"
    assert "kept general 9 B in 7 documents; math 9 B in 12 documents" in lines[0]
    assert lines[1:] == [f"  [yellow]curate: {line}[/]" for line in (heavy, told)]


def test_a_new_statistic_or_another_order_makes_attributes_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "ensure_in_scratch", lambda context, step, spec, build: spec)
    made: Any = SimpleNamespace(key="a")
    keys = set()
    for columns in (COLUMNS, (*COLUMNS, "shouted_lines"), COLUMNS[::-1]):
        monkeypatch.setattr("herd.llama3.data.annotate.COLUMNS", columns)
        spec: Any = data.annotate_documents.fn(a_context("")[0], made)
        keys.add(spec.key)
    assert len(keys) == 3


def test_a_touched_file_makes_nothing_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: Any = SimpleNamespace(key="a")
    words, text = tmp_path / "words.txt", tmp_path / "a.jsonl"
    words.write_text("bad\n")
    text.write_text('{"text": "some words"}\n')
    context, _ = a_context("", f"curate.dirty_words=[{words}]", f"sources.general=[{{uri: {text}}}]")

    def made_of(context: Any, step: str, spec: Any, build: Any) -> Any:
        return SimpleNamespace(key=spec.key, metadata={"skipped": []})

    def keys() -> tuple[str, str]:
        return data.collect_documents.fn(context).key, data.annotate_documents.fn(context, made).key

    monkeypatch.setattr(data, "ensure_in_scratch", made_of)

    before = keys()
    for path in (words, text):
        os.utime(path, (1, 1))
    assert keys() == before
    words.write_text("bed\n")
    os.utime(words, (1, 1))
    assert keys()[0] == before[0]
    assert keys()[1] != before[1]
    text.write_text('{"text": "same words"}\n')
    os.utime(text, (1, 1))
    assert keys()[0] != before[0]


def test_too_many_epochs_end_only_a_run_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many() -> None:
        raise ValueError("tokens.max_epochs: a\ntokens.max_epochs: b")

    made: Any = SimpleNamespace(key="a", metadata={"skipped": []})
    monkeypatch.setattr(data, "ensure_in_scratch", lambda *_: made)
    monkeypatch.setattr(data, "lazy_folder", lambda *_: None)
    stream = SimpleNamespace(check=too_many, overlapping_offsets=list)
    monkeypatch.setattr("herd.llama3.tokens.stream.TokenStream", lambda *_: stream)
    with pytest.raises(ValueError, match="max_epochs: a"):
        data.tokenize_documents.fn(a_context("ramp")[0], made, made)
    context, lines = a_context("tokenize")
    data.tokenize_documents.fn(context, made, made)
    assert lines == [f"  [yellow]tokenize: tokens.max_epochs: {name}[/]" for name in "ab"]
