"""Whether two folders hold the same model: the largest difference of their logits.

Both are computed by our transformer in fp32, from weights and settings that each format's own reader gives, so a folder
that was exported without a fault gives exactly the same bits, and the smallest fault (a row out of place, a rotary
setting or an epsilon that did not go along) gives others. A bf16 comparison would hide a wrong rotary setting. What
this gives up: a fault that writer and reader share stays unseen, which is why tests compare with transformers; and
one whole model in fp32 must fit in memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from llama3.export.convert import Format, open_source
from llama3.export.names import Source, names
from llama3.model.initial import empty
from llama3.model.rounding import keep_rounding

POSITIONS = 512
"""Positions that are compared: dropping the scaling of Llama 3.1 changes logits by 10 % there."""


def logits_difference(
    one: Path, one_format: Format, other: Path, other_format: Format, positions: int = POSITIONS
) -> float:
    """Return the largest difference of the logits of two model folders, relative to the largest logit of `other`.

    At most `positions` positions of random tokens are computed, the same each time. 0.0: the same model, bit for bit;
    NaN: one of them gives NaN. Raises ValueError if a folder is no Llama 3, or their vocabularies differ.
    """
    first, second = open_source(one, one_format), open_source(other, other_format)
    if first.rows != second.rows:
        raise ValueError(f"{one} has {first.rows} embedding rows, {other} {second.rows}; name two forms of one model")
    count = min(positions, first.spec.max_seq, second.spec.max_seq)
    tokens_1S = torch.randint(0, first.rows, (1, count), generator=torch.Generator().manual_seed(0))
    found, due = logits(first, tokens_1S), logits(second, tokens_1S)
    return float((found - due).abs().max() / due.abs().max())


@torch.inference_mode()
def logits(source: Source, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of a model for `tokens_BS`, in fp32 on the CPU."""
    keep_rounding()
    model = empty(source.spec, source.rows)
    state = {name.ours: source.tensor(name.ours).to(torch.float32, copy=True) for name in names(source.spec)}
    model.load_state_dict(state, assign=True)
    return model.eval()(tokens_BS, None)  # type: ignore[no-any-return]
