"""Anchor A18: minimum-cut placement on the RoCE cluster, 1:7 between pods, against random and contiguous order.

Meta says that its scheduler finds a minimum cut and recommends the order of ranks, and publishes no figure: the target
is a bound of ours. Nothing is fitted. Bytes are those of Table 4's rows as the engine sends them (V = 8, micro-batches
of one sequence), on the whole cluster and with a random quarter of its servers taken. Random order means whole servers
in any order and rings that follow ranks, which is assumed of a job that knows nothing of pods.
"""

from __future__ import annotations

from typing import Literal

from llama3.cluster.anchor import Anchor
from llama3.cluster.axes import AxisBytes, axis_traffic, crossing
from llama3.cluster.cut import RINGS, Recommendation, minimum_cut, slot_groups
from llama3.cluster.orders import packed
from llama3.cluster.placement import Ints, fragmented, free_slots, on_slots
from llama3.cluster.topology import load_fabric
from llama3.cluster.volumes import stage_volumes
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load
from llama3.parallel.scale import ROWS, TABLE_4, Published
from llama3.parallel.sizes import stages
from llama3.recipe.schema import Model

FABRIC = "roce-24k"
LEAST_GAIN = 10.0
SEEDS = (0, 1, 2)
"""Of the fragmented clusters."""
VIRTUAL = 8
"""126 + 2 = 128 = 16 x 8: one layer fewer on the first and the last stage (arXiv 2407.21783, section 3.3.2)."""
ZERO: tuple[Literal[2, 3], ...] = (3, 2)
SOURCE = "Gangidi et al., SIGCOMM 2024: a minimum cut, rank order recommended; no figure published"


def anchors() -> list[Anchor]:
    """Return the rows of A18, with ablations."""
    found = recommendations()
    gain, ratio = min(one.gain for one in found), max(one.ratio for one in found)
    cases = f"the worst of {len(found)}: Table 4 on {FABRIC}, whole and (seeds {SEEDS}) a quarter of the servers taken"
    sorted_too = min(one.over("recommended", RINGS) for one in found)
    return [
        _gain(
            "bytes between pods, random order over minimum cut",
            gain,
            f"{cases}; {sorted_too:.1f} if rings through random order are sorted by pod; {SOURCE}",
        ),
        _ratio("the same, minimum cut over contiguous order", ratio, cases),
        *_ablations(found),
    ]


def recommendations() -> list[Recommendation]:
    """Return the minimum cuts of Table 4's rows on the whole cluster, then on the fragmented ones."""
    fabric = load_fabric(FABRIC)
    clusters: list[Ints | None] = [None, *(fragmented(fabric, 0.25, seed) for seed in SEEDS)]
    jobs = [job(row) for row in TABLE_4]
    return [minimum_cut(layout, world, fabric, sent, free) for free in clusters for layout, world, sent in jobs]


def job(row: Published, zero: Literal[2, 3] = 2) -> tuple[Layout, int, AxisBytes]:
    """Return a row of Table 4 with the bytes that a GPU in the middle of its pipeline sends."""
    spec, load = Model.model_validate({"preset": "405b"}), Load(row.seq, 1, row.sequences)
    layout = row.layout.model_copy(update={"virtual": VIRTUAL, "zero": zero})
    parts = stages(spec, layout, layout.pp // 2)
    sent = [each for part in parts for each in stage_volumes(part, spec, ROWS, layout, row.world, load)]
    return layout, row.world, AxisBytes.of(sent, layout, row.sequences)


def _ablations(found: list[Recommendation]) -> list[Anchor]:
    """Return what each part alone does: ring order without placement, and orders without a search."""
    rings = max(one.over(RINGS, "random") for one in found)
    replica = TABLE_4[2].layout.pp * TABLE_4[2].layout.cp  # in slots of 8 GPUs, as TP is 8
    resharded, kept = (_written(job(TABLE_4[2], zero), replica) for zero in ZERO)
    inside = max(_written(job(row), 1, stage_major=True) for row in TABLE_4)
    return [
        _gain("ablation: random order over itself with rings sorted by pod", rings, "the best of the same", True),
        _ratio(
            "ablation: DP inside PP, over contiguous order", inside, "the worst of Table 4's rows, whole cluster", True
        ),
        _ratio(
            "ablation: whole replicas first, over contiguous order",
            resharded,
            f"Table 4's last row under ZeRO-3, which sends weights for each micro-batch; under ZeRO-2 {kept:.3f}",
            True,
        ),
    ]


def _written(asked: tuple[Layout, int, AxisBytes], block: int, stage_major: bool = False) -> float:
    """Return bytes between pods of an order that is written down and not searched, over those of contiguous order."""
    layout, world, sent = asked
    fabric = load_fabric(FABRIC)
    slots = free_slots(layout, world, fabric)
    shape = (layout.dp(world), layout.pp, layout.cp * layout.tp // slots.shape[1])
    order = packed(shape, slot_groups(fabric, slots)[0], block, stage_major)
    rows = [axis_traffic(layout, fabric, on_slots(each, world), sent) for each in (slots[order], slots)]
    mine, plain = (crossing(each)[fabric.tiers[-1].name] for each in rows)
    return mine / plain


def _gain(what: str, value: float, note: str, ablation: bool = False) -> Anchor:
    target = f"{'must miss ' if ablation else ''}>= {LEAST_GAIN:g}"
    return Anchor("A18", what, value, None, "times", target, (value >= LEAST_GAIN) != ablation, note, ablation)


def _ratio(what: str, value: float, note: str, ablation: bool = False) -> Anchor:
    target = f"{'must miss ' if ablation else ''}<= 1"
    return Anchor("A18", what, value, None, "times", target, (value <= 1) != ablation, note, ablation)
