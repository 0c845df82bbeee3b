"""Parameter counts and training FLOPs per token.

6N: two operations per weight, forward once and backward twice. Causal attention adds 6 L S D, full attention 12 L S D
(what torchtitan and PaLM, arXiv 2204.02311 appendix B, report); for the 8B at 8,192 tokens the ratios are 1 : 1.14 :
1.29. N excludes the embedding lookup and norms; a tied embedding counts once, as the output matrix. Recomputation is
never counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from llama3.recipe.base import SPECIAL_TOKENS
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Model

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


def parameter_count(spec: Model, rows: int) -> int:
    """Return the number of trained parameters of a model with `rows` embedding rows."""
    norms = spec.dim * (2 * spec.layers + 1)
    return spec.layers * _layer_matrices(spec) + norms + rows * spec.dim * (1 if spec.tied_embeddings else 2)


def flops_per_token(spec: Model, rows: int, seq: int) -> TokenFlops:
    """Return operations per token at sequence length `seq`, for documents as long as the sequence.

    Attention: two products of S x D per layer (scores, values), 2 operations each, three times (forward and both
    gradients), half of it under the mask: 6 L S D.
    """
    six_n = 6.0 * (spec.layers * _layer_matrices(spec) + rows * spec.dim)
    return TokenFlops(six_n, six_n + 6.0 * spec.layers * seq * spec.dim)


def document_flops(spec: Model, rows: int, lengths: Iterable[int]) -> float:
    """Return the operations of training on separate documents of `lengths` tokens, with causal attention.

    For documents shorter than the sequence this is less than `flops_per_token` of the sequence.
    """
    return float(sum(length * flops_per_token(spec, rows, length).causal for length in lengths))


def embedding_rows(recipe: Recipe) -> int:
    """Return the embedding rows: base vocabulary (Llama 3's if the tokenizer is a file) plus special tokens."""
    return (recipe.tokenizer.train.vocab if recipe.tokenizer.train else LLAMA3_VOCABULARY) + SPECIAL_TOKENS


def trained_flops(recipe: Recipe, spec: Model, rows: int, position: int) -> float:
    """Return the operations of training up to `position` with the recipe's schedule, with causal attention."""
    return sum(
        min(segment.tokens, position - segment.start) * flops_per_token(spec, rows, segment.seq).causal
        for segment in Schedule(recipe).segments
        if segment.start < position
    )


def _layer_matrices(spec: Model) -> int:
    """Return the weights of the matrices of one layer: q and o, k and v, and the three of the feed-forward block."""
    kv_dim = spec.kv_heads * (spec.dim // spec.heads)
    return 2 * spec.dim * spec.dim + 2 * spec.dim * kv_dim + 3 * spec.dim * spec.ffn
