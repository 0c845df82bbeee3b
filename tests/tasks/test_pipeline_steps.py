"""One table of steps: every list of steps that a user sees is a part of it, in its order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.flows.pipeline import run_chain
from herd.flows.recipe_form import NOTHING, RerunParameters
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.tasks import pipeline_steps as table
from herd.tasks.pipeline_steps import (
    StepKind,
    check_step,
    common_kinds,
    first_step,
    last_step,
    latest,
    next_step,
    pipeline_steps,
    step_names,
)
from herd.tasks.step import Context, reaches
from tests.tasks.promotion_workspace import PromotionWorkspace

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
        assert order[order.index(gate.name) - 1] == gate.inputs["checkpoint"] == gate.span.name
        assert gate.inputs["began"] == "main", "each length is compared with the model before the stage"
    assert len(order) == len(set(order))


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_steps_get_only_what_earlier_steps_leave(path: Path) -> None:
    done = {""}
    for step in pipeline_steps(load_recipe(path)):
        assert set(step.inputs.values()) <= done, step
        done.add(step.name)
        missing = {parameter for parameter, name in step.inputs.items() if not name}
        assert missing <= {"parent", "conversations"}, step


def test_a_stage_continues_the_one_before_it() -> None:
    steps = {step.name: step for step in pipeline_steps(QUICKSTART)}
    stages = [step for step in steps.values() if step.kind == "pretrain"]
    assert [step.inputs["parent"] for step in stages] == ["", "ramp-1", "ramp-2", "main"]
    assert steps["evaluate-main"].inputs == {"checkpoint": "main", "curated": "curate", "conversations": ""}
    assert steps["promote"].inputs == {"checkpoint": "anneal", "evaluation": "evaluate-anneal", "curated": "curate"}


def test_a_kind_names_the_first_or_the_last_of_its_steps() -> None:
    for kind in common_kinds():
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


def test_a_run_that_stops_early_reaches_the_steps_before() -> None:
    steps = pipeline_steps(QUICKSTART)
    assert reaches(steps, "", "evaluate")
    assert reaches(steps, "main", "pretrain")
    assert not reaches(steps, "main", "evaluate")
    assert not reaches(steps, "tokenize", "pretrain", "evaluate")
    assert reaches(steps, "evaluate", "promote") is False, "of a kind, the last step ends the run"


# A new step is a function and a line of the table.


def count_documents(context: Context, curated: str, tokens: str) -> str:
    context.console.log(f"{context.record.name} counts {curated} and {tokens}")
    return "counts"


COUNT = StepKind("count", lambda: count_documents, {"curated": latest("curate"), "tokens": latest("tokenize")})


@pytest.fixture
def with_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a step `count` after `tokenize`; a step of the others returns its kind and what it got."""

    def pretend(kind: StepKind) -> StepKind:
        def work(context: Context, *subject: str, **artifacts: Any) -> str:
            return f"{kind.name}({', '.join([*subject, *(str(artifact) for artifact in artifacts.values())])})"

        return replace(kind, task=lambda: work)

    kinds = [pretend(kind) for kind in table.PIPELINE]
    at = [kind.name for kind in kinds].index("tokenize") + 1
    monkeypatch.setattr(table, "PIPELINE", (*kinds[:at], COUNT, *kinds[at:]))


@pytest.mark.usefixtures("with_count")
def test_a_new_step_is_a_line_of_the_table() -> None:
    order = names(QUICKSTART)
    assert order[order.index("count") - 1 : order.index("count") + 2] == ["tokenize", "count", "ramp-1"]
    assert step_names(QUICKSTART) == order
    check_step(QUICKSTART, "--from", "count")
    assert first_step(QUICKSTART, "count") == last_step(QUICKSTART, "count") == "count"
    with pytest.raises(RecipeError, match="tokenize, count, ramp-1"):
        check_step(QUICKSTART, "--until", "nonsense")
    done = {"collect", "annotate", "curate", "tokenizer", "tokenize"}
    assert next_step(QUICKSTART, done, decided=False) == "count"
    assert next_step(QUICKSTART, done | {"count"}, decided=False) == "ramp-1"
    assert reaches(pipeline_steps(QUICKSTART), "ramp-1", "count")
    assert not reaches(pipeline_steps(QUICKSTART), "tokenize", "count")
    offered = RerunParameters.model_json_schema()["properties"]["from_step"]["enum"]
    data = ["collect", "annotate", "curate", "tokenizer", "tokenize"]
    assert offered[:8] == [NOTHING, *data, "count", "pretrain"]


@pytest.mark.usefixtures("with_count")
def test_the_run_loop_does_a_new_step_with_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = PromotionWorkspace(tmp_path).context
    context.steps = pipeline_steps(context.recipe)
    assert run_chain(context, "tokenize") is None
    assert "counts" not in capsys.readouterr().out
    assert run_chain(context, "count") is None
    curated = "curate(collect(), annotate(collect()))"
    tokens = f"tokenize({curated}, tokenizer({curated}))"
    assert capsys.readouterr().out.strip() == f"quickstart-1 counts {curated} and {tokens}"
    decision = str(run_chain(context, ""))
    assert decision.startswith("promote(pretrain(anneal, tokenize(")
    assert "pretrain(ramp-2, " in decision, "each stage continues the one before"
    assert run_chain(context, "promote") is not None, "to stop after the last step is to do all"
