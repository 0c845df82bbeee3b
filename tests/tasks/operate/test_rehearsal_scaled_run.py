"""Recipes and clusters in small: the same steps, ratios and axes, at sizes that one machine trains."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe, check_batches
from herd.tasks.cluster import Cluster, StageCluster
from herd.tasks.operate.rehearsal import FEWEST, LONGEST, STEPS, ScaledRun, scaled_layout
from herd.tasks.pipeline_steps import pipeline_steps

RECIPES = ("llama3-8b", "llama3-70b", "llama3-405b", "quickstart", "quickstart-chat", "domain-adaptation")
LONG = Cluster(
    processes=16_384,
    layout=Layout(tp=8, pp=16, vpp=4, compile=True),
    stages={"long-131072": StageCluster(layout=Layout(tp=8, cp=16, pp=16, recompute="selective"))},
)


def load(name: str, *overrides: str) -> Recipe:
    return load_recipe(Path("recipes") / f"{name}.yaml", list(overrides))


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_is_scaled_to_the_same_steps(name: str) -> None:
    recipe = load(name)
    scaled = ScaledRun(recipe, Cluster())
    full, small = pipeline_steps(recipe), pipeline_steps(scaled.recipe)
    kinds = [step.kind for step in full if step.kind != "init-weights"]
    assert [step.kind for step in small] == kinds
    schedule = Schedule(scaled.recipe)
    assert schedule.steps <= STEPS + FEWEST * len(schedule.segments) + 8 * len(schedule.spans)
    assert max(segment.seq_len for segment in schedule.segments) <= LONGEST
    for span in schedule.trained:
        place = scaled.cluster.for_stage(span.stage.name, span.name)
        check_batches(span, place.data_parallel)
        place.layout.check(scaled.recipe.model, 2048 + 256, place.processes)
        for seq_len in span.lengths:
            place.layout.check_sequence(seq_len)


def test_ratios_of_batches_and_sequences_are_those_of_the_recipe() -> None:
    recipe = load("llama3-8b")
    full, small = Schedule(recipe).segments, Schedule(ScaledRun(recipe, Cluster()).recipe).segments
    assert [segment.seq_len * 128 for segment in small] == [segment.seq_len for segment in full]
    for pair in zip(pairwise(full), pairwise(small), strict=True):
        ratios = [after.batch / before.batch for before, after in pair]
        assert ratios[0] == ratios[1]


def test_conversations_are_not_shortened_and_change_no_other_stage() -> None:
    """A 64th of an 8,192-token window would cut the answers off; their small batch would make all others large."""
    alone = load("llama3-8b")
    chat = {"name": "chat", "kind": "sft", "for": "100M", "seq_len": 8192, "batch": "128Ki", "mix": "annealing"}
    plain = alone.model_dump(mode="json", by_alias=True)
    tuned = Recipe.model_validate(
        {**plain, "stages": [*plain["stages"], {**chat, "lr": "constant at 1e-5"}], "conversations": [{"uri": "x"}]}
    )
    *others, small = ScaledRun(tuned, Cluster()).recipe.stages
    assert small.seq_len == LONGEST
    assert others == ScaledRun(alone, Cluster()).recipe.stages
    assert ScaledRun(load("quickstart-chat"), Cluster()).recipe.stages[0].seq_len == 256


def test_a_stage_has_no_more_steps_than_at_full_size() -> None:
    small = Schedule(ScaledRun(load("llama3-405b"), Cluster()).recipe)
    assert small.span("anneal").steps == 2  # 40M tokens at 16Mi


def test_warm_up_and_decay_end_at_the_corresponding_positions() -> None:
    recipe = load("llama3-8b", "lr.warmup=40B", "lr.cosine.over=14.8T")
    scaled = ScaledRun(recipe, Cluster())
    small = Schedule(scaled.recipe)
    assert scaled.position(0) == 0
    assert scaled.recipe.lr.warmup.amount == small.span("ramp-4k").end
    assert scaled.recipe.lr.cosine is not None
    assert scaled.recipe.lr.cosine.over.amount == small.span("main").end
    positions = [scaled.position(billions * 1e9) for billions in range(0, 15_600, 100)]
    assert positions == sorted(positions)


def test_each_axis_of_a_stage_becomes_two_and_memory_choices_stay() -> None:
    scaled = ScaledRun(load("llama3-405b"), LONG)
    main, last = scaled.cluster.for_stage("main"), scaled.cluster.for_stage("long", "long-1024")
    assert (main.layout.tp, main.layout.cp, main.layout.pp, main.layout.vpp, main.processes) == (2, 1, 2, 2, 8)
    assert (last.layout.tp, last.layout.cp, last.layout.pp, last.layout.recompute) == (2, 2, 2, "selective")
    assert last.processes == 8
    assert not main.layout.compile
    assert scaled.recipe.model.layers >= main.layout.stages


def test_of_too_few_processes_data_parallelism_goes_first() -> None:
    layout = Layout(tp=8, cp=2, pp=4)
    sizes = [scaled_layout(layout, 1024, processes) for processes in (16, 8, 4, 2, 1)]
    assert [processes for _, processes in sizes] == [16, 8, 4, 2, 1]
    assert [(small.tp, small.cp, small.pp) for small, _ in sizes] == [(2, 2, 2)] * 2 + [(2, 2, 1), (2, 1, 1), (1, 1, 1)]


def test_rules_that_a_first_model_cannot_pass_are_loosened() -> None:
    recipe = load("llama3-8b", "promote.when={eval/bpb: better, eval/mmlu: at least 0.6, eval/bpb/math: at most 0.5}")
    scaled = ScaledRun(recipe, Cluster()).recipe
    assert {metric: str(rule) for metric, rule in scaled.promote.when.items()} == {
        "eval/bpb": "better",
        "eval/mmlu": "at least 0",
        "eval/bpb/math": "at most 1000000000",
    }
    gates = ScaledRun(load("llama3-405b"), Cluster()).recipe.stages[3].gates
    assert {gate: str(rule) for gate, rule in gates.items()} == {
        "short-context": "no worse than 100%",
        "needle": "at least 0",
    }
