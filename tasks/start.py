"""Weights from elsewhere as a tracked step: the model folder with which continued pretraining starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.export.convert import open_source
from llama3.export.start import compare_shapes, import_weights
from llama3.model.flops import parameter_count
from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from llama3.tokens.tokenizer import Tokenizer
from storage.artifact import Artifact, Design
from storage.filesystem import is_local, local_path, state
from tasks.step import Context, ensure

VERSION = 1


@task(name="start", tags=["pretrain"], cache_policy=NO_CACHE, persist_result=False)
def import_start(context: Context, tokenizer: Artifact) -> Artifact | None:
    """Return the weights that the recipe's `start` names as an artifact of ours; None if it starts from its seed."""
    recipe = context.recipe
    if recipe.start is None:
        return None
    start, rows = recipe.start, Tokenizer.load(tokenizer.path).rows
    parameters = {
        "files": state(start.origin),
        "format": start.format,
        "model": resolved(recipe)["model"],
        "rows": rows,
    }
    design = Design("weights", recipe.name, VERSION, parameters, {})

    def build(folder: Path, _: str) -> dict[str, Any]:
        spec = import_weights(start, folder / "model", recipe.model, rows)
        return {"from": start.origin, "parameters": parameter_count(spec, rows)}

    return ensure(context, "start", design, build)


def start_faults(recipe: Recipe) -> list[str]:
    """Return what is wrong with the weights that `start` names, as far as their settings on this machine tell."""
    if recipe.start is None or not is_local(recipe.start.origin):
        return []
    try:
        compare_shapes(recipe.start, open_source(local_path(recipe.start.origin), recipe.start.format), recipe.model)
    except ValueError as error:
        return [text if text.startswith("start.") else f"start.from: {text}" for text in str(error).splitlines()]
    return []
