"""A9 to A11: operations per token, GPU-hours and steps of the 405B over its published schedule.

The schedule stands here as published (arXiv 2407.21783, sections 3.4.1 to 3.4.3), so that the check needs no recipe.
Which part ran on how many GPUs is published for three rows of Table 4 only: 8,192 GPUs up to 2.87T tokens, with the 430
TFLOP/s of row 1, then 16,384 with row 2, and the long context with row 3 is our reading. GPU-hours are told twice: with
the published throughput, all of it at batches of 16M, which flatters the first 2.87T tokens, and with what the
step-time model says of each part at its own batch, its one constant fitted on row 1. Goodput is a published bound.
Attention counts: at 131K it is 40 % of a token's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from llama3.cluster.anchor import Anchor, within
from llama3.cluster.budget import StageTime, total_of
from llama3.cluster.layout import judge
from llama3.cluster.published import llama3_model, llama_405b, meta_layout, wanted
from llama3.model.flops import flops_per_token
from llama3.parallel.scale import ROWS, TABLE_4

GOODPUT = 0.90
"""Effective training time: "higher than 90 %" (section 3.3.4)."""
SOURCE = "arXiv 2407.21783, section 3.4; model card: 30.84M GPU-hours"


class Part(NamedTuple):
    """A part of the published schedule."""

    name: str
    until: float
    """Position at its end, tokens."""
    batch: int
    """Tokens of a step, as the paper writes it: 4M, 8M, 16M."""
    seq: int
    row: int
    """Of Table 4, whose throughput holds."""


SCHEDULE = (
    Part("4M", 252e6, 4, 4_096, 0),
    Part("8M", 2.87e12, 8, 8_192, 0),
    Part("16M", 14.8e12, 16, 8_192, 1),
    Part("long context", 15.6e12, 16, 131_072, 2),
)


def anchors() -> list[Anchor]:
    """Return the rows of A9, A10 and A11."""
    return [*_flops(), *_gpu_hours(), *_steps()]


def _flops() -> list[Anchor]:
    flops = flops_per_token(llama_405b(), ROWS, 8_192)
    what = "operations per token, 405B at 8K"
    note = "6 N + 6 L S D: attention over the causal half"
    found, plain = flops.causal, flops.full
    return [
        Anchor("A9", what, found, 2.526e12, "FLOP", "+-0.5 %", within(found, 2.526e12, 0.005), note),
        Anchor(
            "A9", "6 N alone", flops.six_n, 2.526e12, "FLOP", "must miss", _far(flops.six_n, 2.526e12, 0.005), "", True
        ),
        Anchor(
            "A9",
            "attention over all scores",
            plain,
            2.526e12,
            "FLOP",
            "must miss",
            _far(plain, 2.526e12, 0.005),
            "",
            True,
        ),
    ]


def table_4(part: Part) -> float:
    """Return the TFLOP/s per GPU of the part's row of Table 4, measured with 16M tokens in a step."""
    return TABLE_4[part.row].tflops


def modelled(part: Part) -> float:
    """Return the TFLOP/s per GPU that the step-time model predicts with the part's own batch and sequence."""
    asked = replace(wanted(part.row), seq=part.seq, batch=part.batch * 2**20)
    return judge(asked, meta_layout(part.row), 1, llama3_model()).tflops


def gpu_hours(goodput: float = GOODPUT, causal: bool = True, tflops: Callable[[Part], float] = table_4) -> float:
    """Return the GPU-hours of the schedule; `tflops`: throughput of a GPU in a part."""
    begin, stages = 0.0, []
    for part in SCHEDULE:
        world = TABLE_4[part.row].world
        flops = flops_per_token(llama_405b(), ROWS, part.seq)
        per_token = flops.causal if causal else flops.six_n
        batch = part.batch * 2**20
        step_s = batch * per_token / world / (tflops(part) * 1e12)
        steps = round((part.until - begin) / batch)
        stages.append(StageTime(part.name, steps * batch, steps, world, step_s, goodput))
        begin = part.until
    return total_of(stages)[1]


def _gpu_hours() -> list[Anchor]:
    what, published = "GPU-hours of the 405B", 30.84e6
    rows = [
        Anchor("A10", what, found, published, "h", "+-5 %", within(found, published, 0.05), f"{how}; {SOURCE}")
        for what, found, how in (
            (what, gpu_hours(), f"Table 4's throughput by part, {GOODPUT:.0%} goodput"),
            (
                f"{what}, steps predicted",
                gpu_hours(tflops=modelled),
                "each part by the step-time model, fitted on row 1",
            ),
        )
    ]
    for what, missed in (
        ("without interruptions", gpu_hours(1.0)),
        ("6 N alone", gpu_hours(causal=False)),
        ("row 1's throughput for all parts", gpu_hours(tflops=lambda part: TABLE_4[0].tflops)),
    ):
        rows.append(Anchor("A10", what, missed, published, "h", "must miss", _far(missed, published, 0.05), "", True))
    return rows


def steps(million: int) -> float:
    """Return the steps to 15.6T tokens; `million`: 10^6 or 2^20 tokens, as the batch sizes are read."""
    begin, count = 0.0, 0.0
    for part in SCHEDULE:
        count += (part.until - begin) / (part.batch * million)
        begin = part.until
    return count


def _steps() -> list[Anchor]:
    decimal, binary = steps(10**6), steps(2**20)
    note = f"batches of 4M, 8M, 16M as 10^6 tokens; as 2^20 they are {binary / 1e6:.4f}M, and no step is rounded"
    flat = SCHEDULE[-1].until / 16e6
    return [
        Anchor(
            "A11", "steps to 15.6T tokens", decimal / 1e6, 1.154, "M", "1.154", round(decimal / 1e6, 3) == 1.154, note
        ),
        Anchor("A11", "the same, at most", decimal / 1e6, None, "M", "<= 1.2", decimal <= 1.2e6, "the cosine's length"),
        Anchor(
            "A11", "16M from the first token", flat / 1e6, 1.154, "M", "must miss", _far(flat, 1.154e6, 0.005), "", True
        ),
    ]


def _far(found: float, published: float, tolerance: float) -> bool:
    return not within(found, published, tolerance)
