from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.tokens.source_stream import shuffled_order
from herd.llama3.tokens.stream import TokenStream
from tests.llama3.tokens.token_samples import END, LENGTHS, recipe, stage, stream, write_shards

STAGES = [
    stage("a", 200),
    stage("b", 400, seq_len=16),
    stage("c", 496, seq_len=16, mix="anneal"),
    stage("d", 208, mix="base"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), recipe(STAGES), LENGTHS)


def dataset_tokens(number: int, seed: int, name: str, count: int, chunk: int | None = None) -> list[tuple[int, bool]]:
    """Return the first tokens of a dataset's stream the slow way: (token, whether it begins a segment)."""
    lengths = LENGTHS[number % len(LENGTHS)]
    offsets = np.cumsum([0, *lengths]).tolist()
    tokens: list[tuple[int, bool]] = []
    epoch = 0
    while len(tokens) < count:
        read: list[tuple[int, bool]] = []
        for row in shuffled_order(len(lengths), seed, name, epoch).tolist():
            read += [(number * 1_000_000 + offsets[row] + place, place == 0) for place in range(lengths[row])]
        if chunk:
            chunks = [[(read[at][0], True), *read[at + 1 : at + chunk]] for at in range(0, len(read), chunk)]
            whole = len(read) // chunk
            order = [*shuffled_order(whole, seed, f"{name}/chunks", epoch).tolist(), *range(whole, len(chunks))]
            read = [token for place in order for token in chunks[place]]
        tokens += read
        epoch += 1
    return tokens[:count]


def slow_read(run: TokenStream) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, segments and domains of the whole run, token by token, from the units and the slow datasets."""
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    chunk = run.unit if run.recipe.tokens.shuffle == "chunks" else None
    supplies = [
        iter(dataset_tokens(number, run.recipe.seed, dataset.name, int(count), chunk))
        for number, (dataset, count) in enumerate(zip(run.datasets, run.consumed(run.tokens), strict=True))
    ]
    for phase in run.phases:
        units = phase.interleaver.units(0, phase.interleaver.tokens)
        for dataset, size in zip(units.dataset.tolist(), units.size.tolist(), strict=True):
            for place in range(size):
                token, begins = next(supplies[dataset])
                segment = len(columns[0]) if begins or place == 0 else columns[1][-1]
                for column, value in zip(
                    columns, (token, segment, DOMAINS.index(run.datasets[dataset].domain)), strict=True
                ):
                    column.append(value)
    assert all(next(supply, None) is None for supply in supplies)
    return columns


@pytest.mark.parametrize("unit", [None, 5, 64])
@pytest.mark.parametrize("weights", [None, {"general": [2, 1], "code": [0.3, 0.1, 0.2]}])
@pytest.mark.parametrize("shuffle", ["documents", "chunks"])
def test_every_token_is_where_the_slow_reading_puts_it(
    tmp_path: Path, unit: int | None, weights: dict[str, list[float]] | None, shuffle: str
) -> None:
    run = stream(tmp_path, recipe(STAGES, unit=unit, weights=weights, seed=3, tokens={"shuffle": shuffle}))
    window = run.read(0, run.tokens)
    tokens, segments, domains = slow_read(run)
    assert window.tokens.tolist() == tokens
    assert window.segments.tolist() == segments
    assert window.domains.tolist() == domains


@given(data=st.data(), unit=st.sampled_from([None, 3, 32]), shuffle=st.sampled_from(["documents", "chunks"]))
def test_reads_agree_under_any_split(shards: Path, data: st.DataObject, unit: int | None, shuffle: str) -> None:
    run = TokenStream(shards, recipe(STAGES, unit=unit, tokens={"shuffle": shuffle}))
    whole = run.read(0, run.tokens + 1)
    edges = sorted(data.draw(st.lists(st.integers(0, run.tokens + 1), max_size=6)))
    for start, stop in zip([0, *edges], [*edges, run.tokens + 1], strict=True):
        part = run.read(start, stop)
        for name in ("tokens", "segments", "domains"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[start:stop])


ramps: list[list[dict[str, Any]]] = [
    [stage("all", 1280, seq_len=16, batch=64)],
    [stage("a", 320, seq_len=4, batch=8), stage("b", 320, seq_len=8, batch=32), stage("c", 640, seq_len=16, batch=128)],
    [stage("a", 640, seq_len=8, batch=16), {**stage("b", 640, batch=32), "seq_len": [4, 8]}],
]


@pytest.mark.parametrize("stages", ramps[1:])
def test_batch_ramp_and_sequence_length_do_not_change_the_stream(shards: Path, stages: list[dict[str, Any]]) -> None:
    one = TokenStream(shards, recipe(ramps[0], unit=16))
    other = TokenStream(shards, recipe(stages, unit=16))
    assert one.tokens == other.tokens == 1280
    for name in ("tokens", "segments", "domains"):
        assert np.array_equal(getattr(one.read(0, 1280), name), getattr(other.read(0, 1280), name))


def test_a_change_of_what_is_to_come_leaves_the_past_alone(shards: Path) -> None:
    before = TokenStream(shards, recipe([stage("a", 600), stage("b", 600)]))
    after = TokenStream(shards, recipe([stage("a", 600), stage("b", 320, mix="anneal"), stage("c", 4000)]))
    same = 600 - 8 * 13
    assert np.array_equal(before.read(0, same).tokens, after.read(0, same).tokens)
    assert before.identity(0, same) == after.identity(0, same)
    assert before.identity(0, 600) != after.identity(0, 600)


LATER = [stage("a", 200), stage("b", 200, mix="anneal"), stage("c", 200)]


@pytest.mark.parametrize(
    ("stages", "more"),
    [
        (LATER, {"seed": 1}),
        (LATER, {"unit": 16}),
        (LATER, {"weights": {"math": [1, 2]}}),
        (LATER, {"tokens": {"shuffle": "chunks"}}),
        ([stage("a", 216), stage("b", 184, mix="anneal"), stage("c", 200)], {}),
        ([stage("a", 200), stage("b", 200, mix="anneal"), stage("c", 208)], {}),
    ],
)
def test_identity_tells_runs_apart_that_read_other_tokens(
    tmp_path: Path, stages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    run = stream(tmp_path / "one", recipe(LATER))
    other = stream(tmp_path / "other", recipe(stages, **more))
    assert run.read(400, 600).tokens.tolist() != other.read(400, 600).tokens.tolist()
    assert run.identity(400, 600) != other.identity(400, 600)
    assert json.loads(json.dumps(run.identity(400, 600))) == TokenStream(tmp_path / "one", recipe(LATER)).identity(
        400, 600
    )


def test_seed_decides_the_order(shards: Path) -> None:
    tokens = [TokenStream(shards, recipe(STAGES, seed=seed)).read(0, 1304).tokens for seed in (0, 0, 1)]
    assert np.array_equal(tokens[0], tokens[1])
    assert not np.array_equal(tokens[0], tokens[2])


shares = st.lists(st.integers(1, 97), min_size=4, max_size=4)


def percents(parts: list[int]) -> dict[str, str]:
    """Return shares of four domains near `parts`, in hundredths of a percent."""
    points = [part * 10_000 // sum(parts) for part in parts]
    points[0] += 10_000 - sum(points)
    return {domain: f"{point // 100}.{point % 100:02}%" for domain, point in zip(DOMAINS, points, strict=True)}


@given(first=shares, second=shares, tokens=st.integers(1, 90), unit=st.integers(1, 40))
def test_leaves_are_consumed_in_order_and_spans_end_exact(
    shards: Path, first: list[int], second: list[int], tokens: int, unit: int
) -> None:
    mixes = {"base": percents(first), "other": percents(second)}
    stages = [stage("a", 8 * tokens), stage("b", 496, mix="other"), stage("c", 8 * tokens)]
    run = TokenStream(shards, recipe(stages, mixes, unit=unit))
    window = run.read(0, run.tokens)
    for number, dataset in enumerate(run.datasets):
        mine = window.tokens[window.domains == DOMAINS.index(dataset.domain)]
        assert mine.tolist() == [token for token, _ in dataset_tokens(number, 0, dataset.name, len(mine))]
    for phase in run.phases:
        counts = np.bincount(window.domains[phase.start : phase.end], minlength=4)
        for dataset, share in zip(run.datasets, phase.interleaver.shares, strict=True):
            assert abs(int(counts[DOMAINS.index(dataset.domain)]) - share * (phase.end - phase.start)) < 1


def test_planned_and_realized_are_counts_of_what_is_read(shards: Path) -> None:
    run = TokenStream(shards, recipe(STAGES))
    window = run.read(0, run.tokens)
    for position in range(0, run.tokens + 1, 37):
        counts = np.bincount(window.domains[:position], minlength=4).tolist()
        assert run.realized(position) == dict(zip(DOMAINS, counts, strict=True))
    assert sum(run.planned(0, run.tokens).values()) == run.tokens
    assert run.planned(590, 610) == {
        "general": Fraction(5 + 3),
        "math": Fraction(5, 2) + 4,
        "code": Fraction(17, 10) + Fraction(22, 10),
        "multilingual": Fraction(16, 10),
    }
    assert run.epochs(run.tokens)["code"] == run.realized(run.tokens)["code"] / 30


def test_equal_mixes_in_a_row_form_one_span(shards: Path) -> None:
    run = TokenStream(shards, recipe(STAGES))
    assert [(phase.start, phase.end) for phase in run.phases] == [(0, 600), (600, 1096), (1096, 1304)]


def test_one_token_past_the_end_closes_the_last_target(shards: Path) -> None:
    run = TokenStream(shards, recipe(STAGES))
    window = run.read(run.tokens - 3, run.tokens + 1)
    assert window.tokens[-1] == END
    assert window.segments[-1] == run.tokens
    assert window.segments[-2] < run.tokens
    for start, stop in ((run.tokens, run.tokens + 2), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match="are not in the run of 1304 tokens"):
            run.read(start, stop)


def test_documents_name_what_is_read(shards: Path) -> None:
    run = TokenStream(shards, recipe(STAGES))
    start, stop = 155, 1100
    window = run.read(start, stop)
    uses = run.documents(start, stop)
    assert [use.position for use in uses] == sorted({start, *window.segments[window.segments > start].tolist()})
    position = start
    for use in uses:
        dataset = [dataset.name for dataset in run.datasets].index(use.dataset)
        offset = dataset * 1_000_000 + sum(LENGTHS[dataset][: int(use.document.split(":")[1])])
        length = use.last - use.first + 1
        expected = list(range(offset + use.first, offset + use.last + 1))
        assert window.tokens[position - start : position - start + length].tolist() == expected
        position += length
    assert position == stop
    assert {use.epoch for use in uses if use.dataset == "math"} > {1, 2, 3}


def test_too_many_epochs_are_refused_before_training(shards: Path) -> None:
    TokenStream(shards, recipe(STAGES, tokens={"max_epochs": 12})).check()
    with pytest.raises(ValueError, match="max_epochs") as error:
        TokenStream(shards, recipe(STAGES, tokens={"max_epochs": 8.15})).check()
    lines = str(error.value).split("\n")
    assert len(lines) == 2
    assert "sources.math, which holds 40" in lines[0]
    assert "sources.code, which holds 30: 8.20 epochs, at most 8.15" in lines[1]
    assert "raise tokens.max_epochs" in lines[0]


def test_shards_of_other_sources_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not general-0, general-1; tokenize with this recipe"):
        TokenStream(shards, recipe(STAGES, weights={"general": [1, 2]}))
    with pytest.raises(ValueError, match=r"tokens\.json cannot be read"):
        TokenStream(tmp_path, recipe(STAGES))


def test_a_share_of_an_empty_leaf_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, recipe(STAGES), [[5], [5], [], [5]])
    with pytest.raises(ValueError, match=r"sources\.code has no training document for it"):
        TokenStream(tmp_path, recipe(STAGES))
    none = {"general": "100%"}
    assert TokenStream(tmp_path, recipe(STAGES, {"base": none, "anneal": none})).epochs(80)["code"] == 0


def test_bins_may_be_cut_anywhere(tmp_path: Path) -> None:
    whole = write_shards(tmp_path / "whole", recipe(STAGES), LENGTHS, cuts=1000)
    cut = write_shards(tmp_path / "cut", recipe(STAGES), LENGTHS, cuts=1)
    assert len(list((whole / "general").glob("*.bin"))) == 1
    assert len(list((cut / "general").glob("*.bin"))) == 6
    one, many = (TokenStream(folder, recipe(STAGES)).read(0, 1304) for folder in (whole, cut))
    assert np.array_equal(one.tokens, many.tokens)


def test_narrow_and_wide_shards_read_the_same(tmp_path: Path) -> None:
    lengths = [[3, 9, 4, 7]]
    asked = recipe([stage("a", 256)], {"base": {"general": "100%"}})
    windows = [
        TokenStream(write_shards(tmp_path / dtype, asked, lengths, dtype=dtype), asked).read(0, 256)
        for dtype in ("int32", "uint16")
    ]
    general = windows[0].domains == 0
    assert general.all()
    assert np.array_equal(windows[0].tokens, windows[1].tokens)


def test_a_window_keeps_its_bounds_per_segment(shards: Path) -> None:
    run = TokenStream(shards, recipe(STAGES))
    window = run.read(100, 900)
    changes = 1 + np.flatnonzero(np.diff(window.segments))
    assert window.cu_seqlens.tolist() == [0, *changes.tolist(), 800]
    assert window.origins.tolist() == window.segments[window.cu_seqlens[:-1]].tolist()
    assert len(run.read(50, 50).tokens) == 0
    assert run.documents(50, 50) == []


def test_a_leaf_may_be_read_exactly_as_often_as_allowed(shards: Path) -> None:
    """8.2 epochs of 30 tokens are 246, to the last."""
    run = TokenStream(shards, recipe(STAGES))
    most = max(run.epochs(run.tokens).values())
    TokenStream(shards, recipe(STAGES, tokens={"max_epochs": most})).check()
    with pytest.raises(ValueError, match="max_epochs"):
        TokenStream(shards, recipe(STAGES, tokens={"max_epochs": most - 1e-6})).check()
