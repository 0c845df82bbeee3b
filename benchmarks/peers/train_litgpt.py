"""The step of litgpt's GPT with a Llama shape: its own attention and cross entropy, autocast for bf16."""

from __future__ import annotations

from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn

DISTRIBUTION = "litgpt"
NAMES = {
    "attention_norm": "norm_1",
    "ffn_norm": "norm_2",
    "attention.o": "attn.proj",
    "ffn.gate": "mlp.fc_1",
    "ffn.up": "mlp.fc_2",
    "ffn.down": "mlp.proj",
}


def build(shape: dict[str, Any], weights: dict[str, Tensor], bf16: bool) -> tuple[nn.Module, Any]:
    """Return the model with these weights and its mean loss, whole as its pretraining takes it."""
    config = Config(
        name="herd-bench",
        block_size=shape["max_seq_len"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        n_query_groups=shape["kv_heads"],
        n_embd=shape["dim"],
        intermediate_size=shape["ffn"],
        norm_class_name="RMSNorm",
        norm_eps=shape["norm_eps"],
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        rope_base=int(shape["rope_theta"]),
        parallel_residual=False,
        bias=False,
    )
    model = GPT(config)
    model.load_state_dict(_theirs(weights, shape["layers"]))
    model.max_seq_length = shape["seq_len"]

    def loss_of(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss: Tensor = chunked_cross_entropy(model(tokens_BS), targets_BS, chunk_size=0)
        return loss

    return model, loss_of


def _theirs(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    named = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for layer in range(layers):
        mine, other = f"layers.{layer}", f"transformer.h.{layer}"
        joined = [weights[f"{mine}.attention.{letter}.weight"] for letter in "qkv"]
        named[f"{other}.attn.qkv.weight"] = torch.cat(joined)
        named |= {f"{other}.{name}.weight": weights[f"{mine}.{ours}.weight"] for ours, name in NAMES.items()}
    return named
