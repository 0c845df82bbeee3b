"""Rows of one GPU: model FLOPs utilization of the shapes that Llama 3 has, at 8,192 tokens, in bf16 and float8.

Whole steps as the trainer takes them: blocks compiled one by one, fused AdamW on fp32 weights, chunked loss, nothing
recomputed unless the layers need it. Utilization is of the peak that `llama3.train.peak_flops` names, by the formula
over all scores (what torchtitan and PaLM print) and over the causal half. The 8B does not fit beside its optimizer
state on one card, so it has fewer layers: the same matrices, a larger share of the vocabulary. Not run on a GPU so
far.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.measure import NotMeasured
from benchmarks.rows import Row, measured
from benchmarks.train_session import TrainSession
from llama3.model.flops import flops_per_token
from llama3.model.init import empty_model
from llama3.model.linear import check_device, use_float8
from llama3.model.transformer import Transformer
from llama3.recipe.sections import Model
from llama3.train.peak_flops import device_name, peak_flops

ROWS, SEQ = 128_256, 8_192
WARM_UP, STEPS = 4, 10
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"preset": "1b"},
    "3b": {
        "layers": 28, "dim": 3072, "ffn": 8192, "heads": 24, "kv_heads": 8, "max_seq_len": SEQ, "tied_embeddings": True,
    },
    "8b": {"preset": "8b", "layers": 8},
}  # fmt: skip
SEQUENCES = {"1b": 2, "3b": 1, "8b": 2}
RECOMPUTE = {"1b": "none", "3b": "none", "8b": "none"}


@dataclass(frozen=True)
class Speed:
    """What a shape reached."""

    tokens_per_s: float
    peak_bytes: int


def utilization(run: TrainSession, name: str) -> Row:
    """MFU by the full-attention formula in bf16, or tokens a second in float8 over those in bf16."""
    if not torch.cuda.is_available():
        raise NotMeasured("no CUDA device")
    shape, number_format = name.split("/")[1].split("-")
    bf16 = speed_of(shape, False)
    if number_format == "fp8":
        try:
            check_device(torch.device("cuda"))
        except ValueError as error:
            raise NotMeasured(str(error)) from error
        fp8 = speed_of(shape, True)
        note = f"{fp8.tokens_per_s:,.0f} tokens/s against {bf16.tokens_per_s:,.0f}"
        return measured(name, fp8.tokens_per_s / bf16.tokens_per_s, note)
    return _utilization(name, shape, bf16)


def _utilization(name: str, shape: str, speed: Speed) -> Row:
    device = device_name(torch.device("cuda"))
    peak = peak_flops(device, "bf16")
    if peak is None:
        raise NotMeasured(f"the peak of {device} is not known; it did {speed.tokens_per_s:,.0f} tokens/s")
    flops = flops_per_token(Model.model_validate(SHAPES[shape]), ROWS, SEQ)
    full, causal = (100 * speed.tokens_per_s * per_token / peak.flops for per_token in (flops.full, flops.causal))
    note = (
        f"causal {causal:.1f} %; {speed.tokens_per_s:,.0f} tokens/s, {speed.peak_bytes / 1e9:.0f} GB; {device}, {peak}"
    )
    return measured(name, full, note, causal=causal, tokens_per_s=speed.tokens_per_s)


@cache
def speed_of(shape: str, float8: bool) -> Speed:
    """Return the speed of a shape on the GPU, over steps after the first."""
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    model = _model(shape, float8, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text_BS = torch.randint(0, ROWS, (SEQUENCES[shape], SEQ + 1), device=device)
    tokens_BS, targets_BS = text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            torch.cuda.synchronize(device)
            began = time.perf_counter()
        model(tokens_BS, None, targets_BS).sum().backward()
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1 / tokens_BS.numel())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    speed = Speed(STEPS * tokens_BS.numel() / (time.perf_counter() - began), torch.cuda.max_memory_allocated(device))
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return speed


def _model(shape: str, float8: bool, device: torch.device) -> Transformer:
    """Return a compiled model with weights of chance."""
    model = empty_model(Model.model_validate(SHAPES[shape]), ROWS).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    model.compute, model.recompute = torch.bfloat16, RECOMPUTE[shape]
    if float8:
        use_float8(model.layers)
    for block in model.layers.values():
        block.compile()
    return model
