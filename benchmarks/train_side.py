"""One side of the step benchmark: the program inside each process that takes training steps when told to.

A side is a module with `build(shape, weights, bf16)`, which returns a module with its parameters and a function from
tokens and targets to the mean loss; all sides get the same weights, tokens and optimizer, so that what differs is the
model and its loss. A side that measures something else has `stepper(shape, bf16)` instead, which returns what a step
is. Standard library, torch and safetensors only, because the interpreter may be another one.

A process per side, one step at a time: each line on standard input asks for one step, and its CPU time comes back as a
line of JSON; the other sides wait meanwhile. So rounds can be interleaved, and no side meets the memory or settings of
another. What this gives up: caches are cold after a switch, for every side alike.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.meter import MISSING
from herd.storage.processes import peak_rss

Loss = Callable[[Tensor, Tensor], Tensor]
TOKENS, TARGETS = "bench.tokens", "bench.targets"
"""Names of the batch among the tensors of the file of weights; any other is a weight under its name in herd."""


def main() -> None:
    """Take steps until standard input ends; its first line says of what (see `train_rounds`)."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints must not stand among the answers
    request = json.loads(sys.stdin.readline())
    try:
        side = importlib.import_module(request["module"])
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("herd", "benchmarks"):  # a mistake of ours, no missing library
            raise
        print(json.dumps({MISSING: str(error)}), file=answers, flush=True)
        return
    step = prepare(side, request)
    ready = {"version": version(getattr(side, "DISTRIBUTION", "torch")), "peak_bytes": peak_rss()}
    print(json.dumps(ready), file=answers, flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        loss = step()
        cpu_s = time.process_time() - began
        print(json.dumps({"cpu_s": cpu_s, "loss": loss, "peak_bytes": peak_rss()}), file=answers, flush=True)


def prepare(side: Any, request: dict[str, Any]) -> Callable[[], float]:
    """Return a function that takes one step (forward, backward, AdamW) and returns the loss before it."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(request["products"])
    if hasattr(side, "stepper"):
        other: Callable[[], float] = side.stepper(request["shape"], request["bf16"])
        return other
    tensors = load_file(Path(request["weights"]))
    tokens_BS, targets_BS = tensors.pop(TOKENS), tensors.pop(TARGETS)
    model, loss_of = side.build(request["shape"], tensors, request["bf16"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        loss = loss_of(tokens_BS, targets_BS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


if __name__ == "__main__":
    main()
