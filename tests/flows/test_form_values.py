"""Values that no form offers but the API takes: each is refused in one line, by the server, the form or the flow."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.flows import Flow
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel, ValidationError

from herd.flows import checkpoint, maintenance, pipeline
from herd.flows import study as studies
from herd.flows.recipe_form import PipelineParameters, RerunParameters, chosen_recipe
from herd.flows.run_lifecycle import MISTAKES, FlowResult
from herd.llama3.recipe.load import RecipeError
from tests.flows.test_recipe_form import FLOWS as DRAWN
from tests.flows.test_recipe_form import schema_of, with_words

FLOWS = [*DRAWN, checkpoint.evaluate_checkpoint, maintenance.reconcile]
VALUES: list[Any] = [{}, {"x": 1}, [], [[]], [None], -1.5, True, None, 10**30, 1e300]
TEXTS = [
    "",
    "nan",
    "1e999",
    "no\x00name",
    "../../etc/passwd",
    "é\n" * 50,
    "x" * 300,
    "s3://b/x",
    "a@champion",
    "\ud800",
]
LONGEST = 800
"""Characters of a message about a text of 300."""
Path_ = tuple[str | int, ...]


def parameters(flow: Flow[Any, Any]) -> type[BaseModel]:
    """Return the model of the flow's form."""
    model = inspect.signature(flow.fn, eval_str=True).parameters["config"].annotation
    assert issubclass(model, BaseModel)
    return model


def places(model: type[BaseModel], above: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of each field, of sections and of items of lists too."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        item = (0,) if typing.get_origin(field.annotation) is list else ()
        for section in (typing.get_args(field.annotation) or (field.annotation,))[:1]:
            if inspect.isclass(section) and issubclass(section, BaseModel):
                yield from places(section, (*above, name, *item))


def at(path: Path_, value: Any) -> Any:
    for step in reversed(path):
        value = [value] if step == 0 else {step: value}
    return value


def refusals(flow: Flow[Any, Any], config: dict[str, Any]) -> list[str]:
    """Return what the server, the form or the recipe says against `config`; nothing if it is accepted."""
    if said := validate({"config": config}, schema_of(flow), raise_on_error=False, preprocess=True):
        return [error.message for error in said]
    try:
        form = parameters(flow).model_validate(config)
        if isinstance(form, PipelineParameters):
            chosen_recipe(form.resolved_parameters())
        elif isinstance(form, RerunParameters):
            form.resolved_parameters("tiny-1")
    except ValidationError as error:
        return [each["msg"] for each in error.errors()]
    except (RecipeError, ValueError) as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_value_of_a_wrong_type_is_refused_in_a_line(flow: Flow[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with_words(monkeypatch)
    taken = 0
    for path in places(parameters(flow)):
        for value in (*VALUES, *TEXTS):
            said = refusals(flow, at(path, value))
            taken += not said
            for message in said:
                assert message, (path, value)
                assert "\n" not in message.strip(), (path, value, message)
                assert len(message) < LONGEST, (path, value, message)
    assert taken < len(list(places(parameters(flow)))) * len((*VALUES, *TEXTS)), "some are refused"


@pytest.mark.parametrize(
    ("module", "flow"),
    [
        (checkpoint, checkpoint.evaluate),
        (checkpoint, checkpoint.evaluate_checkpoint),
        (checkpoint, checkpoint.promote),
        (maintenance, maintenance.report),
        (maintenance, maintenance.verify),
        (pipeline, pipeline.rerun),
        (studies, studies.study),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_name_that_names_nothing_ends_the_flow_with_a_sentence(
    module: types.ModuleType, flow: Flow[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the flow is looked at and not sent: Prefect's server has no part in it."""

    def ended(work: Callable[[], FlowResult]) -> str:
        try:
            return work().message
        except MISTAKES as error:
            return f"{error}"

    monkeypatch.setattr(module, "flow_state", ended)
    monkeypatch.chdir(tmp_path)
    model = parameters(flow)
    for name, field in model.model_fields.items():
        if field.annotation is str and name != "root":
            for text in TEXTS:
                said = flow.fn(model.model_validate({name: text, "root": str(tmp_path / "root")}))
                assert said, (name, text)
                assert "\n" not in said, (name, text, said)
                assert len(said) < LONGEST, (name, text, said)
