"""Records which fields of recipes are read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from pydantic import BaseModel

from herd.llama3.recipe.base import FrozenModel, Section, mark_of, models_in
from herd.llama3.recipe.schema import Recipe

KEYS = ("herd.llama3.recipe.keys", "herd.llama3.recipe.base")
"""Modules that read fields for keys, not for results."""


@cache
def paths_of_fields() -> dict[tuple[type[BaseModel], str], set[str]]:
    """Return (model, attribute) -> paths of the declared fields that it is, or is inside of."""
    paths: dict[tuple[type[BaseModel], str], set[str]] = {}

    def visit(model: type[BaseModel], path: str, declared: str) -> None:
        for name, field in model.model_fields.items():
            below = f"{path}.{field.alias or name}".lstrip(".")
            own = declared or (below if mark_of(field) else "")
            if own:
                paths.setdefault((model, name), set()).add(own)
            for inner in models_in(field.annotation):
                visit(inner, below, own)

    visit(Recipe, "", "")
    return paths


@contextmanager
def recorded_fields() -> Iterator[set[str]]:
    """Record the paths of the fields that any thread of this process reads until the block ends.

    A dump reads all fields of a section. Validation is left out, and what `recipe.keys` reads; a schedule is built anew
    where it is used. A model that several fields have counts for all of them.
    """
    read: set[str] = set()
    validating = threading.local()
    paths, plain, validate = paths_of_fields(), FrozenModel.__getattribute__, FrozenModel.model_validate.__func__

    def getattribute(self: Any, name: str) -> Any:
        fields = paths.get((type(self), name), set())
        if name in ("model_dump", "model_dump_json") and isinstance(self, Section):
            fields = {path for (model, _), known in paths.items() if model is type(self) for path in known}
        by = sys._getframe(1).f_globals.get("__name__") if fields else ""
        if fields and by not in KEYS and not getattr(validating, "now", False):
            read.update(fields)
        return plain(self, name)

    def model_validate(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        outer, validating.now = getattr(validating, "now", False), True
        try:
            model = validate(cls, *arguments, **keywords)
        finally:
            validating.now = outer
        model.__dict__.pop("schedule", None)
        return model

    FrozenModel.__getattribute__ = getattribute  # type: ignore[method-assign]
    FrozenModel.model_validate = classmethod(model_validate)  # type: ignore[assignment,method-assign]
    try:
        yield read
    finally:
        del FrozenModel.__getattribute__, FrozenModel.model_validate
