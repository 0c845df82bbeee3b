from __future__ import annotations

from pathlib import Path

from llama3.recipe.reference import recipe_reference


def test_the_committed_reference_is_the_schema_s() -> None:
    written = Path("docs/reference/recipe.md").read_text()
    assert written == recipe_reference(), "write it again: herd schema > docs/reference/recipe.md"
