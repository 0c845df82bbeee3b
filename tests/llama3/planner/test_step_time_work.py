from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.planner.device_curves import BACKWARD
from herd.llama3.planner.step_time import (
    LayerSeconds,
    LayerWork,
    compute_seconds,
    embedding_work,
    head_work,
    layer_work,
)
from tests.llama3.planner.plan_samples import VOCAB_SIZE, config, curves

layouts = st.builds(lambda tp, cp: Layout(tp=tp, cp=cp), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
loads = st.builds(lambda seq_len, size: Load(seq_len, size), st.sampled_from([2048, 8192]), st.integers(1, 4))


def products(work: LayerWork) -> float:
    return sum(2.0 * rows * inner * columns for rows, inner, columns in work.products)


@given(layouts, loads)
def test_all_gpus_together_do_the_models_work_and_no_more(layout: Layout, load: Load) -> None:
    """Three times the forward products and attention are 6N and 6 L S D, which another module counts."""
    shape = config()
    layer, head = layer_work(shape, layout, load), head_work(shape, VOCAB_SIZE, layout, load)
    gpus, tokens = layout.tp * layout.cp, load.seq_len * load.micro_batch
    flops = flops_per_token(shape, VOCAB_SIZE, load.seq_len)
    assert 3 * gpus * (shape.layers * products(layer) + products(head)) == pytest.approx(flops.six_n * tokens)
    attended = 3 * gpus * shape.layers * layer.attention
    assert attended == pytest.approx((flops.causal - flops.six_n) * tokens)
    assert layer.seq_len == load.seq_len  # a part of a sequence attends over all of it


@given(layouts, loads)
def test_twice_the_tokens_are_twice_the_work(layout: Layout, load: Load) -> None:
    twice = replace(load, micro_batch=2 * load.micro_batch)
    pairs = [
        (layer_work(config(), layout, load), layer_work(config(), layout, twice)),
        (head_work(config(), VOCAB_SIZE, layout, load), head_work(config(), VOCAB_SIZE, layout, twice)),
        (embedding_work(config(), layout, load), embedding_work(config(), layout, twice)),
    ]
    for one, two in pairs:
        assert products(two) == 2 * products(one)
        assert two.attention == 2 * one.attention
        assert two.moved == pytest.approx(2 * one.moved)


def test_forward_and_backward_are_priced_by_the_curves() -> None:
    work = layer_work(config(), Layout(tp=2), Load(4096))
    found, priced = compute_seconds(work, curves(), "none", again=False), curves()
    assert found.gemm == pytest.approx(3 * sum(priced.gemm.seconds(*shape) for shape in work.products))
    forward = priced.attention.seconds(work.attention, 4096, False)
    assert found.attention == pytest.approx((1 + BACKWARD) * forward)
    assert found.elementwise == pytest.approx(3 * priced.memory.seconds(work.moved))
    assert found.recompute == 0
    assert found.total == pytest.approx(found.gemm + found.attention + found.elementwise)


def test_more_recomputation_takes_longer_and_full_makes_all_but_the_last_product_again() -> None:
    work = layer_work(config(), Layout(), Load(4096))
    none, selective, full = (compute_seconds(work, curves(), kind) for kind in ("none", "selective", "full"))
    assert 0 < none.recompute < selective.recompute < full.recompute
    *first, _ = (curves().gemm.seconds(*shape) for shape in work.products)
    forward = curves().attention.seconds(work.attention, 4096, False)
    assert full.recompute == pytest.approx(sum(first) + forward + curves().memory.seconds(work.moved))
    assert selective.recompute == pytest.approx(first[2] + curves().memory.seconds(work.moved))
    assert replace(full, recompute=0.0) == replace(none, recompute=0.0)


def test_an_unknown_way_to_recompute_is_no_silent_zero() -> None:
    with pytest.raises(KeyError, match="some"):
        compute_seconds(LayerWork(), curves(), "some")


def test_the_total_counts_every_component() -> None:
    assert LayerSeconds(1, 2, 4, 8, 16, 32).total == 63
    assert compute_seconds(LayerWork(), curves(), "full") == LayerSeconds()
