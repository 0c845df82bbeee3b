"""Rows of one GPU, the most valuable first: values against the CPU, the whole chain, predictions, utilization.

Utilization is that of the shapes of Llama 3 at 8,192 tokens, in bf16 and float8: whole steps as the trainer takes them,
blocks compiled one by one, fused AdamW on fp32 weights, chunked loss, nothing recomputed unless the layers need it. It
is of the peak that `herd.llama3.train.device` names, by the formula over all scores (what torchtitan and PaLM print)
and over the causal half. The 8B does not fit beside its optimizer state on one card, so it has fewer layers: the same
matrices, a larger share of the vocabulary. `make gpu-day` measures all rows, each in a process of its own.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.measure import NotMeasured
from benchmarks.null_cuda import memory_errors, predicted_layer_s, step_cost
from benchmarks.rows import Row, measured
from benchmarks.train_session import TrainSession
from herd.llama3.model.attention import AttentionMask, attend, attention_mask, can_attend, use_flash
from herd.llama3.model.flops import flops_per_token
from herd.llama3.model.linear import check_device, use_float8
from herd.llama3.model.transformer import Transformer, empty_model
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import init_distributed
from herd.llama3.recipe.base import DOMAINS, SPECIAL_TOKENS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model
from herd.llama3.train.data_loader import Step, TokenBatch, local_batch
from herd.llama3.train.device import device_name, peak_flops
from herd.llama3.train.job import TrainJob
from herd.llama3.train.loss_spikes import SpikeGuard
from herd.llama3.train.state import Precision, TrainState
from herd.llama3.train.train_step import Engine

LLAMA3_VOCAB_SIZE, SEQ = 128_256, 8_192
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


VALUES: dict[str, tuple[Literal["fp32", "bf16", "fp8"], bool, dict[str, Any]]] = {
    "values-fp32": ("fp32", False, {}),
    "values-fp32-documents": ("fp32", True, {}),
    "values-bf16": ("bf16", False, {}),
    "values-bf16-documents": ("bf16", True, {}),
    "values-bf16-recompute": ("bf16", True, {"recompute": "full"}),
    "values-bf16-compile": ("bf16", True, {"compile": True}),
    "values-fp8-compile": ("fp8", True, {"compile": True}),
}
"""Row -> precision, whether sequences hold several documents (then another attention kernel runs), and layout."""
VALUE_ROWS, VALUE_SEQ, VALUE_STEPS = 1024, 512, 4
CHAIN_S = 300
"""Maximum seconds of each half of the chain."""


def gpu_row(run: TrainSession, name: str) -> Row:
    """Return a row; not measured where there is no GPU."""
    if not torch.cuda.is_available():
        raise NotMeasured("no CUDA device")
    row = name.split("/")[1]
    if row in VALUES:
        return _values(name, *VALUES[row])
    if row == "chain":
        return _chain(run, name)
    if row == "attention":
        errors = attention_errors()
        worst = max(errors, key=errors.__getitem__)
        return measured(name, 100 * errors[worst], f"{worst} is the worst of {len(errors)}", errors=errors)
    if row == "layer":
        two, four = step_cost("8b", 2), step_cost("8b", 4)
        layer_s, predicted_s = (four.step_s - two.step_s) / 2 / 2, predicted_layer_s()
        note = f"{1e3 * layer_s:.1f} ms a layer and pass, {1e3 * predicted_s:.1f} predicted for an H100"
        return measured(name, 100 * abs(layer_s / predicted_s - 1), note)
    if row == "memory":
        found = memory_errors()
        note = f"{min(found):+.1f} to {max(found):+.1f} % of {len(found)} layouts"
        return measured(name, max(map(abs, found)), note)
    return utilization(run, name)


def attention_errors() -> dict[str, float]:
    """Return the relative error of each way of attention, gradients included, against all scores in fp64 on the CPU."""
    use_flash("auto", torch.device("cuda"))
    heads, groups, size, random = 8, 2, 64, torch.Generator().manual_seed(1)
    positions_S = torch.arange(VALUE_SEQ)
    documents_BS = torch.stack([positions_S // 100, positions_S // 37])
    order_S = positions_S.view(4, -1)[[3, 0, 2, 1]].flatten()  # as context parallelism gathers keys
    # way -> documents, queries, keys
    ways = {
        "whole": (None, positions_S, positions_S),
        "documents": (documents_BS, positions_S, positions_S),
        "other order": (documents_BS, order_S[:256], order_S),
        "one query": (None, positions_S[-1:], positions_S),
    }
    errors = {}
    for way, dtype in itertools.product(ways, (torch.float32, torch.bfloat16)):
        documents, queries_Q, keys_T = ways[way]
        shapes = [(2, len(queries_Q), heads, size), *[(2, len(keys_T), groups, size)] * 2]
        q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes)
        outer = torch.randn(shapes[0], generator=random, dtype=torch.float64)
        exact = attend(q, k, v, AttentionMask(mask=can_attend(documents, queries_Q, keys_T)))
        expected = [exact.detach(), *torch.autograd.grad(exact, (q, k, v), outer)]
        queries = queries_Q.cuda()
        keys = queries if keys_T is queries_Q else keys_T.cuda()
        visible = AttentionMask() if way == "one query" else attention_mask(documents, queries, keys, dtype)
        q, k, v = (x.detach().to("cuda", dtype).requires_grad_() for x in (q, k, v))
        out = attend(q, k, v, visible)
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), outer.to("cuda", dtype))]
        pairs = zip(found, expected, strict=True)
        off = [float((one.double().cpu() - two).norm() / two.norm()) for one, two in pairs]
        errors[f"{way}, {str(dtype).removeprefix('torch.')}"] = max(off)
    return errors


def _values(name: str, precision: Literal["fp32", "bf16", "fp8"], documents: bool, layout: dict[str, Any]) -> Row:
    """Compare losses and gradient norms of the first steps with those of the CPU in fp32."""
    expected = first_steps("cpu", "fp32", documents, {})
    found = first_steps("cuda", precision, documents, layout)
    off = [abs(mine / theirs - 1) for mine, theirs in zip(found, expected, strict=True)]
    return measured(name, 100 * max(off), f"loss {found[0]:.5f} and {expected[0]:.5f} at the first step")


def first_steps(device: str, precision: str, documents: bool, layout: dict[str, Any]) -> list[float]:
    """Return loss and gradient norm of the first steps on one process, by the trainer's own engine."""
    recipe = Recipe.model_validate(
        {
            "name": "values",
            "seed": 1,
            "sources": {domain: [{"uri": "x"}] for domain in DOMAINS},
            "tokenizer": {"train": {"vocab": VALUE_ROWS - SPECIAL_TOKENS}},
            "mix": {"base": {"general": "100%"}},
            "model": {"layers": 2, "dim": 256, "ffn": 896, "heads": 4, "kv_heads": 2, "max_seq_len": VALUE_SEQ},
            "lr": {"peak": 1e-3, "warmup": "1 steps", "cosine": {"to": 1e-4, "over": "9 steps"}},
            "stages": [{"name": "main", "for": "64Ki", "seq_len": VALUE_SEQ, "batch": "2Ki", "mix": "base"}],
            "precision": precision,
        }
    )
    job = TrainJob(recipe=Path("-"), stage="main", tokens=Path("-"), work=Path("-"), micro_batch=2, device=device)
    random, numbers = torch.Generator().manual_seed(1), list[float]()
    with init_distributed(device, 60, Layout.model_validate(layout), meshed=True) as world:
        state = TrainState(recipe, VALUE_ROWS, Precision.from_recipe(recipe, world.device), world, 0)
        state.reset(recipe, 0, world)
        engine = Engine(state, recipe, job, world, SpikeGuard(recipe.spikes, world.device))
        for number in range(VALUE_STEPS):
            text_BS = torch.randint(0, VALUE_ROWS, (4, VALUE_SEQ + 1), generator=random)
            ends_BS = torch.arange(VALUE_SEQ).expand(4, -1).contiguous() // (100 if documents else VALUE_SEQ)
            whole = TokenBatch(text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous(), ends_BS, 0 * ends_BS)
            step = Step(number * 4 * VALUE_SEQ, VALUE_SEQ, 4 * VALUE_SEQ)
            result = engine.train_step(step, local_batch(whole, world), 1e-3, stop=False, save=False).read()
            numbers += [result.loss, result.grad_norm]
    return numbers


def _chain(run: TrainSession, name: str) -> Row:
    """Run a 30M recipe from raw text to a promoted model, with kill -9 of everything while it trains."""
    root = run.settings.folder / "chain"
    place = run.settings.folder / "cluster.yaml"
    place.write_text("device: cuda\n")
    sets = ("model.preset=30m", "name=gpu-day", "checkpoint.every=50Ki")
    words = ["run", "recipes/quickstart.yaml", "--root", str(root), "--cluster", str(place)]
    command = [
        sys.executable,
        "-m",
        "herd.flows.cli.main",
        *words,
        *(word for each in sets for word in ("--set", each)),
    ]
    began = time.monotonic()
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journals = (root / "work").glob
    while first.poll() is None and not any(
        path.read_bytes().count(b"\n") > 50 for path in journals("main-*/journal.jsonl")
    ):
        if time.monotonic() - began > CHAIN_S:
            break
        time.sleep(0.05)
    killed = first.poll() is None
    if killed:
        os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(command, capture_output=True, text=True, timeout=CHAIN_S)
    done = killed and second.returncode == 0 and "continuing" in second.stdout
    lines = (second.stdout + second.stderr).strip().splitlines() or [""]
    when = "killed while main trained" if killed else f"ended with status {first.returncode} before it was killed"
    note = f"{time.monotonic() - began:.0f} s; {when}; {lines[-1]}"
    return measured(name, 0 if done else 1, note)


@dataclass(frozen=True)
class Speed:
    """What a shape reached."""

    tokens_per_s: float
    peak_bytes: int


def utilization(run: TrainSession, name: str) -> Row:
    """MFU by the full-attention formula in bf16, or tokens a second in float8 over those in bf16."""
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
    flops = flops_per_token(Model.model_validate(SHAPES[shape]), LLAMA3_VOCAB_SIZE, SEQ)
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
    model = build_model(shape, float8, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text_BS = torch.randint(0, LLAMA3_VOCAB_SIZE, (SEQUENCES[shape], SEQ + 1), device=device)
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


def build_model(
    shape: str, float8: bool, device: torch.device, compiled: bool = True, layers: int | None = None
) -> Transformer:
    """Return a model with weights of chance; `layers`: another number of them."""
    config = Model.model_validate({**SHAPES[shape], **({"layers": layers} if layers else {})})
    model = empty_model(config, LLAMA3_VOCAB_SIZE).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    model.compute, model.recompute = torch.bfloat16, RECOMPUTE[shape]
    use_flash("auto", device)
    if float8:
        use_float8(model.layers)
    for block in model.layers.values() if compiled else ():
        block.compile()
    return model
