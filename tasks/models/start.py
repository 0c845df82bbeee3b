"""The checkpoint that a run goes on from: found by its label or by run and stage, and compared with the recipe.

Position, shape and tokenizer must be the recipe's, because the optimizer's moments, the rate and the token stream go on
where the checkpoint ends. What is not compared is what it was trained on: to go on with other data is the point.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llama3.recipe.load import RecipeError
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Model
from llama3.tokens.tokenizer import MODEL_FILE, Tokenizer, use_tokenizer
from storage.artifact import Artifact, Store
from tasks.runs.records import Runs

KIND = "checkpoint"


class ModelShape(NamedTuple):
    """Shape of a model, and how many embedding rows it has."""

    spec: Model
    rows: int


def find_start(store: Store, runs: Runs, recipe: Recipe) -> Artifact:
    """Return the checkpoint that `start.from` names. Raises RecipeError if there is none of that name."""
    assert recipe.start is not None
    origin = recipe.start.origin
    place, _, stage = origin.partition("/")
    try:
        if place == KIND:
            return store.at(origin)
        steps = runs.find(place).steps
        made = {name: step.artifact for name, step in steps.items() if step.artifact.startswith(f"{KIND}/")}
        if stage in made:
            return store.at(made[stage])
    except ValueError as error:
        raise RecipeError(f"start.from: {origin!r}: {error}") from None
    known = ", ".join(f"{place}/{name}" for name in made) or "none yet"
    raise RecipeError(f"start.from: {origin!r}: {place} has not finished such a stage; it has {known}")


def start_faults(store: Store, runs: Runs, recipe: Recipe) -> list[str]:
    """Return why the run cannot go on from its checkpoint, as far as that shows before there is a tokenizer."""
    try:
        checkpoint = find_start(store, runs, recipe)
    except RecipeError as error:
        return [str(error)]
    used = Path(recipe.tokenizer.use or "")
    own = [*tokenizer_faults(recipe, checkpoint, use_tokenizer(used))] if used.is_file() else []
    return [*_position_faults(recipe, checkpoint), *_shape_faults(recipe, checkpoint), *own]


def tokenizer_faults(recipe: Recipe, checkpoint: Artifact, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a fault if the checkpoint reads other ids than `tokenizer` writes."""
    theirs = Tokenizer.load(checkpoint.part(f"model/{MODEL_FILE}").parent)
    if theirs.digest != tokenizer.digest:
        what = "use" if recipe.tokenizer.use else "train"
        yield (
            f"tokenizer.{what}: gives a tokenizer with digest {tokenizer.digest[:12]}, but {checkpoint.label} was "
            f"trained with {theirs.digest[:12]}; write tokenizer: {{use: {checkpoint.part(f'model/{MODEL_FILE}')}}}"
        )


def _position_faults(recipe: Recipe, checkpoint: Artifact) -> Iterator[str]:
    assert recipe.start is not None
    ends = {span.name: span.end for span in Schedule(recipe).spans}
    after, end = recipe.start.after, int(checkpoint.facts["end"])
    assert after is not None
    if ends[after] != end:
        fitting = [name for name, own in ends.items() if own == end]
        listed = ", ".join(f"{name} at {own:,}" for name, own in ends.items())
        remedy = f"write after: {fitting[0]}" if fitting else f"write until: {end} tokens there, or name another"
        yield (
            f"start.after: {after!r} ends at token {ends[after]:,}, {checkpoint.label} at {end:,}; {remedy} "
            f"(stages end: {listed})"
        )


def _shape_faults(recipe: Recipe, checkpoint: Artifact) -> list[str]:
    from llama3.export.convert import compare_shapes  # imports torch, which most recipes need not wait for here
    from llama3.model.files import CONFIG, read_config

    assert recipe.start is not None
    try:
        shape = ModelShape(*read_config(checkpoint.part(f"model/{CONFIG}").parent))
        compare_shapes(recipe.start, shape, recipe.model)
    except ValueError as error:
        return str(error).splitlines()
    return []
