"""A5: MegaScale's 175B on 256 to 12,288 GPUs, under Megatron-LM and under MegaScale: one constant each, 14 rows.

The constant, a rate of products, is fitted on 3,072 GPUs. What is tested is how a step shrinks with the number of GPUs:
the bubble, which grows as each replica has fewer micro-batches, and gradients, which stay as large. Megatron-LM waits
for all of its gradients; MegaScale hides those of all pipeline stages but one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from scipy.optimize import brentq

from llama3.cluster.anchor import Anchor
from llama3.cluster.steptime import Pipeline
from llama3.cluster.work import Spent

SOURCE = "arXiv 2402.15627, Table 2"
LAYERS, HIDDEN, VOCABULARY, SEQ = 96, 12_288, 64_000, 2_048
TENSOR, PIPELINE, VIRTUAL = 8, 8, 6
CARD = 200e9 / 8 * 0.97
"""Bytes a second of a 200 Gb/s card."""
MEMORY, STATE_BYTES = 2.039e12, 16
"""A100's HBM; bytes of optimizer state that a step moves per parameter."""
FITTED = 3_072
MOST, MEAN = 0.12, 0.06


class System(NamedTuple):
    """A training system, and the seconds of an iteration by GPUs: batch 768 up to 1,024 GPUs, 6,144 above."""

    name: str
    seconds: dict[int, float]
    pieces: int
    """Parts into which gradients go; all but one hide behind the backward pass."""


SYSTEMS = (
    System(
        "Megatron-LM",
        {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9, 3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57},
        1,
    ),
    System(
        "MegaScale",
        {256: 32.0, 512: 16.5, 768: 11.5, 1024: 8.9, 3072: 23.66, 6144: 12.21, 8192: 9.56, 12288: 6.34},
        VIRTUAL,
    ),
)


def seconds(gpus: int, rate: float, pieces: int, virtual: int = VIRTUAL) -> float:
    """Return an iteration on `gpus` that compute `rate` operations a second each."""
    copies = gpus // (TENSOR * PIPELINE)
    micro_batches = (768 if gpus <= 1_024 else 6_144) // copies
    parameters = 12 * LAYERS * HIDDEN**2 / (TENSOR * PIPELINE)
    layer = (72 * HIDDEN**2 + 12 * SEQ * HIDDEN) * SEQ / TENSOR / rate
    head = 6 * HIDDEN * VOCABULARY * SEQ / TENSOR / rate / PIPELINE  # spread: MegaScale balances the ends
    sent = parameters * (4 + 2) * (copies - 1) / copies / CARD  # fp32 gradients, bf16 weights
    each = Spent(layer + head * PIPELINE / LAYERS)
    pipe = Pipeline(
        each,
        (Spent(), Spent()),
        (LAYERS // PIPELINE,) * PIPELINE,
        virtual,
        micro_batches,
        exposed=sent / pieces,
        optimizer=parameters * STATE_BYTES / copies / MEMORY,
    )
    return pipe.step().total


@cache
def fitted(name: str) -> float:
    """Return the rate at which a system's step on 3,072 GPUs takes what was published."""
    system = next(one for one in SYSTEMS if one.name == name)
    return float(brentq(lambda rate: seconds(FITTED, rate, system.pieces) - system.seconds[FITTED], 1e13, 5e14))


def anchors() -> list[Anchor]:
    """Return the 14 held-out rows, their mean, and a model without bubble and messages, which must miss."""
    rows = [row for system in SYSTEMS for row in _rows(system)]
    mean = sum(abs(row.error or 0.0) for row in rows) / len(rows)
    linear = [
        abs(system.seconds[FITTED] * FITTED / gpus * (1 if gpus > 1_024 else 768 / 6_144) / took - 1)
        for system in SYSTEMS
        for gpus, took in system.seconds.items()
        if gpus != FITTED
    ]
    missed = sum(linear) / len(linear)
    what = "mean error if steps shrink with the number of GPUs"
    return [
        *rows,
        Anchor("A5", "mean error of the 14", mean, None, "", "<= 6 %", mean <= MEAN, SOURCE),
        Anchor("A5", what, missed, None, "", "must miss 6 %", missed > MEAN, ablation=True),
    ]


def _rows(system: System) -> Iterator[Anchor]:
    rate = fitted(system.name)
    note = f"{rate / 1e12:.0f} TFLOP/s, fitted on {FITTED:,} GPUs; {SOURCE}"
    for gpus, published in system.seconds.items():
        if gpus != FITTED:
            found = seconds(gpus, rate, system.pieces)
            ok = abs(found / published - 1) <= MOST
            yield Anchor("A5", f"{system.name}, {gpus:,} GPUs", found, published, "s", "+-12 %", ok, note)
