"""What training goes on from, as a tracked step: weights from elsewhere, or a checkpoint of another run as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.model.flops import parameter_count
from llama3.recipe.load import RecipeError, resolved
from llama3.tokens.tokenizer import Tokenizer
from storage.artifact import Artifact, ArtifactSpec
from storage.filesystem import state
from tasks.models.start import find_start, start_faults, tokenizer_faults
from tasks.step import Context, ensure

if TYPE_CHECKING:
    from llama3.tokens.tokenizer import Tokenizer


VERSION = 1


@task(name="start", cache_policy=NO_CACHE, persist_result=False)
def import_start(context: Context, tokenizer: Artifact) -> Artifact:
    """Return the weights that the recipe's `start` names as an artifact of ours, or the checkpoint that it names.

    Raises ValueError if they are not of the recipe's shape, or the checkpoint does not fit it otherwise.
    """
    from llama3.export.convert import import_weights
    from llama3.tokens.tokenizer import Tokenizer

    recipe = context.recipe
    assert recipe.start is not None
    if recipe.start.is_checkpoint:
        return _checkpoint(context, Tokenizer.load(tokenizer.path))
    start, rows = recipe.start, Tokenizer.load(tokenizer.path).rows
    parameters = {
        "files": state(start.origin),
        "format": start.format,
        "model": resolved(recipe)["model"],
        "rows": rows,
    }
    design = ArtifactSpec("weights", recipe.name, VERSION, parameters, {})

    def build(folder: Path, _: str) -> dict[str, Any]:
        spec = import_weights(start, folder / "model", recipe.model, rows)
        return {"from": start.origin, "parameters": parameter_count(spec, rows)}

    return ensure(context, "start", design, build)


def _checkpoint(context: Context, tokenizer: Tokenizer) -> Artifact:
    """Return the checkpoint that the recipe starts from: reused, as a stage of another run is."""
    if faults := start_faults(context.store, context.runs, context.recipe):
        raise RecipeError("\n".join(faults))
    found = find_start(context.store, context.runs, context.recipe)
    if faults := list(tokenizer_faults(context.recipe, found, tokenizer)):
        raise RecipeError("\n".join(faults))
    made = found.manifest
    design = ArtifactSpec(made.kind, made.name, made.version, made.parameters, made.inputs)

    def build(folder: Path, _: str) -> dict[str, Any]:
        raise RecipeError(f"start.from: {found.label} is damaged; run {made.made_by} again, or start from another")

    return ensure(context, "start", design, build)
