from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.corpus import (
    LONGEST,
    SHORTEST,
    Page,
    changed_words,
    cut,
    digest,
    make_pages,
    plant,
    read_texts,
    write_jsonl,
    write_shard,
)
from benchmarks.inputs import make_large

NOUNS = ("river", "engine", "letter", "garden", "market", "window", "teacher", "island", "question", "mountain")


def prose(seed: int, paragraphs: int) -> str:
    chance = random.Random(seed)
    return "\n\n".join(
        " ".join(f"The {chance.choice(NOUNS)} number {chance.randint(0, 99)} is near the sea." for _ in range(6))
        for _ in range(paragraphs)
    )


TEXTS = [prose(seed, 60) for seed in range(40)]


def test_the_same_texts_give_the_same_pages(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_jsonl(make_pages(TEXTS, 300_000), tmp_path / name)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert make_pages(TEXTS, 300_000) != make_pages(TEXTS, 300_000, seed=8)


def test_pages_are_about_as_many_bytes_as_asked() -> None:
    assert sum(page.size for page in make_pages(TEXTS, 700_000)) == pytest.approx(700_000, rel=0.2)


def test_pieces_are_whole_paragraphs_of_some_kilobytes() -> None:
    text = prose(1, 100)
    pieces = list(cut(text.replace("\n", "\r\n"), random.Random(1)))
    assert len(pieces) > 3
    assert all(SHORTEST <= len(piece) <= LONGEST for piece in pieces)
    assert set("\n\n".join(pieces).split("\n\n")) <= set(text.split("\n\n"))


def test_a_paragraph_that_is_too_long_is_left_out() -> None:
    assert list(cut("word " * LONGEST, random.Random(1))) == []


def test_copies_versions_and_boilerplate_are_planted() -> None:
    pages = [Page(prose(seed, 8), f"https://bench.example/{seed}") for seed in range(400)]
    planted = plant(pages, random.Random(3))
    hosts = Counter(page.url.split("/")[2] for page in planted)
    assert 0.04 < hosts["mirror.example"] / 400 < 0.14
    assert 0.2 < hosts["near.example"] / 400 < 0.6
    versions = [page for page in planted if page.date == "2023-06-01"]
    assert versions
    assert {page.url for page in versions} <= {page.url for page in pages}
    texts = Counter(page.text for page in planted)
    assert all(texts[page.text] >= 2 for page in planted if page.url.startswith("https://mirror"))
    known = {line for page in pages for line in page.text.split("\n")}
    lines = Counter(line for page in planted if "bench.example" in page.url for line in page.text.split("\n"))
    assert max(count for line, count in lines.items() if line not in known) > 6


def test_a_share_of_the_words_changes_and_the_space_between_stays() -> None:
    text = "one two\n\nthree  four\tfive six seven eight nine ten " * 10
    changed = changed_words(text, 0.1, ["other"], random.Random(2))
    assert [char for char in changed if char in "\n\t"] == [char for char in text if char in "\n\t"]
    lost = Counter(text.split()) - Counter(changed.split())
    assert 4 <= lost.total() <= 10
    assert set((Counter(changed.split()) - Counter(text.split())).keys()) == {"other"}


def test_a_shard_has_the_columns_and_the_order_of_collected_documents(tmp_path: Path) -> None:
    pages = make_pages(TEXTS, 60_000)
    write_shard(pages, tmp_path / "shard.parquet")
    rows = pq.read_table(tmp_path / "shard.parquet").to_pylist()
    assert sorted(row["text"] for row in rows) == sorted(page.text for page in pages)
    assert rows == sorted(rows, key=lambda row: (row["id"], row["url"], row["date"]))
    assert [row["row"] for row in rows] == list(range(len(rows)))
    assert all(row["bytes"] == len(row["text"].encode()) for row in rows)


def test_texts_come_from_jsonl_plain_and_packed_but_not_from_html(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "plain"}) + "\n")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "packed", "format": "text"}) + "\n")
        file.write(json.dumps({"text": "<p>no", "format": "html"}) + "\n")
    assert list(read_texts(tmp_path)) == ["packed", "plain"]


def test_a_folder_without_jsonl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--corpus: .* holds no \.jsonl"):
        list(read_texts(tmp_path))


def test_a_large_corpus_has_no_copies_that_the_small_one_had_not(tmp_path: Path) -> None:
    pages = make_pages(TEXTS, 60_000)
    write_jsonl(pages, tmp_path / "small.jsonl")
    size = make_large(tmp_path / "large", tmp_path / "small.jsonl", 500_000)
    rows = [json.loads(line) for file in sorted((tmp_path / "large").iterdir()) for line in file.open()]
    assert size == sum(len(row["text"].encode()) for row in rows) >= 500_000
    rounds = len(rows) // len(pages)
    assert len({row["text"] for row in rows}) == rounds * len({page.text for page in pages})
    assert len({row["url"] for row in rows}) == rounds * len({page.url for page in pages})
