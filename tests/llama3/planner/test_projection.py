from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.hardware.topology import load_fabric
from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.layout import Layout
from herd.llama3.planner.layout_search import SearchResult
from herd.llama3.planner.projection import Projection, StagePlacement, max_gpus, nearest_gpus, project
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schedule import Schedule
from tests.llama3.planner.plan_samples import SMALL, VOCAB_SIZE, curves, fabric, layout_query, projection, recipe

TINY = {"name": "h8", "dense_tflops": 989, "reached_tflops": 795, "memory_gb": 8, "memory_tb_s": 3, "watts": 700}
"""An H100 with 8 GB."""


def projected(
    placements: dict[str, StagePlacement] | None = None, gpus: int = 0, *overrides: str, **changes: Any
) -> Projection:
    return project(recipe(*overrides), VOCAB_SIZE, fabric(**changes), curves(), placements or {}, gpus)


def test_every_stage_has_the_fastest_layout_of_its_gpus() -> None:
    result = projection()
    assert [(segment.stage, segment.best.world) for segment in result.segments] == [("main", 64), ("long", 32)]
    for segment in result.segments:
        assert segment.search is not None
        assert segment.best == segment.search.fitting[0]
        assert segment.seconds == pytest.approx(segment.segment.steps * segment.best.time.total)
        work = flops_per_token(result.recipe.model, VOCAB_SIZE, segment.segment.seq_len).causal * segment.segment.batch
        assert segment.mfu == pytest.approx(work / segment.best.world / segment.best.time.total / 989e12)


def test_the_main_part_is_the_one_with_most_gpu_hours() -> None:
    result = projection()
    hours = {segment.stage: segment.seconds * segment.best.world for segment in result.segments}
    assert result.main.stage == max(hours, key=lambda name: hours[name]) == "main"


def test_stages_may_be_named_or_their_parts_which_come_first() -> None:
    stage = "{name: long, for: 32Mi, seq_len: [8192, 16384], batch: 1Mi, mix: base, gates: [short-context]}"
    gated = f"stages=[{{name: main, until: 64Mi, seq_len: 4096, batch: 1Mi, mix: base}}, {stage}]"
    result = projected({"long": StagePlacement(32), "long-16384": StagePlacement(16)}, 64, gated)
    assert [(segment.stage, segment.best.world) for segment in result.segments] == [
        ("main", 64),
        ("long-8192", 32),
        ("long-16384", 16),
    ]


def test_lengths_that_are_trained_in_one_go_share_a_layout() -> None:
    both = "stages=[{name: main, until: 64Mi, seq_len: [4096, 16384], batch: 1Mi, mix: base}]"
    short, long = projected(None, 32, both).segments
    assert (short.segment.seq_len, long.segment.seq_len) == (4096, 16384)
    assert short.best.layout == long.best.layout
    assert short.best.load.micro_batch == long.best.load.micro_batch
    assert [short.search is None, long.search is None].count(False) == 1
    assert min(short.best.margin, long.best.margin) >= 0


def test_lengths_that_share_a_layout_take_the_one_with_the_least_time_for_all() -> None:
    stage = "stages=[{name: main, until: 64Mi, seq_len: [2048, 16384], batch: 1Mi, mix: base}]"
    short, _ = projected(None, 16, stage, accelerator=TINY).segments
    assert short.search is not None
    spent = []
    for candidate in short.search.fitting[:12]:
        placement = {"main": StagePlacement(16, candidate.layout, candidate.load.micro_batch)}
        segments = projected(placement, 0, stage, accelerator=TINY).segments
        spent.append(sum(segment.seconds for segment in segments))
        steps = sum(segment.segment.steps for segment in segments)
        assert candidate.mean_step_s == pytest.approx(spent[-1] / steps)
    assert spent[0] <= 1.01 * min(spent)
    assert spent[1:] == sorted(spent[1:])


@pytest.mark.parametrize("gpus", [8, 16])
def test_a_layout_is_found_that_needs_more_recomputation_for_the_longest_sequences(gpus: int) -> None:
    """With the first entry of the ladder that fits 16Ki, 128Ki does not fit."""
    stage = "{name: long, until: 64Gi, seq_len: [16384, 131072], batch: 8Mi, mix: base}"
    eight = load_recipe(Path("recipes/llama3-8b.yaml"), [f"stages=[{stage}]", "evaluate.after=[]"])
    lengths = project(eight, VOCAB_SIZE, load_fabric("roce-24k"), curves(), {}, gpus).segments
    assert [segment.segment.seq_len for segment in lengths] == [16384, 131072]
    assert lengths[0].best.layout == lengths[1].best.layout
    assert all(segment.best.memory.total <= 0.9 * 80e9 for segment in lengths)
    assert min(segment.best.tflops for segment in lengths) > 300


def test_of_layouts_that_are_as_fast_the_largest_micro_batch_is_proposed() -> None:
    """The smallest is a little faster by arithmetic, which does not count launches: 64 micro-batches in 0.18 s."""
    small = load_recipe(Path("recipes/gpt2-24gb.yaml"))
    segment = project(small, 50_304, load_fabric("h100x8"), curves(), {}).main
    assert segment.best.load.micro_batch * segment.segment.seq_len == 8192
    assert segment.search is not None
    assert segment.best == segment.search.fitting[0]
    fastest = min(candidate.time.total for candidate in segment.search.fitting)
    assert segment.best.time.total <= 1.01 * fastest
    assert segment.best.memory.total <= 0.9 * 80e9


def test_a_given_layout_is_judged_and_nothing_is_searched() -> None:
    layout = Layout(tp=2, cp=2, recompute="full")
    result = projected({name: StagePlacement(16, layout, 2) for name in ("main", "long")})
    assert [segment.best.layout for segment in result.segments] == [layout, layout]
    assert [segment.best.load.micro_batch for segment in result.segments] == [2, 2]
    assert [segment.search for segment in result.segments] == [None, None]


def test_without_a_wish_as_many_gpus_are_taken_as_can_work() -> None:
    assert [segment.best.world for segment in projected().segments] == [64, 64]
    few = "stages=[{name: main, until: 64Mi, seq_len: 4096, batch: 8Ki, mix: base}]"
    best = projected(None, 0, few, "model.kv_heads=2", "model.tied_embeddings=true").segments[0].best
    assert (best.world, best.layout.tp, best.dp) == (4, 2, 2)  # two sequences of a step, two heads of keys, no pipeline


def test_the_most_gpus_follow_from_sequences_of_the_smallest_step() -> None:
    spans = Schedule(recipe()).trained
    assert [max_gpus(fabric(), span, 64) for span in spans] == [64, 64]
    tiny = Schedule(recipe("stages=[{name: main, until: 64Mi, seq_len: 4096, batch: 4Ki, mix: base}]")).trained[0]
    large = fabric(tiers=[{"name": "cluster", "gpus": 4096}])
    assert max_gpus(large, tiny, large.gpus) == 8 * 16  # one sequence: a server by 16 ranks of a pipeline


def test_a_layout_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(
        ValueError, match=r"main: tp 1 x cp 1 x pp 1 x dp 16.* does not fit: [0-9.]+ GB of 7\.5: "
    ) as raised:
        projected({name: StagePlacement(16, Layout()) for name in ("main", "long")}, accelerator=TINY)
    remedy = str(raised.value).rsplit("; ", 1)[1]
    assert remedy.startswith("tp ")
    assert float(remedy.rsplit(" ", 1)[1]) <= 7.5  # GB that it needs
    assert "micro-batch 1 would, with" in remedy


def test_what_fits_nowhere_names_the_smallest_number_of_gpus_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"main: no layout of 1 GPU fits sequences of 4,096 \(memory: ") as raised:
        projected(None, 1, accelerator=TINY)
    enough = int(str(raised.value).rsplit("; ", 1)[1].split()[0])
    assert 1 < enough <= 64
    query = layout_query(memory_bytes=8e9, world=1)
    assert nearest_gpus(query, fabric(accelerator=TINY), curves()) == [enough]
    assert nearest_gpus(replace(query, world=64), fabric(accelerator=TINY), curves()) == [32]
    projected(
        None, enough, "stages=[{name: main, until: 64Mi, seq_len: 4096, batch: 1Mi, mix: base}]", accelerator=TINY
    )
    with pytest.raises(ValueError, match="no layout of"):
        projected(None, enough // 2, accelerator=TINY)


def test_what_no_size_of_the_cluster_fits_says_so() -> None:
    with pytest.raises(ValueError, match=r"no layout of 64 GPUs .*; no number of GPUs of small would do; take a"):
        projected(None, 64, accelerator={**TINY, "memory_gb": 0.1})


def test_without_a_number_the_error_names_the_gpus_of_the_cluster() -> None:
    """All halves of the cluster are tried first; the last of them, 1 GPU, is not what the user has."""
    tiers = [{"name": "cluster", "gpus": 8}]
    with pytest.raises(ValueError, match=r"main: no layout of 8 GPUs fits .*; no number of GPUs of small would do"):
        projected(accelerator={**TINY, "memory_gb": 0.1}, tiers=tiers)


def test_lengths_that_no_layout_serves_may_get_their_own() -> None:
    stage = "stages=[{name: main, until: 64Mi, seq_len: [4096, 16384], batch: 1Mi, mix: base}]"
    pattern = (
        r"no layout of 2 GPUs fits sequences of 4,096 to 16,384 \(memory: .*; or let the stage advance from length"
    )
    with pytest.raises(ValueError, match=pattern):
        projected(None, 2, stage, accelerator=TINY)


def test_more_gpus_than_the_cluster_has_are_refused() -> None:
    for placements, gpus in [({}, 65), ({"long": StagePlacement(128)}, 0)]:
        most = max(gpus, *(placement.gpus for placement in placements.values()), 0)
        with pytest.raises(ValueError, match=f"gpus: {most} are more than the 64 of small; ask for fewer"):
            projected(placements, gpus)


def test_gpus_that_no_layout_divides_are_told_with_the_reason() -> None:
    """37 GPUs are a prime number of replicas, or of pipeline ranks."""
    with pytest.raises(
        ValueError, match=r"main: no layout of 37 GPUs fits .*37 must divide them.*; 32 or 64 GPUs would do"
    ):
        projected(None, 37)


def test_the_search_result_knows_what_was_asked() -> None:
    segment = projection().segments[0]
    assert isinstance(segment.search, SearchResult)
    assert (segment.search.query.world, segment.search.query.seq_len) == (64, 4096)
    assert segment.search.query.config.layers == SMALL["layers"]


def test_a_proposal_leaves_a_tenth_of_the_memory_free() -> None:
    """On a GPU that the fastest layout would fill to 92 %, which `herd run` allows, another one is proposed."""
    fastest = projection().segments[0].best
    memory_gb = fastest.memory.total / 0.92 / 1e9
    result = projected({"long": StagePlacement(32)}, accelerator={**TINY, "memory_gb": memory_gb})
    assert (result.segments[0].best.layout, result.segments[0].best.load) != (fastest.layout, fastest.load)
    assert all(segment.best.memory.total <= 0.9 * memory_gb * 1e9 for segment in result.segments)
