"""The checkpoint that a run continues from: found by its label or by run and stage, and compared with the recipe.

Position, shape and tokenizer must match the recipe, because optimizer moments, learning rate and token stream continue
where the checkpoint ends. Its training data may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from herd.llama3.model.flops import recipe_vocab_size
from herd.llama3.recipe import load
from herd.llama3.recipe.base import NAME
from herd.llama3.recipe.load import RecipeError
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import FROM_WEIGHTS, InitFrom
from herd.llama3.tokens.tokenizer import Tokenizer, tokenizer_file, use_tokenizer
from herd.storage.artifact import Artifact, Store
from herd.storage.fetch import use_fetched
from herd.storage.filesystem import PACKAGE, fetched_files, is_local, local_path
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.models.lookup import label_of_alias
from herd.tasks.runs.records import Runs

KIND = "checkpoint"
FOREIGN_SUFFIXES = (".json", ".gguf")
"""Files whose tokenizer may be in another than the Llama 3 format."""


def alias_label(root: Root, name: str) -> str | None:
    """Return the label of the checkpoint that `name`, such as quickstart@champion, names; None for a path.

    Raises ValueError if no model holds the alias.
    """
    family, at, alias = name.partition("@")
    if not (at and NAME.fullmatch(family) and NAME.fullmatch(alias)) or Path(name).exists():
        return None
    label = label_of_alias(root, family, alias)
    if label is None:
        raise ValueError(f"no model of {root.uri} holds {name}; promote one (herd run), or write a path")
    return label


def with_local_models(root: Root, recipe: Recipe) -> Recipe:
    """Return `recipe` with paths in place of models named by alias and of fetched copies of addresses.

    In `init_from.path`, whose format is no longer `auto`, and `tokenizer.use`. Raises RecipeError if no model holds an
    alias, a tokenizer is remote, or the weights have no known format.
    """

    start, use, changed = recipe.init_from, recipe.tokenizer.use, dict[str, object]()
    if start is not None and not start.is_checkpoint:
        changed["init_from"] = _local_weights(root, start)
    if use is not None:
        changed["tokenizer"] = recipe.tokenizer.model_copy(update={"use": _local(root, "tokenizer.use", use, True)})
    return recipe.model_copy(update=changed)


def _local(root: Root, field: str, name: str, of_tokenizer: bool = False) -> str:
    if not is_local(name):
        copies = fetched_files(name)
        if copies and (of_tokenizer or len({copy.parent for copy in copies}) == 1):
            return str(copies[0] if of_tokenizer else copies[0].parent)
        if of_tokenizer:
            raise RecipeError(f"{field}: {name!r} is not on this machine; download it with herd fetch RECIPE")
        return name
    try:
        if (label := alias_label(root, name)) is None:
            return str(local_path(name)) if name.startswith(PACKAGE) else name
    except ValueError as error:
        raise RecipeError(f"{field}: {error}") from None
    folder = open_store(root).load(label).path_of("model")
    return str(tokenizer_file(folder) if of_tokenizer else folder)


def _local_weights(root: Root, start: InitFrom) -> InitFrom:
    """Return `start` with a path for an alias or a fetched copy, and the format that its files show for `auto`.

    Raises RecipeError.
    """
    start = start.model_copy(update={"path": _local(root, "init_from.path", start.path)})
    if start.format != "auto":
        return start
    from herd.llama3.export.convert import format_of  # imports torch

    try:
        return start.model_copy(update={"format": format_of(start.path)})
    except (OSError, ValueError) as error:
        raise RecipeError(f"init_from.path: {error}") from None


def load_recipe(root: Root, path: Path | str, overrides: list[str] | str | None = None) -> Recipe:
    """Return the recipe in a file, as `llama3.recipe.load` does; without `model` it has the shape of its weights.

    Raises RecipeError.
    """
    return load.load_recipe(path, overrides, partial(_with_shape, root))


def _with_shape(root: Root, data: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping of a recipe with the shape of the weights of `init_from`, if its `model` leaves that open."""
    given = data.get("model") or {"preset": FROM_WEIGHTS}
    if "init_from" not in data or not isinstance(given, dict) or given.get("preset") != FROM_WEIGHTS:
        return data
    try:
        start = InitFrom.model_validate(data["init_from"])
    except ValidationError:  # the recipe says why
        return data
    if start.is_checkpoint:
        return data
    use_fetched(root)
    start = _local_weights(root, start)
    if not is_local(start.path):
        raise RecipeError(f"model: is missing, and {start.path} is not on this machine; write the shape of its weights")
    from herd.llama3.export.convert import open_source  # imports torch

    try:
        config = open_source(local_path(start.path), start.format).config
    except ValueError as error:
        raise RecipeError(f"init_from.path: {error}") from None
    shape = config.model_dump(mode="json", exclude={"preset", "embedding_std"})
    return {**data, "model": {**shape, **{key: value for key, value in given.items() if key != "preset"}}}


def known_tokenizer(root: Root, recipe: Recipe) -> Tokenizer | None:
    """Return the tokenizer that a recipe names, or None: it is trained later, absent, or not needed for a plan.

    A plan needs it for conversations, and to know the vocabulary of one that is not a tiktoken file.
    """
    use = recipe.tokenizer.use or ""
    if recipe.conversations or use.endswith(FOREIGN_SUFFIXES) or "@" in use:
        with suppress(ValueError):  # the checks of the run tell
            return use_tokenizer(str(with_local_models(root, recipe).tokenizer.use))
    return None


def known_vocab_size(root: Root, recipe: Recipe) -> int:
    """Return the vocab_size of the recipe's tokenizer if that exists, else the one it is going to have."""
    known = known_tokenizer(root, recipe)
    return known.vocab_size if known else recipe_vocab_size(recipe)


def find_init_checkpoint(store: Store, runs: Runs, recipe: Recipe) -> Artifact:
    """Return the checkpoint that `init_from.path` names. Raises RecipeError if there is none of that name."""
    assert recipe.init_from is not None
    path = recipe.init_from.path
    run, _, stage = path.partition("/")
    try:
        if run == KIND:
            return store.load(path)
        steps = runs.find(run).steps
        labels = {name: step.artifact for name, step in steps.items() if step.artifact.startswith(f"{KIND}/")}
        if stage in labels:
            return store.load(labels[stage])
    except ValueError as error:
        raise RecipeError(f"init_from.path: {path!r}: {error}") from None
    known = ", ".join(f"{run}/{name}" for name in labels) or "none yet"
    raise RecipeError(f"init_from.path: {path!r}: {run} has not finished such a stage; it has {known}")


def init_from_faults(store: Store, runs: Runs, recipe: Recipe) -> list[str]:
    """Return why the run cannot continue from its checkpoint; the tokenizer is compared only if the recipe has one."""
    try:
        checkpoint = find_init_checkpoint(store, runs, recipe)
    except RecipeError as error:
        return [str(error)]
    from herd.llama3.export.convert import compare_shapes  # imports torch
    from herd.llama3.model.files import CONFIG, read_config

    assert recipe.init_from is not None
    faults = []
    ends = {span.name: span.end for span in recipe.schedule.spans}
    after, end = recipe.init_from.after, int(checkpoint.metadata["end"])
    assert after is not None
    if ends[after] != end:
        matching = [name for name, stage_end in ends.items() if stage_end == end]
        listed = ", ".join(f"{name} at {stage_end:,}" for name, stage_end in ends.items())
        remedy = f"write after: {matching[0]}" if matching else f"write until: {end} tokens there, or name another"
        faults.append(
            f"init_from.after: {after!r} ends at token {ends[after]:,}, {checkpoint.label} at {end:,}; {remedy} "
            f"(stages end: {listed})"
        )
    try:
        config, vocab_size = read_config(checkpoint.path_of(f"model/{CONFIG}").parent)
        compare_shapes(recipe.init_from, config, vocab_size, recipe.model)
    except ValueError as error:
        faults += str(error).splitlines()
    file = Path(recipe.tokenizer.use or "")
    return [*faults, *tokenizer_faults(recipe, checkpoint, use_tokenizer(file))] if file.is_file() else faults


def tokenizer_faults(recipe: Recipe, checkpoint: Artifact, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a fault if the checkpoint was trained with another tokenizer than `tokenizer`."""
    model = checkpoint.path_of("model")
    trained_with = Tokenizer.load(model)
    if trained_with.digest != tokenizer.digest:
        field, file = "use" if recipe.tokenizer.use else "train", tokenizer_file(model)
        yield (
            f"tokenizer.{field}: gives a tokenizer with digest {tokenizer.digest[:12]}, but {checkpoint.label} was "
            f"trained with {trained_with.digest[:12]}; write tokenizer: {{use: {file}}}"
        )
