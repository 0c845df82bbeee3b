"""What a layout accepts and refuses, without any process."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.sections import Model

VOCAB_SIZE = 128_256


def published(preset: str = "405b") -> Model:
    return Model.model_validate({"preset": preset})


@pytest.mark.parametrize(("world", "cp", "dp"), [(8_192, 1, 64), (16_384, 1, 128), (16_384, 16, 8)])
def test_the_published_rows_are_accepted(world: int, cp: int, dp: int) -> None:
    layout = Layout(tp=8, cp=cp, pp=16)
    layout.check(published(), VOCAB_SIZE, world)
    layout.check_sequence(8_192 if cp == 1 else 131_072)
    assert layout.dp(world) == dp


@pytest.mark.parametrize(
    ("fields", "world", "message"),
    [
        ({"tp": 16}, 16, "cluster.layout.tp: 16 does not divide kv_heads 8; use one of"),
        ({"tp": 3}, 3, "cluster.layout.tp: 3 does not divide heads 128, kv_heads 8, ffn 53248; use one of"),
        ({"tp": 8, "pp": 3}, 64, "tp 8 x cp 1 x pp 3 = 24 does not divide 64 processes; start 72"),
        ({"pp": 16, "vpp": 9}, 16, "cluster.layout.pp: 16 x vpp 9 stages are too many for 126 layers"),
        ({"vpp": 2}, 1, "cluster.layout.vpp: 2 stages per process need pp above 1"),
        ({"pp": 2, "vpp": 2, "schedule": "1f1b"}, 2, "1f1b has one stage per process, vpp is 2"),
        ({"dp_replicate": 3}, 4, "cluster.layout.dp_replicate: 3 does not divide the data-parallel size 4"),
        ({"tp": 2, "async_tp": True}, 2, "cluster.layout.async_tp: needs compile: true"),
        ({"pp": 2, "schedule": "zero-bubble", "zero": 3}, 4, "zero"),
    ],
)
def test_refusals_name_field_numbers_and_remedy(fields: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(**fields).check(published(), VOCAB_SIZE, world)


def test_a_tied_embedding_cannot_be_piped() -> None:
    with pytest.raises(ValueError, match=r"model\.tied_embeddings: false"):
        Layout(pp=2).check(published("1b"), VOCAB_SIZE, 2)


@given(tp=st.integers(1, 8), cp=st.integers(1, 4), seq_len=st.integers(1, 4096))
def test_a_sequence_is_accepted_when_every_part_is_whole(tp: int, cp: int, seq_len: int) -> None:
    """Context parallelism needs two equal chunks for each process, sequence parallelism equal parts of both."""
    chunks = 2 * cp if cp > 1 else 1
    fits = seq_len % chunks == 0 and seq_len // chunks % tp == 0
    with nullcontext() if fits else pytest.raises(ValueError, match=f"sequence {seq_len} does not split"):
        Layout(tp=tp, cp=cp).check_sequence(seq_len)
