"""The recipe reference, written from the schema itself so that it cannot fall behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llama3.recipe.load import models_in
from llama3.recipe.presets import PRESETS
from llama3.recipe.schema import Recipe

Sections = Collection[type[BaseModel]]
PAGE = "recipe.md"
"""File of the recipe reference, as pages beside it link to it."""


def recipe_reference() -> str:
    """Return the reference of every recipe field as markdown: key, form, default, meaning."""
    parts = ["# Recipe reference", "", "Written by `herd reference`; do not edit by hand.", ""]
    return "\n".join([*parts, *described(sections(Recipe)), *_presets()]) + "\n"


def sections(model: type[BaseModel], but: Sections = ()) -> list[type[BaseModel]]:
    """Return `model` and every section below it, each once, in reading order; without those of `but`."""
    found: list[type[BaseModel]] = []
    _collect(model, but, found)
    return found


def _collect(model: type[BaseModel], but: Sections, found: list[type[BaseModel]]) -> None:
    if model in found or model in but:
        return
    found.append(model)
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            _collect(inner, but, found)


def described(models: Sections, elsewhere: Sections = ()) -> Iterator[str]:
    """Yield the lines that describe `models`; sections `elsewhere` are on the recipe's page and are linked there."""
    for model in models:
        above = [base for base in elsewhere if base in model.__bases__]
        yield from (f"## {model.__name__}", "", _purpose(model), "")
        if above:
            yield from (f"It has the fields of {_link(above[0], elsewhere)}, and:", "")
        yield from ("| key | form | default | meaning |", "|---|---|---|---|")
        inherited = {name for base in above for name in base.model_fields}
        for name, field in model.model_fields.items():
            if name not in inherited:
                yield _row(name, field, elsewhere)
        yield ""


def _purpose(model: type[BaseModel]) -> str:
    doc = model.__doc__ or ""
    return " ".join(doc.split()) if doc != BaseModel.__doc__ else ""


def _row(name: str, field: FieldInfo, elsewhere: Sections) -> str:
    meaning = " ".join((field.description or "").split())
    cells = (f"`{field.alias or name}`", _form(field.annotation, elsewhere), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _form(annotation: Any, elsewhere: Sections) -> str:
    example = getattr(annotation, "example", None)
    if example:
        return f"such as `{example}`"
    inner = [part for part in getattr(annotation, "__args__", ()) if part is not type(None)]
    if inner and all(isinstance(part, str) for part in inner):
        return ", ".join(f"`{part}`" for part in inner)
    if len(inner) == 1:
        only = _form(inner[0], elsewhere)
        return f"list of {only}" if get_origin(annotation) is list else only
    if inner:
        return _several(annotation, inner, elsewhere)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _link(annotation, elsewhere)
    return getattr(annotation, "__name__", str(annotation))


def _several(annotation: Any, inner: Sequence[Any], elsewhere: Sections) -> str:
    if get_origin(annotation) is tuple:
        return f"pair of {_form(inner[0], elsewhere)}"
    if get_origin(annotation) is dict:
        return f"mapping to {_link(inner[1], elsewhere)}" if models_in(inner[1]) == [inner[1]] else "mapping"
    return " or ".join(_form(part, elsewhere) for part in inner)


def _link(model: type[BaseModel], elsewhere: Sections) -> str:
    return f"[{model.__name__}]({PAGE if model in elsewhere else ''}#{model.__name__.lower()})"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, dict):
        return ", ".join(f"`{key}: {item}`" for key, item in value.items())
    if isinstance(value, tuple):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return "" if value in (None, [], "") else f"`{value}`"


def _presets() -> list[str]:
    keys = list(next(iter(PRESETS.values())))
    rows = [
        f"| `{name}` | " + " | ".join(str(value) for value in preset.values()) + " |"
        for name, preset in PRESETS.items()
    ]
    return ["## Presets", "", "| preset | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|", *rows]
