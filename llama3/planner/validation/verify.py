"""All anchors, for `herd plan validate`. docs/explanations/planning/limits.md says what they cannot validate."""

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

    Raises ValueError for an unknown number.
    """
    anchors = [anchor for group in ANCHORS for anchor in group()]
    anchors.sort(key=lambda anchor: (int(anchor.number[1:]), anchor.ablation))  # stable within a number
    chosen = [anchor for anchor in anchors if not only or anchor.number == only.upper()]
    if not chosen:
        raise ValueError(f"anchor: {only!r} is unknown; write {anchors[0].number} to {anchors[-1].number}")
    return chosen
