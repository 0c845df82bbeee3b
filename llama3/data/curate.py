"""Documents and their attributes to what is trained on: drop, strip, redact, split, write, account.

The order is that of arXiv 2407.21783, section 3.1.1: rules and block lists first because they are cheap, then copies
(by URL, exact, near), evaluation sets, topics, and last the lines that many of the remaining documents share. Each step
sees what the ones before it left. What is written depends on the documents alone: not on how they were sharded, on the
order in which they were read, on threads, memory or where the steps ran. A killed job goes on in `scratch`.
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
from llama3.data.mapreduce import CurationJob, Runner, Work, in_turn, run
from llama3.data.topics import cap_topics
from llama3.data.write_shards import write_documents
from llama3.recipe.schema import Recipe

PART_DOCUMENTS = 1_000_000
"""Documents whose hashes one reducer looks at: a few hundred megabytes."""


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
    """Write `documents/<domain>-<file>.parquet`, `ledger.parquet` and the tables of the report into `folder`.

    Documents are ordered by id (see `output.SCHEMA`). `memory` and `threads` bound DuckDB in each work item. Returns
    facts as plain data: `ledger.facts_of`. Raises ValueError if a file that the recipe names cannot be read or a domain
    keeps nothing.
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
    """Find the documents to drop, step by step, and the lines to remove from the rest."""
    rules = job.recipe.curate
    run(runner, job, "filter/drop", filter_shard, range(len(job.shards)))
    if rules.dedup.url == "newest":
        _by_hash(runner, job, "url", map_url, reduce_url)
    _by_hash(runner, job, "exact", map_exact, reduce_exact)
    near_duplicates(runner, job)
    if rules.decontaminate:
        decontaminate(runner, job)
    if rules.topics is not None and rules.topics.caps:
        cap_topics(runner, job)
    count_lines(runner, job)


def _by_hash(runner: Runner, job: CurationJob, step: str, mapper: Work, reducer: Work) -> None:
    run(runner, job, f"{step}/map", mapper, range(len(job.shards)))
    run(runner, job, f"{step}/drop", reducer, range(job.parts))
