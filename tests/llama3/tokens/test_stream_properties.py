"""What the stream promises: no batch, length, rank or restart changes it, every share is kept, sources are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.tokens import shards as shards_module
from herd.llama3.tokens import source_stream
from herd.llama3.tokens.source_stream import EpochOrder, shuffled_order
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train.data_loader import Batches
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards

STAGES = [
    stage("a", 200),
    stage("b", 400, seq_len=16),
    stage("c", 496, seq_len=16, mix="anneal"),
    stage("d", 208, mix="base"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), recipe(STAGES), LENGTHS)


TILE = 64
"""Tokens in which the ramps below are cut: every batch divides it."""
shapes = st.sampled_from([(4, 16), (8, 16), (4, 32), (8, 64), (16, 32), (16, 64), (32, 64), (64, 64)])


@given(
    tiles=st.lists(st.tuples(st.integers(1, 8), shapes), min_size=1, max_size=5),
    unit=st.sampled_from([8, 64]),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_no_ramp_and_no_number_of_ranks_changes_what_is_trained_on(
    shards: Path, tiles: list[tuple[int, tuple[int, int]]], unit: int, ranks: int
) -> None:
    stages = [stage(f"s{n}", TILE * many, seq_len, batch) for n, (many, (seq_len, batch)) in enumerate(tiles)]
    plain = recipe([stage("all", TILE * sum(many for many, _ in tiles), seq_len=8, batch=TILE)], unit=unit)
    expected = TokenStream(shards, plain).read(0, Schedule(plain).tokens)
    ramped = recipe(stages, unit=unit)
    batches, columns = Batches(TokenStream(shards, ramped)), []
    for segment in Schedule(ramped).segments:
        for start in range(segment.start, segment.end, segment.batch):
            rows = segment.batch // segment.seq_len
            for rank in range(ranks):
                first, stop = rank * rows // ranks, (rank + 1) * rows // ranks
                batch = batches.sequences(start, segment.seq_len, first, stop - first)
                columns.append((batch.tokens_BS.numpy().ravel(), batch.domains_BS.numpy().ravel()))
    tokens, domains = (np.concatenate(column) for column in zip(*columns, strict=True))
    assert np.array_equal(tokens, expected.tokens)
    assert np.array_equal(domains, expected.domains)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of six documents, so that small datasets have several."""
    monkeypatch.setattr(source_stream, "GROUP", 2)
    monkeypatch.setattr(shards_module, "GROUP", 2)
    monkeypatch.setattr(source_stream, "BLOCK", 3)


def slow_documents(count: int, seed: int, name: str, epochs: int) -> list[int]:
    """Return the documents of a dataset's first epochs in their order, block after block."""
    found: list[int] = []
    for epoch in range(epochs):
        blocks = EpochOrder(count, seed, name, epoch)
        for block in range(blocks.blocks):
            rows = blocks.rows_of(block)
            found += rows[blocks.shuffle(block, len(rows))].tolist()
    return found


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cuts", [1, 4, 100])
def test_a_leaf_of_several_blocks_is_read_in_their_order(tmp_path: Path, cuts: int) -> None:
    random = np.random.default_rng(5)
    lengths = [random.integers(2, 12, count).tolist() for count in (31, 20, 7, 6)]
    asked = recipe(STAGES, seed=2)
    run = TokenStream(write_shards(tmp_path, asked, lengths, cuts=cuts), asked)
    window = run.read(0, run.tokens)
    for number, dataset in enumerate(run.datasets):
        mine = window.tokens[window.domains == DOMAINS.index(dataset.domain)]
        offsets = np.cumsum([0, *lengths[number]])
        expected: list[int] = []
        for row in slow_documents(len(lengths[number]), 2, dataset.name, 1 + len(mine) // int(offsets[-1])):
            expected += range(number * 1_000_000 + offsets[row], number * 1_000_000 + offsets[row + 1])
        assert mine.tolist() == expected[: len(mine)]
    for path in tmp_path.glob("*/groups.npy"):  # shards of an earlier version have none
        path.unlink()
    for start in range(0, run.tokens, 113):  # a stream that is opened there, as a resumed run does
        part = TokenStream(tmp_path, asked).read(start, start + 50)
        assert np.array_equal(part.tokens, window.tokens[start : start + 50])
        assert np.array_equal(part.segments, window.segments[start : start + 50])


@pytest.mark.usefixtures("small_blocks")
def test_shuffled_chunks_hold_each_token_once_and_are_told_as_pieces_of_documents(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    lengths = [random.integers(2, 60, count).tolist() for count in (31, 20, 9, 3)]
    asked = recipe(STAGES, unit=8, tokens={"shuffle": "chunks"})
    run = TokenStream(write_shards(tmp_path, asked, lengths, cuts=4), asked)
    window, seen = run.read(0, run.tokens), []
    for use in run.documents(0, run.tokens):
        dataset, _, row = use.document.partition(":")
        if dataset == "general" and use.epoch == 0:
            begin = sum(lengths[0][: int(row)])
            piece = list(range(begin + use.first, begin + use.last + 1))
            assert window.tokens[use.position : use.position + len(piece)].tolist() == piece
            seen += piece
    assert len(seen) == len(set(seen)) == min(sum(lengths[0]), run.realized(run.tokens)["general"])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shuffle", ["documents", "chunks"])
def test_sources_are_counted_as_they_are_read(tmp_path: Path, shuffle: str) -> None:
    """Both ways: from documents one by one, and from tables, blocks and whole epochs."""
    random = np.random.default_rng(6)
    lengths = [random.integers(2, 12, count).tolist() for count in (31, 20, 9, 3)]
    asked = recipe(STAGES, weights={"code": [2, 1]}, unit=8, tokens={"shuffle": shuffle})
    run = TokenStream(write_shards(tmp_path, asked, lengths, cuts=4, sources=("a", "b", "c")), asked)
    for start, stop in [(0, 0), (5, 6), (0, 1304), (333, 1000), (1000, 1304), *[(at, at + 97) for at in (0, 450, 900)]]:
        uses = run.documents(start, stop)
        counted: Counter[str] = Counter()
        for use in uses:
            counted[f"{use.dataset.split('-')[0]}/{use.source}"] += use.last - use.first + 1
        found = run.sources(start, stop)
        assert sum(found.values()) == stop - start
        assert {name: tokens for name, tokens in found.items() if tokens} == counted
        assert len(found) == 12
        for domain, columns in run.tally(["language", "license"], start, stop).items():
            mine = [use for use in uses if use.dataset.split("-")[0] == domain]
            for column, values in columns.items():
                for value, (tokens, documents) in values.items():
                    those = [use for use in mine if getattr(use, column) == value]
                    assert tokens == sum(use.last - use.first + 1 for use in those)
                    assert documents == len({(use.document, use.epoch) for use in those})


def test_a_weighted_source_is_counted_without_its_tables(shards: Path, tmp_path: Path) -> None:
    asked = recipe(STAGES, weights={"code": [2, 1]})
    run = TokenStream(write_shards(tmp_path, asked, LENGTHS), asked)
    for table in tmp_path.rglob("*.parquet"):
        table.unlink()
    assert run.sources(0, 1304) == {f"{domain}/s": tokens for domain, tokens in run.realized(1304).items()}


def test_a_millionth_of_the_mix_is_drawn(shards: Path) -> None:
    rare = {"general": "99.9999%", "math": "0.0001%"}
    total = 24_000_000
    run = TokenStream(shards, recipe([stage("a", total, seq_len=8, batch=64)], {"base": rare}))
    assert run.realized(total)["math"] == 24
    for position in range(0, total + 1, 1_000_000):
        assert abs(run.realized(position)["math"] - position / 1e6) <= run.unit
    low, high = 0, total
    while high - low > 1:  # the position of the first such token
        middle = (low + high) // 2
        low, high = (low, middle) if run.realized(middle)["math"] else (middle, high)
    window = run.read(low - 1, low + 2)
    assert window.domains.tolist()[:2] == [DOMAINS.index("general"), DOMAINS.index("math")]
    documents = np.cumsum([0, *LENGTHS[1]])[:-1] + 1_000_000
    assert window.tokens[1] == documents[shuffled_order(len(documents), 0, "math", 0)[0]]


def test_too_many_epochs_of_one_weighted_source_are_refused(tmp_path: Path) -> None:
    asked = recipe(STAGES, weights={"code": [9, 1]}, tokens={"max_epochs": 17})
    run = TokenStream(write_shards(tmp_path, asked, [[60] * 20, [60] * 20, [5], [5]]), asked)
    taken = int(run.consumed(run.tokens)[2])
    with pytest.raises(ValueError, match=rf"takes {taken} tokens from sources\.code\.0, which holds 5: .*at most 17"):
        run.check()
