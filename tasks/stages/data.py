"""Raw text to curated documents, as three tracked steps: collect (read), annotate (measure), curate (decide).

Each is an artifact of its own, so a new threshold reads no source again and measures nothing again: it only decides
again. Work in progress lies in the root's scratch folder under the artifact's key, where a killed step goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.recipe.data_schema import Curate
from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, ArtifactSpec, file_digest
from storage.filesystem import state
from storage.page_cache import lazy_folder
from tasks.executors import data_runner, item_memory
from tasks.step import Context, ensure, ensure_in_scratch, link_files

COLLECT_VERSION = 2
ANNOTATE_VERSION = 2
CURATE_VERSION = 3
READING = ("on_error", "max_lost", "extractor", "repair")
"""Fields of `curate` that decide what is read."""
LABELS = ("name", "judged")
"""Fields of a source that do not."""


@task(name="collect", cache_policy=NO_CACHE, persist_result=False)
def collect_documents(context: Context) -> Artifact:
    """Return the documents of the recipe's sources as text shards."""
    from llama3.data.collect import collect
    from llama3.data.readers.sources import fingerprint

    plain = resolved(context.recipe)
    design = ArtifactSpec(
        kind="collected",
        name=context.recipe.name,
        version=COLLECT_VERSION,
        parameters={
            "sources": read_from(context.recipe),
            "curate": {field: plain["curate"][field] for field in READING},
            "seed": context.recipe.documents_seed,
        },
        inputs={"sources": fingerprint(context.recipe)},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        with data_runner(context.cluster) as runner:
            facts = collect(context.recipe, scratch, runner)
        link_files(scratch / "text", folder / "text")
        os.link(scratch / "skipped.parquet", folder / "skipped.parquet")
        return facts

    artifact = ensure_in_scratch(context, "collect", design, build)
    _say_what_was_left_out(context, artifact)
    return artifact


@task(name="annotate", cache_policy=NO_CACHE, persist_result=False)
def annotate_documents(context: Context, collected: Artifact) -> Artifact:
    """Return the attributes of the collected documents."""
    from llama3.data.annotate import STEP as ATTRIBUTES
    from llama3.data.annotate import annotate

    curation = context.recipe.curate
    design = ArtifactSpec(
        kind="annotated",
        name=context.recipe.name,
        version=ANNOTATE_VERSION,
        parameters=measured(curation),
        inputs={"collected": collected.key, "files": _state_of(_seeds(curation))},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        with data_runner(context.cluster) as runner:
            facts = annotate(context.recipe, collected.path, scratch, runner, memory=item_memory(context.cluster))
        link_files(scratch / ATTRIBUTES, folder / ATTRIBUTES)
        return facts

    return ensure_in_scratch(context, "annotate", design, build)


@task(name="curate", cache_policy=NO_CACHE, persist_result=False)
def curate_documents(context: Context, collected: Artifact, annotated: Artifact) -> Artifact:
    """Return the documents to train on."""
    from llama3.data.curate import curate

    curation = context.recipe.curate
    design = ArtifactSpec(
        kind="curated",
        name=context.recipe.name,
        version=CURATE_VERSION,
        parameters={"curate": resolved(context.recipe)["curate"], **_apart(context.recipe)},
        inputs={"annotated": annotated.key, "files": _state_of([*curation.block, *_benchmarks(curation)])},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        paths = (collected.path, annotated.path, folder, scratch)
        with data_runner(context.cluster) as runner:
            return curate(context.recipe, *paths, runner, memory=item_memory(context.cluster))

    artifact = ensure_in_scratch(context, "curate", design, build)
    _say_what_was_kept(context, artifact)
    return artifact


def read_from(recipe: Recipe) -> dict[str, list[dict[str, Any]]]:
    """Return what of the sources decides what is read; what they are called is no part of it."""
    sources: dict[str, list[dict[str, Any]]] = resolved(recipe)["sources"]
    return {
        domain: [{field: value for field, value in one.items() if field not in LABELS} for one in listed]
        for domain, listed in sources.items()
    }


def _apart(recipe: Recipe) -> dict[str, list[str]]:
    """Return what decides which documents are held out or capped in recipes that have sources apart, or caps.

    Caps left held-out documents alone from some day on; the word keeps what was curated before from being reused.
    """
    named = [f"{domain}/{place}" for domain in recipe.sources for place in recipe.places_apart(domain)]
    capped = recipe.curate.topics is not None and bool(recipe.curate.topics.caps)
    return {**({"apart": named} if named else {}), **({"caps": ["training text"]} if capped else {})}


def measured(curation: Curate) -> dict[str, Any]:
    """Return what of the `curate` section decides attributes: everything but thresholds."""
    from llama3.data.annotate import bounds_divergence

    dedup, lines, topics = curation.dedup, curation.lines, curation.topics
    return {
        "bands": {"shingle": dedup.shingle, "bands": dedup.bands, "rows": dedup.rows},
        "lines": lines.model_dump(mode="json", include={"min_chars", "domains"}) if lines.max_copies else None,
        "scores": [score.model_dump(mode="json", exclude={"min"}) for score in curation.scores],
        "topics": topics.model_dump(mode="json", exclude={"caps"}) if topics else None,
        "dirty_words": curation.dirty_words,
        "divergence": bounds_divergence(curation),
    }


def _seeds(curation: Curate) -> list[str]:
    examples = [uri for score in curation.scores for uri in (*score.good, *score.bad, *filter(None, [score.model]))]
    topics = [uri for uris in (curation.topics.seeds if curation.topics else {}).values() for uri in uris]
    return [*examples, *topics, *curation.dirty_words]


def _benchmarks(curation: Curate) -> list[str]:
    return [benchmark.uri for benchmark in curation.decontaminate]


def _state_of(uris: list[str]) -> str:
    """Return a digest of what the files of `uris` are now."""
    return hashlib.sha256(json.dumps([state(uri) for uri in uris]).encode()).hexdigest()


def _say_what_was_left_out(context: Context, artifact: Artifact) -> None:
    lines = [f"{line['domain']} {line['reason']} {line['documents']:,}" for line in artifact.facts["skipped"]]
    if lines:
        context.console.say(f"  {'':<18}[dim]left out while reading: {'; '.join(lines)}[/]")


def _say_what_was_kept(context: Context, artifact: Artifact) -> None:
    facts = artifact.facts
    parts = [
        f"{domain} {facts['bytes'][domain] / 1e6:.1f} MB in {facts['documents'][domain]:,} documents"
        for domain in facts["documents"]
    ]
    context.console.say(f"  {'':<18}[dim]kept {'; '.join(parts)}[/]")


# Curated documents to a tokenizer and to token shards, as two tracked steps.

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
    design = ArtifactSpec("tokenizer", recipe.name, TOKENIZER_VERSION, learnt_by(recipe), inputs)
    return ensure(context, "tokenizer", design, lambda folder, _: make_tokenizer(recipe, curated.path, folder))


@task(name="tokenise", cache_policy=NO_CACHE, persist_result=False)
def tokenise_documents(context: Context, curated: Artifact, tokenizer: Artifact) -> Artifact:
    """Return the token shards, and refuse a run that would repeat a domain more often than the recipe allows."""
    from llama3.tokens.shards import tokenise
    from llama3.tokens.stream import TokenStream

    recipe = context.recipe
    design = ArtifactSpec(
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
