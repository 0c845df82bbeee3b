"""A4: iteration times of Megatron-LM on A100s, 22B to 1T: a curve of two constants, fitted on two rows, against six.

The models are GPT's, with four products a layer, attention that computes all scores and keeps them, and dropout, so
their work stands here and not with Llama's. What is tested is what both share: the efficiency of a product as a
function of its smallest local dimension, and the pipeline.

Shapes: T = b s tokens of a micro-batch, h hidden, a heads, t tensor-parallel, L layers, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from scipy.optimize import least_squares

from llama3.cluster.anchor import Anchor
from llama3.cluster.curves import GemmCurve
from llama3.cluster.steptime import Pipeline
from llama3.cluster.work import Spent

SOURCE = "arXiv 2205.05198, Table 5"
PEAK, MEMORY, LINK = 312e12, 2.039e12, 235e9
"""A100 80 GB: dense BF16 and HBM bandwidth (NVIDIA's data sheet); NVLink 3 as all-gathers reach it (assumed)."""
ATTENTION = 0.35
"""Share of the peak of batched products of scores and values, without a fused kernel (assumed)."""
SEQ, TENSOR, VOCABULARY = 2_048, 8, 51_200


class Run(NamedTuple):
    """A model, its pipeline, and the seconds of an iteration."""

    name: str
    layers: int
    hidden: int
    heads: int
    pipeline: int
    interleave: int
    micro_batches: int
    micro_batch: int
    full: float
    """With full recomputation."""
    present: float
    """With sequence parallelism and selective recomputation, the paper's own work."""


RUNS = (
    Run("22B", 48, 6_144, 64, 1, 1, 1, 4, 1.42, 1.10),
    Run("175B", 96, 12_288, 96, 8, 3, 64, 1, 18.13, 13.75),
    Run("530B", 105, 20_480, 128, 35, 3, 280, 1, 49.05, 37.83),
    Run("1T", 128, 25_600, 160, 64, 1, 512, 1, 94.42, 71.49),
)
FITTED = RUNS[:2]
"""Whose `present` times fit the curve."""


def seconds(run: Run, curve: GemmCurve, full: bool) -> float:
    """Return the iteration time of a run."""
    layer = _layer(run, curve, full)
    head = 3 * curve.seconds(run.micro_batch * SEQ, run.hidden, VOCABULARY // TENSOR)
    layers = (run.layers // run.pipeline,) * run.pipeline
    return Pipeline(layer, (Spent(), Spent(head)), layers, run.interleave, run.micro_batches).step().total


def _layer(run: Run, curve: GemmCurve, full: bool) -> Spent:
    tokens, h, t = run.micro_batch * SEQ, run.hidden, TENSOR
    shapes = ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h))
    gemm = sum(curve.seconds(tokens, inner, columns) for inner, columns in shapes)
    attention = 4 * tokens * SEQ * h / t / (PEAK * ATTENTION)
    scores = run.heads / t * tokens * SEQ * 2 * 7 / MEMORY  # softmax and dropout over all scores, in BF16
    moved = (tokens * h * 24 / t + tokens * 4 * h / t * 6) / MEMORY + scores
    messages = 4 * tokens * h * 2 * (t - 1) / t / LINK
    again = gemm + attention + moved + messages if full else attention + scores
    return Spent(3 * gemm, 3 * attention, 3 * moved, again, 2 * messages)


@cache
def fitted() -> GemmCurve:
    """Return the curve through the `present` times of 22B and 175B."""

    def curve(constants: tuple[float, float]) -> GemmCurve:
        return GemmCurve(peak_flops=PEAK, ceiling=constants[0], half=constants[1])

    def misses(constants: tuple[float, float]) -> list[float]:
        return [math.log(seconds(run, curve(constants), False) / run.present) for run in FITTED]

    ceiling, half = least_squares(misses, (0.8, 300.0)).x
    return curve((float(ceiling), float(half)))


def anchors() -> list[Anchor]:
    """Return the six held-out rows, their mean, and a curve without its second constant, which must miss."""
    curve = fitted()
    note = f"ceiling {curve.ceiling:.3f}, half at {curve.half:.0f}, fitted on 22B and 175B with selective; {SOURCE}"
    rows = list(_held_out(curve, note))
    mean = _mean(rows)
    flat = GemmCurve(peak_flops=PEAK, ceiling=_flat_ceiling(), half=0.0)
    missed = _mean(list(_held_out(flat, "")))
    what = "mean error with one efficiency for all sizes"
    return [
        *rows,
        Anchor("A4", "mean error of the six", mean, None, "", "<= 4 %", mean <= 0.04, note),
        Anchor("A4", what, missed, None, "", "must miss 4 %", missed > 0.04, ablation=True),
    ]


def _held_out(curve: GemmCurve, note: str) -> Iterator[Anchor]:
    for run in RUNS:
        for full, published in ((True, run.full), (False, run.present)):
            if full or run not in FITTED:
                found = seconds(run, curve, full)
                what = f"{run.name}, {'full' if full else 'selective'} recomputation"
                ok = abs(found / published - 1) <= 0.08
                yield Anchor("A4", what, found, published, "s", "+-8 %", ok, note)


def _flat_ceiling() -> float:
    """Return the one efficiency that fits 22B."""
    run = RUNS[0]

    def miss(constants: tuple[float]) -> list[float]:
        curve = GemmCurve(peak_flops=PEAK, ceiling=constants[0], half=0.0)
        return [math.log(seconds(run, curve, False) / run.present)]

    return float(least_squares(miss, (0.6,)).x[0])


def _mean(rows: list[Anchor]) -> float:
    return sum(abs(row.error or 0.0) for row in rows) / len(rows)
