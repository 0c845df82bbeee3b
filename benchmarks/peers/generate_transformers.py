"""Hugging Face transformers' own `generate`: greedy, its default cache of keys, SDPA attention."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

DISTRIBUTION = "transformers"


def stepper(shape: dict[str, Any], bf16: bool) -> Callable[[], float]:
    """Return a function that writes after each prompt of `shape` once; it returns how many tokens it wrote.

    With `shape["together"]` the prompts are one left-padded batch; with `shape["first"]` it returns milliseconds.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    model: Any = LlamaForCausalLM.from_pretrained(
        Path(shape["models"], "hf"), dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()

    def step() -> float:
        began = time.perf_counter()
        batches = [shape["prompts"]] if shape.get("together") else [[prompt] for prompt in shape["prompts"]]
        tokens = [text for batch in batches for text in _written(model, batch, shape["new"])]
        wall_ms = 1000 * (time.perf_counter() - began)
        Path(shape["out"], f"{shape['side']}.json").write_text(json.dumps(tokens))
        return wall_ms if shape.get("first") else float(sum(map(len, tokens)))

    return step


def _written(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    given = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        whole = model.generate(given, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    tokens: list[list[int]] = whole[:, longest:].tolist()
    return tokens
