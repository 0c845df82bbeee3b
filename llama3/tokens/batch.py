"""The sequences of an optimizer step as tensors: positions folded into rows, with targets and segment numbers.

Nothing is decided here: which tokens a step trains on is the stream's business, which rows a rank takes is the
trainer's. What this gives up: all four tensors are 64 bits wide, the width that torch wants indices in, where 17 bytes
a token would do; no prefetching: a thread around `sequences` hides the hundredth of a step that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama3.tokens.kernels import fold
from llama3.tokens.stream import TokenStream


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of one step, int64[B, S] each. B sequences, S tokens."""

    tokens_BS: Tensor
    targets_BS: Tensor
    """The next token, or -100 where that belongs to another segment."""
    documents_BS: Tensor
    """Number of the segment inside its sequence: 0, 1, 2, ...; attention stays inside one."""
    domains_BS: Tensor
    """Index in DOMAINS."""


class Batches:
    """The steps of a run."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream

    def sequences(self, start: int, seq: int, first: int, count: int) -> TokenBatch:
        """Return sequences [first, first + count) of the step whose first token is at position `start`.

        `seq` is the sequence length in tokens. Pure: the same arguments give the same tensors anywhere. Raises
        ValueError for positions outside the run.
        """
        begin = start + first * seq
        window = self.stream.read(begin, begin + count * seq + 1)
        targets, documents, domains = (np.empty(count * seq, np.int64) for _ in range(3))
        fold(window.tokens, window.cu_seqlens, window.kinds, seq, targets, documents, domains)
        columns = window.tokens[:-1], targets, documents, domains
        return TokenBatch(*(torch.from_numpy(column.reshape(count, seq)) for column in columns))
