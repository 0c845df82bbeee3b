"""Hugging Face transformers' own `generate`: greedy, its default cache of keys, SDPA attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

DISTRIBUTION = "transformers"


def stepper(shape: dict[str, Any], bf16: bool) -> Callable[[], float]:
    """Return a function that writes after each prompt of `shape` once; it returns how many tokens it wrote."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    model: Any = LlamaForCausalLM.from_pretrained(
        Path(shape["models"], "hf"), dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()

    def step() -> float:
        tokens = [_written(model, prompt, shape["new"]) for prompt in shape["prompts"]]
        Path(shape["out"], f"{shape['side']}.json").write_text(json.dumps(tokens))
        return float(sum(map(len, tokens)))

    return step


def _written(model: Any, prompt: list[int], new: int) -> list[int]:
    given = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens
