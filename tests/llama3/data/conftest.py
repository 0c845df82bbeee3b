from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.recipe.load import parse_recipe
from herd.llama3.recipe.schema import Recipe
from tests.storage.s3 import moto_endpoint

__all__ = ["moto_endpoint"]

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """Return a function that makes a recipe from sources by domain and the section `curate`."""

    def make(sources: dict[str, list[dict[str, Any]]], **curate: Any) -> Recipe:
        data = yaml.safe_load(QUICKSTART.read_text())
        share = {next(iter(sources)): "100%"}
        data |= {"sources": sources, "mix": {"base": share, "annealing": share}, "curate": curate}
        return parse_recipe(data, "test recipe")

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes texts as JSON lines and returns the path."""

    def write(name: str, texts: list[str], **fields: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text, **fields}, ensure_ascii=False) + "\n" for text in texts))
        return str(path)

    return write
