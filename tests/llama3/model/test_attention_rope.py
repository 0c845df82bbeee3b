"""Rotary positions: the rule of Llama 3.1, and what a rotation is for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.attention import frequencies, rotate, rotation
from herd.llama3.recipe.sections import RopeScaling

LLAMA31 = RopeScaling()


def test_frequencies_are_kept_slowed_and_blended_by_their_wavelength() -> None:
    """Wavelengths below 8192 / 4 are kept, those above 8192 are 8 times as long, between them nothing jumps."""
    plain, scaled = frequencies(128, 5e5, None), frequencies(128, 5e5, LLAMA31)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 2048, wavelength > 8192
    assert torch.equal(scaled[short], plain[short])
    assert torch.equal(scaled[long], plain[long] / 8)
    between = (plain / scaled)[~short & ~long]
    assert between.numel() > 2
    assert torch.equal(between, between.sort().values)
    assert between.min() > 1
    assert between.max() < 8


def test_frequencies_equal_those_of_transformers() -> None:
    configuration = pytest.importorskip("transformers.models.llama.configuration_llama")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = configuration.LlamaConfig(
        hidden_size=2048, num_attention_heads=32, max_position_embeddings=131072, rope_theta=5e5, rope_scaling=scaling
    )
    theirs, _ = utilities.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert torch.allclose(frequencies(64, 5e5, RopeScaling(factor=32)), theirs.double(), rtol=1e-6, atol=0)


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 1000), st.sampled_from([None, LLAMA31]))
def test_scores_depend_on_distances_only(first: int, second: int, shift: int, scaling: RopeScaling | None) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> float:
        tables = (rotation(torch.tensor([at]), 16, 5e5, scaling, torch.float64) for at in (at_q, at_k))
        turned_q, turned_k = (rotate(x, table) for x, table in zip((q, k), tables, strict=True))
        return float((turned_q * turned_k).sum())

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=1e-9)


def test_a_part_of_the_positions_gives_a_part_of_the_table() -> None:
    positions = torch.arange(32)
    whole = rotation(positions, 8, 1e4, LLAMA31, torch.float32)
    part = rotation(positions[[3, 9, 30]], 8, 1e4, LLAMA31, torch.float32)
    assert whole[0].shape == (32, 1, 4)
    assert whole[0].dtype == torch.float32
    assert all(torch.equal(table[[3, 9, 30]], own) for table, own in zip(whole, part, strict=True))
