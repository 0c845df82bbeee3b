from __future__ import annotations

import gzip
import json
import os
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama3.data.collect import collect
from llama3.data.curate import COLUMNS, curate
from llama3.data.quality import judge
from llama3.data.split import draw, threshold
from llama3.data.words import words
from llama3.recipe.load import load_recipe
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Share
from storage.duck import session

Make = Callable[..., Recipe]
Write = Callable[..., str]
SHARED = Path(os.environ.get("HERD_SHARED", Path(__file__).parents[4] / "shared"))
GERMAN = "Der Hund läuft durch den Wald und sucht nach seinem Stock, den er gestern verloren hat. "


def prose(seed: int, count: int) -> list[str]:
    """Return `count` unrelated documents of 40 to 120 made-up words."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(4000)]
    return [" ".join(rng.choices(vocabulary, k=rng.randint(40, 120))) + "." for _ in range(count)]


def read_back(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / "documents").iterdir()) for row in pq.read_table(path).to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_document_is_accounted_for(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    good = prose(1, 200)
    bad = {
        "too_short": ["tiny", ""],
        "too_long": ["long words in a document " + " ".join(prose(9, 60))],
        "symbols": ["#!? " * 60],
        "repeated_lines": ["\n".join([*(f"this is line {i}" for i in range(6)), *["the same old line"] * 20])],
        "top_gram": ["very good " * 40],
        "exact_duplicate": [good[0], good[0] + "\r\n", good[1]],
        "near_duplicate": [good[2].rsplit(" ", 1)[0]],
    }
    path = write_jsonl("web/a.jsonl", [*good[:100], *(text for texts in bad.values() for text in texts)])
    other = write_jsonl("web/b.jsonl", good[100:])
    german = write_jsonl("de/a.jsonl", [f"{GERMAN}Nummer {i} {text}" for i, text in enumerate(prose(3, 5))])
    recipe = make_recipe(
        {
            "general": [{"uri": path}, {"uri": other, "limit": "9kB"}],
            "multilingual": [{"uri": german, "language": "de"}],
        },
        quality={"max_chars": 3000},
        languages=["de", "fr"],
    )
    out = tmp_path / "out"
    out.mkdir()
    facts = curate(recipe, out, tmp_path / "scratch")
    ledger = pq.read_table(out / "ledger.parquet").to_pylist()
    count = {(line["source"], line["outcome"]): line["documents"] for line in ledger}
    for outcome, texts in bad.items():
        assert count.pop(("web/a", outcome)) == len(texts), outcome
    assert count["web/a", "kept"] + count["web/a", "held_out"] == 100
    assert sum(n for (source, _), n in count.items() if source == "web/b") <= 100
    assert count["web/b", "over_limit"] > 0
    rows = read_back(out)
    assert {(row["source"], row["source_index"]) for row in rows} == {("web/a", 0), ("web/b", 1), ("de/a", 0)}
    by_outcome = Counter({"kept": 0, "held_out": 0})
    for line in ledger:
        by_outcome[line["outcome"]] += line["documents"]
    assert Counter("kept" if row["split"] == "train" else "held_out" for row in rows) == Counter(
        {name: by_outcome[name] for name in ("kept", "held_out")}
    )
    kept_bytes = sum(line["bytes"] for line in ledger if line["outcome"] in ("kept", "held_out"))
    assert kept_bytes == sum(len(row["text"].encode()) for row in rows)
    assert facts["read"] == {
        domain: sum(line["documents"] for line in ledger if line["domain"] == domain) for domain in recipe.sources
    }
    assert facts["documents"]["multilingual"] + facts["held_out"]["multilingual"] == 5
    assert facts["languages"]["de"] == facts["documents"]["multilingual"]
    assert sum(facts["languages"].values()) == sum(facts["documents"].values())
    assert json.loads(json.dumps(facts)) == facts


def test_documents_have_the_promised_shape(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", prose(4, 60), licence="MIT", url="https://a")
    recipe = make_recipe({"general": [{"uri": path, "language": "en"}], "code": [{"uri": path}]}, held_out="20%")
    curate(recipe, tmp_path / "out", tmp_path / "scratch")
    assert sorted(contents(tmp_path / "out")) == [
        "documents/code-00000.parquet", "documents/general-00000.parquet", "ledger.parquet",
    ]  # fmt: skip
    rows = read_back(tmp_path / "out")
    general = [row for row in rows if row["domain"] == "general"]
    assert tuple(rows[0]) == COLUMNS
    assert [row["id"] for row in general] == sorted(row["id"] for row in general)
    assert all(re.fullmatch("[0-9a-f]{32}", row["id"]) for row in rows)
    assert len({row["id"] for row in rows}) == len(rows) == 120
    assert {(row["language"], row["licence"], row["url"]) for row in general} == {("en", "MIT", "https://a")}
    assert {row["language"] for row in rows if row["domain"] == "code"} == {"und"}
    # one text has one fate in every domain
    fate = {row["text"]: row["split"] for row in general}
    assert all(fate[row["text"]] == row["split"] for row in rows)


def test_bytes_do_not_depend_on_threads_or_order(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    texts = prose(5, 1500)
    near = [text.replace(" ", "  ", 1) + " more" for text in texts[:200]]
    every = texts + near + texts[300:400]
    outs = []
    for number, threads in enumerate((1, 2, 2)):
        random.Random(number).shuffle(every)
        path = write_jsonl("a/a.jsonl", every, url="https://a")
        out = tmp_path / f"out{number}"
        curate(make_recipe({"general": [{"uri": path}]}), out, tmp_path / f"scratch{number}", threads=threads)
        outs.append(contents(out))
    assert outs[0] == outs[1] == outs[2]
    assert len(outs[0]) == 2


def test_long_corpora_are_cut_into_shards_in_id_order(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama3.data.curate.SHARD_BYTES", 20_000)
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", prose(6, 200))}]})
    curate(recipe, tmp_path / "out", tmp_path / "scratch")
    files = sorted((tmp_path / "out" / "documents").iterdir())
    assert [path.name for path in files] == [f"general-{i:05}.parquet" for i in range(len(files))]
    sizes = [sum(len(row["text"]) for row in pq.read_table(path).to_pylist()) for path in files]
    assert len(files) > 3
    assert all(20_000 - 1_000 < size < 20_000 + 1_000 for size in sizes[:-1])
    ids = [row["id"] for row in read_back(tmp_path / "out")]
    assert ids == sorted(ids)
    assert len(ids) == 200


def test_the_held_out_split_is_stable_and_disjoint(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    texts = prose(7, 600)
    fates = []
    for number, some in enumerate((texts[:300], texts)):
        recipe = make_recipe({"general": [{"uri": write_jsonl(f"{number}.jsonl", some)}]}, held_out="10%")
        curate(recipe, tmp_path / f"out{number}", tmp_path / "scratch")
        fates.append({row["text"]: row["split"] for row in read_back(tmp_path / f"out{number}")})
    assert all(fates[1][text] == split for text, split in fates[0].items())
    held_out = [text for text, split in fates[1].items() if split == "held_out"]
    assert 30 <= len(held_out) <= 95  # 600 draws at 10 %: mean 60, standard deviation 7.3
    assert [text for text in fates[1] if draw(text) < threshold(Share.parse("10%"))] == held_out


def test_near_copies_of_held_out_documents_are_not_trained_on(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write
) -> None:
    texts = prose(8, 300)
    copies = [text.rsplit(" ", 1)[0] for text in texts]
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", texts + copies)}]}, held_out="20%")
    curate(recipe, tmp_path / "out", tmp_path / "scratch")
    rows = read_back(tmp_path / "out")
    held_out = {row["text"][:100] for row in rows if row["split"] == "held_out"}
    assert len(held_out) > 30
    assert not held_out & {row["text"][:100] for row in rows if row["split"] == "train"}


def test_a_domain_that_keeps_nothing_is_an_error(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", ["short"] * 3)}]})
    with pytest.raises(ValueError, match=r"sources\.general: nothing is left to train on \(too_short 3\)"):
        curate(recipe, tmp_path / "out", tmp_path / "scratch")


def reference_outcome(text: str, domain: str) -> str | None:
    """The quality rules at their defaults, character by character in plain Python."""
    symbols = sum(unicodedata.category(c)[0] not in "LNMZ" and c not in "\t\n\f\r " for c in text)
    lines = [line.strip(" \t") for line in text.split("\n") if len(line.strip(" \t")) > 3]
    found = words(text)
    pairs = Counter(f"{a} {b}" for a, b in pairwise(found))
    times, size = max(((n, len(pair)) for pair, n in pairs.items() if n > 1), default=(0, 0))
    if len(text) < 100:
        return "too_short"
    if symbols > len(text) * 0.4 * (2 if domain == "code" else 1):
        return "symbols"
    if len(lines) - len(set(lines)) > 0.3 * len(lines):
        return "repeated_lines"
    return "top_gram" if times * size > 0.2 * len(text) else None


PIECES = st.sampled_from(
    ["the cat", "dog ", "{ } ; ", "\n", "return x\n", "模型", "हिन्दी ", "a b ", "#", "\u3000", "Zeile 1\n\t"]
)


@settings(max_examples=8, deadline=None)
@given(texts=st.lists(st.lists(PIECES, min_size=5, max_size=60).map("".join), min_size=20, max_size=60))
def test_quality_rules_equal_the_plain_reference(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("quality")
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in texts))
    recipe = load_recipe(Path(__file__).parents[3] / "recipes" / "quickstart.yaml")
    sources = {
        domain: [recipe.sources[domain][0].model_copy(update={"uri": str(source)})] for domain in ("general", "code")
    }
    recipe = recipe.model_copy(update={"sources": sources})
    collected = collect(recipe, folder / "read")
    with session(folder / "spill") as connection:
        judge(connection, list(collected.files.values()), recipe.curate)
        found = dict(connection.execute('SELECT "row", outcome FROM judged').fetchall())
    rows = [row for path in collected.files.values() for row in pq.read_table(path).to_pylist()]
    assert found == {row["row"]: reference_outcome(row["text"], row["domain"]) for row in rows}


@pytest.mark.skipif(not (SHARED / "corpora").is_dir(), reason=f"no corpora at {SHARED}; set HERD_SHARED")
def test_real_corpora(tmp_path: Path, make_recipe: Make) -> None:
    corpora = SHARED / "corpora"
    recipe = make_recipe(
        {
            "general": [
                {"uri": str(corpora / "general/html.jsonl.gz")},
                {"uri": str(corpora / "general/tldr-en.jsonl.gz"), "limit": "600kB"},
            ],
            "code": [{"uri": str(corpora / "code/*flask.jsonl.gz"), "licence": "BSD-3-Clause"}],
            "multilingual": [{"uri": str(corpora / "multilingual/progit-??.jsonl.gz"), "limit": "1.5MB"}],
        }
    )
    facts = curate(recipe, tmp_path / "out", tmp_path / "scratch")
    rows = read_back(tmp_path / "out")
    with gzip.open(corpora / "general/html.jsonl.gz", "rt") as lines:
        html = [json.loads(line) for line in lines]
    assert any(one["format"] == "html" for one in html)
    pages = [row["text"] for row in rows if row["source"] == "general/html"]
    assert len(pages) > 0.8 * len(html)
    assert not any(re.search(r"</(p|div|span|body)>", text) for text in pages)
    assert any("It is a truth universally acknowledged" in text for text in pages)
    assert {row["licence"] for row in rows if row["domain"] == "code"} == {"BSD-3-Clause"}
    assert facts["documents"]["code"] > 50
    assert facts["languages"].get("es", 0) > 20
