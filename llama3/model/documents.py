"""Which keys a query may read: the same document, not later, wherever both stand.

Documents share a sequence, and attention never crosses from one to the next (Llama 3, section 3.2).

Shapes: B batch, S sequence, Q queries held here, T keys held here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Visible(NamedTuple):
    """What attention needs to know of a batch, made once for all layers."""

    mask: Tensor | None
    """bool [B or 1, 1, Q, T]; None is plain causal over queries and keys in order."""


def visible(documents_BS: Tensor | None, queries_Q: Tensor, keys_T: Tensor) -> Visible:
    """Return what the queries at positions `queries_Q` may read of the keys at `keys_T`.

    `documents_BS` numbers the document of every token of the whole sequences; None says that each sequence is one.
    """
    in_order = queries_Q is keys_T
    if documents_BS is None and in_order:
        return Visible(None)
    mask = (queries_Q.unsqueeze(1) >= keys_T.unsqueeze(0)).unsqueeze(0)
    if documents_BS is not None:
        asking = documents_BS if in_order else documents_BS[:, queries_Q]
        asked = documents_BS if in_order else documents_BS[:, keys_T]
        mask = mask & (asking.unsqueeze(2) == asked.unsqueeze(1))
    return Visible(mask.unsqueeze(1))
