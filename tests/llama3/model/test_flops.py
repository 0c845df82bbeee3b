"""FLOPs per token: against a counted model, and the formulas against each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from herd.llama3.model.flops import checkpoint_bytes, flops_per_token, parameter_count
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model

TINY = Model(layers=2, dim=64, ffn=160, heads=4, kv_heads=2, max_seq_len=64)
VOCAB_SIZE = 256


@pytest.mark.parametrize("tied", [False, True])
def test_full_attention_is_what_a_counter_sees_of_a_step(tied: bool) -> None:
    """By torch's plain attention: its counter knows no flash kernel of the CPU."""
    seq_len = 64
    config = TINY.model_copy(update={"tied_embeddings": tied})
    model = build_model(config, VOCAB_SIZE, 0, torch.float32, torch.device("cpu"))
    tokens = torch.arange(seq_len).view(1, seq_len)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, None, tokens).sum().backward()
    assert counter.get_total_flops() == seq_len * flops_per_token(config, VOCAB_SIZE, seq_len).full


def test_published_figures() -> None:
    """405B: 3.8e25 operations for 15.6T tokens (Llama 3, section 3.2); the ratios that the module states for the 8B."""
    flops = flops_per_token(Model.model_validate({"preset": "405b"}), 128_256, 8192)
    assert flops.six_n * 15.6e12 == pytest.approx(3.8e25, rel=0.01)
    eight = flops_per_token(Model.model_validate({"preset": "8b"}), 128_256, 8192)
    assert eight.causal / eight.six_n == pytest.approx(1.143, abs=0.001)
    assert eight.full / eight.six_n == pytest.approx(1.286, abs=0.001)
    assert checkpoint_bytes(405_853_388_800) == 12 * 405_853_388_800


@given(seq_len=st.integers(1, 10**6))
def test_full_counts_twice_the_attention_of_causal(seq_len: int) -> None:
    flops = flops_per_token(TINY, VOCAB_SIZE, seq_len)
    assert flops.full - flops.six_n == pytest.approx(2 * (flops.causal - flops.six_n))
    assert flops.full - flops.six_n == 12.0 * TINY.layers * seq_len * TINY.dim


def test_parameters_are_those_of_the_model() -> None:
    for tied in (False, True):
        config = TINY.model_copy(update={"tied_embeddings": tied})
        model = build_model(config, VOCAB_SIZE, 0, torch.float32, torch.device("cpu"))
        assert parameter_count(config, VOCAB_SIZE) == sum(parameter.numel() for parameter in model.parameters())
