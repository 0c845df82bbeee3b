"""Products that have the same bits wherever their operands lie in memory.

On some processors (seen: AMD EPYC with AVX-512) the fp32 matrix products of MKL, which torch uses on a CPU, choose
their instructions by the alignment of an operand, so the same numbers at another address are summed in another order:
a resumed run, or one on more processes, then ends in other last bits. Its reproducible mode takes one way for all
addresses and costs nothing that could be measured. What this gives up: it does not make the number of threads
irrelevant, which still may change the last bits of narrow products.
"""

from __future__ import annotations

import os

MODE = "MKL_CBWR"
"""MKL reads this variable at the first product of a process; AUTO keeps the processor's fastest instructions."""


def keep_rounding() -> None:
    """Ask for reproducible products; to be called before the process's first. A mode that is set already stays."""
    os.environ.setdefault(MODE, "AUTO")
