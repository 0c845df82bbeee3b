"""Read a recipe from YAML, apply overrides, and turn every mistake into a line that says what to write instead."""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from llama3.recipe.base import read_plain
from llama3.recipe.schema import Recipe
from storage.secrets import refuse_secrets


class RecipeError(ValueError):
    """A recipe that cannot be run; the text has one line per fault: field, value, remedy."""


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe in the YAML file `path` with `overrides` such as `curate.dedup.jaccard=0.7` applied.

    Raises RecipeError naming the file and each faulty field.
    """
    try:
        data = read_plain(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); recipes are YAML files") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML: {error}") from error
    return parse_recipe(data, str(path), overrides)


def parse_recipe(data: object, name: str, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe that the mapping `data` describes; `name` is what errors call it. Raises RecipeError."""
    if not isinstance(data, dict):
        raise RecipeError(f"{name}: must be a mapping with the keys {', '.join(Recipe.model_fields)}")
    for override in overrides or []:
        apply_override(data, override)
    try:
        refuse_secrets(data, name)  # before anything that would repeat one in a message
    except ValueError as error:
        raise RecipeError(str(error)) from None
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(fault_lines(error, Recipe, name)) from None


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe with every default filled in, as plain data: what is digested, logged and shown."""
    return recipe.model_dump(mode="json", by_alias=True)


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that `load_recipe` reads back to an equal recipe."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True, width=120)


def digest(data: object) -> str:
    """Return the SHA-256 (hex) of `data` as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set the field of `data` that `override` names (`stages.2.for=1M`, `mix.base.math=25%`). Raises RecipeError."""
    (*parents, last), text = override_parts(override)
    place: Any = data
    for key in parents:
        if isinstance(place, list):
            place = place[element(place, key, override)]
        else:
            place = place.setdefault(key, {})
        if not isinstance(place, dict | list):
            raise RecipeError(f"override {override!r}: {key!r} has no fields")
    place[element(place, last, override) if isinstance(place, list) else last] = _value(text, override)


def _value(text: str, override: str) -> Any:
    try:
        return read_plain(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {text!r} is not YAML: {error}") from None


def override_parts(override: str) -> tuple[list[str], str]:
    """Return the keys that lead to the field of an override, and its value as YAML. Raises RecipeError."""
    path, separator, text = override.partition("=")
    if not separator:
        raise RecipeError(f"override {override!r}: write field.subfield=value")
    return path.split("."), text


def element(items: list[Any], key: str, override: str) -> int:
    """Return the place in a list that `key` means: an element's `name`, or its number. Raises RecipeError."""
    named = [place for place, item in enumerate(items) if isinstance(item, dict) and item.get("name") == key]
    if named:
        return named[0]
    if key.isdigit() and int(key) < len(items):
        return int(key)
    raise RecipeError(f"override {override!r}: there is no element {key!r} in that list")


def fault_lines(error: ValidationError, model: type[BaseModel], name: str) -> str:
    """Return a line for each fault that `model` found in the file called `name`: field, value, remedy."""
    faults = [line for fault in error.errors() for line in _explain(dict(fault), model)]
    return "\n".join(f"{name}: {line}" for line in faults)


def _explain(fault: dict[str, Any], root: type[BaseModel]) -> list[str]:
    whole = root.__name__.lower()
    field = ".".join(str(part) for part in fault["loc"]) or whole
    if fault["type"] == "extra_forbidden":
        return [f"{field}: unknown key; {_nearest(fault['loc'], root)}"]
    if fault["type"] == "missing":
        return [f"{field}: is missing"]
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        lines = message.split("\n")
        return lines if field == whole else [f"{field}: {line}" for line in lines]
    return [f"{field}: {fault['input']!r}: {message[0].lower()}{message[1:]}"]


def _nearest(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    known = _fields_at(location[:-1], root)
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(known)}"


def _fields_at(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """Return the keys that the schema `root` knows at `location`."""
    models = [root]
    for part in location:
        fields = [field for model in models for key, field in model.model_fields.items() if part in (key, field.alias)]
        if fields:
            models = [model for field in fields for model in models_in(field.annotation)]
    return [field.alias or key for model in models for key, field in model.model_fields.items()]


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the models that a field's annotation mentions, however nested."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]
