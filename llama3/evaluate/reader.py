"""Reading tokens up to the next one's logits: what was read before is kept, and only what is new is computed.

A sequence that begins as the one before it is read from where they differ: the next step of a text costs one token,
and the second question behind the same solved examples costs the question. What this gives up: two texts that take
turns on one reader share only their beginning, so each wants a reader of its own; weights are shared.

Shapes: B sequences, S tokens, D model, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from llama3.model.cache import Cache, reading
from llama3.model.transformer import Transformer


class Reader:
    """Reads one sequence at a time."""

    def __init__(self, model: Transformer, room: int) -> None:
        """Make a reader for sequences of at most `room` tokens; `model` stays free for others."""
        self.cache = Cache(room)
        """Of the sequence that was read last."""
        self.device = next(model.parameters()).device
        self._model = reading(model, self.cache)
        self._read: list[int] = []

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [1, V] of what follows `tokens`, which are one or more."""
        known = min(_shared(self._read, tokens), len(tokens) - 1)
        self.cache.cut(known)
        self._read = list(tokens)
        return next_logits(self._model, self.cache, torch.tensor([self._read[known:]], device=self.device))


def next_logits(model: Transformer, cache: Cache, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, V] after `tokens_BS`, which follow what `cache` holds; `model` reads with that cache."""
    seen = cache.visible(tokens_BS.shape[1], tokens_BS.device)
    logits_BV: Tensor = model(tokens_BS, seen, head=_of_last)
    return logits_BV


def _of_last(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the logits of the last position alone: of a long prompt with 128,000 rows all would be gigabytes."""
    return F.linear(hidden_BSD[:, -1], weight_VD)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
