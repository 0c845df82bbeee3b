"""The published layouts of the 405B on 8,192 and 16,384 ranks hold together, in seconds and in one process."""

from __future__ import annotations

from functools import cache

import pytest

from herd.llama3.parallel.check_layout import LayoutCheck, measure_layout
from herd.llama3.parallel.layout import LLAMA3_VOCAB_SIZE, TABLE_4, Layout
from herd.llama3.parallel.memory import Load, RankCoords, memory, memory_line
from herd.llama3.recipe.sections import Model
from tests.dist import run
from tests.llama3.parallel.scale_samples import checked, local_parameters

PAPER = Model.model_validate({"preset": "405b"})


@cache
def checks() -> list[LayoutCheck]:
    """Check rank 5,000 and the last of each row of Table 4."""
    requests = [
        (row.layout.model_dump(), row.world, Load(row.seq_len, 1, row.sequences), (5_000, row.world - 1))
        for row in TABLE_4
    ]
    found: list[LayoutCheck] = run(1, checked, PAPER, LLAMA3_VOCAB_SIZE, requests)[0]
    return found


@pytest.mark.slow
def test_the_model_has_its_published_size() -> None:
    assert {check.parameters for check in checks()} == {405_853_388_800}


@pytest.mark.slow
def test_data_parallel_sizes_are_the_published_ones() -> None:
    assert [row.layout.dp(row.world) for row in TABLE_4] == [64, 128, 8]
    assert [check.ranks[-1].dp + 1 for check in checks()] == [64, 128, 8]
    assert [row.world * row.seq_len * row.sequences // row.layout.model_parallel for row in TABLE_4] == [2**24] * 3


@pytest.mark.parametrize("row", range(3))
def test_neighbours_share_tensors_then_context_then_layers(row: int) -> None:
    layout, world = TABLE_4[row].layout, TABLE_4[row].world
    for found in checks()[row].ranks:
        place = RankCoords.from_rank(found.rank, layout)
        assert (found.dp, found.pp, found.cp, found.tp) == (place.dp, place.pp, place.cp, place.tp)
        first = found.rank - place.tp
        assert found.peers["tp"] == list(range(first, first + 8))
        assert found.peers["cp"] == [found.rank + 8 * (other - place.cp) for other in range(layout.cp)]
        stride = 8 * layout.cp
        assert found.peers["pp"] == [found.rank + stride * (other - place.pp) for other in range(16)]
        same = [
            rank
            for rank in range(world)
            if (at := RankCoords.from_rank(rank, layout)).pp == place.pp and at.tp == place.tp
        ]
        assert found.peers["shards"] == same


def test_rank_5000_sits_where_the_order_puts_it() -> None:
    found = checks()[1].ranks[0]
    assert found.peers["tp"] == list(range(5000, 5008))
    assert found.peers["pp"][:3] == [4992, 5000, 5008]
    assert (found.dp, found.pp, found.tp) == (39, 1, 0)
    assert found.layers == list(range(7, 15))


@pytest.mark.parametrize("row", range(3))
def test_ranks_hold_the_parameters_that_arithmetic_gives_them(row: int) -> None:
    layout, world = TABLE_4[row].layout, TABLE_4[row].world
    for found in checks()[row].ranks:
        assert found.parameters == local_parameters(PAPER, LLAMA3_VOCAB_SIZE, layout, world, found.rank)
        assert len(found.layers) == (7 if found.pp in (0, 15) else 8)


def test_a_line_says_where_the_memory_goes() -> None:
    need = checks()[1].fullest
    assert need.pipeline_rank == 1  # a whole stage, and the most in flight of those
    line = memory_line(need)
    assert line.startswith(f"{need.total / 2**30:.0f} GiB on pipeline rank 1: ")
    assert f"activations {need.activations / 2**30:.1f}" in line
    small = memory(Model.model_validate({"preset": "tiny"}), 2048, Layout(), 1, Load(64, 1, 1))[0]
    assert memory_line(small).startswith(f"{small.total / 2**20:.0f} MiB on pipeline rank 0: ")
    assert f"activations {small.activations / 2**20:.1f}" in memory_line(small)


@pytest.mark.slow
def test_a_fresh_process_checks_table_4_in_little_memory() -> None:
    seconds, peak = measure_layout()
    assert seconds > 0
    assert 100e6 < peak < 1e9


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="tp 8 x cp 1 x pp 16 = 128 does not divide 100"):
        run(1, checked, PAPER, LLAMA3_VOCAB_SIZE, [(TABLE_4[0].layout.model_dump(), 100, Load(8192), (0,))])
