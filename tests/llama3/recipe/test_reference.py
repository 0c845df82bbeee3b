"""The reference pages are what the schemas say, and the JSON Schemas take what the models take."""

from pathlib import Path
from typing import Any

import jsonschema
import yaml

from herd.llama3.recipe.reference import json_schema, recipe_reference
from herd.llama3.recipe.schema import Recipe


def test_the_written_reference_is_the_current_one() -> None:
    written = Path("docs/reference/recipe.md").read_text()
    assert written == recipe_reference(), "write it again: herd schema > docs/reference/recipe.md"


def faults(data: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(json_schema(Recipe)).iter_errors(data)]


def test_an_editor_accepts_every_shipped_recipe_and_refuses_unknown_keys() -> None:
    for path in Path("recipes").glob("*.yaml"):
        assert faults(yaml.safe_load(path.read_text())) == [], path
    assert faults({"name": "a", "curate": {"dedupe": {}}, "base": 3}) == [
        "Additional properties are not allowed ('dedupe' was unexpected)",
        "3 is not of type 'string'",
    ]
    assert faults({"seed": 1}) == ["'name' is a required property"]
