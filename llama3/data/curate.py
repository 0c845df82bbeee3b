"""Curate documents: drop, deduplicate, decontaminate, strip lines, redact, split, write, account.

The order of steps follows arXiv 2407.21783, section 3.1.1. Each step sees the documents that earlier steps kept. The
output depends on the documents alone: not on shards, read order, threads, memory or the machine. A killed job resumes
from `scratch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llama3.data.accounting import EXPLAINED, FINDINGS, check_not_empty, summarize_ledger, write_findings, write_ledger
from llama3.data.annotate import list_shards
from llama3.data.decontam.decontaminate import Decontaminate
from llama3.data.dedup.exact import Exact, NewestVersion
from llama3.data.dedup.lines import LineDedup
from llama3.data.dedup.minhash import MinHash
from llama3.data.filters import Filters
from llama3.data.mapreduce import CurationJob, CurationStage, Runner, run_serial
from llama3.data.topics import TopicCaps
from llama3.data.write_shards import write_documents
from llama3.recipe.schema import Recipe

VERSION = 3
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
PART_DOCUMENTS = 1_000_000
"""Documents per reducer: their hashes take a few hundred megabytes."""


def curate(
    recipe: Recipe,
    collected: Path,
    annotated: Path,
    folder: Path,
    scratch: Path,
    runner: Runner = run_serial,
    *,
    memory: str = "1GiB",
    threads: int = 1,
    parts: int | None = None,
) -> dict[str, Any]:
    """Write `documents/<domain>-<file>.parquet`, `ledger.parquet` and the report tables into `folder`.

    Documents are ordered by id (see `write_shards.CURATED_SCHEMA`). `memory` and `threads` limit DuckDB in each work
    item. Returns the facts of the artifact. Raises ValueError if a file named in the recipe cannot be read or a domain
    keeps no document.
    """
    shards = list_shards(collected, annotated)
    parts = parts or max(1, -(-sum(shard.documents for shard in shards) // PART_DOCUMENTS))
    job = CurationJob(recipe, shards, scratch, parts, memory, threads, CURATION)
    for stage in job.stages:
        stage.run(runner, job)
    names = write_documents(runner, job)
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "documents" / name).unlink(missing_ok=True)
        os.link(scratch / "documents" / name, folder / "documents" / name)
    ledger = write_ledger(runner, job, collected / "skipped.parquet", folder / "ledger.parquet")
    facts = summarize_ledger(ledger, job)
    check_not_empty(facts, ledger)
    write_findings(runner, job, folder / FINDINGS)
    return facts


def explain(outcome: str) -> str:
    """Return one sentence that explains `outcome` in the ledger."""
    return next(filter(None, (stage.explain(outcome) for stage in CURATION)), None) or EXPLAINED[outcome]
