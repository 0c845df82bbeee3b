"""A pipeline computes what one process computes with the same micro-batches, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.parallel.pipeline import Pipeline
from herd.llama3.parallel.pipeline_schedule import split_layers
from tests.dist import run
from tests.llama3.parallel import pipeline_samples as samples
from tests.llama3.parallel.pipeline_samples import Result, Step


def same(ranks: list[list[Result]], expected: list[Result]) -> None:
    """Assert that ranks have together the nats and gradients of `expected`, bit for bit."""
    for step, (nll, gradients) in enumerate(expected):
        found = {name: value for rank in ranks for name, value in rank[step][1].items()}
        assert found.keys() == gradients.keys()
        assert [name for name in gradients if not np.array_equal(found[name], gradients[name])] == []
        held = [rank[step][0] for rank in ranks if rank[step][0] is not None]
        assert len(held) == 1
        assert np.array_equal(held[0], nll)


def layouts(pp: int, *changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"pp": pp, **change} for change in changes]


ZERO_BUBBLE = {"schedule": "zero-bubble"}
CASES = {
    2: [{"schedule": "1f1b"}, ZERO_BUBBLE, *({"vpp": 2, "microbatch_group_size": n} for n in (1, 2, 3, 5)), {"vpp": 3}],
    3: [{"schedule": "1f1b"}, *({"vpp": 2, "microbatch_group_size": n} for n in (1, 2, 3)), {**ZERO_BUBBLE, "vpp": 2}],
    4: [{"schedule": "1f1b"}, {"vpp": 2}, {"vpp": 2, "microbatch_group_size": 5}, ZERO_BUBBLE],
}


@pytest.mark.parametrize("pp", [2, *(pytest.param(pp, marks=pytest.mark.slow) for pp in (3, 4))])
def test_every_schedule_gives_the_bits_of_one_process(pp: int) -> None:
    """Five micro-batches: no N but 1 and 5 divides them. Eight stages of six layers: the ends have none."""
    steps = [Step(sequences=5, micro_batch=1, documents=True)]
    (expected,) = run(1, samples.alone, steps)
    cases = layouts(pp, *CASES[pp])
    ranks = run(pp, samples.piped, cases, steps)
    for number in range(len(cases)):
        same([rank[number] for rank in ranks], expected)


@pytest.mark.slow
def test_batch_and_sequence_may_grow_and_shrink() -> None:
    """A live stage with another shape ended the process in torch 2.13."""
    steps = [
        Step(4, 2, 12),
        Step(8, 2, 12),
        Step(8, 2, 24),
        Step(8, 4, 24, documents=True),
        Step(2, 2, 24),  # fewer micro-batches than ranks
        Step(4, 2, 12),
    ]
    (expected,) = run(1, samples.alone, steps)
    cases = layouts(2, {"vpp": 2}, {**ZERO_BUBBLE, "vpp": 2})
    ranks = run(2, samples.piped, cases, steps)
    for number in range(len(cases)):
        same([rank[number] for rank in ranks], expected)


def test_evaluation_gives_the_nats_of_training_and_no_gradients() -> None:
    step = Step(sequences=6, micro_batch=2, documents=True)
    ((expected_nll, _),) = run(1, samples.alone, [step])[0]
    ranks = run(2, samples.evaluated, {"pp": 2, "vpp": 2}, step)
    for before, trained, after in ranks:
        assert not before[1]
        assert trained[1].keys() == after[1].keys()
        assert all(np.array_equal(trained[1][name], after[1][name]) for name in trained[1])
    for nll, _ in ranks[1]:
        assert np.array_equal(nll, expected_nll)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_nothing_is_held_between_steps(schedule: str) -> None:
    """torch holds a buffer for each micro-batch of each stage, both ways."""
    ranks = run(2, samples.buffers, {"pp": 2, "vpp": 2, "schedule": schedule}, Step())
    assert ranks == [[0] * 4] * 2


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_what_a_stage_returned_belongs_to_the_send(schedule: str) -> None:
    """Micro-batches wait for their gradients with one number each: three stages of two ranks send theirs on."""
    step = Step(sequences=8, micro_batch=1)
    first, last = run(2, samples.returned, {"pp": 2, "vpp": 2, "schedule": schedule}, step)
    assert len(first) == len(last) == 16
    assert 2 <= max(first) <= step.sequences * 2
    assert 1 <= max(last) <= step.sequences


@pytest.mark.parametrize(("schedule", "passes"), [("interleaved", 1), ("zero-bubble", 2)])
def test_what_is_made_again_leaves_with_its_half_of_a_layer(schedule: str, passes: int) -> None:
    """Two normed inputs and a product for each layer and micro-batch; a backward pass in halves makes them twice."""
    step = Step(sequences=4, micro_batch=1)
    first, last = run(2, samples.promises, {"pp": 2, "vpp": 2, "schedule": schedule}, step)
    values = 3 * samples.shape().layers * step.sequences
    whole = 3 * step.sequences * len(split_layers(samples.shape().layers, 4)[0])  # the first stage's is never cut
    assert first[0] + last[0] == passes * values - (passes - 1) * whole
    assert first[1:] == last[1:] == (1, 0)


def together(ranks: list[list[dict[str, Any]]], number: int) -> dict[str, np.ndarray]:
    return {name: value for rank in ranks for name, value in rank[number]["gradients"].items()}


@pytest.mark.parametrize(
    "changes",
    [
        [{**ZERO_BUBBLE, "vpp": 2}],
        pytest.param([{"schedule": "1f1b"}, {"vpp": 4}, {"vpp": 2, "zero": 3}], marks=pytest.mark.slow),
    ],
    ids=["zero-bubble", "others"],
)
@pytest.mark.slow
def test_sharded_stages_reduce_once_and_zero_2_gathers_once(changes: list[dict[str, Any]]) -> None:
    """Several stages on a rank: torch's own plan would gather them again and again."""
    step = Step(sequences=8, micro_batch=1)
    cases = layouts(2, *changes)
    ((_, expected),) = run(1, samples.alone, [step])[0]
    ranks = run(4, samples.sharded, cases, step)
    for number, case in enumerate(cases):
        found = together(ranks, number)
        assert found.keys() == expected.keys()
        assert max(np.abs(found[name] - expected[name]).max() for name in expected) < 1e-12
        for rank in ranks:
            assert rank[number]["evaluates"]
            calls, groups = rank[number]["calls"], rank[number]["groups"]
            assert calls["_reduce_scatter_base_"] == groups
            assert (calls["_allgather_base_"] == groups) == ("zero" not in case)


def test_zero_bubble_adds_weight_gradients_in_the_precision_of_the_reduction() -> None:
    """FSDP took no notice of the W of a stage between first and last, and bf16 gradients were added up in bf16."""
    step = Step(sequences=8, micro_batch=1)
    cases = layouts(2, {"vpp": 2}, {**ZERO_BUBBLE, "vpp": 2})
    ranks = run(2, samples.sharded, cases, step, "bfloat16")
    whole, halves = together(ranks, 0), together(ranks, 1)
    assert [name for name in whole if not np.array_equal(whole[name], halves[name])] == []


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({**ZERO_BUBBLE, "zero": 3}, r"cluster.layout.zero: 3 .* write zero: 2, or schedule: interleaved"),
        ({**ZERO_BUBBLE, "recompute": "full"}, r"cluster.layout.recompute: full .* write recompute: none"),
        ({**ZERO_BUBBLE, "compile": True}, r"cluster.layout.compile: true .* write compile: false"),
    ],
)
def test_what_a_split_backward_pass_cannot_do_is_refused(layout: dict[str, Any], message: str) -> None:
    world = ParallelContext(0, 2, torch.device("cpu"), Layout(pp=2, **layout))
    with pytest.raises(ValueError, match=message):
        Pipeline({}, world)
