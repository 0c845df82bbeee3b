"""A6 to A8: activations in flight, the memory of Table 4's layouts, and the bubble of the pipeline.

Activations of Megatron's models are counted here from our own schedules, held against the closed formula of the paper,
so that what agrees is the number of micro-batches in flight and not one formula with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llama3.cluster.anchor import Anchor, within
from llama3.cluster.layout import Found, judge, search
from llama3.cluster.published import llama3_model, meta_layout, wanted
from llama3.parallel.scale import TABLE_4
from llama3.parallel.schedule import Action, actions, bubble, held, ideal_bubble, rank_actions

GIB = 2**30
BYTES = 34
"""Of a layer per token and feature under tensor and sequence parallelism, selective recomputation (2205.05198, 4.3)."""


class Megatron(NamedTuple):
    """A model of arXiv 2205.05198, Table 3, sequences of 2,048 tokens on TP 8."""

    name: str
    layers: int
    hidden: int
    pipeline: int
    interleave: int
    micro_batch: int
    gib: float
    """Activations of the first pipeline rank: 34 s b h L / t (1 + (p - 1) / (p m))."""


MODELS = (
    Megatron("22B", 48, 6_144, 1, 1, 4, 9.5625),
    Megatron("175B", 96, 12_288, 8, 3, 1, 12.3516),
    Megatron("530B", 105, 20_480, 35, 3, 1, 23.0762),
    Megatron("1T", 128, 25_600, 64, 1, 1, 26.5625),
)
SEQ, TENSOR = 2_048, 8


def anchors() -> list[Anchor]:
    """Return the rows of A6, A7 and A8."""
    return [*_activations(), *_table_4(), *_bubbles()]


def in_flight_gib(model: Megatron) -> float:
    """Return the activations that our schedule holds on the first rank."""
    p, m = model.pipeline, model.interleave
    most = max(sum(counts) for counts in held("interleaved", p, m, 4 * p, p, 0))
    return most * model.layers / (p * m) * BYTES * SEQ * model.micro_batch * model.hidden / TENSOR / GIB


def _activations() -> Iterator[Anchor]:
    for model in MODELS:
        found = in_flight_gib(model)
        note = "34 s b h of a layer, times what our schedule holds (arXiv 2205.05198, section 4)"
        ok = within(found, model.gib, 0.001)
        yield Anchor("A6", f"activations, {model.name}", found, model.gib, "GiB", "+-0.1 %", ok, note)
    model = MODELS[1]
    plain = in_flight_gib(model._replace(interleave=1))
    yield Anchor(
        "A6",
        "175B without interleaving in flight",
        plain,
        model.gib,
        "GiB",
        "must miss",
        not within(plain, model.gib, 0.001),
        ablation=True,
    )


def _table_4() -> Iterator[Anchor]:
    model = llama3_model()
    for number in range(len(TABLE_4)):
        asked = wanted(number)
        meta = judge(asked, meta_layout(number), 1, model)
        name = f"row {number + 1} of Table 4"
        needs = meta.memory.total / 1e9
        ok, note = needs < 80, "no recomputation; V 8 from 126 + 2 = 128 = 16 x 8; N 16"
        yield Anchor("A7", f"{name}: memory of the fullest GPU", needs, None, "GB", "< 80", ok, note)
        yield from _in_search(name, search(asked, model), meta.time.total)
    whole = judge(wanted(0), meta_layout(0).model_copy(update={"compile": True}), 1, model)
    kept = whole.memory.total / 1e9
    what = "row 1 with gathered inputs kept"
    yield Anchor("A7", what, kept, None, "GB", "must miss", kept > 80, "as a compiled block keeps them", ablation=True)


def _in_search(name: str, found: Found, seconds: float) -> Iterator[Anchor]:
    best = found.fitting[0].time.total if found.fitting else float("inf")
    place = 1 + sum(one.time.total < seconds * (1 - 1e-9) for one in found.fitting)
    told = f"of {len(found.fitting):,} that fit; {len(found.rejected):,} refused, each with its reason"
    yield Anchor("A7", f"{name}: place of Meta's layout", place, None, "", "<= 20", place <= 20, told)
    share = best / seconds
    yield Anchor("A7", f"{name}: speed against the best found", share, None, "", ">= 0.93", share >= 0.93)


def _bubbles() -> Iterator[Anchor]:
    for ranks, virtual, count in ((16, 8, 32), (16, 8, 16), (4, 2, 10)):
        found = bubble(actions("interleaved", ranks, virtual, count, count if count < 16 else 16))
        ideal = ideal_bubble(ranks, virtual, count)
        what = f"bubble, PP {ranks} V {virtual} M {count}"
        yield Anchor("A8", what, found, ideal, "", "1e-6", abs(found - ideal) < 1e-6, "(PP - 1) / (V M)")
    dealt = bubble(actions("interleaved", 4, 2, 10, 5))
    yield Anchor("A8", "bubble, PP 4 V 2 M 10, N 5", dealt, 0.150, "", "1e-6", abs(dealt - 0.150) < 1e-6)
    short = bubble(short_last_round())
    note = "rounds of 4, 4 and 2, as Megatron deals them; ours are 5 and 5, so that N 4 costs 0.150 here"
    yield Anchor("A8", "bubble, PP 4 V 2 M 10, N 4", short, 0.317, "", "+-0.001", abs(short - 0.317) < 0.001, note)


def short_last_round() -> list[list[Action]]:
    """Return the schedule of ten micro-batches in rounds of four, four and two, warmed up as for whole rounds."""
    rounds = [range(4), range(4, 8), range(8, 10)]
    return [rank_actions(rank, 4, 2, rounds, 2 * (3 - rank) + 4) for rank in range(4)]
