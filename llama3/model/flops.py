"""Parameter counts and training FLOPs per token.

6N: two operations per weight, forward once and backward twice. Causal attention adds 6 L S D, full attention 12 L S D
(what torchtitan and PaLM, arXiv 2204.02311 appendix B, report); for the 8B at 8,192 tokens the ratios are 1 : 1.14 :
1.29. N excludes the embedding lookup and norms; a tied embedding counts once, as the output matrix. Recomputation is
never counted.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from herd.llama3.model.param_table import PARAMS, axis_sizes
from herd.llama3.recipe.base import SPECIAL_TOKENS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model

LLAMA3_VOCABULARY = 128_000
"""Base vocabulary assumed for a tokenizer given as a file."""


class TokenFlops(NamedTuple):
    """Training operations (forward and backward) per token."""

    six_n: float
    """6 N: matrix products with weights."""
    causal: float
    """6 N + 6 L S D: attention over the half of the scores under a causal mask."""

    @property
    def full(self) -> float:
        """6 N + 12 L S D: attention over all scores."""
        return 2 * self.causal - self.six_n


def checkpoint_bytes(parameters: int) -> float:
    """Return the bytes of a checkpoint: weights and both of AdamW's moments in fp32."""
    return 12.0 * parameters


def parameter_count(config: Model, vocab_size: int) -> int:
    """Return the number of trained parameters of a model."""
    sizes = axis_sizes(config, vocab_size)
    times = {"first": 1, "layer": config.layers, "last": 1}
    return sum(times[row.stage] * prod(row.shape(sizes)) for row in PARAMS if row.present(config))


def flops_per_token(config: Model, vocab_size: int, seq_len: int) -> TokenFlops:
    """Return operations per token at sequence length `seq_len`, for documents as long as the sequence.

    Attention: two products of S x D per layer (scores, values), 2 operations each, three times (forward and both
    gradients), half of it under the mask: 6 L S D.
    """
    six_n = 6.0 * (config.layers * _layer_matrices(config) + vocab_size * config.dim)  # the output matrix, tied or not
    return TokenFlops(six_n, six_n + 6.0 * config.layers * seq_len * config.dim)


def recipe_vocab_size(recipe: Recipe) -> int:
    """Return the size of the vocabulary: base vocabulary (Llama 3's if the tokenizer is a file) plus special tokens."""
    return (recipe.tokenizer.train.vocab if recipe.tokenizer.train else LLAMA3_VOCABULARY) + SPECIAL_TOKENS


def trained_flops(recipe: Recipe, config: Model, vocab_size: int, position: int) -> float:
    """Return the operations of training up to `position` with the recipe's schedule, with causal attention."""
    return sum(
        min(segment.tokens, position - segment.start) * flops_per_token(config, vocab_size, segment.seq_len).causal
        for segment in recipe.schedule.segments
        if segment.start < position
    )


@lru_cache(maxsize=256)  # read again for each segment and each candidate of a layout
def _layer_matrices(config: Model) -> int:
    """Return the number of weights in the matrices of one layer."""
    sizes = axis_sizes(config, vocab_size=0)
    matrices = [row for row in PARAMS if row.stage == "layer" and row.kind == "matrix" and row.present(config)]
    return sum(prod(row.shape(sizes)) for row in matrices)
