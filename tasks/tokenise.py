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
from storage.lazy import lazy_folder
from tasks.runners import data_runner
from tasks.step import Context, ensure, ensure_in_scratch, link_files

TOKENIZER_VERSION = 2
TOKENS_VERSION = 2


@task(name="tokenizer", cache_policy=NO_CACHE, persist_result=False)
def prepare_tokenizer(context: Context, curated: Artifact) -> Artifact:
    """Return the tokenizer of the recipe, trained on the curated documents or taken from its file."""
    recipe = context.recipe
    plain = resolved(recipe)
    train = {key: value for key, value in (plain["tokenizer"]["train"] or {}).items() if key != "mix"}
    shares = {domain: str(share) for domain, share in recipe.tokenizer_mix.items()}
    parameters = {"tokenizer": {**plain["tokenizer"], "train": train or None}, "mix": shares}  # shares, not their name
    inputs = {"curated": curated.key}
    if recipe.tokenizer.use:
        inputs["model"] = file_digest(Path(recipe.tokenizer.use))
    design = Design("tokenizer", recipe.name, TOKENIZER_VERSION, parameters, inputs)
    return ensure(context, "tokenizer", design, lambda folder, _: make_tokenizer(recipe, curated.path, folder))


@task(name="tokenise", cache_policy=NO_CACHE, persist_result=False)
def tokenise_documents(context: Context, curated: Artifact, tokenizer: Artifact) -> Artifact:
    """Return the token shards, and refuse a run that would repeat a domain more often than the recipe allows."""
    recipe = context.recipe
    weights = {
        domain: [source.weight for source in sources]
        for domain, sources in recipe.sources.items()
        if any(source.weight for source in sources)
    }
    apart = {domain: names for domain, sources in recipe.sources.items() if any(names := [one.name for one in sources])}
    design = Design(
        kind="tokens",
        name=recipe.name,
        version=TOKENS_VERSION,
        parameters={"dtype": recipe.tokens.dtype, "weights": weights, **({"apart": apart} if apart else {})},
        inputs={"curated": curated.key, "tokenizer": tokenizer.key},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        with data_runner(context.cluster) as runner:
            facts = tokenise(recipe, curated.path, tokenizer.path, scratch, runner=runner)
        link_files(scratch, folder)
        return facts

    artifact = ensure_in_scratch(context, "tokenise", design, build)
    TokenStream(lazy_folder(artifact, 0), recipe).check()
    return artifact
