"""Where every document went: documents, bytes and words by domain, source and outcome, summing to what was read.

Counted shard by shard from attributes, drops and what was written, then added up with what reading skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.job import DROPS, Job, Runner, Shard, listed, quoted, run, write_table
from llama3.data.output import STEP as WRITTEN

STEP = "ledger"
KEPT = ("kept", "held_out")
SCHEMA = pa.schema(
    {
        "domain": pa.string(),
        "source": pa.string(),
        "step": pa.string(),
        "outcome": pa.string(),
        "documents": pa.int64(),
        "bytes": pa.int64(),
        "words": pa.int64(),
    }
)
"""`step` is `read` for what was never a document, one of DROPS, or `written`. Bytes and words are those of the text
after extraction and before lines are removed; for what was not read, bytes as found and no words."""


def fates(job: Job, shard: Shard) -> str:
    """Return SQL for the attributes of `shard` with `step`, `outcome` and `kept_id` of every document. Unordered."""
    low, high = shard.rows
    here = f'WHERE "row" >= {low} AND "row" < {high}'
    parts = [
        f"SELECT \"row\", '{step}' AS step, outcome, kept AS kept_id FROM read_parquet({listed(files)}) {here}"
        for step in DROPS
        if (files := job.files(f"{step}/drop"))
    ]
    written = listed(job.files(WRITTEN))
    parts.append(f"SELECT \"row\", 'written', outcome, NULL FROM read_parquet({written}) {here}")
    return f"""SELECT attributes.*, fate.step, fate.outcome, fate.kept_id
        FROM read_parquet({quoted(str(shard.attributes))}) AS attributes
        JOIN ({" UNION ALL ".join(parts)}) AS fate USING ("row")"""


def count_shard(job: Job, item: int) -> None:
    """Count the fates of the documents of shard `item`."""
    with job.session() as connection:
        table = connection.sql(
            f"""SELECT domain, source, step, outcome, count(*)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes,
                sum(words)::BIGINT AS words FROM ({fates(job, job.shards[item])}) GROUP BY ALL ORDER BY ALL"""
        ).to_arrow_table()
    write_table(table.cast(SCHEMA), job.file(STEP, item))


def write_ledger(runner: Runner, job: Job, skipped: Path, path: Path) -> pa.Table:
    """Write the ledger of the job and of what reading skipped to `path`, and return it.

    Raises AssertionError if a document is missing from it or counted twice.
    """
    run(runner, job, STEP, count_shard, range(len(job.shards)))
    with job.session() as connection:
        ledger = connection.sql(
            f"""SELECT domain, source, step, outcome, sum(documents)::BIGINT AS documents,
                sum(bytes)::BIGINT AS bytes, sum(words)::BIGINT AS words
            FROM (SELECT * FROM read_parquet({listed(job.files(STEP))})
                UNION ALL SELECT domain, source, 'read', reason, documents, bytes, 0
                FROM read_parquet({quoted(str(skipped))}))
            GROUP BY ALL ORDER BY ALL"""
        ).to_arrow_table()
    ledger = ledger.cast(SCHEMA).combine_chunks()
    counted = sum(line["documents"] for line in ledger.to_pylist() if line["step"] != "read")
    assert counted == sum(shard.documents for shard in job.shards)
    pq.write_table(ledger, path, compression="zstd")
    return ledger


def facts_of(ledger: pa.Table, job: Job) -> dict[str, Any]:
    """Return what an artifact says of itself, by domain: documents and bytes to train on, held out, read, removed."""
    lines = ledger.to_pylist()

    def total(domain: str, column: str, *outcomes: str) -> int:
        chosen = (line for line in lines if line["domain"] == domain and (not outcomes or line["outcome"] in outcomes))
        return sum(line[column] for line in chosen)

    domains = list(job.recipe.sources)
    with job.session() as connection:
        written, languages = _written(connection, job), _languages(connection, job)
    return {
        "documents": {domain: total(domain, "documents", "kept") for domain in domains},
        "bytes": {domain: written.get(domain, (0, 0, 0))[0] for domain in domains},
        "held_out": {domain: total(domain, "documents", "held_out") for domain in domains},
        "read": {domain: total(domain, "documents") for domain in domains},
        "lines_removed": {domain: written.get(domain, (0, 0, 0))[1] for domain in domains},
        "redacted": {domain: written.get(domain, (0, 0, 0))[2] for domain in domains},
        "languages": languages,
    }


def check_something_kept(facts: dict[str, Any], ledger: pa.Table) -> None:
    """Raise ValueError if a domain is left with nothing to train on, with where its documents went."""
    for domain, kept in facts["documents"].items():
        if facts["read"][domain] and not kept:
            gone = [line for line in ledger.to_pylist() if line["domain"] == domain]
            reasons = ", ".join(f"{line['outcome']} {line['documents']:,}" for line in gone)
            raise ValueError(f"sources.{domain}: nothing is left to train on ({reasons}); loosen curate.quality")


def _written(connection: duckdb.DuckDBPyConnection, job: Job) -> dict[str, tuple[int, int, int]]:
    """Return bytes to train on, lines removed and redactions by domain."""
    places = ", ".join(f"({shard.number}, '{shard.domain}')" for shard in job.shards)
    rows = connection.execute(
        f"""SELECT domain, sum(bytes) FILTER (outcome = 'kept')::BIGINT, sum(lines)::BIGINT, sum(redacted)::BIGINT
        FROM read_parquet({listed(job.files(WRITTEN))}) AS written
        JOIN (VALUES {places}) AS shards (number, domain) ON written."row" >> 32 = shards.number
        GROUP BY domain ORDER BY domain"""
    ).fetchall()
    return {
        str(domain): (int(size or 0), int(lines or 0), int(redacted or 0)) for domain, size, lines, redacted in rows
    }


def _languages(connection: duckdb.DuckDBPyConnection, job: Job) -> dict[str, int]:
    """Return how many documents to train on there are in each language."""
    files = [str(path) for path in sorted((job.folder / "documents").glob("*.parquet"))]
    rows = connection.execute(
        f"""SELECT language, count(*) FROM read_parquet({listed(files)}) WHERE split = 'train'
        GROUP BY language ORDER BY language"""
    ).fetchall()
    return {str(language): int(count) for language, count in rows}
