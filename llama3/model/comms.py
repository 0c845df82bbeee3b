"""What a model that is cut over processes exchanges with the others, as a seam: alone, nothing happens.

The model calls these where Llama 3 communicates (section 3.3.2), so that a reader of the model sees each place, and the
model still imports nothing distributed. `llama3.parallel.comms` fills the seam in. Each method is differentiable,
and its backward pass is the adjoint: where gather joins parts, gradients are summed and cut, and so on. What `gather`
and `keys` return is not kept for the backward pass: they are called again there (see `again`).

Shapes: B sequences, S tokens of them that this process holds, D model, T tokens, V rows of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Comms(Protocol):
    """Tensor parallelism (gather, scatter, shared, rows and the two reductions) and context parallelism (the rest)."""

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Return the tokens of all tensor-parallel peers, in order, from my part of them."""
        ...

    def scatter(self, x_BSD: Tensor) -> Tensor:
        """Return my part of the tokens of the sum of all tensor-parallel peers' partial results."""
        ...

    def shared(self, weight: Tensor) -> Tensor:
        """Return a weight that every tensor-parallel peer uses on its own tokens; its gradient is their sum."""
        ...

    def first_row(self, rows: int) -> int:
        """Return the vocabulary row at which my part of the table, which has `rows` rows, begins."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over tensor-parallel peers; outside of any gradient."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over tensor-parallel peers; outside of any gradient."""
        ...

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, S, K, E] of all context-parallel peers, one peer's after another."""
        ...

    def positions(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where in a sequence of `seq` tokens my tokens stand, and those that `keys` returns (int64)."""
        ...

    def sequence(self, tokens: int, whole: bool) -> int:
        """Return the length of the sequence of which I hold `tokens`: what scatter left of mine, or all if `whole`."""
        ...


class NoComms:
    """One process holds everything."""

    def gather(self, x_BSD: Tensor) -> Tensor:
        return x_BSD

    def scatter(self, x_BSD: Tensor) -> Tensor:
        return x_BSD

    def shared(self, weight: Tensor) -> Tensor:
        return weight

    def first_row(self, rows: int) -> int:
        return 0

    def largest(self, x: Tensor) -> Tensor:
        return x

    def total(self, x: Tensor) -> Tensor:
        return x

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def positions(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(seq, device=device)
        return positions, positions

    def sequence(self, tokens: int, whole: bool) -> int:
        return tokens
