"""What a read of the training stream returns: tokens with the bounds of their segments, or the documents behind them.

Bounds are kept per segment and spread over tokens only when asked: at 1,000 tokens a document that is a thousandth of
the memory. What this gives up: a caller that wants a column per token pays for it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llama3.tokens.kernels import Ints

PAST_END = -1
"""Domain of the token after the run's last."""


@dataclass(frozen=True)
class Window:
    """The tokens at positions [start, start + n), in s segments; attention stays inside a segment."""

    start: int
    tokens: Ints
    """int64[n]."""
    cu_seqlens: Ints
    """int64[s + 1]: place in the window at which each segment begins, and n."""
    origins: Ints
    """int64[s]: position at which each segment begins; that of the first may be before the window."""
    kinds: npt.NDArray[np.int8]
    """int8[s]: domain of each segment as an index in DOMAINS; -1 past the end of the run."""

    @cached_property
    def segments(self) -> Ints:
        """int64[n]: position at which the token's segment begins."""
        return np.repeat(self.origins, np.diff(self.cu_seqlens))

    @cached_property
    def domains(self) -> npt.NDArray[np.int8]:
        """int8[n]: domain of each token."""
        return np.repeat(self.kinds, np.diff(self.cu_seqlens))


class DocumentUse(NamedTuple):
    """A stretch of one document that is trained on as one segment."""

    document: str
    leaf: str
    source: str
    language: str
    licence: str
    epoch: int
    first: int
    """First token of the stretch, counted in the document (0 is the begin token)."""
    last: int
    """Its last token."""
    position: int
    """Position of the first token in the run."""
