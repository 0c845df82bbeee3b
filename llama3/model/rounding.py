"""Matrix products with the same bits at any memory address.

On some processors (seen: AMD EPYC with AVX-512) MKL's fp32 products, which torch uses on a CPU, choose instructions by
the alignment of an operand, so a resumed run may differ in its last bits. MKL's reproducible mode prevents that at no
measurable cost. The number of threads may still change the last bits of narrow products.
"""

from __future__ import annotations

import os

MODE = "MKL_CBWR"
"""MKL reads it at the first product of a process; AUTO keeps the fastest instructions of the processor."""


def use_reproducible_matmul() -> None:
    """Turn on reproducible products, unless a mode is set. Call it before the first product of the process."""
    os.environ.setdefault(MODE, "AUTO")
