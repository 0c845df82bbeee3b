"""What training starts from, as a tracked step: imported weights, or a checkpoint of another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from herd.llama3.model.flops import parameter_count
from herd.llama3.recipe.load import RecipeError, resolved
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.filesystem import source_state
from herd.tasks.models.start import (
    alias_label,
    find_init_checkpoint,
    init_from_faults,
    tokenizer_faults,
    with_local_models,
)
from herd.tasks.step import Context, ensure_artifact

if TYPE_CHECKING:
    from herd.llama3.tokens.tokenizer import Tokenizer


VERSION = 1


@task(name="init-weights", cache_policy=NO_CACHE, persist_result=False)
def init_weights(context: Context, tokenizer: Artifact) -> Artifact:
    """Return the weights of the recipe's `init_from` as an artifact, or the checkpoint that it names.

    Raises ValueError if they do not fit the recipe.
    """
    from herd.llama3.export.convert import import_weights
    from herd.llama3.tokens.tokenizer import Tokenizer

    recipe = context.recipe
    assert recipe.init_from is not None
    if recipe.init_from.is_checkpoint:
        return _checkpoint(context, Tokenizer.load(tokenizer.path))
    start, rows = with_local_models(context.root, recipe).init_from, Tokenizer.load(tokenizer.path).rows
    assert start is not None
    path = recipe.init_from.path
    label = alias_label(context.root, path)
    parameters = {
        "files": label or source_state(path),
        "format": start.format,
        "model": resolved(recipe)["model"],
        "rows": rows,
    }
    design = ArtifactSpec("weights", recipe.name, VERSION, parameters, {})

    def build(folder: Path, _: str) -> dict[str, Any]:
        config = import_weights(start, folder / "model", recipe.model, rows)
        return {"from": label or path, "parameters": parameter_count(config, rows)}

    return ensure_artifact(context, "init-weights", design, build)


def _checkpoint(context: Context, tokenizer: Tokenizer) -> Artifact:
    """Return the checkpoint that the recipe starts from: reused, as a stage of another run is."""
    if faults := init_from_faults(context.store, context.runs, context.recipe):
        raise RecipeError("\n".join(faults))
    found = find_init_checkpoint(context.store, context.runs, context.recipe)
    if faults := list(tokenizer_faults(context.recipe, found, tokenizer)):
        raise RecipeError("\n".join(faults))
    made = found.manifest
    design = ArtifactSpec(made.kind, made.name, made.version, made.parameters, made.inputs)

    def build(folder: Path, _: str) -> dict[str, Any]:
        raise RecipeError(
            f"init_from.path: {found.label} is damaged; run {made.created_by} again, or start from another"
        )

    return ensure_artifact(context, "init-weights", design, build)
