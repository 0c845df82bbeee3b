"""The Llama 3 transformer: RMSNorm, grouped-query attention with rotary positions, SwiGLU, no biases (Table 3).

It does not know of processes and devices: sharding wraps it from outside, and a sharded model communicates through
`comms`, which also provides cached keys and values in generation (`kv_cache`).

Initial weights depend only on the seed and the parameter's name. Each parameter has its own random stream, so any
process can draw its parameters alone, and a model sharded over any number of devices starts with the same weights.
Matrices are normal with standard deviation 0.02, those that write to the residual stream divided by sqrt(2 L) as in
GPT-2, embeddings with `embedding_std`; norms are 1. Llama 3's own scheme is not published.

Shapes: B batch, S sequence, D model, F hidden of the feed-forward block, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from herd.llama3.model.attention import Attention, AttentionMask, attention_mask, rotation
from herd.llama3.model.comms import Comms, NoComms
from herd.llama3.model.linear import Linear, RMSNorm, Weighted, local_weight
from herd.llama3.model.loss import token_nll
from herd.llama3.model.param_table import param_row
from herd.llama3.model.recompute import gate_product, recomputed, swiglu
from herd.llama3.recipe.sections import INIT_STD, Model

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
        hidden_BSF = swiglu(gate_BSF, up_BSF) if spare else F.silu(gate_BSF) * up_BSF
        with recomputed(hidden_BSF, gate_product, gate_BSF, up_BSF, enabled=spare):
            out_BSD: Tensor = self.down(hidden_BSF)
        return out_BSD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, config: Model, comms: Comms) -> None:
        super().__init__()
        self.comms = comms
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, comms)
        self.attention = Attention(config, comms)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, comms)
        self.ffn = FeedForward(config.dim, config.ffn)

    def forward(
        self,
        x_BSD: Tensor,
        table: tuple[Tensor, Tensor],
        mask: AttentionMask,
        spare: bool = False,
        recompute_ffn: bool = False,
    ) -> Tensor:
        """Return the residual stream after this layer.

        `spare` saves little for backward (see `recompute`); `recompute_ffn` recomputes the whole feed-forward half.
        """
        x_BSD = x_BSD + self._half(self.attention_norm, self.attention, x_BSD, spare, table, mask)
        if recompute_ffn:
            fed_BSD: Tensor = checkpoint(self._half, self.ffn_norm, self.ffn, x_BSD, False, use_reentrant=False)
            return x_BSD + fed_BSD
        return x_BSD + self._half(self.ffn_norm, self.ffn, x_BSD, spare)

    def _half(self, norm: nn.Module, products: nn.Module, x_BSD: Tensor, spare: bool, *more: Any) -> Tensor:
        def gathered_norm(x_BSD: Tensor) -> Tensor:
            return self.comms.all_gather(norm(x_BSD))

        normed_BSD = gathered_norm(x_BSD)
        with recomputed(normed_BSD, gathered_norm, x_BSD, enabled=spare):
            return self.comms.reduce_scatter(products(normed_BSD, *more, spare))


class Transformer(Weighted):
    """From token ids to logits or to the loss of targets, or a pipeline stage of that.

    Weights are not initialized here (see `initial_value`).
    """

    def __init__(
        self,
        config: Model,
        vocab_size: int,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        comms: Comms | None = None,
    ) -> None:
        """Create a model of shape `config` for `vocab_size` ids (base and special tokens).

        A pipeline stage has only `layers`, the embedding if it is `first`, norm and output if it is `last`.
        """
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.comms: Comms = comms or NoComms()
        self.compute: torch.dtype | None = None
        """Dtype of the residual stream and of products; None: that of the weights."""
        self.z_loss = 0.0
        self.recompute = "none"
        layers = range(config.layers) if layers is None else layers
        # Without _weight, nn.Embedding draws normal weights, which on the meta device imports torch's compiler (0.6 s).
        self.embedding = (
            nn.Embedding(vocab_size, config.dim, _weight=torch.empty(vocab_size, config.dim)) if first else None
        )
        # A dictionary, so that a pipeline stage keeps the parameter names of the whole model.
        self.layers = nn.ModuleDict({str(index): Block(config, self.comms) for index in layers})
        self.norm = RMSNorm(config.dim, config.norm_eps, self.comms) if last else None
        self.output = Linear(config.dim, vocab_size) if last and not config.tied_embeddings else None

    def forward(
        self,
        x: Tensor,
        documents: Tensor | AttentionMask | None = None,
        targets_BS: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Return logits [B, S, V] or, with targets, nats per token [B, S] (fp32, 0 where the target is -100).

        `x` is token ids [B, S], or the output of the previous pipeline stage. `documents` is the document number of
        each token [B, S] of the whole sequences; tokens read within their document only. None: each sequence is one
        document (a faster kernel). An `AttentionMask` (see `mask`) is used as it is. With `head` the result is that of
        `head`, for callers that need few logits. A stage that is not the last returns its residual stream.
        """
        config, grad = self.config, torch.is_grad_enabled()
        seq_len = self.comms.sequence(x.shape[1], whole=self.embedding is not None)
        queries, keys = self.comms.positions(seq_len, x.device)
        x_BSD = x if self.embedding is None else self._embed(x)
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        table = rotation(queries, config.head_dim, config.rope_theta, config.rope_scaling, wide)
        compiled = self.is_compiled
        if isinstance(documents, AttentionMask):
            mask = documents
        else:
            mask = attention_mask(documents, queries, keys, x_BSD.dtype, compiled)
        for block in self.layers.values():
            if self.recompute == "full" and grad:
                x_BSD = checkpoint(block, x_BSD, table, mask, use_reentrant=False)
            else:
                recompute_ffn = self.recompute == "selective" and grad
                x_BSD = block(x_BSD, table, mask, spare=not compiled, recompute_ffn=recompute_ffn)
        if self.norm is None:
            return x_BSD
        hidden_BSD = self.comms.all_gather(self.norm(x_BSD))
        owner = self.embedding if self.output is None else self.output
        assert owner is not None
        weight_VD = local_weight(owner.weight, self.exact)
        if head is not None:
            return head(hidden_BSD, weight_VD.to(hidden_BSD.dtype))
        if targets_BS is None:
            return F.linear(hidden_BSD, weight_VD.to(hidden_BSD.dtype))
        return token_nll(hidden_BSD, weight_VD, targets_BS, self.z_loss, self.comms)

    @property
    def is_compiled(self) -> bool:
        return any(block._compiled_call_impl is not None for block in self.layers.values())

    def mask(self, documents_BS: Tensor | None, device: torch.device) -> AttentionMask | None:
        """Return the mask of a batch on `device` from its document numbers [B, S] on the host; None for None.

        For callers of a model that FSDP2 shards: it moves every tensor argument to the device before `forward`, where
        counting the lengths of documents would make the host wait.
        """
        if documents_BS is None:
            return None
        queries, keys = self.comms.positions(documents_BS.shape[1], device)
        dtype = self.compute or next(self.parameters()).dtype
        return attention_mask(documents_BS, queries, keys, dtype, self.is_compiled)

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        assert self.embedding is not None
        weight_VD = local_weight(self.embedding.weight, self.exact)
        if len(weight_VD) == self.vocab_size:
            x_BSD = F.embedding(tokens_BS, weight_VD)
        else:  # vocabulary parallel: one process has the row of a token, the others add zero
            index_BS = tokens_BS - self.comms.vocab_start(len(weight_VD))
            absent_BS = (index_BS < 0) | (index_BS >= len(weight_VD))
            x_BSD = F.embedding(index_BS.masked_fill(absent_BS, 0), weight_VD)
            x_BSD = x_BSD.masked_fill(absent_BS.unsqueeze(-1), 0)
        return self.comms.reduce_scatter(x_BSD.to(self.compute or x_BSD.dtype))


def initial_value(config: Model, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Return the initial value of parameter `name`, fp64 on the CPU; it depends on the arguments only."""
    row = param_row(name)
    if row.kind == "norm":
        return torch.ones(shape, dtype=torch.float64)
    std = config.embedding_std if row.kind == "embedding" else INIT_STD
    if row.residual:
        std /= math.sqrt(2 * config.layers)
    # numpy and not torch, whose normal distribution differs between processors in its last bits
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal(tuple(shape)) * std)


def build_model(config: Model, vocab_size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a whole (not sharded) model with its initial weights on `device`."""
    model = empty_model(config, vocab_size).to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model.config, seed, name, parameter.shape))
    return model


def empty_model(config: Model, vocab_size: int) -> Transformer:
    """Return a model on the meta device: shapes without memory (405B takes a second)."""
    with torch.device("meta"):
        return Transformer(config, vocab_size)
