"""Anchors A15, A16, A19: flows on the AI zone's Clos, and halving against rings.

A15 and A16 are calibrations. Meta publishes "up to 40 %" and "more than 30 %" (Gangidi et al., SIGCOMM 2024) without
the size of the AllReduce, its placement, or how many flows a pair of cards had before; each row states its reading. One
flow per pair is assumed, and an ablation shows how much hangs on it. A19 has no published figure: Meta says that
recursive halving and doubling is "less latency-sensitive" than a ring. Its latencies are NCCL's (14 us between servers,
3.4 us inside), nothing is fitted. Crossovers are those of neighbours: with one member a server, both use one card, and
inside a pod halving is never slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from llama3.parallel.check_layout import ROWS, TABLE_4, Published
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, stages
from llama3.planner.collectives import ALL, Algorithm, Kind, contiguous, crossover, curve, seconds
from llama3.planner.comm_volume import stage_volumes
from llama3.planner.placement import (
    RINGS,
    AxisBytes,
    Ints,
    Recommendation,
    axis_traffic,
    crossing,
    fragmented,
    free_slots,
    minimum_cut,
    on_slots,
    packed,
    slot_groups,
)
from llama3.planner.projection import on_fabric
from llama3.planner.published import fitted, meta_layout, wanted
from llama3.planner.routing import SEEDS, Clos, RoutedJob, pair_rates, ring_share, zone
from llama3.planner.topology import Fabric, Layer, load_fabric
from llama3.planner.validation.anchor import Anchor
from llama3.recipe.sections import Model

NETWORK_SOURCE = "Gangidi et al., SIGCOMM 2024"
GAIN, MOST_GAIN = 0.30, 0.40
CARD = 0.95
FLOWS = (1, 2, 4, 8, 16)
FRAGMENTED = 0.25
RANKS = (1024, 2048, 4096, 8192, 16384)
STRIDES = (1, 8)
"""Neighbours, and one member a server."""
SIZES = np.exp2(np.arange(10, 27))
"""1 KiB to 64 MiB of the whole tensor."""
LARGE = 2.0**30
KINDS: tuple[Kind, ...] = ("reduce-scatter", "all-gather", "all-reduce")
NEAR: Algorithm = "halving nearest-first"
FAR: Algorithm = "halving farthest-first"


def network_anchors() -> list[Anchor]:
    """Return the rows of A15, A16 and A19, with ablations."""
    return [*queue_pairs(), *pinning(), *halving()]


def queue_pairs() -> list[Anchor]:
    """Return A15: E-ECMP with 16 queue pairs over ECMP."""
    small, large = (zone(load_fabric("ai-zone"), racks) for racks in (2, 16))
    single = replace(large, uplinks=large.cards)
    reading = f"mean ring over {SEEDS} seeds, uplinks twice the downlinks, every card's ring leaves its rack"
    two, three = (_share(large, 16) / _share(large, flows) - 1 for flows in (2, 3))
    excess = (
        f"{NETWORK_SOURCE}; {reading}; more than is published of any size: pairs may have had some entropy before "
        f"(2 flows a pair: {100 * two:+.0f} %, 3: {100 * three:+.0f} %), which is unknown"
    )
    steps = [after - before for clos in (small, large, single) for before, after in pairwise(_by_flows(clos))]
    return [
        _up_to("AllReduce of 32 GPUs, E-ECMP with 16 queue pairs: faster than ECMP by", _gain(small), excess),
        _up_to("the same, 256 GPUs", _gain(large), excess),
        _least("A15", "least change of a ring's share from 1 to 2, 4, 8, 16 flows", min(steps), 0.0, None, reading),
        _least("A15", "ring's share of a card, 16 flows, 2x uplinks, 256 GPUs", _share(large, 16), CARD, None, reading),
        _missed("A15", "ablation: over perfect spraying", _share(small, 16) / _adaptive(small) - 1, GAIN),
        _missed("A15", "ablation: one queue pair", _share(small, 1) / _ecmp(small) - 1, GAIN),
        _missed("A15", "ablation: two flows a pair before", _share(small, 16) / _share(small, 2) - 1, GAIN),
        _missed("A15", "ablation: share of a card with 1x uplinks", _share(single, 16), CARD),
    ]


def pinning() -> list[Anchor]:
    """Return A16: path pinning on a quarter of the servers taken, and with cables out."""
    clos = Clos(16)
    whole, spread = RoutedJob(clos, "pinning"), RoutedJob(clos, "pinning", taken=FRAGMENTED)
    doubled = RoutedJob(replace(clos, uplinks=2 * clos.uplinks), "pinning", taken=FRAGMENTED)
    hashed = RoutedJob(clos, "e-ecmp", 16, taken=FRAGMENTED)
    reading = f"a zone of 256 GPUs, replicas of 16, 1x uplinks, loss of the mean ring's rate over {SEEDS} seeds"
    told = f"{NETWORK_SOURCE}: more than 30 % when fragmented or uplinks fail; {reading}"
    pairs = 1 - float(np.mean([pair_rates(spread, seed).mean() for seed in range(SEEDS)]))
    return [
        _least(
            "A16",
            "pinning, a quarter of the servers taken: slower than whole racks by",
            _loss(spread),
            GAIN,
            GAIN,
            told,
        ),
        _least(
            "A16", "the same, whole racks, one cable in 16 out", _loss(replace(whole, failed=1 / 16)), GAIN, GAIN, told
        ),
        _missed("A16", "ablation: whole racks", _loss(whole), GAIN),
        _missed("A16", "ablation: fragmented, 2x uplinks", _loss(doubled), GAIN, "what Meta did first"),
        _missed("A16", "ablation: fragmented, E-ECMP with 16 queue pairs", _loss(hashed), GAIN, "what Meta did last"),
        _missed("A16", "ablation: fragmented, the mean pair and not the slowest of a ring", pairs, GAIN),
    ]


def halving() -> list[Anchor]:
    """Return A19: recursive halving and doubling against a ring."""
    layers = load_fabric("roce-24k").layers()
    instant = [replace(layer, latency_s=0.0) for layer in layers]
    flat = [replace(layer, bytes_per_s=layers[1].bytes_per_s) for layer in layers]
    crossings = [[crossover(kind, contiguous(ranks, layers), layers) for ranks in RANKS] for kind in KINDS]
    growth = min(after / before for row in crossings for before, after in pairwise(row))
    sizes = ", ".join(f"{size / 2**30:.1f} GiB at {ranks:,}" for size, ranks in zip(crossings[0], RANKS, strict=True))
    over = f"the least of {RANKS[0]:,} to {RANKS[-1]:,} ranks on roce-24k, 1 KiB to 64 MiB, each kind"
    big = f"reduce-scatter of 1 GiB among {RANKS[-1]:,} neighbours, 1:7 between pods"
    return [
        _above("time of a ring over halving's", _lead(layers, RANKS), f"{over}; 14 us and 3.4 us"),
        _crossings("crossings of ring and halving over the size, most", _signs(layers)),
        _above("crossover at twice the ranks over the one before", growth, f"ring wins above {sizes}"),
        _above("farthest-first over nearest-first", _order(layers, RANKS[-1]), big),
        _above("ablation: ring over halving without latency", _lead(instant, RANKS), over, ablation=True),
        _above("ablation: ring over halving among 16 ranks", _lead(layers, (16,)), "1 KiB to 64 MiB", ablation=True),
        _above("ablation: farthest over nearest on equal layers", _order(flat, RANKS[-1]), big, ablation=True),
    ]


def _share(clos: Clos, flows: int) -> float:
    return ring_share(RoutedJob(clos, "e-ecmp", flows))


def _by_flows(clos: Clos) -> list[float]:
    return [_share(clos, flows) for flows in FLOWS]


def _ecmp(clos: Clos) -> float:
    return ring_share(RoutedJob(clos, "ecmp"))


def _adaptive(clos: Clos) -> float:
    return ring_share(RoutedJob(clos, "adaptive"))


def _gain(clos: Clos) -> float:
    return _share(clos, 16) / _ecmp(clos) - 1


def _loss(job: RoutedJob) -> float:
    """Return what a ring loses of the rate that whole racks and whole cables would give it."""
    return 1 - ring_share(job) / ring_share(replace(job, taken=0.0, failed=0.0))


def _lead(layers: Sequence[Layer], all_ranks: Iterable[int]) -> float:
    """Return the least time of a ring over halving's."""
    spans = [(ranks, stride) for ranks in all_ranks for stride in STRIDES if ranks * stride <= layers[-1].gpus]
    groups = [contiguous(ranks, layers, stride) for ranks, stride in spans]
    times = [curve(kind, SIZES, group, layers) for kind in KINDS for group in groups]
    return min(float((each["ring"] / each[NEAR]).min()) for each in times)


def _signs(layers: Sequence[Layer]) -> int:
    """Return how often ring and halving cross between 1 KiB and 1 TiB, at most over ranks and kinds."""
    sizes = np.exp2(np.arange(10, 41))
    curves = [curve(kind, sizes, contiguous(ranks, layers), layers, ALL) for kind in KINDS for ranks in RANKS]
    return max(int(np.count_nonzero(np.diff(np.sign(each["ring"] - each[NEAR])))) for each in curves)


def _order(layers: Sequence[Layer], ranks: int) -> float:
    group = contiguous(ranks, layers)
    far, near = (seconds("reduce-scatter", LARGE, group, layers, order) for order in (FAR, NEAR))
    return far / near


def _least(number: str, what: str, value: float, bound: float, published: float | None, note: str) -> Anchor:
    percent = None if published is None else 100 * published
    return Anchor(number, what, 100 * value, percent, "%", f">= {100 * bound:g} %", value >= bound, note)


def _up_to(what: str, value: float, note: str) -> Anchor:
    """Published is "up to 40 %": more is as wrong as too little. Both readings are above it, which is known."""
    ok = GAIN <= value <= MOST_GAIN
    return Anchor(
        "A15", what, 100 * value, 100 * MOST_GAIN, "%", f"{GAIN:.0%} to {MOST_GAIN:.0%}", ok, note, known=True
    )


def _missed(number: str, what: str, value: float, bound: float, note: str = "") -> Anchor:
    return Anchor(number, what, 100 * value, None, "%", f"must miss >= {100 * bound:g} %", value < bound, note, True)


def _above(what: str, value: float, note: str, ablation: bool = False) -> Anchor:
    """Rows of A19 compare two times: right above 1."""
    ok = (value > 1 + 1e-9) != ablation
    return Anchor("A19", what, value, None, "times", f"{'must miss ' if ablation else ''}> 1", ok, note, ablation)


def _crossings(what: str, value: int) -> Anchor:
    return Anchor(
        "A19", what, float(value), None, "", "one", value == 1, "both are lines over the size; 1 KiB to 1 TiB"
    )


# A17: a step on tuned RoCE and on InfiniBand.

FABRICS_SOURCE = "arXiv 2407.21783, section 3.3.1: tuned to equivalent performance; no figure is published"
MOST = 0.02


def fabric_anchors() -> list[Anchor]:
    """Return each row of Table 4 on both clusters, and RoCE untuned, which must be slower."""
    tuned, band = load_fabric("roce-24k"), load_fabric("ib-24k")
    plain = tuned.model_copy(update={"routing": "ecmp", "queue_pairs": 1})
    rows = []
    for row in range(len(TABLE_4)):
        ratio = _step(row, tuned) / _step(row, band)
        what = f"step on RoCE over InfiniBand, row {row + 1} of Table 4"
        rows.append(Anchor("A17", what, ratio, 1.0, "", "+-2 %", abs(ratio - 1) <= MOST, FABRICS_SOURCE))
    slow = _step(2, plain) / _step(2, band)
    what = "the same for row 3 with plain ECMP"
    rows.append(Anchor("A17", what, slow, 1.0, "", "must miss 2 %", slow - 1 > MOST, ablation=True))
    return rows


def _step(row: int, fabric: Fabric) -> float:
    return on_fabric(wanted(row), fabric, fitted(), meta_layout(row)).best.time.total


# Anchor A18: minimum-cut placement on the RoCE cluster, 1:7 between pods, against random and contiguous order.
#
# Meta says that its scheduler finds a minimum cut and recommends the order of ranks, and publishes no figure: the
# target is a bound of ours. Nothing is fitted. Bytes are those of Table 4's rows as the engine sends them (V = 8,
# micro-batches of one sequence), on the whole cluster and with a random quarter of its servers taken. Random order
# means whole servers in any order and rings that follow ranks, which is assumed of a job that knows nothing of
# pods.

FABRIC = "roce-24k"
LEAST_GAIN = 10.0
PLACEMENT_SEEDS = (0, 1, 2)
"""Of the fragmented clusters."""
VIRTUAL = 8
"""126 + 2 = 128 = 16 x 8: one layer fewer on the first and the last stage (arXiv 2407.21783, section 3.3.2)."""
ZERO: tuple[Literal[2, 3], ...] = (3, 2)
PLACEMENT_SOURCE = "Gangidi et al., SIGCOMM 2024: a minimum cut, rank order recommended; no figure published"


def placement_anchors() -> list[Anchor]:
    """Return the rows of A18, with ablations."""
    found = recommendations()
    gain, ratio = min(one.gain for one in found), max(one.ratio for one in found)
    taken = f"whole and (seeds {PLACEMENT_SEEDS}) a quarter of the servers taken"
    cases = f"the worst of {len(found)}: Table 4 on {FABRIC}, {taken}"
    sorted_too = min(one.over("recommended", RINGS) for one in found)
    return [
        _placement_gain(
            "bytes between pods, random order over minimum cut",
            gain,
            f"{cases}; {sorted_too:.1f} if rings through random order are sorted by pod; {PLACEMENT_SOURCE}",
        ),
        _ratio("the same, minimum cut over contiguous order", ratio, cases),
        *_ablations(found),
    ]


def recommendations() -> list[Recommendation]:
    """Return the minimum cuts of Table 4's rows on the whole cluster, then on the fragmented ones."""
    fabric = load_fabric(FABRIC)
    clusters: list[Ints | None] = [None, *(fragmented(fabric, 0.25, seed) for seed in PLACEMENT_SEEDS)]
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
        _placement_gain(
            "ablation: random order over itself with rings sorted by pod", rings, "the best of the same", True
        ),
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


def _placement_gain(what: str, value: float, note: str, ablation: bool = False) -> Anchor:
    target = f"{'must miss ' if ablation else ''}>= {LEAST_GAIN:g}"
    return Anchor("A18", what, value, None, "times", target, (value >= LEAST_GAIN) != ablation, note, ablation)


def _ratio(what: str, value: float, note: str, ablation: bool = False) -> Anchor:
    target = f"{'must miss ' if ablation else ''}<= 1"
    return Anchor("A18", what, value, None, "times", target, (value <= 1) != ablation, note, ablation)
