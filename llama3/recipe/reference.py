"""The recipe reference, written from the schema itself so that it cannot fall behind it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llama3.recipe.load import models_in
from llama3.recipe.presets import PRESETS
from llama3.recipe.schema import Recipe


def recipe_reference() -> str:
    """Return the reference of every recipe field as markdown: key, form, default, meaning."""
    parts = ["# Recipe reference", "", "Written by `herd reference`; do not edit by hand.", ""]
    for model in _sections(Recipe, []):
        parts += [
            f"## {model.__name__}",
            "",
            _purpose(model),
            "",
            "| key | form | default | meaning |",
            "|---|---|---|---|",
        ]
        parts += [_row(name, field) for name, field in model.model_fields.items()]
        parts.append("")
    return "\n".join([*parts, *_presets()]) + "\n"


def _sections(model: type[BaseModel], seen: list[type[BaseModel]]) -> list[type[BaseModel]]:
    """Return `model` and every section below it, each once, in reading order."""
    if model not in seen:
        seen.append(model)
        for field in model.model_fields.values():
            for inner in models_in(field.annotation):
                _sections(inner, seen)
    return seen


def _purpose(model: type[BaseModel]) -> str:
    doc = model.__doc__ or ""
    return " ".join(doc.split()) if doc != BaseModel.__doc__ else ""


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    cells = (f"`{field.alias or name}`", _form(field.annotation), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _form(annotation: Any) -> str:
    example = getattr(annotation, "example", None)
    if example:
        return f"such as `{example}`"
    inner = [part for part in getattr(annotation, "__args__", ()) if part is not type(None)]
    if inner and all(isinstance(part, str) for part in inner):
        return ", ".join(f"`{part}`" for part in inner)
    if len(inner) == 1:
        return f"list of {_form(inner[0])}" if getattr(annotation, "__origin__", None) is list else _form(inner[0])
    if inner:
        return " or ".join(_form(part) for part in inner) if "Union" in str(type(annotation)) else "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, dict):
        return ", ".join(f"`{key}: {item}`" for key, item in value.items())
    return "" if value is None or value == [] else f"`{value}`"


def _presets() -> list[str]:
    keys = list(next(iter(PRESETS.values())))
    rows = [
        f"| `{name}` | " + " | ".join(str(value) for value in preset.values()) + " |"
        for name, preset in PRESETS.items()
    ]
    return ["## Presets", "", "| preset | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|", *rows]
