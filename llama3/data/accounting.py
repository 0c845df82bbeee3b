"""Where every document went: documents, bytes and words by domain, source and outcome, summing to what was read.

Counted shard by shard from attributes, drops and what was written, then added up with what reading skipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.filters import explanation
from llama3.data.mapreduce import DROPS, CurationJob, Runner, Shard, listed, quoted, run, write_table
from llama3.data.write_shards import STEP as WRITTEN

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


def fates(job: CurationJob, shard: Shard) -> str:
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


def count_shard(job: CurationJob, item: int) -> None:
    """Count the fates of the documents of shard `item`."""
    with job.session() as connection:
        table = connection.sql(
            f"""SELECT domain, source, step, outcome, count(*)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes,
                sum(words)::BIGINT AS words FROM ({fates(job, job.shards[item])}) GROUP BY ALL ORDER BY ALL"""
        ).to_arrow_table()
    write_table(table.cast(SCHEMA), job.file(STEP, item))


def write_ledger(runner: Runner, job: CurationJob, skipped: Path, path: Path) -> pa.Table:
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


def facts_of(ledger: pa.Table, job: CurationJob) -> dict[str, Any]:
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


def _written(connection: duckdb.DuckDBPyConnection, job: CurationJob) -> dict[str, tuple[int, int, int]]:
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


def _languages(connection: duckdb.DuckDBPyConnection, job: CurationJob) -> dict[str, int]:
    """Return how many documents to train on there are in each language."""
    files = [str(path) for path in sorted((job.folder / "documents").glob("*.parquet"))]
    rows = connection.execute(
        f"""SELECT language, count(*) FROM read_parquet({listed(files)}) WHERE split = 'train'
        GROUP BY language ORDER BY language"""
    ).fetchall()
    return {str(language): int(count) for language, count in rows}


# Tables for people: what curation found, as small Parquet files that the report page is drawn from.
#
# `lengths` (histogram by domain), `languages`, `samples` (documents of every outcome, with the beginning of their
# text), `clusters` (the largest groups of near copies, with examples), `lines` (what was removed most often) and
# the contamination tables. Samples are those with the smallest draw, so the same documents show up however often it
# is run.

FINDINGS = "report"
"""Folder of these tables in a curated artifact."""
SAMPLES = "samples"
LENGTHS = "lengths"
EXAMPLES = 8
"""Samples for each domain and outcome."""
EXCERPT = 1200
"""Characters shown of a document."""
CLUSTERS = 20
"""Groups of near copies shown."""
COPIED = {
    "lines/common": "lines",
    "contaminated/report": "contamination",
    "contaminated/ratios": "ratios",
    "contaminated/examples": "contaminated",
}
"""Tables that steps leave as one file, and their names in the report."""


def write_findings(runner: Runner, job: CurationJob, folder: Path) -> None:
    """Write the tables of the report of a finished job into `folder`."""
    shards = range(len(job.shards))
    run(runner, job, LENGTHS, count_lengths, shards)
    run(runner, job, SAMPLES, sample_shard, shards)
    folder.mkdir(parents=True, exist_ok=True)
    with job.session() as connection:
        for name, query in (("lengths", _LENGTHS), ("languages", _LANGUAGES)):
            counts = listed(job.files(LENGTHS))
            write_table(connection.sql(query.format(counts=counts)).to_arrow_table(), folder / f"{name}.parquet")
        chosen = connection.sql(_CHOSEN.format(samples=listed(job.files(SAMPLES)))).to_arrow_table()
        write_table(chosen, folder / "samples.parquet")
    write_table(_clusters(job), folder / "clusters.parquet")
    for step, name in COPIED.items():
        for number, file in enumerate(job.files(step)):
            assert number == 0, f"{step} left more than one file"
            shutil.copyfile(file, folder / f"{name}.parquet")


_LENGTHS = """SELECT domain, log2_bytes, kept, sum(documents)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
    FROM read_parquet({counts}) GROUP BY ALL ORDER BY ALL"""
_LANGUAGES = """SELECT domain, language, sum(documents)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
    FROM read_parquet({counts}) WHERE kept GROUP BY ALL ORDER BY domain, bytes DESC, language"""
_CHOSEN = f"""SELECT * FROM read_parquet({{samples}})
    QUALIFY row_number() OVER (PARTITION BY domain, outcome ORDER BY draw, id, url) <= {EXAMPLES}
    ORDER BY domain, outcome, draw, id, url"""


def count_lengths(job: CurationJob, item: int) -> None:
    """Count the documents of a shard by language and power of two of their size."""
    with job.session() as connection:
        table = connection.sql(
            f"""SELECT domain, language, floor(log2(greatest(bytes, 1)))::INTEGER AS log2_bytes,
                outcome IN {KEPT} AS kept, count(*)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
            FROM ({fates(job, job.shards[item])}) GROUP BY ALL ORDER BY ALL"""
        ).to_arrow_table()
    write_table(table, job.file(LENGTHS, item))


def sample_shard(job: CurationJob, item: int) -> None:
    """Choose documents of every outcome in a shard, with the beginning of their text as it was read."""
    shard = job.shards[item]
    with job.session() as connection:
        connection.execute(
            f"""CREATE TEMP TABLE chosen AS
            SELECT "row", step, outcome, kept_id, topic, rank, words FROM ({fates(job, shard)})
            QUALIFY row_number() OVER (PARTITION BY outcome ORDER BY draw, id, url) <= {EXAMPLES}"""
        )
        table = connection.sql(
            f"""SELECT domain, step, outcome, source, language, url, licence, date, id, kept_id, topic, rank, bytes,
                words, draw, left(text, {EXCERPT}) AS excerpt
            FROM read_parquet({quoted(str(shard.text))}) JOIN chosen USING ("row")
            WHERE "row" IN (SELECT "row" FROM chosen) ORDER BY ALL"""
        ).to_arrow_table()
    write_table(table, job.file(SAMPLES, item))


def _clusters(job: CurationJob) -> pa.Table:
    """Return the largest groups of near copies, with the text of the document kept and of the least alike copy."""
    files = job.files("near/clusters")
    with job.session() as connection:
        shown = connection.sql(
            f"""WITH members AS (SELECT * FROM read_parquet({listed(files)})),
            largest AS (SELECT cluster, count(*) AS documents FROM members GROUP BY cluster
                ORDER BY documents DESC, cluster LIMIT {CLUSTERS}),
            last AS (SELECT members.* FROM members SEMI JOIN largest USING (cluster) WHERE id <> cluster
                QUALIFY row_number() OVER (PARTITION BY cluster ORDER BY jaccard, id) = 1)
            SELECT cluster, documents, kept."row" AS kept_row, last."row" AS copy_row, last.jaccard
            FROM largest JOIN members AS kept USING (cluster) JOIN last USING (cluster)
            WHERE kept.id = cluster ORDER BY documents DESC, cluster"""
        ).to_arrow_table()
    texts = _excerpts(job, shown["kept_row"].to_pylist() + shown["copy_row"].to_pylist())
    for name in ("kept", "copy"):
        found = [texts[row] for row in shown[f"{name}_row"].to_pylist()]
        for place, column in enumerate(("domain", "url", "excerpt")):
            shown = shown.append_column(f"{name}_{column}", pa.array([one[place] for one in found], pa.string()))
    return shown.drop_columns(["kept_row", "copy_row"])


def _excerpts(job: CurationJob, rows: list[int]) -> dict[int, tuple[str, str, str]]:
    """Return domain, URL and the beginning of the text of the documents in `rows`."""
    found: dict[int, tuple[str, str, str]] = {}
    for shard in job.shards:
        mine = [row for row in rows if shard.rows[0] <= row < shard.rows[1]]
        if mine:
            found |= _read(shard, mine)
    return found


def _read(shard: Shard, rows: list[int]) -> dict[int, tuple[str, str, str]]:
    table = pq.read_table(shard.text, columns=["row", "domain", "url", "text"], filters=[("row", "in", rows)])
    excerpts = pc.utf8_slice_codeunits(table["text"], 0, EXCERPT)
    columns = (table["row"], table["domain"], table["url"], excerpts)
    return {row: rest for row, *rest in zip(*(column.to_pylist() for column in columns), strict=True)}  # type: ignore[misc]


# What can become of a document, in words: one sentence for each outcome; those of the rules stand beside the rules.

EXPLAINED = {
    "kept": "Trained on.",
    "held_out": "Kept out of training for evaluation, chosen by a hash of the text.",
    "over_limit": "Would not fit under the source's limit.",
    "passed_over": "A file that is no data (hidden, README, LICENSE, checksum), or that `ignore` names.",
    "unknown_format": "A file whose ending says no format that is read.",
    "not_a_file": "A pipe, a device or a link to nothing.",
    "truncated_file": "In a file that is damaged; what came before the break was read.",
    "no_page": "A record of a web archive that is no page of text: an image, an error, a redirection.",
    "bad_csv": "A row with other columns than the first one, or with a quote that does not end.",
    "doubled_column": "In a file that names a column twice.",
    "too_deep": "Markup nested deeper, or with more attributes, than any page that people read.",
    "too_slow": "Markup that took longer to read than the time limit of a document.",
    "bad_json": "A line that is no JSON object.",
    "bad_utf8": "A line that is not UTF-8.",
    "no_text_field": "A record without the text field.",
    "null_text": "A record whose text is null.",
    "not_text": "A record whose text is no string.",
    "empty": "Nothing is left after extraction and normalisation.",
    "line_too_long": "A line longer than the reader takes.",
    "old_version": "Another version of the same URL is newer.",
    "exact_duplicate": "The same text stands elsewhere in its domain.",
    "near_duplicate": "Nearly the same text stands elsewhere in its domain and language.",
    "contaminated": "Contains an example of an evaluation set.",
    "topic_cap": "Its topic has more text than the recipe allows.",
    "emptied": "Too short once the lines that many documents share were removed.",
}


def explain(outcome: str) -> str:
    """Return what `outcome` of any step means."""
    return EXPLAINED.get(outcome) or explanation(outcome)
