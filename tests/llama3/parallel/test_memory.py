"""The memory table against what the parts hold: weights on the meta device, activations alive under fake tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.flops import parameter_count
from herd.llama3.model.param_table import layer_params
from herd.llama3.parallel.layout import TABLE_4, Layout, Published
from herd.llama3.parallel.memory import (
    Load,
    RankCoords,
    RankMemory,
    average_bytes,
    layer_activations,
    memory,
    stage_activations,
    stages,
)
from herd.llama3.parallel.pipeline_schedule import actions, in_flight
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.sections import Model
from herd.llama3.train.state import Precision, TrainState
from tests.dist import run
from tests.llama3.parallel.scale_samples import (
    OPTIONAL,
    VALUES,
    VOCAB_SIZE,
    all_held,
    local_parameters,
    names_and_shapes,
    shape,
)
from tests.llama3.train import train_samples
from tests.llama3.train.checkpoint_samples import ALONE

PAPER = Model.model_validate({"preset": "405b"})
GIB = 2**30


def load(**changes: Any) -> Load:
    return Load(**{"seq_len": 128, "micro_batches": 3, "device": "cpu", **changes})


Case = tuple[dict[str, Any], int, int, Load]
MIDDLE: Case = ({"pp": 3, "tp": 4}, 12, 4, load())
FEW: list[Case] = [
    ({}, 2, 0, load()),
    ({"cp": 2, "tp": 2}, 8, 0, load(micro_batch=3)),
    ({"recompute": "full"}, 2, 0, load()),
    ({"pp": 3, "tp": 2}, 12, 0, load(exact=True)),
    MIDDLE,
]
MORE: list[Case] = [
    ({}, 2, 0, load(micro_batch=2)),
    ({"tp": 2}, 2, 0, load()),
    ({"tp": 4}, 8, 0, load(precision="fp32")),
    ({"recompute": "selective", "cp": 2, "tp": 2}, 4, 0, load()),
    ({"pp": 3, "tp": 2}, 12, 2, load()),
    ({"pp": 3, "tp": 2}, 12, 4, load()),
    ({}, 2, 0, load(precision="fp64")),
    ({"pp": 3, "cp": 4, "tp": 2}, 24, 8, load()),
    ({"pp": 3, "recompute": "selective"}, 6, 1, load(micro_batch=2)),
]


def expected(config: Model, case: Case) -> tuple[int, RankMemory]:
    """Return what a stage keeps of a micro-batch, and the whole table."""
    layout, world, rank, work = case
    place = RankCoords.from_rank(rank, Layout(**layout))
    (stage,) = stages(config, Layout(**layout), place.pp)
    kept = stage_activations(config, VOCAB_SIZE, Layout(**layout), work, stage)
    return kept, memory(config, VOCAB_SIZE, Layout(**layout), world, work)[place.pp]


@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.slow
def test_the_table_is_what_a_step_holds(cases: list[Case]) -> None:
    """To the byte: what a forward pass keeps, and what stays between micro-batches. The peak with some room."""
    check(shape(), cases)


@pytest.mark.parametrize("field", OPTIONAL)
def test_the_table_knows_every_field_of_a_model(field: str) -> None:
    check(shape(layers=1, **{field: VALUES[field]}), [({"tp": 2}, 2, 0, load())])


def check(config: Model, cases: list[Case]) -> None:
    (measured,) = run(1, all_held, [(config, *case) for case in cases])
    for case, found in zip(cases, measured, strict=True):
        kept, need = expected(config, case)
        assert found["kept"] == kept, case
        assert found["steady"] == need.gathered + need.gradients, case
        foreseen = kept + need.passing
        assert 0.65 * foreseen < found["peak"] <= foreseen, case  # a third is the coarse loss of tiny shapes


def test_a_stage_keeps_nothing_of_what_it_sent() -> None:
    """Three of one layer each: the middle one keeps that layer, the rotary table and one number."""
    layout, work = Layout(pp=3, tp=4), MIDDLE[3]
    layer = layer_activations(shape(), layout, work, "none")
    assert expected(shape(), MIDDLE)[0] == layer + work.seq_len * 8 * work.wide + 2


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "vpp": 2}, {"dp_replicate": 2}], ids=str
)
@pytest.mark.slow
def test_every_rank_holds_the_parameters_that_arithmetic_gives_it(layout: dict[str, int]) -> None:
    cut, world = Layout(**layout), 8
    (ranks,) = run(1, names_and_shapes, layout, world)
    for rank, found in enumerate(ranks):
        parts = stages(shape(), cut, RankCoords.from_rank(rank, cut).pp)
        assert {name: whole for name, (whole, _) in found.items()} == {
            param.name: param.shape for part in parts for param in part.params(shape(), VOCAB_SIZE)
        }
        assert sum(prod(shard) for _, shard in found.values()) == local_parameters(
            shape(), VOCAB_SIZE, cut, world, rank
        )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Model, Layout, int]:
    """A model, a layout that fits it and a world."""
    config = shape(layers=draw(st.integers(2, 6)), dim=32 * draw(st.integers(1, 4)), ffn=8 * draw(st.integers(1, 30)))
    pp = draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    replicas = draw(st.sampled_from([1, 2]))
    numbers = {"tp": draw(st.sampled_from([1, 2, 4])), "cp": draw(st.sampled_from([1, 2])), "pp": pp}
    layout = Layout(**numbers, vpp=vpp, dp_replicate=replicas)
    return config, layout, layout.model_parallel * replicas * draw(st.integers(1, 3))


@given(layouts())
def test_all_ranks_together_hold_every_parameter(case: tuple[Model, Layout, int]) -> None:
    config, layout, world = case
    held = sum(local_parameters(config, VOCAB_SIZE, layout, world, rank) for rank in range(world))
    norms = config.dim * (2 * config.layers + 1)
    assert held == layout.dp_replicate * (parameter_count(config, VOCAB_SIZE) + (layout.tp - 1) * norms)


@given(layouts(), st.sampled_from(["none", "selective", "full"]), st.integers(1, 4))
def test_more_processes_never_need_more_memory_each(
    case: tuple[Model, Layout, int], recompute: Any, micro_batches: int
) -> None:
    _, layout, _ = case
    config = shape(layers=6, dim=128, ffn=256)  # powers of two: padding of uneven shards may cost a little
    layout = layout.model_copy(update={"recompute": recompute, "dp_replicate": 1})
    work = load(micro_batches=micro_batches)
    base, wider = layout.model_parallel, layout.model_copy(update={"tp": 2 * layout.tp})

    def fullest(layout: Layout, world: int) -> int:
        return max(need.total for need in memory(config, VOCAB_SIZE, layout, world, work))

    assert fullest(layout, 2 * base) <= fullest(layout, base) or base == 1  # a process alone gathers nothing
    assert fullest(layout, 4 * base) <= fullest(layout, 2 * base)
    if wider.tp <= config.kv_heads:
        assert fullest(wider, 4 * base) <= fullest(layout, 2 * base)


@given(layouts(), st.booleans())
def test_recomputation_keeps_less(case: tuple[Model, Layout, int], compiled: bool) -> None:
    config, layout, _ = case
    layout = layout.model_copy(update={"compile": compiled})
    kept = [layer_activations(config, layout, load(device="cuda"), how) for how in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2]


@given(layouts(), st.sampled_from(["none", "selective", "full"]))
def test_tensor_parallelism_cuts_all_that_a_layer_keeps(case: tuple[Model, Layout, int], how: str) -> None:
    """No gathered input is kept, which would be the same for any size of it; a compiled layer keeps them."""
    config, layout, _ = case
    work = load(device="cuda")
    for compiled in (False, True) if how == "none" else (False,):
        kept = [
            tp * layer_activations(config, layout.model_copy(update={"tp": tp, "compile": compiled}), work, how)
            for tp in (1, 2, 4)
        ]
        assert (kept[0] == kept[1] == kept[2]) != compiled


@given(layouts(), st.sampled_from(["none", "selective", "full"]))
def test_context_parallelism_keeps_nothing_of_its_peers(case: tuple[Model, Layout, int], how: str) -> None:
    """Twice the processes with twice the sequence keep the same each; a compiled layer keeps all keys and values."""
    config, layout, _ = case
    for compiled in (False, True) if how == "none" else (False,):
        kept = [
            layer_activations(
                config,
                layout.model_copy(update={"cp": cp, "compile": compiled}),
                load(device="cuda", seq_len=64 * cp),
                how,
            )
            for cp in (1, 2, 4)
        ]
        assert (kept[0] == kept[1] == kept[2]) != compiled


def test_zero_3_gathers_two_layers_at_a_time() -> None:
    work = Load(8192, 1, 16)
    two, three = (memory(PAPER, 128_256, Layout(tp=8, zero=zero), 1_024, work)[0] for zero in (2, 3))
    assert two.gathered - three.gathered == 796_983_296 * (126 - 2)


def test_the_405b_needs_what_its_shape_says() -> None:
    need = memory(PAPER, 128_256, Layout(tp=8, pp=16), 16_384, Load(8192, 1, 16))
    assert need[1].gathered == 8 * 796_983_296  # 5.9 GiB of bf16 weights, as measured once (torch.md, section 4)
    assert need[1].gradients == 8 * 1_593_966_592
    assert need[1].in_flight == 15
    assert 35 < need[1].activations / GIB < 45
    full = memory(PAPER, 128_256, Layout(tp=8, pp=16, recompute="full"), 16_384, Load(8192, 1, 16))
    assert full[1].total / GIB < 40


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: f"{row.world} x {row.seq_len}")
@pytest.mark.parametrize("cut", [{}, {"vpp": 8}], ids=str)
def test_the_405b_fits_80_gb_without_recomputation_as_published(row: Published, cut: dict[str, int]) -> None:
    """Section 3.3.2 says so; what autograd and compiled blocks keep would not fit."""
    layout, work = row.layout.model_copy(update=cut), Load(row.seq_len, 1, row.sequences)
    fullest, compiled = (
        max(need.total for need in memory(PAPER, 128_256, one, row.world, work))
        for one in (layout, layout.model_copy(update={"compile": True}))
    )
    assert fullest < 74e9
    assert compiled > 140e9


@given(layouts(), st.integers(1, 9))
def test_ranks_that_are_asked_for_are_those_of_all(case: tuple[Model, Layout, int], micro_batches: int) -> None:
    config, layout, world = case
    work = load(micro_batches=micro_batches)
    every = memory(config, VOCAB_SIZE, layout, world, work)
    assert memory(config, VOCAB_SIZE, layout, world, work, [layout.pp - 1, 0]) == [every[-1], every[0]]
    lists = actions(layout.schedule, layout.pp, layout.vpp, micro_batches, layout.microbatch_group_size)
    assert [need.in_flight for need in every] == in_flight(lists)


def test_a_process_alone_needs_weights_moments_and_gradients_in_fp32() -> None:
    (need,) = memory(shape(), VOCAB_SIZE, Layout(), 1, load(precision="fp32", micro_batches=1))
    count = 4 * parameter_count(shape(), VOCAB_SIZE)
    assert (need.master, need.moments, need.sharded_gradients, need.gathered) == (count, 2 * count, count, 0)
    assert need.total == 3 * count + max(need.activations + need.passing, count + need.temporaries)
    (need,) = memory(shape(), VOCAB_SIZE, Layout(), 1, load(precision="fp32", micro_batches=2))
    assert need.total == 4 * count + need.activations + need.passing
    (few,) = memory(shape(), VOCAB_SIZE, Layout(), 1, Load(8, precision="fp32"))
    assert few.activations + few.passing < count
    assert few.total == 4 * count + few.temporaries + few.reduction


def test_float8_weights_are_kept_in_both_layouts_over_several_micro_batches() -> None:
    def gathered(precision: str, micro_batches: int, zero: int = 2, meshed: bool = True) -> int:
        work = load(precision=precision, micro_batches=micro_batches)
        return memory(shape(), VOCAB_SIZE, Layout(zero=zero), 1, work, meshed=meshed)[0].gathered

    layers = sum(prod(param.shape) for param in layer_params(shape())) * shape().layers
    assert gathered("fp8", 1) == gathered("bf16", 1)
    assert gathered("fp8", 2) == gathered("bf16", 2) + 2 * layers
    assert gathered("fp8", 2, zero=3) == gathered("bf16", 2, zero=3)
    assert gathered("fp8", 1, meshed=False) == 0
    assert gathered("fp8", 2, meshed=False) == 2 * layers


@pytest.mark.parametrize(
    ("rule", "steps", "terms"),
    [
        ("last 3", 9, 3),
        ("last 2000", 9, 9),
        ("polyak", 1023, 1023),
        ("polyak", 1024, 1024),
        ("last 1024", 1024, 1024),
        ("ema 0.9", 1024, 1),
    ],
)
def test_an_average_and_a_save_are_those_of_the_trainer(rule: str, steps: int, terms: int) -> None:
    stage = {**train_samples.stages(steps)[0], "weight_averaging": rule}
    recipe = train_samples.recipe(precision="fp32", stages=[stage])
    (segment,) = Schedule(recipe).segments
    state = TrainState(recipe, VOCAB_SIZE, Precision(torch.float32), ALONE, 0)
    state.make_average(terms)
    work = Load(segment.seq_len, precision="fp32", average=average_bytes(recipe, segment))
    (need,), (plain,) = (
        memory(recipe.model, VOCAB_SIZE, Layout(), 1, one) for one in (work, Load(16, precision="fp32"))
    )
    assert need.average == need.total - plain.total == sum(total.nbytes for total in state.sum.values())
    assert need.saved == sum(tensor.nbytes for name, tensor in state.tensors().items() if not name.endswith(".step"))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="tp: 3 does not divide"):
        memory(shape(), VOCAB_SIZE, Layout(tp=3), 3, load())
    with pytest.raises(ValueError, match="sequence 100 does not split"):
        memory(shape(), VOCAB_SIZE, Layout(cp=4), 4, load(seq_len=100))
