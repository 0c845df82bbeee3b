"""The arithmetic of messages against the engine's own trace: bytes of every axis, kind, phase and place are equal."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from herd.llama3.parallel.comm_records import Collective, RankTrace
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, RankCoords, stages
from herd.llama3.planner.comm_volume import stage_volumes
from tests.dist import run
from tests.llama3.parallel.scale_samples import VOCAB_SIZE, shape, traced

CONFIG = shape(layers=4)
LOAD = Load(seq_len=128, micro_batch=2, micro_batches=3)
Case = tuple[int, int, Layout, Load]
"""World, rank, layout, load."""
CASES: dict[str, Case] = {
    "one process": (1, 0, Layout(), LOAD),
    "fsdp": (4, 1, Layout(), LOAD),
    "tp": (8, 3, Layout(tp=2), LOAD),
    "only tp": (2, 0, Layout(tp=2), LOAD),
    "cp": (8, 0, Layout(cp=2, tp=2), LOAD),
    "first stage": (16, 0, Layout(tp=2, cp=2, pp=2), LOAD),
    "last stage": (16, 7, Layout(tp=2, cp=2, pp=2), LOAD),
    "virtual stages": (8, 2, Layout(tp=2, pp=2, vpp=2), LOAD),
    "zero 3": (8, 0, Layout(tp=2, zero=3), LOAD),
    "copies": (8, 0, Layout(tp=2, dp_replicate=2), LOAD),
    "full recomputation": (8, 0, Layout(tp=2, cp=2, recompute="full"), LOAD),
    "selective recomputation": (8, 0, Layout(tp=2, cp=2, recompute="selective"), LOAD),
    "fp32": (4, 0, Layout(tp=2), Load(seq_len=64, precision="fp32")),
    "exact": (4, 0, Layout(tp=2), Load(seq_len=64, exact=True)),
}


EACH_AXIS = ("cp", "virtual stages", "zero 3", "copies")
"""Names of cases in which all axes send."""
OTHERS = [name for name in CASES if name not in EACH_AXIS]
GROUPS = [EACH_AXIS, tuple(OTHERS[:5]), tuple(OTHERS[5:])]
pytestmark = pytest.mark.slow


@cache
def traces(names: tuple[str, ...]) -> dict[str, RankTrace]:
    cases = [CASES[name] for name in names]
    requests = [(layout.model_dump(exclude_defaults=True), world, rank, load) for world, rank, layout, load in cases]
    (texts,) = run(1, traced, CONFIG, VOCAB_SIZE, requests)
    return dict(zip(names, map(RankTrace.from_json, texts), strict=True))


def sent(found: list[Collective]) -> Counter[tuple[str, ...]]:
    total: Counter[tuple[str, ...]] = Counter()
    for one in found:
        total[one.axis, one.kind, one.phase, one.when, one.region, one.dtype, str(one.group_size)] += int(
            one.bytes * one.count
        )
    return +total


@pytest.mark.parametrize("names", GROUPS, ids=",".join)
def test_messages_are_those_of_the_engine(names: tuple[str, ...]) -> None:
    for name, trace in traces(names).items():
        world, rank, layout, load = CASES[name]
        parts = stages(CONFIG, layout, RankCoords.from_rank(rank, layout).pp)
        for traced_stage, part in zip(trace.stages, parts, strict=True):
            assert sent(stage_volumes(part, CONFIG, VOCAB_SIZE, layout, world, load)) == sent(
                traced_stage.collectives
            ), name


@pytest.mark.parametrize("names", GROUPS, ids=",".join)
def test_bytes_of_a_step_are_the_traces(names: tuple[str, ...]) -> None:
    for name, trace in traces(names).items():
        world, rank, layout, load = CASES[name]
        total, seen = Counter[str](), Counter[str]()
        for part in stages(CONFIG, layout, RankCoords.from_rank(rank, layout).pp):
            for one in stage_volumes(part, CONFIG, VOCAB_SIZE, layout, world, load):
                total[one.axis] += int(one.bytes * one.count) * (load.micro_batches if one.when == "each" else 1)
        for sent_by in trace.stages:
            for one in sent_by.collectives:
                seen[one.axis] += one.bytes * int(one.count) * (load.micro_batches if one.when == "each" else 1)
        assert total == seen, name
