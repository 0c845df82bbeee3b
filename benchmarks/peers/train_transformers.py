"""The step of Hugging Face transformers' LlamaForCausalLM: SDPA attention, its own loss, autocast for bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

DISTRIBUTION = "transformers"
NAMES = {
    "embedding.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "output.": "lm_head.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn": "mlp",
    "attention": "self_attn",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    **{letter: f"{letter}_proj" for letter in "qkvo"},
}


def build(shape: dict[str, Any], weights: dict[str, Tensor], bf16: bool) -> tuple[nn.Module, Any]:
    """Return the model with these weights and its mean loss (the library's own, over logits in fp32)."""
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["dim"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape["max_seq_len"],
        rms_norm_eps=shape["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float().train()
    model.load_state_dict({theirs(name): weight for name, weight in weights.items()})

    def loss_of(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss: Tensor = model(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS).loss
        return loss

    return model, loss_of


def theirs(name: str) -> str:
    """Return what transformers calls the weight that herd calls `name`."""
    head, _, rest = name.partition(".")
    return NAMES[f"{head}."] + ".".join(NAMES.get(part, part) for part in rest.split("."))
