"""The stream from a lazy folder is the stream from a plain one, however little of it may lie on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens import source_stream
from herd.llama3.tokens.inspect import inspect
from herd.llama3.tokens.source_stream import CopyRanges
from herd.llama3.tokens.stream import TokenStream
from herd.storage.digests import PAGE
from herd.storage.page_cache import lazy_folder_of
from tests.dist import run
from tests.llama3.tokens.token_samples import recipe, stage, synthetic_shards
from tests.storage.lazy_samples import lazily

TOKENS = 2**22


def asked() -> Recipe:
    return recipe([stage("main", TOKENS, seq_len=4096)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of about a megabyte, 14 MB in all, of documents of some 300 tokens, in two sources."""
    folder = tmp_path_factory.mktemp("store")
    return synthetic_shards(folder, asked(), [4_000, 3_000, 2_500, 2_000], 300, shards=3, sources=["s", "t"])


@pytest.fixture(scope="module")
def expected(plain: Path) -> TokenStream:
    return TokenStream(plain, asked())


def check(folder: Path, plain: Path, start: int, stop: int) -> bool:
    ours, theirs = (TokenStream(place, asked()).read(start, stop) for place in (folder, plain))
    return all(
        np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in ("tokens", "cu_seqlens", "domains")
    )


def check_mine(folder: Path, plain: Path, starts: tuple[int, ...]) -> bool:
    start = starts[int(os.environ["RANK"])]
    return check(folder, plain, start, start + 400_000)


@given(start=st.integers(0, TOKENS - 1), size=st.integers(1, 100_000), pages=st.sampled_from([1, 3, 8, 500]))
def test_any_range_is_the_same_within_any_limit(
    plain: Path, expected: TokenStream, tmp_path_factory: pytest.TempPathFactory, start: int, size: int, pages: int
) -> None:
    folder = lazily(tmp_path_factory.mktemp("lazy") / "x", plain, pages)
    stop = min(start + size, TOKENS)
    assert check(folder, plain, start, stop)
    lazy = lazy_folder_of(folder)
    assert lazy is not None
    assert lazy.table.marks.sum() <= max(lazy.limit, lazy.piece)


def test_processes_that_share_a_cache_read_the_same(plain: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", plain, 3)
    assert run(3, check_mine, folder, plain, (0, 0, 1_000_000)) == [True] * 3
    assert sum(path.stat().st_blocks * 512 for path in folder.rglob("*.bin")) <= (3 + 3) * PAGE


def test_the_next_block_is_brought_while_one_is_read(
    plain: Path, expected: TokenStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_stream, "BLOCK", 1)  # of 256 documents, a third of a page
    folder = lazily(tmp_path / "lazy", plain, 500)
    stream, lazy = TokenStream(folder, asked()), lazy_folder_of(folder)
    assert lazy is not None
    stream.read(0, 10_000)
    lazy._prefetch.submit(lambda: None).result()  # behind what was asked for
    general = stream._streams[0]
    starts = general._epoch(0).starts.tolist()
    assert general._bins is not None
    documents = general.overlapping(starts[1], starts[2])
    runs = CopyRanges(documents.shard, documents.offset, documents.length, documents.start)
    pages = np.unique(general._bins._cut(runs, PAGE // 4)[1])
    assert lazy.table.marks[pages].all()
    assert not lazy.table.marks.all()
    last = len(starts) - 2
    stream._streams[0].copy(general.overlapping(starts[last], starts[last] + 1), *np.zeros((3, 1), np.int64), pages)
    lazy._prefetch.submit(lambda: None).result()
    assert general._ahead == (1, 0)


def test_a_stream_opens_the_shards_of_the_blocks_that_it_reads(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 15T tokens a dataset has 50,000 shards, and 16,384 processes open a stream."""
    monkeypatch.setattr(source_stream, "BLOCK", 1)
    folder = lazily(tmp_path / "lazy", plain, 500)
    lazy = lazy_folder_of(folder)
    assert lazy is not None
    TokenStream(folder, asked()).read(0, 100)
    lazy._prefetch.submit(lambda: None).result()  # behind what was asked for
    indexes = {name for name in lazy._known if name.endswith(".idx")}
    assert 0 < len(indexes) < len(list(plain.rglob("*.idx"))) / 2


def test_tables_come_with_the_documents_that_are_counted(plain: Path, tmp_path: Path) -> None:
    """A trainer's main thread counts sources after each step: it must find the tables there."""
    folder = lazily(tmp_path / "lazy", plain, 500)
    stream, lazy = TokenStream(folder, asked()), lazy_folder_of(folder)
    assert lazy is not None
    assert not list(folder.rglob("*.parquet"))
    stream.read(0, 50_000)
    there = set(lazy._known)
    assert stream.sources(0, 50_000) == TokenStream(plain, asked()).sources(0, 50_000)
    assert lazy._known == there


def test_inspection_is_the_same(plain: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", plain, 2)
    assert inspect(folder, asked(), 5_000, 90_000) == inspect(plain, asked(), 5_000, 90_000)
