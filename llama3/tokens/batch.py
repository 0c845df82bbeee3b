"""The sequences of an optimizer step as tensors: tokens, targets, segment numbers and domains.

All four tensors are int64, because torch indexes with int64. There is no prefetching here: `sequences` takes 1 % of a
step, which the trainer hides with a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llama3.tokens.conversations import ConversationStream
from llama3.tokens.stream import TokenStream


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of one step, int64[B, S] each: B sequences of S tokens."""

    tokens_BS: Tensor
    targets_BS: Tensor
    """The next token, or -100 if it belongs to another segment or is not a target (a user's message)."""
    documents_BS: Tensor
    """Number of the segment inside its sequence: 0, 1, 2, ...; attention stays inside a segment."""
    domains_BS: Tensor
    """Index in DOMAINS; conversations have the index after the last."""


class Batches:
    """The steps of a run."""

    def __init__(self, stream: TokenStream | ConversationStream) -> None:
        self.stream = stream

    def sequences(self, start: int, seq_len: int, first: int, count: int) -> TokenBatch:
        """Return sequences [first, first + count) of `seq_len` tokens of the step that starts at position `start`.

        Equal arguments give equal tensors on every machine. Raises ValueError for positions outside the run.
        """
        return TokenBatch(*map(torch.from_numpy, self.stream.sequences(start + first * seq_len, seq_len, count)))
