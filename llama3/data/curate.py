"""Curate documents: drop, deduplicate, decontaminate, strip lines, redact, split, write, account.

The order of steps follows arXiv 2407.21783, section 3.1.1. Each step sees the documents that earlier steps kept. The
output depends on the documents alone: not on shards, read order, threads, memory or the machine. A killed job resumes
from `scratch`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from herd.llama3.data.accounting import (
    DROPS,
    EXPLAINED,
    FINDINGS,
    check_not_empty,
    summarize_ledger,
    write_findings,
    write_ledger,
)
from herd.llama3.data.annotate import annotate, list_shards
from herd.llama3.data.collect import collect, skipped_table
from herd.llama3.data.decontam.decontaminate import Decontaminate
from herd.llama3.data.dedup.exact import Exact, NewestVersion
from herd.llama3.data.dedup.lines import LineDedup
from herd.llama3.data.dedup.minhash import MinHash
from herd.llama3.data.filters import Filters
from herd.llama3.data.mapreduce import CurationJob, CurationStage
from herd.llama3.data.readers.document import Document
from herd.llama3.data.readers.files import File, ReadErrors, SourceError, list_source
from herd.llama3.data.readers.sources import BUILT_IN, is_read, left_out, listing_fault, naming, read_source
from herd.llama3.data.shuffle import FAN
from herd.llama3.data.topics import TopicCaps
from herd.llama3.data.work_items import Runner, read_table, run_serial, write_table
from herd.llama3.data.write_shards import write_documents
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import Source
from herd.llama3.recipe.schema import Recipe
from herd.storage.files import file_names
from herd.storage.filesystem import is_local

VERSION = 9
"""Version of curated artifacts; a higher number makes them again although the recipe is the same."""
CURATION: tuple[CurationStage, ...] = (
    Filters(),  # first: rules and block lists are cheap
    NewestVersion(),
    Exact(),
    MinHash(),
    Decontaminate(),
    TopicCaps(),
    LineDedup(),
)
"""The stages in order. For a new one: a `DocumentRule` or `CurationStage` in a file, a line here, a recipe section."""
SAMPLED_AT_ONCE, SAMPLED_FILES = 8, 1000
"""Files of a source that a sample is read from in turns, and in total."""
PARTITION_DOCUMENTS = 125_000
"""Documents per piece of a partition: their bands take 60 MB, and a few times as much while they are sorted."""


def curate(
    recipe: Recipe,
    collected: str | Path,
    annotated: str | Path,
    folder: Path,
    scratch: str | Path,
    runner: Runner = run_serial,
    *,
    memory: str = "1GiB",
    threads: int = 1,
    partitions: int | None = None,
    fan: int | None = None,
) -> dict[str, Any]:
    """Write `documents/<domain>-<file>.parquet`, `drops`, `ledger.parquet` and report tables into `folder`.

    `collected`, `annotated` and `scratch` are paths or URIs; with a scratch folder in a store the documents stay there.
    They are ordered by id (see `write_shards.CURATED_SCHEMA`). `memory` and `threads` limit DuckDB in each work item,
    and `fan` the files that it reads of a step; the result depends on none of them. Returns the artifact's metadata.
    Raises ValueError if a file named in the recipe cannot be read or a domain keeps no document.
    """
    shards = list_shards(collected, annotated)
    pieces = 1
    if not partitions:
        partitions, pieces = partitions_for(sum(shard.documents for shard in shards), len(shards))
    job = CurationJob(recipe, shards, str(scratch), partitions, memory, threads, CURATION, fan or FAN, pieces)
    for stage in job.stages:
        stage.run(runner, job)
    names, metadata, ledger = write_curated(runner, job, f"{collected}/skipped.parquet", folder)
    if is_local(job.folder):
        _link(job, "documents", names, folder)
        _link(job, DROPS, file_names(f"{job.folder}/{DROPS}"), folder)
    check_not_empty(metadata, ledger)
    return metadata


def write_curated(
    runner: Runner, job: CurationJob, skipped: str, folder: Path
) -> tuple[list[str], dict[str, Any], pa.Table]:
    """Write the documents that the stages left, and the ledger and the report tables into `folder`.

    `skipped` is the table of what collecting left out. Returns the names of the curated files, metadata and ledger.
    """
    names = write_documents(runner, job)
    folder.mkdir(parents=True, exist_ok=True)
    ledger = write_ledger(runner, job, skipped, folder / "ledger.parquet")
    metadata = summarize_ledger(runner, job, ledger)
    write_findings(runner, job, folder / FINDINGS)
    return names, metadata, ledger


def partitions_for(documents: int, shards: int) -> tuple[int, int]:
    """Return the number of partitions, about as many as shards or fewer, and of the pieces of each."""
    pieces = max(1, -(-documents // PARTITION_DOCUMENTS // shards))
    return max(1, -(-documents // PARTITION_DOCUMENTS // pieces)), pieces


def _link(job: CurationJob, step: str, names: Iterable[str], folder: Path) -> None:
    (folder / step).mkdir(exist_ok=True)
    for name in names:
        (folder / step / name).unlink(missing_ok=True)
        os.link(f"{job.folder}/{step}/{name}", folder / step / name)


def curate_sample(recipe: Recipe, count: int, folder: Path, note: Callable[[str], None] = lambda line: None) -> None:
    """Curate `count` documents of each source, the first ones of files spread over it, into `folder`/curated.

    They are read from 8 files in turns, and from further ones where these end; of a source with a limit, in file order.
    The ledger and the samples there say what each rule drops; few duplicates show in few documents. `note` gets a line
    about files that are not read. Raises ValueError as `collect` and `curate` do.
    """
    sampled, unread = sample_sources(recipe, count, folder, note)
    for step in ("collected", "annotated", "scratch", "curated"):
        (folder / step).mkdir()
    collect(sampled, folder / "collected")
    skipped = f"{folder}/collected/skipped.parquet"
    write_table(pa.concat_tables([read_table(skipped), skipped_table(unread)]), skipped)
    annotate(sampled, folder / "collected", folder / "annotated", run_serial)
    curate(sampled, folder / "collected", folder / "annotated", folder / "curated", folder / "scratch")


def sample_sources(
    recipe: Recipe, count: int, folder: Path, note: Callable[[str], None] = lambda line: None
) -> tuple[Recipe, list[tuple[Any, ...]]]:
    """Write up to `count` documents of each source into `folder`/sample; see `curate_sample`.

    Returns the recipe that reads them instead of its sources, and rows of SKIPPED for what could not be read.
    """
    sources: dict[Domain, list[Source]] = {}
    unread: list[tuple[Any, ...]] = []
    for domain, given in recipe.sources.items():
        sources[domain] = []
        for number, source in enumerate(given):
            path = folder / "sample" / f"{domain}-{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            errors = ReadErrors(fail := recipe.curate.on_error == "fail")
            with naming(f"sources.{domain}.{number}"):
                listing = list_source(source) if source.uri not in BUILT_IN else None
                if listing is not None and (fault := listing_fault(source, listing, fail)):
                    raise SourceError(fault)
                for amount in left_out(listing) if listing else ():
                    note(f"sources.{domain}.{number}: {amount}")
                readable = [file for file in listing.files if is_read(file)] if listing else None
                path.write_bytes(b"".join(_lines(source, domain, recipe, count, errors, readable)))
            unread += errors.rows(domain, path.stem)
            local = {"uri": str(path), "format": "jsonl", "text": "text", "contents": None, "limit": None}
            sources[domain].append(source.model_copy(update=local))
    return recipe.model_copy(update={"sources": sources}), unread


def _lines(
    source: Source, domain: Domain, recipe: Recipe, count: int, errors: ReadErrors, readable: Sequence[File] | None
) -> Iterator[bytes]:
    """Yield `count` documents of `source`, or of its `readable` files, as JSON lines."""

    def documents(files: Sequence[File] | None) -> Iterator[Document]:
        batches = read_source(source, domain, recipe.documents_seed, errors, files, most=count * 100)
        return chain.from_iterable(batch.documents("") for batch in batches)

    if readable is None or source.limit is not None:
        streams = iter([documents(readable)])
    else:
        step = max(1, -(-len(readable) // SAMPLED_AT_ONCE))
        spread = (file for start in range(step) for file in readable[start::step])
        streams = (documents([file]) for file in islice(spread, SAMPLED_FILES))
    turns = deque(islice(streams, SAMPLED_AT_ONCE))
    while turns and count:
        stream = turns.popleft()
        document = next(stream, None)
        turns.extend(islice(streams, 1) if document is None else [stream])
        if document is not None:
            text, url, language, license, _, form, date = document
            record = {"text": text, "url": url, "language": language, "license": license, "format": form, "date": date}
            yield orjson.dumps(record) + b"\n"
            count -= 1


def explain(outcome: str) -> str:
    """Return one sentence that explains `outcome` in the ledger."""
    return next(filter(None, (stage.explain(outcome) for stage in CURATION)), None) or EXPLAINED[outcome]
