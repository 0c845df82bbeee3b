"""The communication of a sharded model, as a protocol: on one process nothing happens.

The model calls these where Llama 3 communicates (section 3.3.2) and imports nothing distributed;
`herd.llama3.parallel.comms` implements them. Each method is differentiable, its backward is the adjoint (all-gather:
reduce-scatter). Results of `all_gather` and `all_gather_kv` are not saved for backward: they are recomputed.

Shapes: B sequences, S tokens of them on this process, D model, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Comms(Protocol):
    """Tensor parallelism (the first seven methods), context parallelism (the next three), the pipeline (the last)."""

    def all_gather(self, x_BSD: Tensor) -> Tensor:
        """All-gather the tokens of the tensor-parallel peers, in order."""
        ...

    def reduce_scatter(self, x_BSD: Tensor) -> Tensor:
        """Reduce-scatter partial results over the tensor-parallel peers; returns this process's tokens of the sum."""
        ...

    def tp_replicated(self, weight: Tensor) -> Tensor:
        """Return a weight replicated over tensor-parallel peers, each with its own tokens; gradients are summed."""
        ...

    def vocab_start(self, local_vocab_size: int) -> int:
        """Return the first token id of this process's shard of the vocabulary, which has `local_vocab_size` ids."""
        ...

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """All-reduce the elementwise maximum over tensor-parallel peers; not differentiable."""
        ...

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """All-reduce the elementwise sum over tensor-parallel peers; not differentiable."""
        ...

    def all_gather_logits(self, logits_TV: Tensor) -> Tensor:
        """All-gather the logits of the tensor-parallel peers, in order; not differentiable."""
        ...

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather keys and values [B, S, K, E] of the context-parallel peers, peer after peer."""
        ...

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return positions (int64) in a sequence of `seq_len`: of this process's tokens, and of all gathered keys."""
        ...

    def sequence(self, tokens: int, whole: bool) -> int:
        """Return the length of the full sequence of which this process has `tokens`.

        `whole`: `tokens` are not divided over tensor-parallel peers (the input of the embedding).
        """
        ...

    def from_last_stage(self, output: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        """Return the `output` of the last pipeline stage on every stage; `dtype` if it is not that of hidden states."""
        ...


class NoComms:
    """One process holds everything."""

    def all_gather(self, x_BSD: Tensor) -> Tensor:
        return x_BSD

    def reduce_scatter(self, x_BSD: Tensor) -> Tensor:
        return x_BSD

    def tp_replicated(self, weight: Tensor) -> Tensor:
        return weight

    def vocab_start(self, local_vocab_size: int) -> int:
        return 0

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x

    def all_gather_logits(self, logits_TV: Tensor) -> Tensor:
        return logits_TV

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(seq_len, device=device)
        return positions, positions

    def sequence(self, tokens: int, whole: bool) -> int:
        return tokens

    def from_last_stage(self, output: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        return output
