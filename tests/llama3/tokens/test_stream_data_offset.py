"""Helpings of data: stages that differ in `data_offset` alone read other tokens of the same mix, and all counts are of
what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.load import digest
from herd.llama3.tokens.source_stream import shuffled_order
from herd.llama3.tokens.stream import TokenStream
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, stream, write_shards

LONG = [[3, 11, 2, 8, 7, 5] * 60] * 4
"""Documents of each dataset: 2,160 tokens, more than any run here reads."""
MOST = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), recipe([stage("a", 80)]), LONG, cuts=100)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("short"), recipe([stage("a", 80)]), LENGTHS)


def drawn(first: int, second: int, draw: int, mix: str = "base") -> list[dict[str, Any]]:
    """Return two stages, of which the second reads the offset `data_offset`."""
    return [stage("a", first), {**stage("b", second, mix=mix), "data_offset": draw}]


def dataset_stream(lengths: list[int], number: int, seed: int, name: str, count: int) -> list[int]:
    """Return the first tokens of a dataset's stream the slow way: document by document, epoch by epoch."""
    offsets = np.cumsum([0, *lengths]).tolist()
    tokens: list[int] = []
    epoch = 0
    while len(tokens) < count:
        for row in shuffled_order(len(lengths), seed, name, epoch).tolist():
            tokens += [number * 1_000_000 + offsets[row] + place for place in range(lengths[row])]
        epoch += 1
    return tokens[:count]


@given(
    first=st.integers(1, 60),
    second=st.integers(1, 40),
    mix=st.sampled_from(["base", "anneal"]),
    draws=st.lists(st.integers(1, MOST), min_size=2, max_size=2, unique=True),
    unit=st.sampled_from([None, 3, 32]),
)
def test_two_offsets_share_no_token_and_have_the_same_mix(
    shards: Path, first: int, second: int, mix: str, draws: list[int], unit: int | None
) -> None:
    one, other = (TokenStream(shards, recipe(drawn(8 * first, 8 * second, draw, mix), unit=unit)) for draw in draws)
    begin, end = 8 * first, one.tokens
    before, offsets = one.read(0, begin), [run.read(begin, end) for run in (one, other)]
    assert np.array_equal(before.tokens, other.read(0, begin).tokens)
    assert one.identity(0, begin) == other.identity(0, begin)
    assert one.identity(begin, end) != other.identity(begin, end)
    assert np.array_equal(offsets[0].domains, offsets[1].domains)
    read = [set(window.tokens.tolist()) for window in (before, *offsets)]
    assert sum(map(len, read)) == len(set.union(*read)) == begin + 2 * (end - begin)


@pytest.mark.parametrize("unit", [None, 5, 64])
@pytest.mark.parametrize("weights", [None, {"general": [2, 1], "code": [0.3, 0.1, 0.2]}])
@pytest.mark.parametrize("lengths", [LONG, LENGTHS], ids=["within an epoch", "many epochs"])
def test_an_offset_begins_as_often_its_own_need_further_on(
    tmp_path: Path, unit: int | None, weights: dict[str, list[float]] | None, lengths: list[list[int]]
) -> None:
    """Against datasets read the slow way: what is passed over is passed over, and a later stage goes on behind it."""
    stages = [*drawn(200, 104, 3), stage("c", 120), {**stage("d", 80), "data_offset": 1}, stage("e", 48, mix="anneal")]
    asked = recipe(stages, unit=unit, weights=weights, seed=3)
    run = TokenStream(write_shards(tmp_path, asked, lengths, cuts=100), asked)
    window = run.read(0, run.tokens)
    datasets = [
        dataset_stream(lengths[number % 4], number, 3, dataset.name, 4000)
        for number, dataset in enumerate(run.datasets)
    ]
    dataset_of, places = window.tokens // 1_000_000, [0] * len(datasets)
    assert [(phase.start, phase.end) for phase in run.phases] == [
        (0, 200),
        (200, 304),
        (304, 424),
        (424, 504),
        (504, 552),
    ]
    for phase, draw in zip(run.phases, [0, 3, 0, 1, 0], strict=True):
        for number, dataset in enumerate(datasets):
            here = window.tokens[phase.start : phase.end][dataset_of[phase.start : phase.end] == number].tolist()
            begin = places[number] + draw * len(here)
            assert here == dataset[begin : begin + len(here)]
            places[number] = begin + len(here)


def test_stages_that_read_a_later_offset_are_separate_phases(shards: Path) -> None:
    """Else the length of the second would decide what the first reads."""
    first = [*drawn(80, 80, 2), {**stage("c", 80), "data_offset": 2}]
    longer = [*drawn(80, 80, 2), {**stage("c", 800), "data_offset": 2}]
    one, other = (TokenStream(shards, recipe(stages)) for stages in (first, longer))
    assert np.array_equal(one.read(80, 160).tokens, other.read(80, 160).tokens)
    assert one.identity(80, 160) == other.identity(80, 160)


@given(data=st.data(), unit=st.sampled_from([None, 3, 32]))
def test_reads_agree_under_any_split_across_what_is_passed_over(
    short: Path, data: st.DataObject, unit: int | None
) -> None:
    run = TokenStream(short, recipe([*drawn(96, 200, 2), stage("c", 104)], unit=unit))
    whole = run.read(0, run.tokens + 1)
    edges = sorted(data.draw(st.lists(st.integers(0, run.tokens + 1), max_size=6)))
    for start, stop in zip([0, *edges], [*edges, run.tokens + 1], strict=True):
        part = run.read(start, stop)
        for name in ("tokens", "segments", "domains"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[start:stop])


@given(data=st.data(), lengths=st.sampled_from(["short", "long"]))
def test_counts_are_of_what_is_read(shards: Path, short: Path, data: st.DataObject, lengths: str) -> None:
    run = TokenStream(shards if lengths == "long" else short, recipe([*drawn(96, 200, 2), stage("c", 104)]))
    start, stop = sorted(data.draw(st.lists(st.integers(0, run.tokens), min_size=2, max_size=2)))
    window, uses = run.read(start, stop), run.documents(start, stop)
    counts = np.bincount(window.domains, minlength=4).tolist()
    before, after = run.realized(start), run.realized(stop)
    assert [after[domain] - before[domain] for domain in after] == counts
    assert [run.sources(start, stop)[f"{domain}/s"] for domain in after] == counts
    tallied = run.tally(["source"], start, stop)
    for domain, count in zip(after, counts, strict=True):
        tokens, documents = tallied[domain]["source"].get("s", [0, 0])
        assert tokens == count == sum(use.last - use.first + 1 for use in uses if use.dataset == domain)
        different = len({(use.document, use.epoch) for use in uses if use.dataset == domain})
        assert different <= documents <= different + 1  # one may be read before and behind what is passed over


def test_epochs_and_their_limit_count_what_is_read(short: Path) -> None:
    """A hundred offsets are passed over; only one of them is read."""
    run = TokenStream(short, recipe(drawn(96, 200, 100), tokens={"max_epochs": 3}))
    run.check()
    assert (
        run.epochs(run.tokens)["code"] == run.realized(run.tokens)["code"] / 30 == pytest.approx(296 * 0.17 / 30, 0.02)
    )
    assert sum(run.planned(0, run.tokens).values()) == run.tokens


@given(first=st.integers(1, 60), second=st.integers(1, 40), draw=st.integers(0, 12))
def test_offsets_that_share_documents_are_told(shards: Path, first: int, second: int, draw: int) -> None:
    """A dataset of 2,160 tokens holds the offsets up to this one, or it comes round."""
    run = TokenStream(shards, recipe(drawn(8 * first, 8 * second, draw, "anneal")))
    told = {line.split()[0] for line in run.overlapping_offsets()}
    totals = [phase.interleaver.totals for phase in run.phases]
    ends = totals[0] + (draw + 1) * totals[1]
    assert told == {dataset.name for dataset, end in zip(run.datasets, ends, strict=True) if draw and end > 2160}


def test_many_epochs_of_one_offset_are_no_shared_offsets(short: Path) -> None:
    assert TokenStream(short, recipe(drawn(400, 200, 0))).overlapping_offsets() == []


STAGES = [
    stage("a", 200),
    stage("b", 400, seq_len=16),
    stage("c", 496, seq_len=16, mix="anneal"),
    stage("d", 208, mix="base"),
]


@pytest.mark.parametrize(
    ("weights", "known"),
    [(None, "1cbbd8c88a27bd1f"), ({"general": [2, 1], "code": [0.3, 0.1, 0.2]}, "cc66015fcc336fa1")],
)
def test_without_offsets_and_additions_identities_and_tokens_are_what_they_always_were(
    tmp_path: Path, weights: dict[str, list[float]] | None, known: str
) -> None:
    """Digests from before there were any: another one would train every stage of every run again."""
    run = stream(tmp_path, recipe(STAGES, weights=weights, seed=3))
    found = [run.identity(0, run.tokens), run.identity(0, 600), run.read(0, run.tokens).tokens.tolist()]
    assert digest(found).startswith(known)
