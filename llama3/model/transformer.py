"""The Llama 3 transformer: RMSNorm, grouped-query attention with rotary positions, SwiGLU, no biases (Table 3).

It knows no processes or devices: sharding wraps it from outside, and a sharded model communicates through `exchange`,
which also provides cached keys and values in generation (`kv_cache`).

Shapes: B batch, S sequence, D model, F hidden of the feed-forward block, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llama3.model.attention import Attention, AttentionMask, visible
from llama3.model.comms import Comms, NoComms
from llama3.model.linear import Linear, RMSNorm, used
from llama3.model.loss import token_nats
from llama3.model.recompute import gate_product, gated, made_again
from llama3.model.rope import rotation
from llama3.recipe.sections import Model

Head = Callable[[Tensor, Tensor], Tensor]
"""Function of the normed last hidden states [B, S, D] and the output weights [V, D]."""


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn)
        self.up = Linear(dim, ffn)
        self.down = Linear(ffn, dim)

    def forward(self, x_BSD: Tensor, spare: bool = False) -> Tensor:
        """Return [B, S, D], a partial sum under tensor parallelism; `spare` saves only gate and up for backward."""
        gate_BSF, up_BSF = self.gate(x_BSD), self.up(x_BSD)
        hidden_BSF = gated(gate_BSF, up_BSF) if spare else F.silu(gate_BSF) * up_BSF
        with made_again(hidden_BSF, gate_product, gate_BSF, up_BSF, wanted=spare):
            out_BSD: Tensor = self.down(hidden_BSF)
        return out_BSD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, spec: Model, exchange: Comms) -> None:
        super().__init__()
        self.exchange = exchange
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps, exchange)
        self.attention = Attention(spec.dim, spec.heads, spec.kv_heads, exchange)
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps, exchange)
        self.ffn = FeedForward(spec.dim, spec.ffn)

    def forward(
        self,
        x_BSD: Tensor,
        table: tuple[Tensor, Tensor],
        mask: AttentionMask,
        spare: bool = False,
        feed_again: bool = False,
    ) -> Tensor:
        """Return the residual stream after this layer.

        `spare` saves little for backward (see `recompute`); `feed_again` recomputes the whole feed-forward half.
        """
        x_BSD = x_BSD + self._half(self.attention_norm, self.attention, x_BSD, spare, table, mask)
        if feed_again:
            fed_BSD: Tensor = checkpoint(self._half, self.ffn_norm, self.ffn, x_BSD, False, use_reentrant=False)
            return x_BSD + fed_BSD
        return x_BSD + self._half(self.ffn_norm, self.ffn, x_BSD, spare)

    def _half(self, norm: nn.Module, products: nn.Module, x_BSD: Tensor, spare: bool, *more: Any) -> Tensor:
        def gathered_norm(x_BSD: Tensor) -> Tensor:
            return self.exchange.gather(norm(x_BSD))

        normed_BSD = gathered_norm(x_BSD)
        with made_again(normed_BSD, gathered_norm, x_BSD, wanted=spare):
            return self.exchange.scatter(products(normed_BSD, *more, spare))


class Transformer(nn.Module):
    """From token ids to logits or to the loss of targets, or a pipeline stage of that.

    Weights are not initialized here (see `init`).
    """

    def __init__(
        self,
        spec: Model,
        rows: int,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        exchange: Comms | None = None,
    ) -> None:
        """Create a model of shape `spec` with `rows` embedding rows (base and special tokens).

        A pipeline stage has only `layers`, the embedding if it is `first`, norm and output if it is `last`.
        """
        super().__init__()
        self.spec = spec
        self.rows = rows
        self.exchange: Comms = exchange or NoComms()
        self.compute: torch.dtype | None = None
        """Dtype of the residual stream and of products; None: that of the weights."""
        self.z_loss = 0.0
        self.recompute = "none"
        self.exact = False
        """Whether weight gradients are rounded so that their sums do not depend on the order (`linear.used`)."""
        layers = range(spec.layers) if layers is None else layers
        # Without _weight, nn.Embedding draws normal weights, which on the meta device imports torch's compiler (0.6 s).
        self.embedding = nn.Embedding(rows, spec.dim, _weight=torch.empty(rows, spec.dim)) if first else None
        # A dictionary, so that a pipeline stage keeps the parameter names of the whole model.
        self.layers = nn.ModuleDict({str(index): Block(spec, self.exchange) for index in layers})
        self.norm = RMSNorm(spec.dim, spec.norm_eps, self.exchange) if last else None
        self.output = Linear(spec.dim, rows) if last and not spec.tied_embeddings else None

    def forward(
        self,
        x: Tensor,
        documents: Tensor | AttentionMask | None = None,
        targets_BS: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Return logits [B, S, V] or, with targets, nats per token [B, S] (fp32, 0 where the target is -100).

        `x` is token ids [B, S], or the output of the previous pipeline stage. `documents` is the document number of
        each token [B, S] of the whole sequences, best on the CPU; tokens read within their document only. None: each
        sequence is one document (a faster kernel). An `AttentionMask` is used as it is. With `head` the result is that
        of `head`, for callers that need few logits. A stage that is not the last returns its residual stream.
        """
        spec, grad = self.spec, torch.is_grad_enabled()
        seq = self.exchange.sequence(x.shape[1], whole=self.embedding is not None)
        queries, keys = self.exchange.positions(seq, x.device)
        x_BSD = x if self.embedding is None else self._embed(x)
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        table = rotation(queries, spec.dim // spec.heads, spec.rope_theta, spec.rope_scaling, wide)
        compiled = any(block._compiled_call_impl is not None for block in self.layers.values())
        if isinstance(documents, AttentionMask):
            mask = documents
        else:
            mask = visible(documents, queries, keys, x_BSD.dtype, compiled)
        for block in self.layers.values():
            if self.recompute == "full" and grad:
                x_BSD = checkpoint(block, x_BSD, table, mask, use_reentrant=False)
            else:
                feed_again = self.recompute == "selective" and grad
                x_BSD = block(x_BSD, table, mask, spare=not compiled, feed_again=feed_again)
        if self.norm is None:
            return x_BSD
        hidden_BSD = self.exchange.gather(self.norm(x_BSD))
        owner = self.embedding if self.output is None else self.output
        assert owner is not None
        weight_VD = used(owner.weight, self.exact)
        if head is not None:
            return head(hidden_BSD, weight_VD.to(hidden_BSD.dtype))
        if targets_BS is None:
            return F.linear(hidden_BSD, weight_VD.to(hidden_BSD.dtype))
        return token_nats(hidden_BSD, weight_VD, targets_BS, self.z_loss, self.exchange)

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        assert self.embedding is not None
        weight_VD = used(self.embedding.weight, self.exact)
        if len(weight_VD) == self.rows:
            x_BSD = F.embedding(tokens_BS, weight_VD)
        else:  # vocabulary parallel: one process has the row of a token, the others add zero
            index_BS = tokens_BS - self.exchange.first_row(len(weight_VD))
            absent_BS = (index_BS < 0) | (index_BS >= len(weight_VD))
            x_BSD = F.embedding(index_BS.masked_fill(absent_BS, 0), weight_VD)
            x_BSD = x_BSD.masked_fill(absent_BS.unsqueeze(-1), 0)
        return self.exchange.scatter(x_BSD.to(self.compute or x_BSD.dtype))
