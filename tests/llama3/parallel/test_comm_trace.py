"""What the engine sends is what theory says, for tiny shapes and for two layers of the 405B on 1,024 ranks."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from math import prod
from typing import Any

import pytest

from herd.llama3.model.param_table import layer_params
from herd.llama3.parallel.comm_records import RankTrace, StageTrace, transfers
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, shard_elements, stages
from herd.llama3.parallel.pipeline_schedule import actions
from herd.llama3.recipe.sections import Model
from tests.dist import run
from tests.llama3.parallel.scale_samples import VOCAB_SIZE, shape, traced

LARGE = Model.model_validate({"preset": "405b", "layers": 2})
LOAD = Load(seq_len=128, micro_batch=2, micro_batches=3)
PAPER = Load(seq_len=8192, micro_batch=1, micro_batches=16)


Case = tuple[int, int, Load, tuple[tuple[str, Any], ...]]
"""World, rank, load and layout."""


def case(world: int, rank: int = 0, load: Load = LOAD, **layout: Any) -> Case:
    return world, rank, load, tuple(layout.items())


CONFIG = shape(layers=2)
PLAIN, CUT, PIPED = case(8, tp=2), case(24, 5, tp=4, cp=2), case(24, 3, tp=2, pp=3)
REPLICAS = case(8, tp=2, dp_replicate=2)
SELECTIVE, FULL = case(8, tp=2, recompute="selective"), case(8, tp=2, recompute="full")
CONTEXT, ZERO_3 = case(4, cp=2), case(4, zero=3)
FP32, EXACT = case(2, load=Load(seq_len=64, precision="fp32")), case(4, load=Load(seq_len=64, exact=True))
STAGES = case(8, 2, pp=2, vpp=2, tp=2)  # pipeline rank 1 of dp 0
ONLY_TP = case(2, load=Load(seq_len=64), tp=2)
TINY = [PLAIN, CUT, PIPED, REPLICAS, ZERO_3, STAGES]
MORE = [SELECTIVE, FULL, CONTEXT, FP32, EXACT, ONLY_TP]
"""Only slow tests read them."""


@cache
def traced_together(cases: tuple[Case, ...]) -> dict[Case, RankTrace]:
    """Trace cases in one process: most of the time of a case is what the first one imports."""
    return dict(zip(cases, several(CONFIG, VOCAB_SIZE, list(cases)), strict=True))


def tiny_trace(case: Case) -> RankTrace:
    return traced_together(tuple(TINY if case in TINY else MORE))[case]


@cache
def paper() -> StageTrace:
    (found,) = several(LARGE, 128_256, [case(1024, 500, PAPER, tp=8)])
    return found.stages[0]


def several(config: Model, vocab_size: int, cases: list[Case]) -> list[RankTrace]:
    requests = [(dict(layout), world, rank, load) for world, rank, load, layout in cases]
    (texts,) = run(1, traced, config, vocab_size, requests)
    return [RankTrace.from_json(text) for text in texts]


def only(wanted: Case) -> StageTrace:
    (stage,) = tiny_trace(wanted).stages
    return stage


def sent(stage: StageTrace, axis: str, **wanted: str) -> dict[tuple[str, str, str, int, str], float]:
    """Return count per layer by (when, phase, kind, bytes, dtype)."""
    found = [c for c in stage.per_layer() if c.axis == axis and all(getattr(c, k) == v for k, v in wanted.items())]
    return {(c.when, c.phase, c.kind, c.bytes, c.dtype): c.count for c in found}


def tensor_parallel(config: Model, load: Load, cp: int, size: int, dtype: str) -> dict[Any, float]:
    """Two gathers and two scatters of B x S x D each way, two gathers of inputs again, and gradients of both norms."""
    whole = load.micro_batch * load.seq_len // cp * config.dim * size
    halves = {("each", way, kind, whole, dtype): 2 for way in ("forward", "backward") for kind in BOTH}
    again = {("each", "backward", "all-gather", whole, dtype): 4}
    return halves | again | {("each", "backward", "all-reduce", config.dim * size, dtype): 2}


BOTH = ("all-gather", "reduce-scatter")


def layer_elements(config: Model, tp: int) -> int:
    return sum(prod(param.local_shape(tp)) for param in layer_params(config))


@pytest.mark.parametrize("wanted", [PLAIN, CUT, PIPED, REPLICAS], ids=str)
@pytest.mark.slow
def test_tensor_parallel_traffic_is_ten_halves_of_an_all_reduce(wanted: Case) -> None:
    for stage in tiny_trace(wanted).stages:
        assert sent(stage, "tp") == tensor_parallel(CONFIG, LOAD, dict(wanted[3]).get("cp", 1), 2, "bfloat16")


@pytest.mark.slow
def test_tensor_parallel_traffic_of_the_405b() -> None:
    assert sent(paper(), "tp") == tensor_parallel(LARGE, PAPER, 1, 2, "bfloat16")


@pytest.mark.parametrize(
    ("wanted", "size", "dtype"),
    [(PLAIN, 2, "bfloat16"), pytest.param(FP32, 4, "float32", marks=pytest.mark.slow)],
    ids=str,
)
def test_weights_are_gathered_in_the_compute_type_and_gradients_reduced_in_fp32(
    wanted: Case, size: int, dtype: str
) -> None:
    elements = layer_elements(CONFIG, dict(wanted[3]).get("tp", 1))
    assert sent(only(wanted), "fsdp") == {
        ("first", "forward", "all-gather", elements * size, dtype): 1,
        ("last", "backward", "reduce-scatter", elements * 4, "float32"): 1,
    }


@pytest.mark.slow
def test_weights_of_the_405b_are_gathered_once_a_step() -> None:
    assert sent(paper(), "fsdp") == {
        ("first", "forward", "all-gather", 796_983_296, "bfloat16"): 1,
        ("last", "backward", "reduce-scatter", 1_593_966_592, "float32"): 1,
    }
    assert layer_elements(LARGE, 8) * 4 == 1_593_966_592
    ends = [c for c in paper().collectives if c.axis == "fsdp" and c.region == "ends"]
    (whole,) = stages(LARGE, Layout(tp=8), 0)
    elements = 128 * shard_elements(whole.ends(LARGE, 128_256), 8, 128)  # 16,032 rows as 128 x 126
    assert {(c.kind, c.bytes) for c in ends} == {("all-gather", 4 * elements), ("reduce-scatter", 4 * elements)}


@pytest.mark.slow
def test_exact_gradients_are_reduced_in_fp64() -> None:
    reduced = layer_elements(CONFIG, 1) * 8
    assert ("last", "backward", "reduce-scatter", reduced, "float64") in sent(only(EXACT), "fsdp")


def test_replicas_reduce_a_share_of_the_gradients_once_more() -> None:
    share = layer_elements(CONFIG, 2) * 4 // 2
    assert sent(only(REPLICAS), "replica") == {("last", "backward", "all-reduce", share, "float32"): 1}


def test_zero_3_gathers_weights_and_reduces_gradients_in_the_backward_pass_of_every_micro_batch() -> None:
    whole = layer_elements(CONFIG, 1) * 2
    assert sent(only(ZERO_3), "fsdp", when="each", phase="backward") == {
        ("each", "backward", "all-gather", whole, "bfloat16"): 1,
        ("each", "backward", "reduce-scatter", whole * 2, "float32"): 1,
    }


@pytest.mark.parametrize(("wanted", "tp"), [pytest.param(CONTEXT, 1, marks=pytest.mark.slow), (CUT, 4)], ids=str)
def test_context_parallel_traffic_is_keys_and_values(wanted: Case, tp: int) -> None:
    config = CONFIG
    both = 2 * LOAD.micro_batch * LOAD.seq_len * config.kv_heads * (config.dim // config.heads) // tp * 2
    assert sent(only(wanted), "cp") == {
        ("each", "forward", "all-gather", both, "bfloat16"): 1,
        ("each", "backward", "all-gather", both, "bfloat16"): 1,  # they were not kept
        ("each", "backward", "reduce-scatter", both, "bfloat16"): 1,
    }


@pytest.mark.slow
def test_recomputation_gathers_no_more_than_is_gathered_without() -> None:
    """Full recomputation sums the attention half once more; the feed-forward half ends before its sum."""
    plain = sent(only(PLAIN), "tp")
    more = {key: sent(only(FULL), "tp")[key] - count for key, count in plain.items()}
    changed = {(phase, kind): count for (_, phase, kind, _, _), count in more.items() if count}
    assert changed == {("backward", "reduce-scatter"): 1}
    assert sent(only(SELECTIVE), "tp") == plain


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_stage_sends_once_for_every_action_that_another_waits_for(vpp: int) -> None:
    layout = Layout(pp=2, vpp=vpp, tp=2)
    count = 4
    lists = actions("interleaved", 2, vpp, count)
    hidden = LOAD.micro_batch * LOAD.seq_len // 2 * CONFIG.dim * 2
    for rank, mine in enumerate(lists):
        forward = sum(a.kind == "F" and a.stage < layout.stages - 1 for a in mine)
        backward = sum(a.kind == "B" and a.stage > 0 for a in mine)
        found = [c for s in stages(CONFIG, layout, rank) for c in transfers(s.number, CONFIG, layout, LOAD)]
        assert {c.bytes for c in found} == {hidden}
        assert sum(c.count for c in found if c.phase == "forward") * count == forward
        assert sum(c.count for c in found if c.phase == "backward") * count == backward


def test_transfers_are_part_of_the_trace_of_each_stage() -> None:
    found = tiny_trace(STAGES)
    assert [(stage.stage, stage.layers) for stage in found.stages] == [(1, 1), (3, 0)]
    sends = [[c.phase for c in stage.collectives if c.axis == "pp"] for stage in found.stages]
    assert sends == [["forward", "backward"], ["backward"]]


@pytest.mark.slow
def test_only_an_axis_of_several_processes_sends() -> None:
    assert {c.axis for c in only(ONLY_TP).collectives} == {"tp"}
    assert {c.axis for c in only(EXACT).collectives} == {"fsdp"}


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"tp: 3 does not divide"):
        several(CONFIG, VOCAB_SIZE, [case(3, tp=3)])


def test_traces_are_json_both_ways() -> None:
    for found in map(tiny_trace, TINY):
        assert RankTrace.from_json(found.as_json()) == found
    assert all(isinstance(value, str | int | float) for value in asdict(only(PLAIN).collectives[0]).values())
