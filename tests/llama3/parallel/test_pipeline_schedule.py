"""Schedules of pipeline work: complete, free of deadlock, bounded in memory, with the bubble of the closed form."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from herd.llama3.parallel.pipeline_schedule import (
    Action,
    Lists,
    Times,
    action_end_times,
    actions,
    bubble,
    check,
    ideal_bubble,
    in_flight,
    peak_in_flight,
    split_layers,
)

Case = tuple[str, int, int, int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Kind, P, V, M, N, each combination that `check` allows."""
    kind = draw(st.sampled_from(["1f1b", "interleaved", "zero-bubble"]))
    pipeline, micro_batches = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    vpp = 1 if kind == "1f1b" or pipeline == 1 else draw(st.integers(1, 5))
    return kind, pipeline, vpp, micro_batches, draw(st.integers(0, micro_batches + 2))


def without_stalls(case: Case) -> bool:
    """Whether a round is long enough for its first micro-batch to be back when its last one has left."""
    _, pipeline, vpp, micro_batches, microbatch_group_size = case
    return vpp == 1 or min(microbatch_group_size or pipeline, micro_batches) >= pipeline


def biggest_round(pipeline: int, micro_batches: int, microbatch_group_size: int) -> int:
    rounds = micro_batches // min(microbatch_group_size or pipeline, micro_batches)
    return -(-micro_batches // rounds)


@given(cases())
def test_each_rank_does_the_work_of_its_stages_once(case: Case) -> None:
    kind, pipeline, vpp, micro_batches, _ = case
    kinds = "FIW" if kind == "zero-bubble" else "FB"
    for rank, mine in enumerate(actions(*case)):
        expected = {
            Action(stage, kind, number)
            for stage in range(rank, pipeline * vpp, pipeline)
            for kind in kinds
            for number in range(micro_batches)
        }
        assert len(mine) == len(expected)
        assert set(mine) == expected


@given(cases(), st.sampled_from([0.0, 0.3, 5.0]))
def test_work_starts_after_what_it_needs(case: Case, transfer: float) -> None:
    """Checked against the dependencies as they stand in the model, not as the simulation writes them."""
    _, pipeline, vpp, _, _ = case
    times, lists = Times(transfer=transfer), actions(*case)
    ends = action_end_times(lists, times)
    wire = transfer if pipeline > 1 else 0.0
    for (stage, kind, number), end in ends.items():
        start = end - times.duration(Action(stage, kind, number))
        gradient = "I" if kind in "IW" else "B"
        if kind == "F" and stage:
            assert start >= ends[Action(stage - 1, "F", number)] + wire - 1e-9
        if kind in "BI":
            assert start >= ends[Action(stage, "F", number)] - 1e-9
            if stage < pipeline * vpp - 1:
                assert start >= ends[Action(stage + 1, gradient, number)] + wire - 1e-9
        if kind == "W":
            assert start >= ends[Action(stage, "I", number)] - 1e-9


@given(cases())
def test_gradients_are_added_in_the_order_of_micro_batches(case: Case) -> None:
    """Each stage works in that order, whatever the schedule: the sum is that of one process, to the bit."""
    for mine in actions(*case):
        for stage in {action.stage for action in mine}:
            for kind in "FBIW":
                order = [a.micro_batch for a in mine if a.stage == stage and a.kind == kind]
                assert order == sorted(order)


@given(cases())
def test_bubble_is_that_of_the_closed_form(case: Case) -> None:
    """(P - 1) / (V M) also where N divides nothing; a third of it with the backward pass in two, if M >= P."""
    assume(without_stalls(case))
    kind, pipeline, vpp, micro_batches, _ = case
    ideal = ideal_bubble(pipeline, vpp, micro_batches)
    found = bubble(actions(*case))
    if kind == "zero-bubble":
        assert found < ideal or pipeline == 1
        assert found <= ideal / 3 + 1e-9 or micro_batches < pipeline
    else:
        assert found == pytest.approx(ideal)


@given(cases())
def test_activations_in_flight_are_bounded(case: Case) -> None:
    kind, pipeline, vpp, micro_batches, microbatch_group_size = case
    assume(without_stalls(case))
    work = vpp * micro_batches
    held = in_flight(actions(*case))
    later = (vpp - 1) * biggest_round(pipeline, micro_batches, microbatch_group_size)
    for rank, most in enumerate(held):
        after = pipeline - 1 - (0 if kind == "zero-bubble" else rank)
        assert most <= min(work, (after if vpp == 1 else 2 * after + later) + 1)
    if kind == "zero-bubble":
        assert max(held) == max(in_flight(actions("interleaved", *case[1:])))


def test_planner_needs_no_torch() -> None:
    code = "import sys, herd.llama3.parallel.pipeline_schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_1f1b_as_published() -> None:
    """Four ranks hold 4, 3, 2, 1 micro-batches (PipeDream-Flush; Megatron, arXiv 2104.04473, figure 4)."""
    lists = actions("1f1b", 4, 1, 8)
    assert in_flight(lists) == [4, 3, 2, 1]
    assert "".join(action.kind for action in lists[3]) == "FB" * 8
    assert "".join(action.kind for action in lists[0]) == "FFF" + "FB" * 5 + "BBB"


def test_interleaving_as_published() -> None:
    """Llama 3, section 3.3.2, figure 6: four ranks, two stages each, N = 5; the first rank runs 0..4 through both."""
    lists = actions("interleaved", 4, 2, 10, 5)
    assert lists[0][:10] == [Action(stage, "F", number) for stage in (0, 4) for number in range(5)]
    assert bubble(lists) == pytest.approx(3 / 20)


def test_longer_rounds_hide_transfers_and_hold_more() -> None:
    wire = Times(transfer=0.3)
    few, many = (actions("interleaved", 4, 4, 32, microbatch_group_size) for microbatch_group_size in (4, 8))
    assert bubble(few) == pytest.approx(bubble(many))
    assert bubble(many, wire) < 0.6 * bubble(few, wire)
    assert max(in_flight(few)) == 19
    assert max(in_flight(many)) == 31


def test_unequal_stages_slow_the_pipeline_down() -> None:
    lists = actions("1f1b", 4, 1, 16)
    assert bubble(lists, Times(stages=(1.0, 1.0, 2.0, 1.0))) > 0
    assert max(action_end_times(lists, Times(stages=(1.0, 1.0, 2.0, 1.0))).values()) > 1.8 * max(
        action_end_times(lists).values()
    )


def test_ranks_that_wait_for_each_other_are_found() -> None:
    lists: Lists = [
        [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
    ]
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] wait"):
        action_end_times(lists)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpipe", 2, 1, 4, 0), "cluster.layout.schedule: 'gpipe' is unknown; write interleaved"),
        (("1f1b", 2, 2, 4, 0), "cluster.layout.schedule: 1f1b has one stage per process, vpp is 2; write inter"),
        (("interleaved", 1, 2, 4, 0), "cluster.layout.vpp: 2 stages per process need pp above 1; write vpp: 1"),
        (("interleaved", 2, 1, 4, -1), "cluster.layout.microbatch_group_size: -1 is negative; write 0"),
        (("interleaved", 0, 1, 4, 0), "cluster.layout.pp: 0 .* write 1 or more"),
    ],
)
def test_impossible_schedules_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(*arguments)


def sizes(layers: int, stages: int) -> list[int]:
    return [len(part) for part in split_layers(layers, stages)]


def test_layers_are_split_as_published() -> None:
    """Llama 3, section 3.3.2: one layer fewer on the first and the last stage."""
    assert sizes(126, 16) == [7, *[8] * 14, 7]
    assert sizes(126, 128) == [0, *[1] * 126, 0]
    assert sizes(4, 4) == [1, 1, 1, 1]
    assert sizes(5, 2) == [3, 2]
    assert sizes(3, 1) == [3]


@given(st.integers(1, 130), st.integers(1, 132))
def test_splits_are_complete_and_even(layers: int, stages: int) -> None:
    if stages > layers + 2:
        with pytest.raises(ValueError, match=rf"{stages} stages .* {layers} layers; use at most {layers + 2} "):
            split_layers(layers, stages)
        return
    parts = split_layers(layers, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    weights = [len(part) for part in parts]
    weights[0] += 1
    weights[-1] += 1
    assert max(weights) - min(weights) <= 1
    assert all(parts[1:-1])
    assert all(parts) or layers < stages


@given(cases())
@example(("1f1b", 3, 1, 3, 1))  # two rounds of one micro-batch do not fill three stages
def test_fullest_moments_hold_what_the_actions_do(case: Case) -> None:
    """Also where only the first rounds are played through; under zero-bubble W frees an activation, I does not."""
    lists = actions(*case)
    for rank, mine in enumerate(lists):
        now = most = 0
        for action in mine:
            now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
        assert now == 0
        assert in_flight(lists)[rank] == most
        assert max(sum(counts) for counts in peak_in_flight(*case, rank)) == most
