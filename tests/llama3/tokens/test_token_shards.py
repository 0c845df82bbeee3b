from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from llama3.tokens.shards import token_dtype, tokenise
from llama3.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.llama3.tokens.token_samples import recipe, stage, write_documents

TEXTS = {
    "general": ["plain words", "hostile <|end_of_text|><|begin_of_text|> text", "third", "naïve — 東京 👩‍👩‍👧"],
    "math": ["2 + 2 = 4"] + [f"{number} squared is {number**2}" for number in range(600)],
    "code": ["def f():\n\treturn 1\n"],
    "multilingual": ["привет", "مرحبا"],
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    texts = [text for texts in TEXTS.values() for text in texts]
    train_tokenizer(texts * 3, 300).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rows: dict[str, list[dict[str, Any]]] = {
        domain: [{"text": text, "source_index": number % 2} for number, text in enumerate(texts)]
        for domain, texts in TEXTS.items()
    }
    rows["general"].append({"text": "kept for evaluation", "split": "held_out"})
    return write_documents(tmp_path / "curated", rows)


def read_back(folder: Path, leaf: str) -> list[list[int]]:
    index = json.loads((folder / "tokens.json").read_text())
    bins = sorted((folder / leaf).glob("tokens-*.bin"))
    tokens = np.concatenate([np.fromfile(file, np.dtype(index["dtype"]).newbyteorder("<")) for file in bins])
    rows = pq.read_table(folder / leaf / "documents.parquet").to_pylist()
    return [tokens[row["offset"] : row["offset"] + row["length"]].tolist() for row in rows]


def test_documents_come_back_whole_in_order_and_only_for_training(
    documents: Path, tokenizer: Path, tmp_path: Path
) -> None:
    tokenise(recipe([stage("a", 80)]), documents, tokenizer, tmp_path / "tokens")
    encoder = Tokenizer.load(tokenizer)
    for domain in TEXTS:
        table = pq.read_table(documents / "documents" / f"{domain}-00000.parquet").to_pylist()
        kept = [row for row in table if row["split"] == "train"]
        rows = pq.read_table(tmp_path / "tokens" / domain / "documents.parquet").to_pylist()
        assert [row["id"] for row in rows] == [row["id"] for row in kept]
        assert [row["bytes"] for row in rows] == [len(row["text"].encode()) for row in kept]
        read = read_back(tmp_path / "tokens", domain)
        assert [encoder.decode(ids) for ids in read] == [row["text"] for row in kept]
        for ids in read:
            assert (ids[0], ids[-1]) == (encoder.begin, encoder.end)
            assert max(ids[1:-1]) < len(encoder.base)


def test_facts_and_index_count_what_is_there(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    facts = tokenise(recipe([stage("a", 80)]), documents, tokenizer, tmp_path / "tokens")
    index = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    for domain, texts in TEXTS.items():
        tokens = sum(len(ids) for ids in read_back(tmp_path / "tokens", domain))
        counted = {"tokens": tokens, "documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        assert facts["leaves"][domain] == {name: facts[name][domain] for name in counted} == counted
        assert index["leaves"][domain] == {"domain": domain, "shards": [tokens], **counted}
    assert (index["dtype"], index["rows"], index["begin"], index["end"]) == ("uint16", 556, 300, 301)


def test_weighted_sources_are_leaves_of_their_own(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    asked = recipe([stage("a", 80)], weights={"general": [3, 1]})
    facts = tokenise(asked, documents, tokenizer, tmp_path / "tokens")
    assert list(facts["leaves"]) == ["general-0", "general-1", "math", "code", "multilingual"]
    assert facts["tokens"]["general"] == sum(facts["leaves"][name]["tokens"] for name in ("general-0", "general-1"))
    encoder = Tokenizer.load(tokenizer)
    for index in (0, 1):
        read = {encoder.decode(ids) for ids in read_back(tmp_path / "tokens", f"general-{index}")}
        assert read == set(TEXTS["general"][index::2])


def test_document_of_an_unknown_source_is_refused(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    asked = recipe([stage("a", 80)], weights={"general": [3]})
    with pytest.raises(ValueError, match=r"sources\.general: document \w+ is of source 1, the recipe has 1"):
        tokenise(asked, documents, tokenizer, tmp_path / "tokens")


def test_threads_and_repetition_change_no_byte(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    written = []
    for threads in (1, 3):
        folder = tmp_path / str(threads)
        tokenise(recipe([stage("a", 80)]), documents, tokenizer, folder, threads=threads)
        written.append({str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")})
    assert written[0] == written[1]
    assert len(written[0]) == 9


def test_bins_are_bounded_and_documents_never_straddle_them(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tokenise(recipe([stage("a", 80)]), documents, tokenizer, whole)
    tokenise(recipe([stage("a", 80)]), documents, tokenizer, cut, shard_tokens=200)
    index = json.loads((cut / "tokens.json").read_text())["leaves"]["math"]
    assert len(index["shards"]) > 10
    assert max(index["shards"]) <= 200
    assert [file.stat().st_size // 2 for file in sorted((cut / "math").glob("*.bin"))] == index["shards"]
    edges = np.cumsum(index["shards"]).tolist()
    rows = pq.read_table(cut / "math" / "documents.parquet").to_pylist()
    assert all(
        np.searchsorted(edges, row["offset"], "right")
        == np.searchsorted(edges, row["offset"] + row["length"] - 1, "right")
        for row in rows
    )
    assert read_back(cut, "math") == read_back(whole, "math")


def test_dtype_goes_by_the_vocabulary(tmp_path: Path) -> None:
    def dtype(asked: str, rows: int) -> str:
        return token_dtype(recipe([stage("a", 80)], tokens={"dtype": asked}), rows).name

    assert dtype("auto", 65_536) == "uint16"
    assert dtype("auto", 65_537) == "uint32"
    assert dtype("uint32", 300) == "uint32"
    with pytest.raises(ValueError, match=r"tokens\.dtype: uint16 holds 65,536 ids, the tokenizer has 65,537 rows"):
        dtype("uint16", 65_537)


def test_wide_ids_are_stored_as_asked(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    tokenise(recipe([stage("a", 80)]), documents, tokenizer, tmp_path / "narrow")
    tokenise(recipe([stage("a", 80)], tokens={"dtype": "uint32"}), documents, tokenizer, tmp_path / "wide")
    assert read_back(tmp_path / "narrow", "math") == read_back(tmp_path / "wide", "math")
    narrow, wide = ((tmp_path / name / "math" / "tokens-00000.bin").stat().st_size for name in ("narrow", "wide"))
    assert wide == 2 * narrow


def test_missing_domain_is_named(tokenizer: Path, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "few", {"general": [{"text": "only this"}]})
    with pytest.raises(ValueError, match=r"sources\.math: .*holds no math-\*\.parquet"):
        tokenise(recipe([stage("a", 80)]), folder, tokenizer, tmp_path / "tokens")
