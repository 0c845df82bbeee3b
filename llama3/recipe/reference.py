"""The recipe reference as markdown, generated from the schema."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_origin

from pydantic import BaseModel

from herd.llama3.recipe.base import models_in
from herd.llama3.recipe.load import BASE
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import PRESETS

Sections = Collection[type[BaseModel]]
FILE_KEYS = """\
A recipe file may also have the key `base`: the path of another recipe from the folder of this one, whose fields it
takes and changes. Mappings are merged, lists and values replaced; a base may have a base. `herd plan` prints the
changes in a line. Only the resolved recipe is recorded, so the digest is that of the same recipe written out.

In addresses (keys `uri`, `contents`, `use`, `path`, `init_from`, `data`) `${NAME}` is the variable NAME of the
environment, `${NAME:-default}` has a default. A variable that holds a secret or is named like one is refused.

In an editor: `herd schema --json > recipe.schema.json`, and as the recipe's first line
`# yaml-language-server: $schema=recipe.schema.json`."""
_SIGNS = {
    "gt": ">",
    "ge": "≥",
    "lt": "<",
    "le": "≤",
    "multiple_of": "multiple of ",
    "min_length": "length≥",
    "max_length": "length≤",
    "pattern": "",
}
"""How a bound in a field's metadata is written."""
PAGE = "recipe.md"
"""File of the recipe reference; pages in the same folder link to it."""


def recipe_reference() -> str:
    """Return the reference of all recipe fields as markdown: key, form, default, meaning."""
    parts = ["# Recipe reference", "", "Written by `herd schema`; do not edit by hand.", "", FILE_KEYS, ""]
    keys = list(next(iter(PRESETS.values())))
    presets = ["## Presets", "", f"| preset | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    presets += [f"| `{name}` | {' | '.join(map(str, preset.values()))} |" for name, preset in PRESETS.items()]
    return "\n".join([*parts, *describe_sections(sections(Recipe)), *presets]) + "\n"


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of a file with the fields of `model`, for editors.

    A recipe may have a base and need no other field than its name: presets and bases have the rest.
    """
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(by_alias=True)}
    if model is Recipe:
        for section in (schema, *schema["$defs"].values()):
            section.pop("required", None)
        _accept_text(schema)
        gates = schema["$defs"]["Stage"]["properties"]["gates"]
        names = {"type": "array", "items": {"type": "string"}}  # short for gates without settings
        schema["$defs"]["Stage"]["properties"]["gates"] = {"anyOf": [names, gates], "description": gates["description"]}
        schema["properties"]["init_from"]["anyOf"].append({"type": "string"})  # short for its path
        about = "Recipe file, from the folder of this one, whose fields this one takes and changes."
        schema["properties"][BASE] = {"type": "string", "description": about}
        schema["required"] = ["name"]
    return schema


def _accept_text(schema: Any) -> None:
    """Let every number of `schema` be text too: YAML 1.1, which herd reads, takes 3e-4 for text, 1.2 for a number."""
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _accept_text(value)
    if isinstance(schema, dict) and schema.get("type") == "number":
        schema["type"] = ["number", "string"]


def sections(model: type[BaseModel], but: Sections = ()) -> list[type[BaseModel]]:
    """Return `model` and all sections below it, each once, in reading order, without those in `but`."""
    ordered: list[type[BaseModel]] = []
    pending = [model]
    while pending:
        section = pending.pop()
        if section not in ordered and section not in but:
            ordered.append(section)
            fields = section.model_fields.values()
            pending += reversed([inner for field in fields for inner in models_in(field.annotation)])
    return ordered


def describe_sections(
    models: Sections, elsewhere: Sections = (), defaults: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the lines about `models`; the recipe's page describes the sections `elsewhere`.

    `defaults` has the text of a default that differs between machines, by field.
    """
    for model in models:
        purpose = "" if model.__doc__ == BaseModel.__doc__ else " ".join((model.__doc__ or "").split())
        yield from (f"## {model.__name__}", "", purpose, "")
        bases = [base for base in elsewhere if base in model.__bases__]
        if bases:
            yield from (f"It has the fields of {_link(bases[0], elsewhere)}, and:", "")
        yield from ("| key | form | default | meaning |", "|---|---|---|---|")
        inherited = {name for base in bases for name in base.model_fields}
        for name, field in model.model_fields.items():
            if name in inherited:
                continue
            value = field.get_default(call_default_factory=True)
            if field.is_required():
                default = "required"
            elif name in defaults:
                default = defaults[name]
            elif isinstance(value, BaseModel) or value in (None, [], ""):
                default = ""
            elif isinstance(value, dict):
                default = ", ".join(f"`{key}: {item}`" for key, item in value.items())
            else:
                default = f"`[{', '.join(map(str, value))}]`" if isinstance(value, tuple) else f"`{value}`"
            meaning = " ".join((field.description or "").split())
            form = " ".join([_form(field.annotation, elsewhere), *_bounds(field.metadata)])
            cells = (f"`{field.alias or name}`", form, default, meaning)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    """Yield what the metadata of a field demands of a number, of a text or of a length, such as `>0`."""
    for constraint in metadata:
        for name, sign in _SIGNS.items():
            bound = getattr(constraint, name, None)
            if bound is not None:
                yield f"{sign}{bound:g}" if isinstance(bound, (int, float)) else f"`{bound}`"


def _form(annotation: Any, elsewhere: Sections) -> str:
    """Return how a value of the type `annotation` is written."""
    example, origin = getattr(annotation, "example", None), get_origin(annotation)
    if example:
        return f"such as `{example}`"
    types = [argument for argument in getattr(annotation, "__args__", ()) if argument is not type(None)]
    if types and all(isinstance(value, str) for value in types):
        return ", ".join(f"`{value}`" for value in types)
    if len(types) == 1:
        return f"{'list of ' if origin is list else ''}{_form(types[0], elsewhere)}"
    if types and origin is tuple:
        return f"pair of {_form(types[0], elsewhere)}"
    if types and origin is dict:
        return f"mapping to {_link(types[1], elsewhere)}" if models_in(types[1]) == [types[1]] else "mapping"
    if types:
        return " or ".join(_form(inner, elsewhere) for inner in types)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _link(annotation, elsewhere)
    return getattr(annotation, "__name__", str(annotation))


def _link(model: type[BaseModel], elsewhere: Sections) -> str:
    return f"[{model.__name__}]({PAGE if model in elsewhere else ''}#{model.__name__.lower()})"
