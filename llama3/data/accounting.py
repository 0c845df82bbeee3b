"""Account for every document: counts by domain, source and outcome, and tables for the report page.

The ledger counts documents, bytes and words shard by shard, and adds what reading skipped. It sums to everything read.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.mapreduce import CurationJob, Runner, Shard, run_step, schema_of, sql_list, sql_literal, write_table
from llama3.data.write_shards import STEP as WRITTEN

STEP = "ledger"
KEPT = ("kept", "held_out")
SCHEMA = schema_of(
    "domain string, source string, step string, outcome string, documents int64, bytes int64, words int64"
)
"""`step` is `read` (skipped by the reader), the name of a stage, or `written`. Bytes and words: of the text after
extraction and before lines are removed; for skipped input, raw bytes and no words."""
FINDINGS = "report"
"""Folder of the report tables in a curated artifact: `lengths` (histogram by domain), `languages`, `samples`,
`clusters` (the largest groups of near duplicates, with examples) and the tables of the stages."""
SAMPLES = "samples"
LENGTHS = "lengths"
EXAMPLES = 8
"""Samples per domain and outcome."""
EXCERPT = 1200
"""Characters of a document in the report."""
CLUSTERS = 20
"""Groups of near duplicates in the report."""
_LENGTHS = """SELECT domain, log2_bytes, kept, sum(documents)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
    FROM read_parquet({counts}) GROUP BY ALL ORDER BY ALL"""
_LANGUAGES = """SELECT domain, language, sum(documents)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
    FROM read_parquet({counts}) WHERE kept GROUP BY ALL ORDER BY domain, bytes DESC, language"""
EXPLAINED = {
    "kept": "Trained on.",
    "held_out": "Kept out of training for evaluation, chosen by a hash of the text.",
    "over_limit": "Exceeds the limit of its source.",
    "passed_over": "A file that is not data (hidden, README, LICENSE, checksum), or that `ignore` names.",
    "unknown_format": "A file with an unknown extension.",
    "not_a_file": "A pipe, a device or a broken link.",
    "truncated_file": "In a damaged file; everything before the damage was read.",
    "no_page": "A record of a web archive that is not a page of text: an image, an error, a redirect.",
    "bad_csv": "A row with other columns than the first row, or with an unclosed quote.",
    "doubled_column": "In a file with two columns of the same name.",
    "too_deep": "Markup nested deeper, or with more attributes, than any real page.",
    "too_slow": "Markup that took longer than the time limit per document.",
    "bad_json": "A line that is not a JSON object.",
    "bad_utf8": "A line that is not UTF-8.",
    "no_text_field": "A record without the text field.",
    "null_text": "A record whose text is null.",
    "not_text": "A record whose text is not a string.",
    "empty": "No text is left after extraction and normalization.",
    "line_too_long": "A line longer than the reader accepts.",
}
"""Outcome of reading and writing -> explanation; stages explain theirs."""


def document_outcomes_sql(job: CurationJob, shard: Shard) -> str:
    """Return SQL for the attributes of `shard` with `step`, `outcome` and `kept_id` of every document. Unordered."""
    low, high = shard.rows
    in_shard = f'WHERE "row" >= {low} AND "row" < {high}'
    dropped = [(stage.name, job.files(f"{stage.name}/drop"), "kept") for stage in job.stages]
    queries = [
        f"SELECT \"row\", '{step}' AS step, outcome, {kept} AS kept_id FROM read_parquet({sql_list(files)}) {in_shard}"
        for step, files, kept in (*dropped, ("written", job.files(WRITTEN), "NULL"))
        if files
    ]
    return f"""SELECT attributes.*, fate.step, fate.outcome, fate.kept_id
        FROM read_parquet({sql_literal(str(shard.attributes))}) AS attributes
        JOIN ({" UNION ALL ".join(queries)}) AS fate USING ("row")"""


def count_shard(job: CurationJob, item: int) -> None:
    """Count the documents of shard `item` by outcome."""
    outcomes = document_outcomes_sql(job, job.shards[item])
    table = job.query(
        f"""SELECT domain, source, step, outcome, count(*)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes,
            sum(words)::BIGINT AS words FROM ({outcomes}) GROUP BY ALL ORDER BY ALL"""
    )
    write_table(table.cast(SCHEMA), job.file(STEP, item))


def write_ledger(runner: Runner, job: CurationJob, skipped: Path, path: Path) -> pa.Table:
    """Write the ledger of the job and of what reading skipped to `path`, and return it.

    Raises AssertionError if a document is missing from it or counted twice.
    """
    run_step(runner, job, STEP, count_shard, range(len(job.shards)))
    ledger = job.query(
        f"""SELECT domain, source, step, outcome, sum(documents)::BIGINT AS documents,
            sum(bytes)::BIGINT AS bytes, sum(words)::BIGINT AS words
        FROM (SELECT * FROM read_parquet({sql_list(job.files(STEP))})
            UNION ALL SELECT domain, source, 'read', reason, documents, bytes, 0
            FROM read_parquet({sql_literal(str(skipped))}))
        GROUP BY ALL ORDER BY ALL"""
    )
    ledger = ledger.cast(SCHEMA).combine_chunks()
    counted = sum(row["documents"] for row in ledger.to_pylist() if row["step"] != "read")
    assert counted == sum(shard.documents for shard in job.shards)
    pq.write_table(ledger, path, compression="zstd")
    return ledger


def summarize_ledger(ledger: pa.Table, job: CurationJob) -> dict[str, Any]:
    """Return the facts of the artifact, mostly by domain: documents and bytes to train on, held out, read, removed."""
    ledger_rows = ledger.to_pylist()

    def documents(domain: str, outcome: str | None = None) -> int:
        rows = (row for row in ledger_rows if row["domain"] == domain and outcome in (None, row["outcome"]))
        return sum(row["documents"] for row in rows)

    shards = ", ".join(f"({shard.number}, '{shard.domain}')" for shard in job.shards)
    by_domain = f"""SELECT domain, sum(bytes) FILTER (outcome = 'kept')::BIGINT, sum(lines)::BIGINT,
            sum(redacted)::BIGINT
        FROM read_parquet({sql_list(job.files(WRITTEN))}) AS written
        JOIN (VALUES {shards}) AS shards (number, domain) ON written."row" >> 32 = shards.number
        GROUP BY domain ORDER BY domain"""
    files = [str(path) for path in sorted((job.folder / "documents").glob("*.parquet"))]
    by_language = f"""SELECT language, count(*) FROM read_parquet({sql_list(files)}) WHERE split = 'train'
        GROUP BY language ORDER BY language"""
    with job.session() as connection:
        written = {domain: sums for domain, *sums in connection.execute(by_domain).fetchall()}
        languages = connection.execute(by_language).fetchall()
    domains = list(job.recipe.sources)
    size, lines, redacted = (
        {domain: int(written.get(domain, (0, 0, 0))[column] or 0) for domain in domains} for column in range(3)
    )
    return {
        "documents": {domain: documents(domain, "kept") for domain in domains},
        "bytes": size,
        "held_out": {domain: documents(domain, "held_out") for domain in domains},
        "read": {domain: documents(domain) for domain in domains},
        "lines_removed": lines,
        "redacted": redacted,
        "languages": {str(language): int(count) for language, count in languages},
    }


def check_not_empty(facts: dict[str, Any], ledger: pa.Table) -> None:
    """Raise ValueError if a domain has documents but none to train on; the message lists their outcomes."""
    for domain, kept in facts["documents"].items():
        if facts["read"][domain] and not kept:
            outcomes = [row for row in ledger.to_pylist() if row["domain"] == domain]
            reasons = ", ".join(f"{row['outcome']} {row['documents']:,}" for row in outcomes)
            raise ValueError(f"sources.{domain}: nothing is left to train on ({reasons}); loosen curate.quality")


def write_findings(runner: Runner, job: CurationJob, folder: Path) -> None:
    """Write the report tables of a finished job into `folder`."""
    shards = range(len(job.shards))
    run_step(runner, job, LENGTHS, count_lengths, shards)
    run_step(runner, job, SAMPLES, sample_shard, shards)
    folder.mkdir(parents=True, exist_ok=True)
    counts = sql_list(job.files(LENGTHS))
    chosen = f"""SELECT * FROM read_parquet({sql_list(job.files(SAMPLES))})
        QUALIFY row_number() OVER (PARTITION BY domain, outcome ORDER BY draw, id, url) <= {EXAMPLES}
        ORDER BY domain, outcome, draw, id, url"""
    write_table(job.query(_LENGTHS.format(counts=counts)), folder / "lengths.parquet")
    write_table(job.query(_LANGUAGES.format(counts=counts)), folder / "languages.parquet")
    write_table(job.query(chosen), folder / "samples.parquet")
    write_table(_clusters(job), folder / "clusters.parquet")
    for stage in job.stages:
        for step, name in stage.tables.items():
            for number, file in enumerate(job.files(step)):
                assert number == 0, f"{step} left more than one file"
                shutil.copyfile(file, folder / f"{name}.parquet")


def count_lengths(job: CurationJob, item: int) -> None:
    """Count the documents of a shard by language and power of two of their size."""
    table = job.query(
        f"""SELECT domain, language, floor(log2(greatest(bytes, 1)))::INTEGER AS log2_bytes,
            outcome IN {KEPT} AS kept, count(*)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
        FROM ({document_outcomes_sql(job, job.shards[item])}) GROUP BY ALL ORDER BY ALL"""
    )
    write_table(table, job.file(LENGTHS, item))


def sample_shard(job: CurationJob, item: int) -> None:
    """Choose documents of every outcome in a shard, with the beginning of their text as it was read."""
    shard = job.shards[item]
    with job.session() as connection:
        # The smallest draws, so that a second run shows the same documents.
        connection.execute(
            f"""CREATE TEMP TABLE chosen AS
            SELECT "row", step, outcome, kept_id, topic, rank, words FROM ({document_outcomes_sql(job, shard)})
            QUALIFY row_number() OVER (PARTITION BY outcome ORDER BY draw, id, url) <= {EXAMPLES}"""
        )
        table = connection.sql(
            f"""SELECT domain, step, outcome, source, language, url, license, date, id, kept_id, topic, rank, bytes,
                words, draw, left(text, {EXCERPT}) AS excerpt
            FROM read_parquet({sql_literal(str(shard.text))}) JOIN chosen USING ("row")
            WHERE "row" IN (SELECT "row" FROM chosen) ORDER BY ALL"""
        ).to_arrow_table()
    write_table(table, job.file(SAMPLES, item))


def _clusters(job: CurationJob) -> pa.Table:
    """Return the largest groups of near duplicates, with the text of the kept document and the least similar copy."""
    clusters = job.query(
        f"""WITH members AS (SELECT * FROM read_parquet({sql_list(job.files("near/clusters"))})),
        largest AS (SELECT cluster, count(*) AS documents FROM members GROUP BY cluster
            ORDER BY documents DESC, cluster LIMIT {CLUSTERS}),
        last AS (SELECT members.* FROM members SEMI JOIN largest USING (cluster) WHERE id <> cluster
            QUALIFY row_number() OVER (PARTITION BY cluster ORDER BY jaccard, id) = 1)
        SELECT cluster, documents, kept."row" AS kept_row, last."row" AS copy_row, last.jaccard
        FROM largest JOIN members AS kept USING (cluster) JOIN last USING (cluster)
        WHERE kept.id = cluster ORDER BY documents DESC, cluster"""
    )
    rows = clusters["kept_row"].to_pylist() + clusters["copy_row"].to_pylist()
    documents: dict[int, tuple[str, str, str]] = {}
    for shard in job.shards:
        in_shard = [row for row in rows if shard.rows[0] <= row < shard.rows[1]]
        if in_shard:
            columns = ["row", "domain", "url", "text"]
            table = pq.read_table(shard.text, columns=columns, filters=[("row", "in", in_shard)])
            excerpts = pc.utf8_slice_codeunits(table["text"], 0, EXCERPT).to_pylist()
            values = zip(table["domain"].to_pylist(), table["url"].to_pylist(), excerpts, strict=True)
            documents.update(zip(table["row"].to_pylist(), values, strict=True))
    for name in ("kept", "copy"):
        shown = [documents[row] for row in clusters[f"{name}_row"].to_pylist()]
        for index, column in enumerate(("domain", "url", "excerpt")):
            values = pa.array([document[index] for document in shown], pa.string())
            clusters = clusters.append_column(f"{name}_{column}", values)
    return clusters.drop_columns(["kept_row", "copy_row"])
