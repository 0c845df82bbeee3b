"""The step that one would write first: plain fp32 code, one operation after another, torch's settings as they are.

It is what the tuned step is compared with. Attention is torch's own function, because everybody's is; norm, rotary
positions, the whole logits and their cross entropy, and an optimizer that is not fused are written as in the papers.

Shapes: B batch, S sequence, D model, H heads, E features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.train_side import Loss

FUSED = False


def build(shape: dict[str, Any], weights: dict[str, Tensor], bf16: bool) -> tuple[nn.Module, Loss]:
    """Return the model with these weights and its mean loss."""
    assert not bf16
    model = Naive(shape, weights)

    def loss_of(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens_BS).flatten(0, 1), targets_BS.flatten())

    return model, loss_of


class Naive(nn.Module):
    """Llama 3 as functions of a dictionary of weights."""

    def __init__(self, shape: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        named = {name.replace(".", "/"): nn.Parameter(value) for name, value in weights.items()}
        self.weights = nn.ParameterDict(named)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits [B, S, V]."""
        x_BSD = self._weight("embedding")[tokens_BS]
        for layer in range(self.shape["layers"]):
            x_BSD = x_BSD + self._attention(self._norm(x_BSD, f"layers.{layer}.attention_norm"), f"layers.{layer}")
            normed_BSD = self._norm(x_BSD, f"layers.{layer}.ffn_norm")
            gate, up = (normed_BSD @ self._weight(f"layers.{layer}.ffn.{name}").T for name in ("gate", "up"))
            x_BSD = x_BSD + (F.silu(gate) * up) @ self._weight(f"layers.{layer}.ffn.down").T
        return self._norm(x_BSD, "norm") @ self._weight("output").T

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[f"{name}.weight".replace(".", "/")]
        return weight

    def _norm(self, x_BSD: Tensor, name: str) -> Tensor:
        return x_BSD * torch.rsqrt(x_BSD.pow(2).mean(-1, keepdim=True) + self.shape["norm_eps"]) * self._weight(name)

    def _attention(self, x_BSD: Tensor, layer: str) -> Tensor:
        size = self.shape["dim"] // self.shape["heads"]
        q, k, v = (
            (x_BSD @ self._weight(f"{layer}.attention.{name}").T).view(*x_BSD.shape[:2], -1, size).transpose(1, 2)
            for name in "qkv"
        )
        groups = self.shape["heads"] // self.shape["kv_heads"]
        k, v = self._turn(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out_BHSE = F.scaled_dot_product_attention(self._turn(q), k, v, is_causal=True)
        return out_BHSE.transpose(1, 2).flatten(2) @ self._weight(f"{layer}.attention.o").T

    def _turn(self, x_BHSE: Tensor) -> Tensor:
        half = x_BHSE.shape[-1] // 2
        frequencies = self.shape["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(x_BHSE.shape[2]), frequencies).repeat(1, 2)
        turned = torch.cat([-x_BHSE[..., half:], x_BHSE[..., :half]], -1)
        return x_BHSE * angles.cos() + turned * angles.sin()
