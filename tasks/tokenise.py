"""Curated documents to a tokenizer and to token shards, as two tracked steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, Design, file_digest
from storage.lazy import lazy_folder
from tasks.runners import data_runner
from tasks.step import Context, ensure, ensure_in_scratch, link_files

TOKENIZER_VERSION = 2
TOKENS_VERSION = 2


@task(name="tokenizer", cache_policy=NO_CACHE, persist_result=False)
def prepare_tokenizer(context: Context, curated: Artifact) -> Artifact:
    """Return the tokenizer of the recipe, trained on the curated documents or taken from its file."""
    from llama3.tokens.tokenizer import make_tokenizer

    recipe = context.recipe
    inputs = {"curated": curated.key}
    if recipe.tokenizer.use:
        inputs["model"] = file_digest(Path(recipe.tokenizer.use))
    design = Design("tokenizer", recipe.name, TOKENIZER_VERSION, learnt_by(recipe), inputs)
    return ensure(context, "tokenizer", design, lambda folder, _: make_tokenizer(recipe, curated.path, folder))


@task(name="tokenise", cache_policy=NO_CACHE, persist_result=False)
def tokenise_documents(context: Context, curated: Artifact, tokenizer: Artifact) -> Artifact:
    """Return the token shards, and refuse a run that would repeat a domain more often than the recipe allows."""
    from llama3.tokens.shards import tokenise
    from llama3.tokens.stream import TokenStream

    recipe = context.recipe
    design = Design(
        kind="tokens",
        name=recipe.name,
        version=TOKENS_VERSION,
        parameters=dealt_by(recipe),
        inputs={"curated": curated.key, "tokenizer": tokenizer.key},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        with data_runner(context.cluster) as runner:
            facts = tokenise(recipe, curated.path, tokenizer.path, scratch, runner=runner)
        link_files(scratch, folder)
        return facts

    artifact = ensure_in_scratch(context, "tokenise", design, build)
    stream = TokenStream(lazy_folder(artifact, 0), recipe)
    stream.check()
    for line in stream.overlapping_helpings():
        context.console.say(f"  [yellow]tokenise: {line}[/]")
    return artifact


def learnt_by(recipe: Recipe) -> dict[str, Any]:
    """Return what of the recipe decides a tokenizer: of its mix the shares, not the name."""
    tokenizer = resolved(recipe)["tokenizer"]
    train = {key: value for key, value in (tokenizer["train"] or {}).items() if key != "mix"}
    shares = {domain: str(share) for domain, share in recipe.tokenizer_mix.items()}
    return {"tokenizer": {**tokenizer, "train": train or None}, "mix": shares}


def dealt_by(recipe: Recipe) -> dict[str, Any]:
    """Return what of the recipe decides the shards: number type, and which sources have shards of their own."""
    sources = recipe.sources.items()
    weights = {
        domain: [one.weight for one in listed] for domain, listed in sources if any(one.weight for one in listed)
    }
    apart = {domain: [one.name for one in listed] for domain, listed in sources if any(one.name for one in listed)}
    return {"dtype": recipe.tokens.dtype, "weights": weights, **({"apart": apart} if apart else {})}
