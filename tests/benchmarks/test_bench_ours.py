"""Our measured sides on a small corpus: what is timed must be the real thing, and right."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpus import Page, plant, write_jsonl, write_shard
from benchmarks.ours import filters, lines, mix, near_quality, pipeline, stream, tokens
from benchmarks.ours.token_shards import make_shards
from benchmarks.pairs import near_pairs, recall
from benchmarks.plain import without_common_lines
from benchmarks.session import texts_of
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer

COMMON = (
    "the of and to a in that is was he for it with as his on be at by had not are but from or have an they which one"
)
RARE = "river engine letter garden market window teacher island question mountain silver winter harbour journey candle"
WORDS = [*COMMON.split(), *RARE.split()]


def prose(chance: random.Random, paragraphs: int) -> str:
    def sentence() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(6, 18))).capitalize() + "."

    return "\n\n".join(" ".join(sentence() for _ in range(4)) for _ in range(paragraphs))


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    chance = random.Random(5)
    pages = [Page(prose(chance, 7), f"https://bench.example/{place}") for place in range(150)]
    return plant(pages, chance)


@pytest.fixture(scope="module")
def shard(pages: list[Page], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "corpus.parquet"
    write_shard(pages, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(pages: list[Page], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((page.text for page in pages), 400).save(folder)
    return folder


@pytest.mark.slow
def test_lines_are_those_of_the_plain_rule(shard: Path, tmp_path: Path) -> None:
    facts = lines.work(shard, tmp_path)
    assert facts["lines"] > 0
    assert texts_of(Path(facts["documents"])) == without_common_lines(texts_of(shard), 6, 8)


@pytest.mark.slow
def test_what_near_quality_says_agrees_with_the_true_pairs(shard: Path, tmp_path: Path) -> None:
    texts = texts_of(shard)
    found = near_quality.work(shard, tmp_path)
    true = near_pairs(texts, 5)
    assert recall(true, found["clusters"], 0.85)[0] > 0.9
    assert found["pairs"]
    assert all(true[tuple(pair)] >= 0.8 for pair in found["pairs"])


@pytest.mark.slow
def test_filters_give_an_outcome_for_every_document_in_its_order(shard: Path, tmp_path: Path) -> None:
    facts = filters.work(shard, tmp_path, alphabetic=0.6)
    reasons = [facts[f"reasons_{name}"] for name in ("gopher", "repetition", "fineweb")]
    assert {len(column) for column in reasons} == {len(texts_of(shard))}
    assert any(not any(row) for row in zip(*reasons, strict=True))
    assert any(any(row) for row in zip(*reasons, strict=True))


@pytest.mark.slow
def test_tokens_are_those_of_the_tokenizer(shard: Path, tokenizer: Path, tmp_path: Path) -> None:
    facts = tokens.work(shard, tmp_path, str(tokenizer))
    ids, counts = np.fromfile(tmp_path / "ids.bin", np.uint32), np.fromfile(tmp_path / "counts.bin", np.int64)
    assert facts["tokens"] == len(ids) == counts.sum()
    assert ids[: counts[0]].tolist() == list(Tokenizer.load(tokenizer).encode(texts_of(shard)[0]))


@pytest.mark.slow
def test_the_pipeline_ends_in_tokens(pages: list[Page], tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(pages, tmp_path / "corpus.jsonl")
    facts = pipeline.work(tmp_path / "corpus.jsonl", tmp_path, str(tokenizer), alphabetic=0.6)
    assert 0 < facts["documents"]["general"] < len(pages)
    assert facts["tokens"]["general"] > 100 * facts["documents"]["general"]


def test_a_mix_is_exact_without_any_token(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", 800, empty=True)
    facts = mix.work(tmp_path / "shards", tmp_path, budget=800_000)
    assert facts["planned"] == facts["realized"]
    assert facts["planned"] == {"general": 400_000, "math": 200_000, "code": 136_000, "multilingual": 64_000}


def test_the_stream_is_read_to_its_end(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", 400, empty=False)
    facts = stream.work(tmp_path / "shards", tmp_path, tokens=1_200_000)
    assert facts["tokens"] == 1_200_000 // 8192 * 8192
    assert facts["segments"] > facts["tokens"] / 1_200
