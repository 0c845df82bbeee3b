"""The Llama 3 transformer: RMSNorm, grouped-query attention with rotary positions, SwiGLU, no biases (Table 3).

It knows nothing of processes or devices: sharding wraps it from outside. Layers stand in a dictionary, so that a part
of them keeps the parameter names of the whole. There is no cache of keys and values: generation runs the whole sequence
again for each token.

Shapes: B batch, S sequence, D model, F hidden of the feed-forward block, V vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama3.model.attention import Attention, document_mask
from llama3.model.loss import token_nats
from llama3.model.rope import rotation
from llama3.recipe.schema import Model


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out_BSD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.attention = Attention(spec.dim, spec.heads, spec.kv_heads)
        self.ffn_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.ffn = FeedForward(spec.dim, spec.ffn)

    def forward(self, x_BSD: Tensor, table: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), table, mask)
        out_BSD: Tensor = x_BSD + self.ffn(self.ffn_norm(x_BSD))
        return out_BSD


class Transformer(nn.Module):
    """Token ids to logits, or to the likelihood of targets; weights are as torch leaves them (see `initial`)."""

    def __init__(self, spec: Model, rows: int) -> None:
        """Make a model of shape `spec` with `rows` embedding rows (base and special tokens)."""
        super().__init__()
        self.spec = spec
        self.rows = rows
        # nn.Embedding() draws normal weights, which on the meta device imports torch's compiler (0.6 s)
        self.embedding = nn.Embedding(rows, spec.dim, _weight=torch.empty(rows, spec.dim))
        self.layers = nn.ModuleDict({str(index): Block(spec) for index in range(spec.layers)})
        self.norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.output = None if spec.tied_embeddings else nn.Linear(spec.dim, rows, bias=False)

    def forward(self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V] or, with targets, nats per token [B, S] (fp32, 0 where the target is -100).

        `documents_BS` numbers the document of each token; positions of one number read each other. None says that
        each sequence is one document, which takes a faster attention kernel.
        """
        x_BSD = self.embedding(tokens_BS)
        spec = self.spec
        table = rotation(tokens_BS.shape[1], spec.dim // spec.heads, spec.rope_theta, x_BSD)
        mask = None if documents_BS is None else document_mask(documents_BS)
        for block in self.layers.values():
            x_BSD = block(x_BSD, table, mask)
        hidden_BSD = self.norm(x_BSD)
        weight_VD = self.embedding.weight if self.output is None else self.output.weight
        if targets_BS is None:
            return F.linear(hidden_BSD, weight_VD)
        return token_nats(hidden_BSD, weight_VD, targets_BS)
