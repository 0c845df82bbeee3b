"""Rows of `python -m benchmarks train --only null-cuda`: what a step costs the host of a GPU, on a null CUDA device.

The null device is a library in place of CUDA's that counts calls and computes nothing, with 79 GiB: host waits, kernel
launches, retries and bytes of torch's own allocator are those of a GPU. `make test-cuda` runs these rows.
Shapes: B sequences, S tokens of each.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import NotMeasured
from benchmarks.rows import Row, measured
from benchmarks.train_session import TrainSession
from herd.llama3.hardware.topology import load_fabric
from herd.llama3.parallel.comm_trace import fake_process_group
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, memory
from herd.llama3.parallel.mesh import init_distributed
from herd.llama3.planner.device_curves import prior_curves
from herd.llama3.planner.step_time import compute_seconds, layer_work
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model
from herd.llama3.train.data_loader import Step, TokenBatch, local_batch
from herd.llama3.train.job import TrainJob
from herd.llama3.train.loss_spikes import SpikeGuard
from herd.llama3.train.state import Precision, TrainState
from herd.llama3.train.train_step import Engine

LLAMA3_VOCAB_SIZE, SEQ = 128_256, 8_192
FABRIC = "roce-24k"
"""Preset whose H100 the GPU time of a layer is predicted for."""
DOCUMENT = 512
"""Tokens of a document."""
LAUNCHES = ("kernel:", "triton:", "gemm:")
"""How counted calls begin that are kernels."""


def is_null() -> bool:
    """Return whether this process runs on a null device."""
    return "NULLCUDA" in os.environ


def reset() -> None:
    """Count from here on."""
    if is_null():
        library: Any = ctypes.CDLL(None)
        library.nullcuda_reset()


def counts() -> Counter[str]:
    """Return how often each kernel, product, copy and synchronization was called since `reset`; nothing on a GPU."""
    if not is_null():
        return Counter()
    library: Any = ctypes.CDLL(None)
    with tempfile.NamedTemporaryFile() as file:
        library.nullcuda_dump(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    return Counter({name.strip(): int(count) for count, name in (line.split("\t", 1) for line in lines)})


MEMORY: list[tuple[str, int, int, dict[str, Any]]] = [
    ("8b", 2, 1, {}),
    ("8b", 4, 2, {}),
    ("8b", 4, 1, {"zero": 3}),
    ("8b", 4, 2, {"zero": 3}),
    ("8b", 4, 2, {"recompute": "selective"}),
    ("8b", 4, 2, {"recompute": "full"}),
    ("1b", 16, 1, {}),
    ("70b", 1, 2, {}),
]
"""Preset, layers, micro-batches and layout of the row on memory."""


HOST: dict[str, tuple[str, Layout]] = {
    "host": ("8b", Layout()),
    "host-8b-compile": ("8b", Layout(compile=True)),
    "host-70b-tp8": ("70b", Layout(tp=8)),
    "host-70b-tp8-compile": ("70b", Layout(tp=8, compile=True)),
    "host-405b-tp8": ("405b", Layout(tp=8)),
}
"""Row -> preset and layout whose host time of a layer is measured, as rank 0 of HOST_SIZE."""
HOST_SIZE = 64


@dataclass(frozen=True)
class StepCost:
    """Of one step after the first two."""

    waits: dict[str, int]
    """Calls in which the host waits for the device; a large copy from pageable memory is one."""
    launches: int
    """Kernels, library products included."""
    retries: int
    """Times that the allocator gave all of its memory back to find room."""
    allocated: int
    """Peak bytes."""
    reserved: int
    """Peak bytes with the allocator's gaps."""
    predicted: int
    """Bytes by `herd.llama3.parallel.memory`."""
    host_s: float
    """CPU seconds of the least of the steps after the first two."""
    step_s: float
    """Wall seconds of the least of them, until the device is done."""


@cache
def step_cost(
    preset: str,
    layers: int,
    documents: bool = False,
    micro_batches: int = 2,
    layout: Layout | None = None,
    size: int = 1,
) -> StepCost:
    """Take six steps of FSDP2 on one process, sequences of 8,192 tokens, in bf16; return the cost of the last.

    As rank 0 of `size` processes, if that is above 1, whose messages are not sent.
    """
    layout = layout or Layout()
    recipe = Recipe.model_validate(
        {
            "name": "null",
            "sources": {domain: [{"uri": "x"}] for domain in DOMAINS},
            "tokenizer": {"train": {"vocab": 1024}},
            "mix": {"base": {"general": "100%"}},
            "model": {"preset": preset, "layers": layers, "max_seq_len": SEQ},
            "lr": {"peak": 1e-4, "warmup": "1 steps", "cosine": {"to": 1e-5, "over": "9 steps"}},
            "stages": [{"name": "main", "for": "1Mi", "seq_len": SEQ, "batch": "64Ki", "mix": "base"}],
            "precision": "bf16",
        }
    )
    job = TrainJob(recipe=Path("-"), stage="main", tokens=Path("-"), work=Path("-"), micro_batch=1, device="cuda")
    tokens_BS = torch.zeros(micro_batches, SEQ, dtype=torch.int64)
    documents_BS = torch.arange(SEQ).expand(micro_batches, -1).contiguous() // DOCUMENT if documents else tokens_BS
    gc.collect()
    torch.cuda.empty_cache()
    group = (
        fake_process_group(layout, size, 0, "cuda") if size > 1 else init_distributed("cuda", 60, layout, meshed=True)
    )
    with group as world:
        state = TrainState(recipe, LLAMA3_VOCAB_SIZE, Precision.from_recipe(recipe, world.device), world, 0)
        engine = Engine(state, recipe, job, world, SpikeGuard(recipe.spikes, world.device))
        host_s = step_s = float("inf")
        for number in range(6):
            batch = local_batch(TokenBatch(tokens_BS, tokens_BS, documents_BS, tokens_BS), world)
            torch.cuda.reset_peak_memory_stats()
            tokens = micro_batches * SEQ
            torch.cuda.synchronize()
            reset()
            wall, began = time.perf_counter(), time.process_time()
            engine.train_step(Step(number * tokens, SEQ, tokens), batch, 1e-4, stop=False, save=False)
            host_s = host_s if number < 2 else min(host_s, time.process_time() - began)
            counted = counts()
            torch.cuda.synchronize()
            step_s = step_s if number < 2 else min(step_s, time.perf_counter() - wall)
        stats = torch.cuda.memory_stats()
        need = memory(recipe.model, LLAMA3_VOCAB_SIZE, layout, size, Load(SEQ, 1, micro_batches), meshed=True)[0]
        return StepCost(
            {name: count for name, count in counted.items() if _waits(name)},
            sum(count for name, count in counted.items() if name.startswith(LAUNCHES)),
            stats["num_alloc_retries"],
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            need.total,
            host_s,
            step_s,
        )


def _waits(name: str) -> bool:
    return name.startswith(("sync:", "copy:sync")) or ("pageable" in name and name.endswith("large"))


def null_row(run: TrainSession, name: str) -> Row:
    """Return a row; not measured where there is no null device."""
    if not is_null():
        raise NotMeasured("no null CUDA device; make test-cuda")
    plain, packed = step_cost("8b", 2), step_cost("8b", 2, documents=True)
    match name.split("/")[1]:
        case "waits":
            found = [cost.waits for cost in (plain, packed, step_cost("8b", 2, True, layout=Layout(zero=3)))]
            return measured(name, sum(sum(waits.values()) for waits in found), "; ".join(map(str, filter(None, found))))
        case "launches":
            return measured(name, (step_cost("8b", 4, documents=True).launches - packed.launches) / 2 / 2)
        case host if host.startswith("host"):
            preset, layout = HOST[host]
            two, four = (step_cost(preset, layers, True, 2, layout, HOST_SIZE) for layers in (2, 4))
            host_s, device_s = (four.host_s - two.host_s) / 2 / 2, predicted_layer_s(preset, layout)
            launches = (four.launches - two.launches) / 2 / 2
            note = f"{1e3 * host_s:.1f} of {1e3 * device_s:.1f} ms of an H100, predicted; {launches:.0f} launches"
            return measured(name, host_s / device_s, note)
        case "retries":
            return measured(name, plain.retries + packed.retries)
        case "memory":
            errors = memory_errors()
            note = f"{min(errors):+.1f} to {max(errors):+.1f} % of {len(errors)} layouts"
            return measured(name, max(map(abs, errors)), note)
        case other:
            raise ValueError(other)


def predicted_layer_s(preset: str = "8b", layout: Layout | None = None) -> float:
    """Return the seconds of a layer, forward and backward, that the planner gives an H100."""
    config, load = Model.model_validate({"preset": preset}), Load(SEQ, 1, 2)
    curves = prior_curves(load_fabric(FABRIC).accelerator)
    return float(compute_seconds(layer_work(config, layout or Layout(), load), curves, "none").total)


def memory_errors() -> list[float]:
    """Return how far `herd.llama3.parallel.memory` is off the allocator's peak in each of `MEMORY`, in percent."""
    costs = [
        step_cost(preset, layers, micro_batches=count, layout=Layout.model_validate(layout))
        for preset, layers, count, layout in MEMORY
    ]
    return [100 * (cost.predicted / cost.allocated - 1) for cost in costs]
