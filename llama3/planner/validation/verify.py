"""All anchors in one list: published figures beside what the planner's models say of them.

`herd plan verify` prints it and fails if a row is wrong. docs/explanations/planning/limits.md says what public data
cannot validate.
"""

from __future__ import annotations

from llama3.planner.validation.anchor import Anchor
from llama3.planner.validation.network import fabric_anchors, network_anchors, placement_anchors
from llama3.planner.validation.run import budget_anchors, reliability_anchors
from llama3.planner.validation.step import (
    megascale_anchors,
    megatron_anchors,
    memory_anchors,
    table4_anchors,
    term_anchors,
)

ANCHORS = (
    table4_anchors,
    term_anchors,
    megatron_anchors,
    megascale_anchors,
    memory_anchors,
    budget_anchors,
    reliability_anchors,
    network_anchors,
    placement_anchors,
    fabric_anchors,
)


def verify(only: str = "") -> list[Anchor]:
    """Return every row in the order of its number, or those of one number such as `A7`.

    Raises ValueError if there is no such number.
    """
    rows = [row for anchors in ANCHORS for row in anchors()]
    rows.sort(key=lambda row: (int(row.number[1:]), row.ablation))  # stable: in a model's own order otherwise
    wanted = [row for row in rows if not only or row.number == only.upper()]
    if not wanted:
        raise ValueError(f"anchor: {only!r} is none; there are {rows[0].number} to {rows[-1].number}")
    return wanted
