"""Grouped-query attention that never crosses a document boundary.

Documents share a sequence, so the mask is causal and block diagonal (Llama 3, section 3.2). It is a dense boolean
[B, 1, S, S]: exact and the same on every backend, and what it gives up is memory and time at long sequences, where a
variable-length kernel reads only the blocks. A batch of one document per sequence needs no mask; on CPU the causal
kernel then gives the same bits as the masked one.

Shapes: B batch, S sequence, D model, H query heads, K key/value heads, E features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama3.model.rope import rotate


def document_mask(documents_BS: Tensor) -> Tensor:
    """Return bool [B, 1, S, S]: whether the query (third axis) may read the key: same document, not later."""
    seq = documents_BS.shape[1]
    same = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    causal = torch.ones(seq, seq, dtype=torch.bool, device=documents_BS.device).tril()
    return (same & causal).unsqueeze(1)


class Attention(nn.Module):
    """Projections without biases around scaled dot-product attention."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x_BSD: Tensor, table: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Return [B, S, D]; `table` is the rotary one, `mask` as from `document_mask` or None for plain causal."""
        q_BSHE, k_BSKE, v_BSKE = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        out_BHSE = F.scaled_dot_product_attention(
            rotate(q_BSHE, table).transpose(1, 2),
            rotate(k_BSKE, table).transpose(1, 2),
            v_BSKE.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        mixed: Tensor = self.o(out_BHSE.transpose(1, 2).flatten(2))
        return mixed
