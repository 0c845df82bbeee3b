"""Models of the root by alias, where a recipe takes a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.storage.root import Root
from herd.tasks.models.start import alias_label, with_local_models

CHAT = Path("recipes/quickstart-chat.yaml")


def test_an_alias_that_no_model_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"init_from.path: no model of .* holds quickstart@champion; promote one"):
        with_local_models(Root.parse(tmp_path), load_recipe(CHAT))


def test_a_path_is_no_alias(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    (tmp_path / "me@champion").mkdir()
    for name in ("models/8b", "s3://me@host/bucket", "Me@Champion/x", str(tmp_path / "me@champion")):
        assert alias_label(root, name) is None
    plain = load_recipe(Path("recipes/domain-adaptation.yaml"))
    assert with_local_models(root, plain) == plain
