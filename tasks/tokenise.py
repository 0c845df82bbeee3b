"""Curated documents to a tokenizer and to token shards, as two tracked steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.recipe.load import resolved
from llama3.tokens.shards import tokenise
from llama3.tokens.stream import TokenStream
from llama3.tokens.tokenizer import make_tokenizer
from storage.artifact import Artifact, Design, file_digest
from tasks.step import Context, ensure

TOKENIZER_VERSION = 1
TOKENS_VERSION = 1


@task(name="tokenizer", tags=["tokenise"], cache_policy=NO_CACHE, persist_result=False)
def prepare_tokenizer(context: Context, curated: Artifact) -> Artifact:
    """Return the tokenizer of the recipe, trained on the curated documents or taken from its file."""
    recipe = context.recipe
    parameters: dict[str, Any] = {"tokenizer": resolved(recipe)["tokenizer"]}
    if recipe.tokenizer.use:
        inputs = {"model": file_digest(Path(recipe.tokenizer.use))}
    else:
        parameters["mix"] = resolved(recipe)["mix"][recipe.stages[0].mix]
        inputs = {"curated": curated.key}
    design = Design("tokenizer", recipe.name, TOKENIZER_VERSION, parameters, inputs)
    return ensure(context, "tokenizer", design, lambda folder, _: make_tokenizer(recipe, curated.path, folder))


@task(name="tokenise", tags=["tokenise"], cache_policy=NO_CACHE, persist_result=False)
def tokenise_documents(context: Context, curated: Artifact, tokenizer: Artifact) -> Artifact:
    """Return the token shards, and refuse a run that would repeat a domain more often than the recipe allows."""
    recipe = context.recipe
    weights = {domain: [source.weight for source in sources] for domain, sources in recipe.sources.items()}
    design = Design(
        kind="tokens",
        name=recipe.name,
        version=TOKENS_VERSION,
        parameters={"dtype": recipe.tokens.dtype, "weights": weights},
        inputs={"curated": curated.key, "tokenizer": tokenizer.key},
    )

    def build(folder: Path, _: str) -> dict[str, Any]:
        return tokenise(recipe, curated.path, tokenizer.path, folder, threads=context.cluster.threads)

    artifact = ensure(context, "tokenise", design, build)
    TokenStream(artifact.path, recipe).check()
    return artifact
