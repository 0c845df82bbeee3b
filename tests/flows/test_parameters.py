from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.opening import chosen_recipe, step_names
from flows.parameters import PipelineParameters
from flows.pipeline import pipeline
from llama3.recipe.load import load_recipe


def test_every_parameter_has_a_default_so_that_a_quick_run_is_one_click() -> None:
    schema = pipeline.parameters.model_dump()
    assert schema.get("required", []) == []
    assert set(schema["properties"]) == {"config"}
    form = schema["definitions"]["PipelineParameters"]["properties"]
    assert [form[name]["position"] for name in form] == list(range(len(form)))
    assert all(form[name].get("title", name == "cluster") and form[name]["description"] for name in form)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ValidationError, match="recepie"):
        PipelineParameters.model_validate({"recepie": "x"})


def test_a_remote_root_is_refused() -> None:
    with pytest.raises(ValueError, match="root: s3://bucket/herd is remote"):
        _ = PipelineParameters(root="s3://bucket/herd").root_path


def test_steps_are_named_in_order() -> None:
    assert step_names(load_recipe(Path("recipes/quickstart.yaml"))) == [
        "collect",
        "annotate",
        "curate",
        "tokenizer",
        "tokenise",
        "ramp-1",
        "ramp-2",
        "main",
        "evaluate-main",
        "anneal",
        "evaluate-anneal",
        "promote",
    ]


def test_overrides_change_the_chosen_recipe() -> None:
    config = PipelineParameters(overrides=["curate.dedup.jaccard=0.7"])
    assert chosen_recipe(config).curate.dedup.jaccard == 0.7
