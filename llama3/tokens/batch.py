"""The sequences of an optimizer step as tensors: tokens, targets, segment numbers and domains.

All four tensors are int64, because torch indexes with int64. There is no prefetching here: `sequences` takes 1 % of a
step, which the trainer hides with a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama3.tokens.kernels import fold_window
from llama3.tokens.stream import TokenStream


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of one step, int64[B, S] each: B sequences of S tokens."""

    tokens_BS: Tensor
    targets_BS: Tensor
    """The next token, or -100 if it belongs to another segment."""
    documents_BS: Tensor
    """Number of the segment inside its sequence: 0, 1, 2, ...; attention stays inside a segment."""
    domains_BS: Tensor
    """Index in DOMAINS."""


class Batches:
    """The steps of a run."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream

    def sequences(self, start: int, seq_len: int, first: int, count: int) -> TokenBatch:
        """Return sequences [first, first + count) of `seq_len` tokens of the step that starts at position `start`.

        Equal arguments give equal tensors on every machine. Raises ValueError for positions outside the run.
        """
        begin = start + first * seq_len
        window = self.stream.read(begin, begin + count * seq_len + 1)
        targets, documents, domains = (np.empty(count * seq_len, np.int64) for _ in range(3))
        fold_window(window.tokens, window.cu_seqlens, window.kinds, seq_len, targets, documents, domains)
        columns = window.tokens[:-1], targets, documents, domains
        return TokenBatch(*(torch.from_numpy(column.reshape(count, seq_len)) for column in columns))
