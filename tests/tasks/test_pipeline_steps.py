"""One table of steps: every list of steps that a user sees is a part of it, in its order."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.tasks.pipeline_steps import KINDS, first_step, last_step, next_step, pipeline_steps, step_names

QUICKSTART = load_recipe(Path("recipes/quickstart.yaml"))
LARGE = load_recipe(Path("recipes/llama3-405b.yaml"))


def names(recipe: Recipe) -> list[str]:
    return [step.name for step in pipeline_steps(recipe)]


def test_the_steps_of_the_quickstart() -> None:
    data = ["collect", "annotate", "curate", "tokenizer", "tokenize"]
    assert names(QUICKSTART) == [
        *data,
        "ramp-1",
        "ramp-2",
        "main",
        "evaluate-main",
        "anneal",
        "evaluate-anneal",
        "promote",
    ]


def test_each_length_of_a_long_stage_has_its_gate_behind_it() -> None:
    order = names(LARGE)
    parts = [step for step in pipeline_steps(LARGE) if step.kind == "gate"]
    assert len(parts) == 6
    for gate in parts:
        assert order[order.index(gate.name) - 1] == gate.span.name
    assert len(order) == len(set(order))


def test_a_kind_names_the_first_or_the_last_of_its_steps() -> None:
    for kind in KINDS:
        steps = [step.name for step in pipeline_steps(LARGE) if step.kind == kind]
        assert (first_step(LARGE, kind), last_step(LARGE, kind)) == (steps[0], steps[-1])
    assert first_step(LARGE, "nonsense") == "nonsense"


@given(st.integers(0, 11))
def test_the_next_step_is_the_first_that_is_not_done(count: int) -> None:
    order = names(QUICKSTART)
    assert next_step(QUICKSTART, set(order[:count]), decided=False) == order[count]
    assert next_step(QUICKSTART, set(order[:-1]), decided=True) == ""
    assert next_step(QUICKSTART, set(order) - {order[count]}, decided=False) == order[count]


def test_a_rerun_starts_from_any_step() -> None:
    assert step_names(QUICKSTART) == names(QUICKSTART)
