"""Weights from elsewhere as a tracked step: the model folder with which continued pretraining starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.export.start import import_weights
from llama3.model.flops import parameter_count
from llama3.recipe.load import resolved
from llama3.tokens.tokenizer import Tokenizer
from storage.artifact import Artifact, Design
from storage.filesystem import state
from tasks.step import Context, ensure

VERSION = 1


@task(name="start", cache_policy=NO_CACHE, persist_result=False)
def import_start(context: Context, tokenizer: Artifact) -> Artifact:
    """Return the weights that the recipe's `start` names, as an artifact of ours."""
    recipe = context.recipe
    assert recipe.start is not None
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
