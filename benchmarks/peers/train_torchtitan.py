"""The step of torchtitan's Llama3Model: its layers, its SDPA attention, its loss on fp32 logits, autocast for bf16.

torchtitan trains language models with FlexAttention, whose backward pass does not exist on CPU, or with varlen, which
has no CPU kernel; its class for torch's scaled_dot_product_attention still stands beside them and takes their place.
Its package (0.3.0) imports triton, so that library must be installed too, though nothing here uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

DISTRIBUTION = "torchtitan"
NAMES = {
    "attention.q": "attention.qkv_linear.wq",
    "attention.k": "attention.qkv_linear.wk",
    "attention.v": "attention.qkv_linear.wv",
    "attention.o": "attention.wo",
    "ffn.gate": "feed_forward.w1",
    "ffn.down": "feed_forward.w2",
    "ffn.up": "feed_forward.w3",
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
}


def build(shape: dict[str, Any], weights: dict[str, Tensor], bf16: bool) -> tuple[nn.Module, Any]:
    """Return the model with these weights and its mean loss."""
    model = _model(shape)
    model.load_state_dict(_theirs(weights, shape), strict=True)

    def loss_of(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BSV = model(tokens_BS)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())

    return model, loss_of


def _model(shape: dict[str, Any]) -> Llama3Model:
    dim, vocab_size, eps = shape["dim"], shape["vocab_size"], shape["norm_eps"]
    rope = ComplexRoPE.Config(
        dim=dim // shape["heads"], max_seq_len=shape["seq_len"], theta=shape["rope_theta"], scaling="none"
    )

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init={})

    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=dim,
                n_heads=shape["heads"],
                n_kv_heads=shape["kv_heads"],
                wqkv_param_init={},
                wo_param_init={},
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(dim=dim, hidden_dim=shape["ffn"], w1_param_init={}, w2w3_param_init={}),
        )
        for _ in range(shape["layers"])
    ]
    config = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init={}),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init={}),
        layers=layers,
    )
    return Llama3Model(config)


def _theirs(weights: dict[str, Tensor], shape: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights under torchtitan's names; q and k with Meta's order of rotated pairs."""
    named = {
        "tok_embeddings.weight": weights["embedding.weight"],
        "norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    size = shape["dim"] // shape["heads"]
    for layer in range(shape["layers"]):
        for ours, theirs in NAMES.items():
            weight = weights[f"layers.{layer}.{ours}.weight"]
            if ours in ("attention.q", "attention.k"):  # halves of a head become neighbours
                weight = weight.view(-1, 2, size // 2, shape["dim"]).transpose(1, 2).reshape(weight.shape)
            named[f"layers.{layer}.{theirs}.weight"] = weight
    return named
