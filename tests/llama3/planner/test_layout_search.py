from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import RankMemory, memory
from herd.llama3.planner.layout_search import (
    LADDER,
    MICRO_BATCHES,
    LayoutQuery,
    SearchResult,
    enumerate_layouts,
    evaluate_layout,
    memory_error,
    search_layouts,
    split_micro_batches,
)
from herd.llama3.train.train_step import largest_divisor
from tests.llama3.planner.plan_samples import VOCAB_SIZE, config, layout_query, step_model


def needs(query: LayoutQuery, layout: Layout, load: Any) -> RankMemory:
    """Return the memory of the fullest process of all pipeline ranks."""
    return max(memory(query.config, query.vocab_size, layout, query.world, load), key=lambda need: need.total)


def tight(**changes: Any) -> tuple[LayoutQuery, SearchResult]:
    query = layout_query(**{"memory_bytes": 8e9, **changes})
    return query, search_layouts(query, step_model())


@settings(max_examples=6)
@given(st.sampled_from([4e9, 6e9, 8e9, 80e9]), st.sampled_from([4, 12, 16, 64]), st.sampled_from([2048, 16384]))
def test_what_is_found_can_be_trained_and_fits(memory_bytes: float, world: int, seq_len: int) -> None:
    query = layout_query(memory_bytes=memory_bytes, world=world, seq_len=seq_len)
    result = search_layouts(query, step_model())
    for candidate in result.fitting:
        candidate.layout.check(query.config, query.vocab_size, query.world)
        candidate.layout.check_sequence(query.seq_len)
        assert candidate.dp * candidate.load.micro_batch * candidate.load.micro_batches * query.seq_len == query.batch
        assert candidate.memory.total <= query.limit
        assert candidate.margin == pytest.approx(query.limit - candidate.memory.total)
    for candidate in result.fitting[:20]:
        assert needs(query, candidate.layout, candidate.load) == candidate.memory
    assert [candidate.time.total for candidate in result.fitting] == sorted(
        candidate.time.total for candidate in result.fitting
    )


def test_the_fullest_rank_is_found_though_layers_do_not_divide() -> None:
    """Ranks in the middle get the layers that are left over: a search that looks at the ends alone misses them."""
    shape = {"layers": 20, "dim": 4096, "ffn": 14336, "heads": 32}
    query = layout_query(config=config(**shape), world=48, batch=48 * 4096, memory_bytes=30e9)
    deep = [candidate for candidate in search_layouts(query, step_model(**shape)).fitting if candidate.layout.pp > 2]
    assert {candidate.layout.pp for candidate in deep} == {3, 4, 6, 8, 12, 16}
    assert {candidate.memory.pipeline_rank for candidate in deep} >= {0, 1}
    for candidate in deep:
        assert candidate.memory.total == needs(query, candidate.layout, candidate.load).total


def test_every_layout_that_was_looked_at_either_fits_or_has_a_reason_with_numbers() -> None:
    query, result = tight(world=24, memory_bytes=6e9)
    tried = {(cut.tp, cut.cp, cut.pp, size) for cut, size in enumerate_layouts(query)}
    fitting = {
        (candidate.layout.tp, candidate.layout.cp, candidate.layout.pp, candidate.load.micro_batch)
        for candidate in result.fitting
    }
    refused = {
        (candidate.layout.tp, candidate.layout.cp, candidate.layout.pp, candidate.micro_batch)
        for candidate in result.rejected
    }
    assert fitting | refused == tried
    assert result.considered == len(result.fitting) + len(result.rejected) >= len(tried)
    assert fitting
    assert refused
    assert all(any(letter.isdigit() for letter in candidate.why) for candidate in result.rejected)
    assert {candidate.why.split(":")[0] for candidate in result.rejected} >= {"batch", "memory"}


def test_what_lacks_memory_says_how_much_in_gb_by_component() -> None:
    query, result = tight(memory_bytes=5e9)
    model, lacking = step_model(), [candidate for candidate in result.rejected if candidate.needs]
    assert lacking
    for candidate in lacking:
        assert candidate.needs > query.limit
        assert candidate.why.startswith(f"memory: {candidate.needs / 1e9:.1f} GB of {query.limit / 1e9:.1f}: ")
        components = [component.split() for component in candidate.why.rsplit(": ", 1)[1].split(", ")]
        assert {name for name, _ in components} == {"activations", "weights", "gradients", "optimizer", "temporary"}
        sizes = [float(size) for _, size in components]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) == pytest.approx(candidate.needs / 1e9, abs=0.3)
        zero, recompute = LADDER[-1]
        sparing = candidate.layout.model_copy(update={"zero": zero, "recompute": recompute})
        load = evaluate_layout(query, sparing, candidate.micro_batch, model).load
        assert needs(query, sparing, load).total > query.limit  # even so it does not fit


def test_the_least_costly_memory_saving_that_fits_is_taken() -> None:
    """Each fitting layout takes the first rung of the ladder on which it fits; the rungs before do not."""
    query, result = tight(memory_bytes=7e9)
    rungs = {(candidate.layout.zero, candidate.layout.recompute) for candidate in result.fitting}
    assert len(rungs) > 2
    for candidate in result.fitting:
        for zero, recompute in LADDER[: LADDER.index((candidate.layout.zero, candidate.layout.recompute))]:
            tried = candidate.layout.model_copy(update={"zero": zero, "recompute": recompute})
            assert needs(query, tried, candidate.load).total > query.limit


def test_less_memory_never_fits_more_nor_faster() -> None:
    results = [search_layouts(layout_query(memory_bytes=size), step_model()) for size in (80e9, 40e9, 7e9, 6.5e9, 1e9)]
    for more, less in pairwise(results):
        assert len(less.fitting) <= len(more.fitting)
        assert less.considered == more.considered
    fastest = [result.fitting[0].time.total for result in results if result.fitting]
    assert fastest == sorted(fastest)
    assert results[-1].fitting == []


def test_a_tied_model_is_not_cut_by_a_pipeline_and_heads_bound_tensor_parallelism() -> None:
    query = layout_query(config=config(tied_embeddings=True, kv_heads=2))
    result = search_layouts(query, step_model(tied_embeddings=True, kv_heads=2))
    assert {(candidate.layout.pp, candidate.layout.tp) for candidate in result.fitting} == {(1, 1), (1, 2)}
    reasons = "\n".join(candidate.why for candidate in result.rejected)
    assert "4 does not divide kv_heads 2; use one of 1, 2" in reasons
    assert "set model.tied_embeddings: false" in reasons


def test_speed_counts_causal_work_over_time() -> None:
    query, result = tight(memory_bytes=80e9)
    best = result.fitting[0]
    work = flops_per_token(config(), VOCAB_SIZE, query.seq_len).causal * query.batch
    assert best.tflops * 1e12 * query.world * best.time.total == pytest.approx(work)
    assert evaluate_layout(query, best.layout, best.load.micro_batch, step_model()) == best


def test_a_given_layout_that_cannot_be_cut_so_is_refused() -> None:
    for layout, changes, message in [
        ({"tp": 3}, {"world": 3}, "tp: 3 does not divide heads 16.*use one of 1, 2, 4, 8"),
        ({"pp": 3}, {}, "tp 1 x cp 1 x pp 3 = 3 does not divide 32 processes; start 33"),
        ({"pp": 16}, {}, "16 x vpp 1 stages are too many for 6 layers"),
        ({"cp": 4, "tp": 8}, {"seq_len": 4112, "batch": 4112 * 256}, "sequence 4112 does not split into 64 pieces"),
        ({}, {"batch": 4096 * 24}, "batch: 24 sequences do not split over dp 32.*32 must divide them"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate_layout(layout_query(**changes), Layout(**layout), 1, step_model())


def test_a_given_layout_that_does_not_fit_is_judged_with_what_it_lacks() -> None:
    result = evaluate_layout(layout_query(memory_bytes=5e9), Layout(), 1, step_model())
    assert result.margin < 0
    assert memory_error(result.memory, layout_query(memory_bytes=5e9).limit).startswith(
        f"{result.memory.total / 1e9:.1f} GB of 4.7: "
    )


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 2]))
def test_sequences_are_dealt_as_the_engine_deals_them(sequences: int, most: int, pp: int) -> None:
    size, count = split_micro_batches(Layout(pp=pp), sequences, most)
    assert size <= most
    assert (count - 1) * size < sequences <= count * size
    if pp > 1:
        assert size == largest_divisor(sequences, most)


def test_a_micro_batch_is_no_more_than_there_is() -> None:
    """`herd run` takes a larger one, so that one file serves a batch that grows."""
    result = evaluate_layout(layout_query(), Layout(), 16, step_model())
    assert (result.load.micro_batch, result.load.micro_batches) == (8, 1)
    assert set(MICRO_BATCHES) >= {1, 2}
