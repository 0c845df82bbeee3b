from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.parallel.pipeline_schedule import Times, action_end_times, actions, bubble
from herd.llama3.planner import step_time
from herd.llama3.planner.step_time import LayerSeconds, PipelineTiming, StepTime, compute_seconds, pipeline_idle
from tests.llama3.planner.plan_samples import VOCAB_SIZE, config, step_model

seconds = st.floats(0.001, 1.0)
EACH = LayerSeconds(1.0, 2.0, 0.5, 0.25, 0.125, 0.0625)


def pipeline(ranks: int, vpp: int, micro_batches: int, **changes: Any) -> PipelineTiming:
    return PipelineTiming(EACH, (LayerSeconds(), LayerSeconds()), (vpp,) * ranks, vpp, micro_batches, **changes)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 64), seconds, seconds, seconds, seconds, seconds)
def test_components_add_up_to_the_step_of_the_slowest_rank(
    ranks: int, vpp: int, count: int, first: float, last: float, transfer: float, exposed: float, optimizer: float
) -> None:
    vpp = 1 if ranks == 1 else vpp
    layers = tuple(vpp + number % 2 for number in range(ranks))
    ends = LayerSeconds(elementwise=first), LayerSeconds(gemm=last)
    found = PipelineTiming(EACH, ends, layers, vpp, count, transfer, exposed, optimizer)
    step = found.step()
    assert step.total == pytest.approx(sum(step.as_dict().values()))
    slowest = max(found.rank_seconds) * count
    assert step.total - step.bubble - step.pp - exposed - optimizer == pytest.approx(slowest)
    assert step.exposed_comm == pytest.approx(step.tp + step.cp + step.pp + exposed)
    assert min(step.as_dict().values()) >= 0


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 8))
def test_more_micro_batches_amortise_the_bubble_exactly(ranks: int, vpp: int, rounds: int) -> None:
    """(PP - 1) / (V M) of the work (arXiv 2407.21783, section 3.3.2): anchor A8."""
    count = ranks * rounds
    step = pipeline(ranks, vpp, count).step()
    work = EACH.total * vpp * count
    assert step.bubble / work == pytest.approx((ranks - 1) / (vpp * count), rel=1e-12)
    assert step.total == pytest.approx(work + step.bubble)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_waits_are_those_of_the_schedule_played_through(ranks: int, vpp: int, count: int) -> None:
    vpp = 1 if ranks == 1 else vpp
    played = bubble(actions("interleaved", ranks, vpp, count)) * count
    assert pipeline_idle(ranks, vpp, count) == pytest.approx(played, abs=1e-9)


def test_a_users_own_schedule_waits_as_long_as_it_does() -> None:
    """Fewer micro-batches in a row than ranks wait in every round; zero-bubble fills waits."""
    for schedule in ["interleaved", "zero-bubble"]:
        for contiguous in [1, 2, 3, 4, 6, 40]:
            for count in [1, 3, 4, 7, 17]:
                try:
                    played = bubble(actions(schedule, 4, 2, count, contiguous)) * count
                except AssertionError:  # some short rounds wait for each other for ever, and no trainer would run them
                    with pytest.raises(AssertionError, match="for ever"):
                        pipeline_idle(4, 2, count, contiguous, schedule)
                    continue
                assert pipeline_idle(4, 2, count, contiguous, schedule) == pytest.approx(played)


def test_published_examples_of_rounds() -> None:
    """PP = 4, V = 2, M = 10: five in a row wait 0.150 of the work."""
    assert pipeline_idle(4, 2, 10, 5) / 10 == pytest.approx(0.150)
    assert pipeline_idle(4, 2, 10, 2) / 10 > 2 * 0.150


def test_zero_bubble_waits_a_third() -> None:
    usual, filled = (pipeline_idle(8, 1, 64, 0, kind) for kind in ("interleaved", "zero-bubble"))
    assert filled == pytest.approx(usual / 3)
    step = pipeline(8, 1, 64, schedule="zero-bubble").step()
    assert step.bubble == pytest.approx(usual / 3 * EACH.total)


def test_a_prediction_does_not_cost_more_for_more_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is played through where there is a formula, and a layer is priced once."""
    model, layout = step_model(), Layout(tp=2, pp=2, vpp=4, microbatch_group_size=2)
    priced: list[object] = []
    monkeypatch.setattr(step_time, "actions", lambda *_: pytest.fail("played through"))

    def counted(*given: Any, **more: Any) -> LayerSeconds:
        priced.append(given)
        return compute_seconds(*given, **more)

    monkeypatch.setattr(step_time, "compute_seconds", counted)
    steps = [model.predict(layout, 8, Load(4096, 1, count)) for count in (8, 64, 2**20)]
    assert len(priced) == 3  # a layer, the embedding, the head
    assert [step.bubble for step in steps] == pytest.approx([steps[0].bubble] * 3)
    assert steps[1].gemm == pytest.approx(8 * steps[0].gemm)
    assert steps[2].tp == pytest.approx(2**17 * steps[0].tp)


def test_the_whole_step_is_that_of_the_schedule_with_the_models_own_passes() -> None:
    """Seconds of a step against the engine's own schedule, played through with equal stages and no transfers."""
    found = pipeline(4, 2, 12)
    forward = EACH.total / 3
    played = max(action_end_times(actions("interleaved", 4, 2, 12), Times(forward, 2 * forward, forward)).values())
    assert found.step().total == pytest.approx(played)


def test_each_degree_has_its_price() -> None:
    for more, longer in [
        ({"tp": 2}, {"tp"}),
        ({"cp": 2}, {"cp"}),
        ({"pp": 2}, {"pp", "bubble"}),
        ({"recompute": "full"}, {"recompute"}),
        ({"pp": 2, "vpp": 3}, {"pp", "bubble", "imbalance"}),
    ]:
        model, load = step_model(), Load(4096, 1, 8)
        plain = model.predict(Layout(), 8, load).as_dict()
        found = model.predict(Layout(**more), 8, load).as_dict()
        assert {
            name for name in ("tp", "cp", "pp", "bubble", "imbalance", "recompute") if found[name] > plain[name]
        } == (longer | ({"imbalance"} if "pp" in more else set()))


def test_the_end_of_the_pipeline_makes_the_others_wait() -> None:
    """The output of 128,256 rows is more work than the embedding."""
    found = step_model().pipeline(Layout(pp=2), 8, Load(4096, 1, 8))
    embedding, head = found.ends
    assert head.total > embedding.total
    assert found.layers == (3, 3)
    assert found.step().imbalance == pytest.approx(8 * (head.total - embedding.total) / 2)


def test_zero_3_gathers_weights_for_every_micro_batch() -> None:
    model, load = step_model(), Load(128, 1, 64)  # so short that nothing hides the gathers
    two, three = (model.predict(Layout(zero=zero), 64, load) for zero in (2, 3))
    assert three.dp > 10 * two.dp
    assert replace(three, dp=0) == replace(two, dp=0)


def test_one_process_sends_nothing() -> None:
    found = step_model().predict(Layout(), 1, Load(4096, 4, 2))
    assert (found.exposed_comm, found.bubble, found.imbalance) == (0, 0, 0)
    assert found.total == pytest.approx(
        found.gemm + found.attention + found.elementwise + found.recompute + found.optimizer
    )


def test_without_a_pipeline_one_rank_updates_and_sends_both_ends() -> None:
    """AdamW moves 28 bytes for each parameter of a process's shard."""
    model, load = step_model(), Load(4096, 1, 8)
    whole = 6 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 8192) + 2 * VOCAB_SIZE * 2048
    found = model.predict(Layout(), 64, load).optimizer
    assert found == pytest.approx(whole / 64 * 28 / model.curves.memory.bytes_per_s, rel=1e-3)
    halved = model.predict(Layout(pp=2), 64, load).optimizer  # half of the layers and one end, in half as many shards
    assert halved == pytest.approx(found, rel=1e-3)


def test_copies_of_shards_sum_each_end_once() -> None:
    """HSDP's sums of gradients, between replicas: those of the ends do not grow with the layers."""
    load, added = Load(4096, 1, 8), []
    for layers in (2, 4, 6):
        model = step_model(layers=layers)
        one, two = (model.predict(Layout(dp_replicate=copies), 64, load).dp for copies in (1, 2))
        added.append(two - one)
    assert added[0] > 0
    ends = added[0] - (added[2] - added[0]) / 2  # what is left at no layers
    assert added[2] - added[1] == pytest.approx(added[1] - added[0], rel=0.05)
    assert ends < added[2]


def test_faster_products_shorten_exactly_their_seconds() -> None:
    """`products` tells the sensitivity what a faster ceiling saves."""
    model, layout, load = step_model(), Layout(tp=2, pp=2), Load(4096, 1, 8)
    before = model.predict(layout, 8, load)
    gemm = replace(model.curves.gemm, ceiling=model.curves.gemm.ceiling * 1.25)
    faster = step_time.StepModel(config(), VOCAB_SIZE, model.network, replace(model.curves, gemm=gemm))
    saved = before.total - faster.predict(layout, 8, load).total
    assert saved == pytest.approx(before.gemm_bound * (1 - 1 / 1.25), rel=0.03)


def test_a_model_that_has_predicted_other_steps_predicts_each_as_a_new_one_does() -> None:
    """It computes once what layouts share, and a search asks for hundreds of them."""
    same, both = Load(4096, 1, 8), Layout(tp=2, cp=2)
    changes: list[dict[str, Any]] = [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "cp": 2, "pp": 2, "vpp": 3}]
    changes += [{"dp_replicate": 2}, {"zero": 3}, {"recompute": "selective"}, {"compile": True}]
    steps = [(Layout(**change), same) for change in changes]
    loads = (same, Load(8192, 1, 8), Load(4096, 2, 8), Load(4096, 1, 4), replace(same, precision="fp32"))
    steps += [(both, load) for load in (*loads, replace(same, precision="fp8"), replace(same, exact=True))]
    shared = step_model()
    for layout, load in [*steps, *steps[::-1]]:
        assert shared.predict(layout, 32, load) == step_model().predict(layout, 32, load)


def test_a_step_is_all_of_its_fields() -> None:
    assert StepTime(*(2.0**power for power in range(11))).total == 2**11 - 1
