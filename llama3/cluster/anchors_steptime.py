"""A1 to A3: the throughput of Table 4, one row fitted and two predicted, and four models that must miss.

A model with a free constant fits any one row. What speaks for this one is that the same constant gives the second row,
where only the bubble grows, and the third, where attention grows too; and that leaving out a part breaks it.
"""

from __future__ import annotations

from collections.abc import Iterator

from llama3.cluster.anchor import Anchor, within
from llama3.cluster.published import fitted, llama_405b, predict, wanted
from llama3.model.flops import flops_per_token
from llama3.parallel.scale import ROWS, TABLE_4

SOURCE = "arXiv 2407.21783, Table 4"
ATTENTION_TFLOPS = 550.0
"""Stated prior of the attention kernel on Hopper (FlashAttention-3 reaches 400 to 650 forward at 8K to 16K)."""
PEAK, SPARSE_PEAK = 989.0, 1979.0
STATED_SHIFT = 0.01
"""How near an ablation must come to the amount by which it is said to miss."""


def anchors() -> list[Anchor]:
    """Return the rows of A1, A2 and A3."""
    return [*_rows(), *_shallow(), *_constant_mfu(), *_six_n(), *_sparse()]


def _rows() -> Iterator[Anchor]:
    curves = fitted()
    found = predict(1, curves).tflops
    note = f"ceiling of products {curves.gemm.ceiling:.3f} of the peak, fitted on row 1 (430); {SOURCE}"
    yield Anchor("A1", "row 2: 16,384 GPUs, 8K", found, 400, "TFLOP/s", "+-3 %", within(found, 400, 0.03), note)
    found = predict(2, curves).tflops
    note = f"attention forward at {ATTENTION_TFLOPS:.0f} TFLOP/s (prior, not fitted), backward 2.5 times the work"
    yield Anchor("A2", "row 3: 16,384 GPUs, 131K", found, 380, "TFLOP/s", "+-5 %", within(found, 380, 0.05), note)
    for other in (400.0, 600.0):
        found = predict(2, fitted(attention_tflops=other)).tflops
        what = f"row 3 with attention at {other:.0f} TFLOP/s"
        yield Anchor("A2", what, found, 380, "TFLOP/s", "printed", True, "how much hangs on the prior")


def _shallow() -> Iterator[Anchor]:
    found = predict(1, fitted(virtual=4), virtual=4).tflops
    yield _ablation("row 2 with V 4 in place of 8, fitted again", found, 400, -0.036, 0.03)


def _constant_mfu() -> Iterator[Anchor]:
    found = TABLE_4[0].tflops
    for row, shift, target in ((1, 0.075, 0.03), (2, 0.132, 0.05)):
        yield _ablation(f"row {row + 1} at the MFU of row 1", found, TABLE_4[row].tflops, shift, target)


def _six_n() -> Iterator[Anchor]:
    """Attention not counted as work: at 131,072 tokens it is two fifths of it."""
    flops = flops_per_token(llama_405b(), ROWS, wanted(2).seq)
    found = predict(2, fitted()).tflops * flops.six_n / flops.causal
    yield _ablation("row 3 counted as 6N alone", found, 380, -0.40, 0.05, 0.04)


def _sparse() -> Iterator[Anchor]:
    for row, published in ((0, 0.43), (1, 0.41)):
        found = predict(row, fitted()).tflops / SPARSE_PEAK
        shift = TABLE_4[row].tflops / SPARSE_PEAK / published - 1
        yield _ablation(f"MFU of row {row + 1} over the sparse peak", found, published, shift, 0.05, 0.03, "")


def _ablation(
    what: str,
    found: float,
    published: float,
    shift: float,
    target: float,
    near: float = STATED_SHIFT,
    unit: str = "TFLOP/s",
) -> Anchor:
    """Return a row that must miss its target, and by about `shift`."""
    error = found / published - 1
    ok = abs(error) > target and abs(error - shift) <= near
    return Anchor("A3", what, found, published, unit, f"must miss, about {shift:+.1%}", ok, ablation=True)
