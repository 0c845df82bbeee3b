"""The reference of a study's file, written from its schema so that it cannot fall behind it.

Sections that a study shares with a recipe (a model's shape, a data source) are described on the recipe's page.
"""

from __future__ import annotations

from llama3.recipe.reference import described, sections
from llama3.recipe.schema import Recipe
from llama3.scaling.study import Study


def study_reference() -> str:
    """Return the reference of every field of a study as markdown: key, form, default, meaning."""
    recipe = sections(Recipe)
    parts = ["# Study reference", "", "Written by `herd reference --study`; do not edit by hand.", ""]
    return "\n".join([*parts, *described(sections(Study, but=recipe), elsewhere=recipe)]).rstrip("\n") + "\n"
