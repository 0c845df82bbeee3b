from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from herd.llama3.tokens.kernels import add_begin_end
from herd.llama3.tokens.megatron import open_pair
from herd.llama3.tokens.shards import SCHEMA, TokenJob, token_dtype, tokenize
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.llama3.tokens.token_samples import recipe, stage, write_documents

pytestmark = pytest.mark.usefixtures("few")

TEXTS = {
    "general": ["plain words", "hostile <|end_of_text|><|begin_of_text|> text", "third", "naïve — 東京 👩‍👩‍👧", ""],
    "math": ["2 + 2 = 4"] + [f"{number} squared is {number**2}" for number in range(600)],
    "code": ["def f():\n\treturn 1\n"],
    "multilingual": ["привет", "مرحبا"],
}
ASKED = recipe([stage("a", 80)])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    texts = [text for texts in TEXTS.values() for text in texts]
    train_tokenizer(texts * 3, 300).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def rows() -> dict[str, list[dict[str, Any]]]:
    rows_by_domain: dict[str, list[dict[str, Any]]] = {
        domain: [{"text": text, "source_index": number % 2} for number, text in enumerate(texts)]
        for domain, texts in TEXTS.items()
    }
    rows_by_domain["general"].append({"text": "kept for evaluation", "split": "held_out"})
    return rows_by_domain


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "curated", rows())


@pytest.fixture
def split_documents(tmp_path: Path) -> Path:
    """The same documents in three files for each domain."""
    return write_documents(tmp_path / "split", rows(), files=3)


def tables(folder: Path, dataset: str) -> list[dict[str, Any]]:
    return [row for file in sorted((folder / dataset).glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def read_back(folder: Path, dataset: str) -> list[list[int]]:
    texts = []
    for file in sorted((folder / dataset).glob("*.parquet")):
        stem = file.with_name(file.stem.replace("documents", "tokens"))
        for row in pq.read_table(file).to_pylist():
            texts.append(open_pair(stem).tokens[row["offset"] : row["offset"] + row["length"]].tolist())
    return texts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}


def test_documents_come_back_whole_in_order_and_only_for_training(
    documents: Path, tokenizer: Path, tmp_path: Path
) -> None:
    tokenize(ASKED, documents, tokenizer, tmp_path / "tokens")
    encoder = Tokenizer.load(tokenizer)
    for domain in TEXTS:
        table = pq.read_table(documents / "documents" / f"{domain}-00000.parquet").to_pylist()
        kept = [row for row in table if row["split"] == "train"]
        written = tables(tmp_path / "tokens", domain)
        carried = set(SCHEMA.names) & set(kept[0])
        assert [{name: row[name] for name in carried} for row in written] == [
            {name: row[name] for name in carried} for row in kept
        ]
        assert [row["bytes"] for row in written] == [len(row["text"].encode()) for row in kept]
        read = read_back(tmp_path / "tokens", domain)
        assert [encoder.decode(ids) for ids in read] == [row["text"] for row in kept]
        for ids in read:
            assert (ids[0], ids[-1]) == (encoder.begin, encoder.end)
            assert max(ids[1:-1], default=0) < len(encoder.base)


def test_facts_and_index_count_what_is_there(split_documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    metadata = tokenize(ASKED, split_documents, tokenizer, tmp_path / "tokens")
    index = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    languages: Counter[str] = Counter()
    for domain, texts in TEXTS.items():
        written = tables(tmp_path / "tokens", domain)
        tokens = sum(row["length"] for row in written)
        counted = {"tokens": tokens, "documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        assert metadata["datasets"][domain] == {name: metadata[name][domain] for name in counted} == counted
        described = index["datasets"][domain]
        assert {name: described[name] for name in counted} == counted
        assert sum(described["shards"]["tokens"]) == tokens
        assert sum(described["shards"]["documents"]) == len(texts)
        for column, values in described["by"].items():
            for value, counts in values.items():
                lengths = [row["length"] for row in written if row[column] == value]
                assert counts == [sum(lengths), len(lengths)]
        by_source: Counter[str] = Counter()
        for row in written:
            by_source[row["source"]] += row["length"]
            languages[row["language"]] += row["length"]
        assert metadata["sources"][domain] == by_source
    assert metadata["languages"] == languages
    assert (index["dtype"], index["vocab_size"], index["begin"], index["end"]) == ("uint16", 556, 300, 301)


def test_weighted_sources_are_separate_datasets(split_documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    weighted = recipe([stage("a", 80)], weights={"general": [3, 1], "code": [1, 1]})
    metadata = tokenize(weighted, split_documents, tokenizer, tmp_path / "tokens")
    assert list(metadata["datasets"]) == ["general-0", "general-1", "math", "code-0", "code-1", "multilingual"]
    assert metadata["tokens"]["general"] == sum(
        metadata["datasets"][name]["tokens"] for name in ("general-0", "general-1")
    )
    encoder = Tokenizer.load(tokenizer)
    for source in (0, 1):
        read = {encoder.decode(ids) for ids in read_back(tmp_path / "tokens", f"general-{source}")}
        assert read == set(TEXTS["general"][source::2])
    assert metadata["datasets"]["code-1"] == {"tokens": 0, "documents": 0, "bytes": 0}
    assert not list((tmp_path / "tokens" / "code-1").glob("*.bin"))


def test_document_of_an_unknown_source_is_refused(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    weighted = recipe([stage("a", 80)], weights={"general": [3]})
    with pytest.raises(ValueError, match=r"sources\.general: document \w+ comes from source 1, the recipe has 1"):
        tokenize(weighted, documents, tokenizer, tmp_path / "tokens")


def backwards(job: TokenJob, step: str, work: Callable[[Any, int], None], items: Sequence[int]) -> None:
    for item in reversed(items):
        work(job, item)


def pooled(job: TokenJob, step: str, work: Callable[[Any, int], None], items: Sequence[int]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda item: work(job, item), items))


def test_threads_runner_and_repetition_change_no_byte(split_documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    tokenize(ASKED, split_documents, tokenizer, whole)
    expected = contents(whole)
    assert len([name for name in expected if name.endswith("parquet")]) == 12
    for name, more in (("threads", {"threads": 3}), ("backwards", {"runner": backwards}), ("pool", {"runner": pooled})):
        tokenize(ASKED, split_documents, tokenizer, tmp_path / name, **more)
        assert contents(tmp_path / name) == expected


def test_a_killed_job_goes_on_to_the_same_bytes(split_documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    metadata = tokenize(ASKED, split_documents, tokenizer, whole)

    def killed(job: TokenJob, step: str, work: Callable[[Any, int], None], items: Sequence[int]) -> None:
        for item in items[:5]:
            work(job, item)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(ASKED, split_documents, tokenizer, cut, runner=killed)
    assert not (cut / "tokens.json").exists()
    half_done = cut / "general" / "documents-00001.parquet"
    half_done.unlink()
    half_done.with_name("tokens-00001.bin").write_bytes(b"cut sho")
    seen: list[int] = []

    def counting(job: TokenJob, step: str, work: Callable[[Any, int], None], items: Sequence[int]) -> None:
        seen.extend(items)
        backwards(job, step, work, items)

    assert tokenize(ASKED, split_documents, tokenizer, cut, runner=counting) == metadata
    assert seen == [1, *range(5, 12)]
    assert contents(cut) == contents(whole)


def test_shards_follow_the_number_of_their_file(split_documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    for file in sorted((split_documents / "documents").glob("math-*.parquet")):
        number = int(file.stem[-1])
        file.rename(file.with_name(f"math-{(99_999, 100_000, 7)[number]:05}.parquet"))
    tokenize(ASKED, split_documents, tokenizer, tmp_path / "tokens")
    index = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert index["datasets"]["math"]["shards"]["number"] == [7, 99_999, 100_000]
    assert (tmp_path / "tokens" / "math" / "tokens-100000.idx").exists()


def test_dtype_goes_by_the_vocabulary() -> None:
    def dtype(dtype_field: str, vocab_size: int) -> str:
        return token_dtype(recipe([stage("a", 80)], tokens={"dtype": dtype_field}), vocab_size).name

    assert dtype("auto", 65_499) == "uint16"
    assert dtype("auto", 65_500) == "int32"
    assert dtype("uint16", 65_536) == "uint16"
    assert dtype("uint32", 300) == "int32"
    with pytest.raises(ValueError, match=r"tokens\.dtype: uint16 holds 65,536 ids, the tokenizer has 65,537;"):
        dtype("uint16", 65_537)


def test_wide_ids_are_stored_as_asked(documents: Path, tokenizer: Path, tmp_path: Path) -> None:
    tokenize(ASKED, documents, tokenizer, tmp_path / "narrow")
    tokenize(recipe([stage("a", 80)], tokens={"dtype": "uint32"}), documents, tokenizer, tmp_path / "wide")
    assert read_back(tmp_path / "narrow", "math") == read_back(tmp_path / "wide", "math")
    narrow, wide = ((tmp_path / name / "math" / "tokens-00000.bin").stat().st_size for name in ("narrow", "wide"))
    assert wide == 2 * narrow


def test_missing_domain_is_named(tokenizer: Path, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "few", {"general": [{"text": "only this"}]})
    with pytest.raises(ValueError, match=r"sources\.math: .*holds no math-\*\.parquet"):
        tokenize(ASKED, folder, tokenizer, tmp_path / "tokens")


def test_frame_puts_chosen_texts_between_their_special_tokens() -> None:
    ids, offsets = np.arange(10, 20, dtype=np.uint32), np.array([0, 3, 3, 7, 10])
    out = np.empty(13, np.uint16)
    add_begin_end(ids, offsets, np.array([1, 3, 2]), 1, 2, out)
    assert out.tolist() == [1, 2, 1, 17, 18, 19, 2, 1, 13, 14, 15, 16, 2]
