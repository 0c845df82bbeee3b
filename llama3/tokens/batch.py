"""The sequences of an optimizer step as tensors: positions folded into rows, with targets and segment numbers.

Nothing is decided here: which tokens a step trains on is the stream's business, which rows a rank takes is the
trainer's. What this gives up: no prefetching; reading takes about a hundredth of the time of training on it, and a
thread around `sequences` hides that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama3.tokens.deal import Ints
from llama3.tokens.stream import TokenStream

IGNORED = -100
"""Target of a token that has none; `torch.nn.functional.cross_entropy` ignores it by default."""


@dataclass(frozen=True)
class Batch:
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

    def sequences(self, start: int, seq: int, first: int, count: int) -> Batch:
        """Return sequences [first, first + count) of the step whose first token is at position `start`.

        `seq` is the sequence length in tokens. Pure: the same arguments give the same tensors anywhere. Raises
        ValueError for positions outside the run.
        """
        begin = start + first * seq
        window = self.stream.read(begin, begin + count * seq + 1)
        same = window.segments[1:] == window.segments[:-1]
        targets = np.where(same, window.tokens[1:], IGNORED)
        return Batch(
            *(
                torch.from_numpy(np.ascontiguousarray(values, np.int64).reshape(count, seq))
                for values in (
                    window.tokens[:-1],
                    targets,
                    _numbered(window.segments[:-1].reshape(count, seq)),
                    window.domains[:-1],
                )
            )
        )


def _numbered(segments_BS: Ints) -> Ints:
    """Return the segments of each row counted from 0."""
    numbers: Ints = np.zeros(segments_BS.shape, np.int64)
    np.cumsum(segments_BS[:, 1:] != segments_BS[:, :-1], axis=1, out=numbers[:, 1:])
    return numbers
