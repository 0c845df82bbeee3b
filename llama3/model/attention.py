"""Grouped-query attention that never crosses a document boundary.

Shapes: B batch, S sequence, T keys, D model, H query heads, K key/value heads, E features of a head.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from llama3.model.documents import Visible
from llama3.model.exchange import Exchange
from llama3.model.linear import Linear
from llama3.model.rope import rotate


def attend(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, visible: Visible) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v over what is visible, [B, S, H, E]."""
    out_BHSE = F.scaled_dot_product_attention(
        q_BSHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=visible.mask,
        is_causal=visible.mask is None,
        enable_gqa=True,
    )
    return out_BHSE.transpose(1, 2)


class Attention(nn.Module):
    """Projections without biases around scaled dot-product attention."""

    def __init__(self, dim: int, heads: int, kv_heads: int, exchange: Exchange) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.exchange = exchange
        self.q = Linear(dim, heads * self.head_dim)
        self.k = Linear(dim, kv_heads * self.head_dim)
        self.v = Linear(dim, kv_heads * self.head_dim)
        self.o = Linear(heads * self.head_dim, dim)

    def forward(self, x_BSD: Tensor, table: tuple[Tensor, Tensor], visible: Visible) -> Tensor:
        """Return [B, S, D], a partial sum if heads are cut; `table` is the rotary one of the queries here."""
        q_BSHE, k_BSKE, v_BSKE = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        k_BTKE, v_BTKE = self.exchange.keys(rotate(k_BSKE, table), v_BSKE)
        out_BSHE = attend(rotate(q_BSHE, table), k_BTKE, v_BTKE, visible)
        mixed: Tensor = self.o(out_BSHE.flatten(2))
        return mixed
