"""Tables for people: what curation found, as small Parquet files that the report page is drawn from.

`lengths` (histogram by domain), `languages`, `samples` (documents of every outcome, with the beginning of their text),
`clusters` (the largest groups of near copies, with examples), `lines` (what was removed most often) and the
contamination tables. Samples are those with the smallest draw, so the same documents show up however often it is run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.job import Job, Runner, Shard, listed, quoted, run, write_table
from llama3.data.ledger import KEPT, fates

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


def write_findings(runner: Runner, job: Job, folder: Path) -> None:
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


def count_lengths(job: Job, item: int) -> None:
    """Count the documents of a shard by language and power of two of their size."""
    with job.session() as connection:
        table = connection.sql(
            f"""SELECT domain, language, floor(log2(greatest(bytes, 1)))::INTEGER AS log2_bytes,
                outcome IN {KEPT} AS kept, count(*)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
            FROM ({fates(job, job.shards[item])}) GROUP BY ALL ORDER BY ALL"""
        ).to_arrow_table()
    write_table(table, job.file(LENGTHS, item))


def sample_shard(job: Job, item: int) -> None:
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


def _clusters(job: Job) -> pa.Table:
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


def _excerpts(job: Job, rows: list[int]) -> dict[int, tuple[str, str, str]]:
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
