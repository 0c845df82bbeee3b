"""What decides collected documents, tokenizers and shards: what recipes say about studies does not, unless it must."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from herd.llama3.recipe.load import digest, load_recipe
from herd.tasks.stages import data
from herd.tasks.stages.data import source_fields, token_shard_fields, tokenizer_fields

TINY = Path("tests/e2e/tiny.yaml")
NEW = "sources.math=[{uri: installed, limit: 500kB, system: false}, {uri: installed, limit: 1MB%s}]"
BUCKET = [
    f'sources.{domain}=[{{uri: "s3://<your-bucket>/{folder}/*.parquet"}}]'
    for domain, folder in {"general": "web", "math": "math", "code": "code", "multilingual": "multilingual"}.items()
]
SHOP = {
    "general": '{uri: "s3://<your-bucket>/shop/english/*.parquet", weight: 5}, '
    '{uri: "s3://<your-bucket>/web/*.parquet", weight: 3}',
    "multilingual": '{uri: "s3://<your-bucket>/shop/multilingual/*.parquet", weight: 5}, '
    '{uri: "s3://<your-bucket>/multilingual/*.parquet", weight: 3}',
}
WORDS = {
    "domain-adaptation": [*BUCKET, *(f"sources.{domain}=[{sources}]" for domain, sources in SHOP.items())],
    "llama3-405b": [*BUCKET, "curate.decontaminate=[]", "evaluate.final=full"],
}
"""Recipe -> the sources that it had when its digests were written down."""
KNOWN = {
    TINY: ("2f37d37c0170db3a", "aa860c0a078f2cd8"),
    Path("recipes/domain-adaptation.yaml"): ("7d0ffa41573688b7", "b46896f80e71acdf"),
    Path("recipes/quickstart.yaml"): ("0d88b33a91a9e32c", "3d277fc11a033840"),
    Path("recipes/llama3-405b.yaml"): ("48849d5fedf40613", "cf5d19e02d4bf7e1"),
}
"""Other digests would make every artifact there is again. Last changed when `licence` became `license`, the
quickstart's when its vocabulary did."""


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: path.stem)
def test_what_recipes_without_studies_decide_is_what_it_always_was(path: Path) -> None:
    recipe = load_recipe(path, WORDS.get(path.stem, []))
    assert (digest(source_fields(recipe))[:16], digest(tokenizer_fields(recipe))[:16]) == KNOWN[path]
    assert set(token_shard_fields(recipe)) == {"dtype", "weights"}


def test_a_name_decides_the_shards_and_not_what_is_read() -> None:
    without, one, other = (load_recipe(TINY, [NEW % name]) for name in ("", ", name: gsm", ", name: apps"))
    assert source_fields(without) == source_fields(one) == source_fields(other)
    assert len({digest(token_shard_fields(recipe)) for recipe in (without, one, other)}) == 3


def test_equal_shares_learn_one_tokenizer_whatever_their_mix_is_called() -> None:
    changed = ["mix.base={general: 40%, math: 35%, code: 17%, multilingual: 8%}"]
    first = ["mix.first={general: 50%, math: 25%, code: 17%, multilingual: 8%}", "tokenizer.train.mix=first"]
    plain, other, same = (load_recipe(TINY, words) for words in ([], changed, [*changed, *first]))
    assert tokenizer_fields(plain) == tokenizer_fields(same)
    assert tokenizer_fields(plain) != tokenizer_fields(other)


def a_context(until: str, *words: str) -> tuple[Any, list[str]]:
    lines: list[str] = []
    console, record = SimpleNamespace(log=lines.append), SimpleNamespace(until=until)
    return SimpleNamespace(recipe=load_recipe(TINY, list(words)), record=record, console=console), lines


def test_nothing_to_score_ends_a_run_that_evaluates_after_curation(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"bytes": {"general": 9, "math": 9}, "documents": {"general": 7, "math": 12}}
    made: Any = SimpleNamespace(key="a", metadata={**facts, "held_out": {"general": 0, "math": 0}})
    monkeypatch.setattr(data, "ensure_in_scratch", lambda *_: made)
    for until in ("", "promote", "evaluate-anneal", "anneal"):  # main is evaluated too
        with pytest.raises(ValueError, match=r"^curate\.validation_fraction: 5% holds out no document, .*; raise"):
            data.curate_documents.fn(a_context(until)[0], made, made)
    none, lines = a_context("main", "curate.validation_fraction=0%")
    data.curate_documents.fn(none, made, made)
    assert len(lines) == 1, "nothing was to be held out"
    made.metadata["held_out"]["general"] = 1
    context, lines = a_context("")
    data.curate_documents.fn(context, made, made)
    told = "math: no held-out document of 12; it is not scored: raise curate.validation_fraction or add text"
    assert "kept general 9 B in 7 documents; math 9 B in 12 documents" in lines[0]
    assert lines[1:] == [f"  [yellow]curate: {told}[/]"]


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
