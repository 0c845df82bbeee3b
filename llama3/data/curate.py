"""Curate documents: drop, deduplicate, decontaminate, strip lines, redact, split, write, account.

The order of steps follows arXiv 2407.21783, section 3.1.1. Each step sees the documents that earlier steps kept. The
output depends on the documents alone: not on shards, read order, threads, memory or the machine. A killed job resumes
from `scratch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llama3.data.accounting import FINDINGS, check_something_kept, facts_of, write_findings, write_ledger
from llama3.data.annotate import shards_in
from llama3.data.decontam.decontaminate import decontaminate
from llama3.data.dedup.exact import map_exact, map_url, reduce_exact, reduce_url
from llama3.data.dedup.lines import count_lines
from llama3.data.dedup.minhash import near_duplicates
from llama3.data.filters import filter_shard
from llama3.data.mapreduce import CurationJob, Runner, in_turn, run
from llama3.data.topics import cap_topics
from llama3.data.write_shards import write_documents
from llama3.recipe.schema import Recipe

PART_DOCUMENTS = 1_000_000
"""Documents per reducer: their hashes take a few hundred megabytes."""


def curate(
    recipe: Recipe,
    collected: Path,
    annotated: Path,
    folder: Path,
    scratch: Path,
    runner: Runner = in_turn,
    *,
    memory: str = "1GiB",
    threads: int = 1,
    parts: int | None = None,
) -> dict[str, Any]:
    """Write `documents/<domain>-<file>.parquet`, `ledger.parquet` and the report tables into `folder`.

    Documents are ordered by id (see `write_shards.CURATED_SCHEMA`). `memory` and `threads` limit DuckDB in each work
    item. Returns `accounting.facts_of`. Raises ValueError if a file named in the recipe cannot be read or a domain
    keeps no document.
    """
    shards = shards_in(collected, annotated)
    parts = parts or max(1, -(-sum(shard.documents for shard in shards) // PART_DOCUMENTS))
    job = CurationJob(recipe, shards, scratch, parts, memory, threads)
    decide(runner, job)
    names = write_documents(runner, job)
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "documents" / name).unlink(missing_ok=True)
        os.link(scratch / "documents" / name, folder / "documents" / name)
    ledger = write_ledger(runner, job, collected / "skipped.parquet", folder / "ledger.parquet")
    facts = facts_of(ledger, job)
    check_something_kept(facts, ledger)
    write_findings(runner, job, folder / FINDINGS)
    return facts


def decide(runner: Runner, job: CurationJob) -> None:
    """Decide step by step which documents to drop, then which lines to remove from the rest."""
    rules, shards, parts = job.recipe.curate, range(len(job.shards)), range(job.parts)
    run(runner, job, "filter/drop", filter_shard, shards)  # first: rules and block lists are cheap
    if rules.dedup.url == "newest":
        run(runner, job, "url/map", map_url, shards)
        run(runner, job, "url/drop", reduce_url, parts)
    run(runner, job, "exact/map", map_exact, shards)
    run(runner, job, "exact/drop", reduce_exact, parts)
    near_duplicates(runner, job)
    if rules.decontaminate:
        decontaminate(runner, job)
    if rules.topics is not None and rules.topics.caps:
        cap_topics(runner, job)
    count_lines(runner, job)
