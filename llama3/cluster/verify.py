"""All anchors in one list: what the models of this room say of published runs, and what they must not say.

`herd plan verify` prints it and fails if a row is wrong. Each module owns the anchors of its model, so that the figures
stand beside the formula that they test. What public data cannot validate is in docs/explanations/planning/limits.md.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from llama3.cluster.anchor import Anchor

MODULES = (
    "anchors_steptime",
    "anchors_terms",
    "anchors_megatron",
    "anchors_megascale",
    "anchors_memory",
    "anchors_budget",
    "anchors_reliability",
    "anchors_network",
    "anchors_placement",
    "anchors_fabrics",
)


def verify(only: str = "") -> list[Anchor]:
    """Return every row in the order of its number, or those of one number such as `A7`.

    Raises ValueError if there is no such number.
    """
    rows = [row for module in MODULES for row in _anchors(module)()]
    rows.sort(key=lambda row: (int(row.number[1:]), row.ablation))  # stable: in a model's own order otherwise
    wanted = [row for row in rows if not only or row.number == only.upper()]
    if not wanted:
        raise ValueError(f"anchor: {only!r} is none; there are {rows[0].number} to {rows[-1].number}")
    return wanted


def _anchors(module: str) -> Callable[[], list[Anchor]]:
    found: Callable[[], list[Anchor]] = import_module(f"llama3.cluster.{module}").anchors
    return found
