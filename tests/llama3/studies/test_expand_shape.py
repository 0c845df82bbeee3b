"""A shape with a given number of parameters: near it, in whole heads, like the one it was made from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.flops import parameter_count
from herd.llama3.recipe.sections import PRESETS, Model
from herd.llama3.studies.expand import nearest_shape, scale_shape, shape_changes

VOCAB_SIZE = 512
SIZES = [
    Model(layers=layers, dim=dim, ffn=28 * dim // 8, heads=dim // 8, kv_heads=dim // 32, max_seq_len=1024)
    for layers, dim in ((2, 32), (4, 64), (6, 96))
]


@given(st.floats(math.log(3e4), math.log(1e10)))
def test_parameters_are_met_in_proportion(size: float) -> None:
    wanted = math.exp(size)
    like = nearest_shape(wanted, SIZES, VOCAB_SIZE)
    found = scale_shape(wanted, like, VOCAB_SIZE)
    assert parameter_count(found, VOCAB_SIZE) == pytest.approx(wanted, rel=0.25)
    assert found.dim // found.heads == like.dim // like.heads
    assert found.kv_heads == like.kv_heads
    assert found.ffn / found.dim == pytest.approx(like.ffn / like.dim, rel=0.15)
    assert 0.4 < (found.layers / found.dim) / (like.layers / like.dim) < 2.5


def test_the_same_number_is_the_same_shape() -> None:
    for like in SIZES:
        assert scale_shape(parameter_count(like, VOCAB_SIZE), like, VOCAB_SIZE) == like
        assert shape_changes(like, like) == []


def test_only_what_differs_from_a_preset_is_a_change() -> None:
    base = Model.model_validate({"preset": "8b"})
    assert set(PRESETS["8b"]) >= {"layers", "dim", "ffn"}
    wider = base.model_copy(update={"layers": 33, "tied_embeddings": True})
    assert shape_changes(wider, base) == ["model.layers=33", "model.tied_embeddings=true"]
