"""What a layer makes a device do, one piece at a time, for `calibrate`: the model's own calls on random numbers.

This file alone of its room imports torch, and is imported when something is measured. Each function returns what is to
be timed, with its tensors made. Random numbers cost a device more power than zeros, and so lower clocks: as in
training. Given up: the first products of a process on a CPU repack weights, which a warm-up hides.

Shapes: T rows (tokens), I inner and C columns of a product, D residual stream, F hidden of the feed-forward block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from llama3.model.attention import attend
from llama3.model.documents import Visible
from llama3.model.exchange import Alone
from llama3.model.linear import RMSNorm

Call = Callable[[], object]
DTYPE = torch.bfloat16


def products(rows: int, inner: int, columns: int, place: torch.device) -> Call:
    """Return the three products of a linear layer [T, I] -> [T, C]: forward, gradients of input and of weight."""
    x_TI, weight_CI, gradient_TC = (
        torch.randn(*size, dtype=DTYPE, device=place) for size in ((rows, inner), (columns, inner), (rows, columns))
    )

    def call() -> None:
        x_TI @ weight_CI.T
        gradient_TC @ weight_CI
        gradient_TC.T @ x_TI

    return call


def attention(
    batch: int, length: int, heads: tuple[int, int], features: int, backward: bool, place: torch.device
) -> Call:
    """Return causal attention over whole sequences; `heads` are those of queries and of keys.

    The forward pass keeps what a backward one needs, as in training.
    """
    queries, keys, values = (
        torch.randn(batch, length, count, features, dtype=DTYPE, device=place, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    )
    if not backward:
        return lambda: attend(queries, keys, values, Visible())
    out = attend(queries, keys, values, Visible())
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (queries, keys, values), gradient, retain_graph=True)


def elementwise(rows: int, width: int, hidden: int, place: torch.device) -> Call:
    """Return two norms with their residual sums and one SwiGLU, forward and backward."""
    stream_TD = torch.randn(rows, width, dtype=DTYPE, device=place, requires_grad=True)
    gate_TF, up_TF = (torch.randn(rows, hidden, dtype=DTYPE, device=place, requires_grad=True) for _ in range(2))
    norm = RMSNorm(width, 1e-5, Alone()).to(place)
    torch.nn.init.ones_(norm.weight)
    gradients = torch.randn(rows, width, dtype=DTYPE, device=place), torch.randn_like(gate_TF)

    def call() -> object:
        once_TD = stream_TD + norm(stream_TD)
        twice_TD = once_TD + norm(once_TD)
        return torch.autograd.grad(
            (twice_TD, F.silu(gate_TF) * up_TF), (stream_TD, norm.weight, gate_TF, up_TF), gradients
        )

    return call


def seconds_of(call: Call, times: int, place: torch.device) -> float:
    """Return the seconds of one of `times` calls in a row, by the device's own clock where it has one."""
    if place.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times
    begin, end = (_event() for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def device_at_hand(asked: str) -> torch.device:
    """Return the device that `asked` (auto, cpu, cuda) names. Raises ValueError if it is not there."""
    present = torch.cuda.is_available()
    if asked not in ("auto", "cpu", "cuda") or (asked == "cuda" and not present):
        has = "cpu and cuda" if present else "cpu alone"
        raise ValueError(f"device: {asked!r} is not to be had, this machine has {has}; write auto or one of them")
    return torch.device("cuda" if present and asked != "cpu" else "cpu")
