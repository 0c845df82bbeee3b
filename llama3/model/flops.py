"""How many parameters a model has and how many floating-point operations a training token costs.

Three formulas are in use, and a utilisation figure means nothing without saying which: 6N counts each weight of a
matrix product once forward and twice backward, two operations each; attention adds the products of scores and values,
which grow with the sequence, over half of the scores (what a causal mask keeps) or over all of them (what torchtitan
and PaLM, arXiv 2204.02311 appendix B, count, though nobody computes it). For the 8B at 8,192 tokens the three are as
1 : 1.14 : 1.29. N leaves out the embedding lookup (it multiplies nothing) and norms; a tied embedding counts once, as
the output matrix that it also is. Recomputed work is never counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from llama3.recipe.base import SPECIAL_TOKENS
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Model

LLAMA3_VOCABULARY = 128_000
"""Base tokens assumed for a tokenizer that is given as a file."""


class TokenFlops(NamedTuple):
    """Training operations (forward and backward) per token."""

    six_n: float
    """6 N: matrix products with weights."""
    causal: float
    """6 N + 6 L S D: attention counted over the half of the scores that a causal mask keeps."""

    @property
    def full(self) -> float:
        """6 N + 12 L S D: attention counted over all scores."""
        return 2 * self.causal - self.six_n


def parameter_count(spec: Model, rows: int) -> int:
    """Return the number of trained parameters with `rows` embedding rows."""
    norms = spec.dim * (2 * spec.layers + 1)
    return spec.layers * _layer_matrices(spec) + norms + rows * spec.dim * (1 if spec.tied_embeddings else 2)


def flops_per_token(spec: Model, rows: int, seq: int) -> TokenFlops:
    """Return operations per token at sequence length `seq`, documents as long as the sequence.

    Attention: scores and values are two products of S x D per layer, 2 operations each, three times (forward and both
    gradients), half of it under the mask: 6 L S D.
    """
    six_n = 6.0 * (spec.layers * _layer_matrices(spec) + rows * spec.dim)
    return TokenFlops(six_n, six_n + 6.0 * spec.layers * seq * spec.dim)


def document_flops(spec: Model, rows: int, lengths: Iterable[int]) -> float:
    """Return operations of training on documents of `lengths` tokens, none of which reads another: causal attention.

    With documents shorter than the sequence this is what the model needs, less than `flops_per_token` says.
    """
    return float(sum(length * flops_per_token(spec, rows, length).causal for length in lengths))


def embedding_rows(recipe: Recipe) -> int:
    """Return the rows of the embedding: base vocabulary (Llama 3's if the tokenizer is a file) and special tokens."""
    return (recipe.tokenizer.train.vocab if recipe.tokenizer.train else LLAMA3_VOCABULARY) + SPECIAL_TOKENS


def trained_flops(recipe: Recipe, spec: Model, rows: int, position: int) -> float:
    """Return the operations of training up to `position` with the recipe's schedule, causal attention counted."""
    return sum(
        min(part.tokens, position - part.start) * flops_per_token(spec, rows, part.seq).causal
        for part in Schedule(recipe).segments
        if part.start < position
    )


def _layer_matrices(spec: Model) -> int:
    kv_dim = spec.kv_heads * (spec.dim // spec.heads)
    return 2 * spec.dim * spec.dim + 2 * spec.dim * kv_dim + 3 * spec.dim * spec.ffn
