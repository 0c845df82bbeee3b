"""Raw text to curated documents, as three tracked steps: collect (read), annotate (measure), curate (decide).

Each is an artifact, so a new threshold only repeats the last one. Work in progress is in the root's scratch folder
under the artifact's key, where a killed step continues.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from herd.llama3.data.accounting import scarce_domains
from herd.llama3.data.work_items import Runner, read_table, run_step, write_table
from herd.llama3.evaluate.held_out import nothing_held_out
from herd.llama3.recipe import keys
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.digests import content_digests
from herd.storage.filesystem import is_local, source_state
from herd.storage.object_artifact import StoredFile, StoredFiles
from herd.storage.objects import list_objects
from herd.storage.page_cache import lazy_folder
from herd.tasks.executors import data_runner, item_memory, workers_of
from herd.tasks.format import format_bytes
from herd.tasks.models.start import with_local_models
from herd.tasks.step import Context, ensure_artifact, ensure_in_scratch, link_files

COLLECT_VERSION = 5


@task(name="collect", cache_policy=NO_CACHE, persist_result=False)
def collect_documents(context: Context) -> Artifact:
    """Return the documents of the recipe's sources as text shards."""
    from herd.llama3.data.collect import collect
    from herd.llama3.data.readers.sources import fingerprint

    spec = ArtifactSpec(
        kind="collected",
        name=context.recipe.name,
        version=COLLECT_VERSION,
        parameters=keys.collected(context.recipe),
        inputs={"sources": fingerprint(context.recipe)},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        work = context.shared_scratch(scratch.name)
        with data_runner(context.cluster) as runner:
            metadata = collect(context.recipe, work, runner, workers_of(context.cluster))
            place_files(runner, work, ["text", "skipped.parquet"], folder)
        return metadata

    artifact = ensure_in_scratch(context, "collect", spec, build)
    lines = [f"{line['domain']} {line['reason']} {line['documents']:,}" for line in artifact.metadata["skipped"]]
    if lines:
        context.console.log(f"  {'':<18}[dim]left out while reading: {'; '.join(lines)}[/]")
    return artifact


@task(name="annotate", cache_policy=NO_CACHE, persist_result=False)
def annotate_documents(context: Context, collected: Artifact) -> Artifact:
    """Return the attributes of the collected documents."""
    from herd.llama3.data.annotate import COLUMNS, VERSION, annotate, attribute_files
    from herd.llama3.data.annotate import STEP as ATTRIBUTES

    curation, columns = context.recipe.curate, {name: position for position, name in enumerate(COLUMNS)}
    spec = ArtifactSpec(
        kind="annotated",
        name=context.recipe.name,
        version=VERSION,
        parameters=keys.annotated(context.recipe) | {"columns": columns},
        inputs={"collected": collected.key, "files": _state_of(attribute_files(curation))},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        work, memory = context.shared_scratch(scratch.name), item_memory(context.cluster)
        with data_runner(context.cluster) as runner:
            metadata = annotate(context.recipe, address(context, collected), work, runner, memory=memory)
            place_files(runner, work, [ATTRIBUTES], folder)
        return metadata

    return ensure_in_scratch(context, "annotate", spec, build)


@task(name="curate", cache_policy=NO_CACHE, persist_result=False)
def curate_documents(context: Context, collected: Artifact, annotated: Artifact) -> Artifact:
    """Return the documents to train on. Raises ValueError if the run scores held-out documents and there are none."""
    from herd.llama3.data.accounting import DROPS
    from herd.llama3.data.curate import CURATION, VERSION, curate
    from herd.llama3.evaluate.suite import with_evaluation_sets

    recipe = with_evaluation_sets(context.recipe)
    files = [uri for stage in CURATION for uri in stage.files(recipe.curate)]
    spec = ArtifactSpec(
        kind="curated",
        name=recipe.name,
        version=VERSION,
        parameters=keys.curated(recipe),
        inputs={"annotated": annotated.key, "files": _state_of(files)},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        work = context.shared_scratch(scratch.name)
        inputs = address(context, collected), address(context, annotated)
        with data_runner(context.cluster) as runner:
            metadata = curate(recipe, *inputs, folder, work, runner, memory=item_memory(context.cluster))
            if context.in_store:
                place_files(runner, work, ["documents", DROPS], folder)
        return metadata

    artifact = ensure_in_scratch(context, "curate", spec, build)
    sizes, counts = artifact.metadata["bytes"], artifact.metadata["documents"]
    lines = [f"{domain} {format_bytes(sizes[domain])} in {counts[domain]:,} documents" for domain in counts]
    context.console.log(f"  {'':<18}[dim]kept {'; '.join(lines)}[/]")
    held_out = sum(artifact.metadata["held_out"].values())
    if not held_out and context.reaches("gate", "evaluate"):
        raise ValueError(nothing_held_out(recipe))
    for line in [
        *artifact.metadata["heavy_rules"],
        *(scarce_domains(artifact.metadata) if recipe.curate.validation_fraction else []),
    ]:
        context.console.log(f"  [yellow]curate: {line}[/]")
    return artifact


def address(context: Context, artifact: Artifact) -> str:
    """Return where data workers read the files of an artifact: its URI, or a verified local folder."""
    return artifact.uri if context.in_store else str(artifact.path)


@dataclass(frozen=True)
class DigestJob:
    """Computes the digests of files that workers wrote into an object store; pickled to workers."""

    folder: str
    names: tuple[str, ...]

    def file(self, step: str, item: int) -> str:
        """Return the file that item `item` of `step` writes."""
        return f"{self.folder}/{step}/{item:05}.parquet"


DIGESTS, DIGESTED = "digests", 16
"""Step with the digests, and the files of an item."""


def digest_batch(job: DigestJob, item: int) -> None:
    """Write the digests of a batch of files; each is read once, so a later download can be compared with the bytes."""
    names = job.names[item * DIGESTED : (item + 1) * DIGESTED]
    files = [StoredFile.read(f"{job.folder}/{name}").model_dump_json() for name in names]
    table = {"name": pa.array(names, pa.string()), "file": pa.array(files, pa.string())}
    write_table(pa.table(table), job.file(DIGESTS, item))


def place_files(runner: Runner, work: str, names: Sequence[str], folder: Path) -> None:
    """Make the files and folders `names` of `work` (path or URI) part of the artifact staged in `folder`."""
    if is_local(work):
        for name in names:
            link_files(Path(work, name), folder / name)
        return
    listed = [
        stored for name in names for stored in ([f"{name}/{file}" for file in list_objects(f"{work}/{name}")] or [name])
    ]
    job = DigestJob(work, tuple(listed))
    items = range(-(-len(listed) // DIGESTED))
    run_step(runner, job, DIGESTS, digest_batch, items)
    rows = [row for item in items for row in read_table(job.file(DIGESTS, item)).to_pylist()]
    StoredFiles({row["name"]: StoredFile.model_validate_json(row["file"]) for row in rows}).give(folder)


def _state_of(uris: list[str]) -> str:
    """Return a digest of the files `uris` now: contents on this machine, versions in stores."""
    states = [source_state(uri) for uri in uris]
    local = {str(name): os.path.abspath(str(name)) for state in states for name, *_ in state if is_local(str(name))}
    digests = content_digests(path for path in local.values() if os.path.isfile(path))
    known = [
        [[name, size, digests.get(local.get(str(name), ""), seen)] for name, size, seen in state] for state in states
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


# Curated documents to a tokenizer and to token shards, as two tracked steps.

TOKENIZER_VERSION = 2
TOKENS_VERSION = 2


@task(name="tokenizer", cache_policy=NO_CACHE, persist_result=False)
def prepare_tokenizer(context: Context, curated: Artifact) -> Artifact:
    """Return the tokenizer of the recipe, trained on the curated documents or taken from its file."""
    from herd.llama3.tokens.tokenizer import make_tokenizer, tokenizer_inputs

    recipe = local = context.recipe
    inputs = {"curated": curated.key}
    if recipe.tokenizer.use:
        local = with_local_models(context.root, recipe)
        inputs |= tokenizer_inputs(local.tokenizer.use or "")
    spec = ArtifactSpec("tokenizer", recipe.name, TOKENIZER_VERSION, keys.tokenizer(recipe), inputs)
    return ensure_artifact(context, "tokenizer", spec, lambda folder, _: make_tokenizer(local, curated.path, folder))


@task(name="tokenize", cache_policy=NO_CACHE, persist_result=False)
def tokenize_documents(context: Context, curated: Artifact, tokenizer: Artifact) -> Artifact:
    """Return the token shards.

    Raises ValueError if the run trains and would repeat a domain more often than the recipe allows.
    """
    from herd.llama3.tokens.shards import NAME as TOKENS
    from herd.llama3.tokens.shards import tokenize
    from herd.llama3.tokens.stream import TokenStream

    recipe = context.recipe
    spec = ArtifactSpec(
        kind="tokens",
        name=recipe.name,
        version=TOKENS_VERSION,
        parameters=keys.tokens(recipe),
        inputs={"curated": curated.key, "tokenizer": tokenizer.key},
    )

    def build(folder: Path, scratch: Path) -> dict[str, Any]:
        work = context.shared_scratch(scratch.name)
        with data_runner(context.cluster) as runner:
            metadata = tokenize(recipe, address(context, curated), address(context, tokenizer), work, runner=runner)
            place_files(runner, work, [*metadata["datasets"], TOKENS], folder)
        return metadata

    artifact = ensure_in_scratch(context, "tokenize", spec, build)
    stream = TokenStream(lazy_folder(artifact, 0), recipe)
    lines = stream.overlapping_offsets()
    try:
        stream.check()
    except ValueError as error:
        if context.reaches("pretrain"):
            raise
        lines = [*str(error).splitlines(), *lines]
    for line in lines:
        context.console.log(f"  [yellow]tokenize: {line}[/]")
    return artifact


CONVERSATIONS_VERSION = 2


@task(name="conversations", cache_policy=NO_CACHE, persist_result=False)
def prepare_conversations(context: Context, tokens: Artifact, tokenizer: Artifact) -> Artifact:
    """Return the packed conversations of the stages of kind `sft`.

    Raises SourceError for a broken row, ValueError if a stage's length contradicts its epochs.
    """
    from herd.llama3.data.readers.conversations import conversation_files
    from herd.llama3.data.readers.sources import content_states
    from herd.llama3.tokens.conversations import ConversationStream, prepare_conversations
    from herd.llama3.tokens.stream import TokenStream
    from herd.llama3.tokens.tokenizer import Tokenizer

    recipe = context.recipe
    files = [file for source in recipe.conversations for file in conversation_files(source)]
    described = [version("duckdb") for source in recipe.conversations if source.uri == "duckdb-functions"]
    spec = ArtifactSpec(
        kind="conversations",
        name=recipe.name,
        version=CONVERSATIONS_VERSION,
        parameters=keys.conversations(recipe),
        inputs={
            "tokenizer": tokenizer.key,
            "files": _digest_of([*content_states(files), *described]),
        },
    )

    def build(folder: Path, _: str) -> dict[str, Any]:
        return prepare_conversations(recipe, Tokenizer.load(tokenizer.path), folder)

    artifact = ensure_artifact(context, "conversations", spec, build)
    metadata, stream = artifact.metadata, TokenStream(lazy_folder(tokens, 0), recipe)
    context.console.log(
        f"  {'':<18}[dim]{metadata['conversations']:,} conversations, {metadata['turns']:,} answers, "
        f"{metadata['tokens']:,} tokens, {metadata['target_tokens']:,} of them targets; "
        f"held out {metadata['held_out']:,}, repeated {metadata['dropped']['duplicate']:,}[/]"
    )
    for span in recipe.schedule.spans:
        if span.stage.kind != "sft":
            continue
        data = ConversationStream(artifact.path, stream, span)
        data.check()
        packed = data.packing
        context.console.log(
            f"  {'':<18}[dim]{span.name}: {packed['sequences']:,} sequences of {data.seq_len}, "
            f"{packed['padding'] / packed['sequences'] / data.seq_len:.1%} padding; "
            f"{data.epochs(span.end)['conversations']:.2f} epochs[/]"
        )
        if lost := packed["cut"] + packed["dropped"]:
            context.console.log(
                f"  [yellow]conversations: {lost:,} of {metadata['conversations']:,} are longer than the "
                f"{data.seq_len} tokens of {span.name}: {packed['cut']:,} are cut at the end, "
                f"{packed['dropped']:,} dropped, whose answers begin later; raise seq_len[/]"
            )
    return artifact


def _digest_of(files: Sequence[object]) -> str:
    """Return a digest of the states of files."""
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
