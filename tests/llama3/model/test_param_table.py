"""The parameter table against the module: names, order and shapes, of whole models, of stages and of shards."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.flops import parameter_count
from herd.llama3.model.param_table import param_row, param_table
from herd.llama3.model.transformer import Transformer, empty_model
from herd.llama3.recipe.sections import Model
from tests.dist import run
from tests.llama3.parallel.scale_samples import OPTIONAL, VALUES, VOCAB_SIZE, names_and_shapes, shape


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, int]:
    """A model and its vocab_size."""
    kv_heads, layers, ffn = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(8, 99))
    heads = kv_heads * draw(st.integers(1, 4))
    config = {"layers": layers, "dim": 8 * heads, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "max_seq_len": 64}
    options = {field: VALUES[field] for field in draw(st.sets(st.sampled_from(OPTIONAL)))}
    return Model.model_validate(config | options), draw(st.integers(1, 300))


@given(models())
def test_the_table_is_the_module_s_parameters(case: tuple[Model, int]) -> None:
    named = {name: tuple(parameter.shape) for name, parameter in empty_model(*case).named_parameters()}
    table = param_table(*case)
    assert [(param.name, param.shape) for param in table] == list(named.items())
    assert all(param.row is param_row(param.name) for param in table)
    assert parameter_count(*case) == sum(map(prod, named.values()))
    for form in ("hf", "meta", "gguf"):
        names = [getattr(param, form) for param in table if getattr(param.row, form)]
        assert len(set(names)) == len(names)


@given(models(), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_a_stage_has_its_part_of_the_table(
    case: tuple[Model, int], start: int, count: int, first: bool, last: bool
) -> None:
    layers = range(start, start + count)
    with torch.device("meta"):
        stage = Transformer(*case, layers, first, last)
    named = [(name, tuple(parameter.shape)) for name, parameter in stage.named_parameters()]
    assert [(param.name, param.shape) for param in param_table(*case, layers, first, last)] == named


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensor_parallel_ranks_have_the_local_shapes(tp: int) -> None:
    (ranks,) = run(1, names_and_shapes, {"tp": tp}, tp)
    expected = {param.name: (param.shape, param.local_shape(tp)) for param in param_table(shape(), VOCAB_SIZE)}
    assert ranks == [expected] * tp
