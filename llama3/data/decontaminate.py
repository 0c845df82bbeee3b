"""Finds evaluation examples in the documents, drops the documents that hold them, and reports how much there is.

The measure of arXiv 2407.21783, section 5.1.4: a word of an example is contaminated if it lies in an 8-gram that occurs
at least once in the training text; an example's ratio is the share of its contaminated words. That ratio is over the
whole corpus, and common phrases of a thousand documents add up in it; so a document is dropped only if it covers an
example to the threshold *alone*, and `contamination.py` reads the texts again to say how many flags are true.

Each document is compared where it lies, so what a shard writes is bounded by the examples (which grams it holds, the
best document of each) and by the documents to drop, never by how often a popular gram occurs.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.benchmarks import STEP, wanted_in, write_benchmarks
from llama3.data.contamination import (
    EXAMPLES,
    FOUND,
    MAP,
    RATIOS,
    REPORT,
    VERIFIED,
    report_benchmarks,
    report_examples,
    report_ratios,
    verify_shard,
)
from llama3.data.job import Job, Runner, Shard, run, write_table
from llama3.data.kernels.arrow import Hashes, Offsets, text_buffers
from llama3.data.kernels.grams import Found, Wanted, nothing_found, scan
from llama3.data.partition import rows_of_part, write_by_key, write_drops

_BATCH = 2048
"""Documents whose text is in memory at a time."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that it maps numbers to distinct keys all over the range of hashes."""
_FOUND = pa.schema(
    {
        "key": pa.uint64(),
        "kind": pa.string(),
        "item": pa.int64(),
        "words": pa.int64(),
        "row": pa.int64(),
        "id": pa.string(),
    }
)
"""Three kinds of findings: `gram` (its hash is the key) occurs; `best` document of example `item` covers so many of its
own words; `document` contains an example of benchmark `item`."""


def decontaminate(runner: Runner, job: Job) -> None:
    """Run all sub-steps; leaves drops in `contaminated/drop` and tables for people in three steps of one file each.

    Tables: `contaminated/report` (one line a benchmark), `contaminated/ratios` (examples by ratio, to choose thresholds
    by) and `contaminated/examples` (those that the corpus holds some of). Without benchmarks it does nothing. Raises
    ValueError if a benchmark cannot be read.
    """
    if not job.recipe.curate.decontaminate:
        return
    shards, parts = range(len(job.shards)), range(job.parts)
    run(runner, job, STEP, write_benchmarks, [0])
    run(runner, job, MAP, scan_shard, shards)
    run(runner, job, "contaminated/drop", drop_documents, parts)
    run(runner, job, FOUND, reduce_found, parts)
    run(runner, job, VERIFIED, verify_shard, shards)
    run(runner, job, REPORT, report_benchmarks, [0])
    run(runner, job, RATIOS, report_ratios, [0])
    run(runner, job, EXAMPLES, report_examples, [0])


def scan_shard(job: Job, item: int) -> None:
    """Look for all examples in the documents of a shard that no earlier step has dropped."""
    shard, benchmarks = job.shards[item], job.recipe.curate.decontaminate
    wanted = wanted_in(job)
    found, stamp, alive = nothing_found(wanted), 0, _alive(job, shard)
    documents, sets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in pq.ParquetFile(shard.text).iter_batches(_BATCH, columns=["row", "text"]):
        rows = batch["row"].to_numpy()
        use = np.isin(rows, alive).astype(np.uint8)
        contains = np.zeros((len(rows), len(benchmarks)), np.uint8)
        stamp = scan(*text_buffers(batch["text"]), rows.copy(), use, wanted, found, stamp, contains)
        document, number = np.nonzero(contains)
        documents.append(rows[document])
        sets.append(number)
    tables = [_grams(wanted, found), _best(found, shard), _documents(np.concatenate(documents), np.concatenate(sets))]
    order = [(name, "ascending") for name in ("key", "kind", "item")]
    write_table(pa.concat_tables(tables).sort_by(order), job.file(MAP, item))


def _alive(job: Job, shard: Shard) -> Offsets:
    with job.session() as connection:
        query = job.survivors(shard, "contaminated", '"row"')
        rows: Offsets = connection.sql(query).to_arrow_table()["row"].to_numpy()
    return rows


def _grams(wanted: Wanted, found: Found) -> pa.Table:
    """Return a row for each gram that the shard holds."""
    slots, where, _ = wanted.table
    used = slots != 0
    keys = slots[used][found.seen[where[used]] == 1]
    return _rows("gram", keys, np.zeros(len(keys), np.int64))


def _best(found: Found, shard: Shard) -> pa.Table:
    """Return the best document of each example that any document covers some of."""
    examples = np.flatnonzero(found.best)
    known = pq.read_table(shard.text, columns=["row", "id"])
    places = np.searchsorted(known["row"].to_numpy(), found.best_row[examples])
    ids = known["id"].take(pa.array(places))
    return _rows(
        "best", _keys(examples), examples, found.best[examples].astype(np.int64), found.best_row[examples], ids
    )


def _documents(rows: Offsets, benchmarks: Offsets) -> pa.Table:
    return _rows("document", _keys(rows), benchmarks, rows=rows)


def _keys(numbers: Offsets) -> Hashes:
    keys: Hashes = numbers.astype(np.uint64) * _SPREAD
    return keys


def _rows(
    kind: str,
    keys: Hashes,
    items: Offsets,
    words: Offsets | None = None,
    rows: Offsets | None = None,
    ids: object = None,
) -> pa.Table:
    none = np.full(len(keys), -1, np.int64)
    words, rows = none if words is None else words, none if rows is None else rows
    ids = pa.array([""] * len(keys), pa.string()) if ids is None else ids
    return pa.table([keys, pa.array([kind] * len(keys), pa.string()), items, words, rows, ids], schema=_FOUND)


def drop_documents(job: Job, part: int) -> None:
    """Drop the documents that contain an example of a benchmark whose action is to drop."""
    benchmarks = enumerate(job.recipe.curate.decontaminate)
    dropping = [number for number, benchmark in benchmarks if benchmark.action == "drop"]
    with job.session() as connection:
        query = f"""SELECT DISTINCT "row", 'contaminated' AS outcome, NULL::VARCHAR AS kept
            FROM ({rows_of_part(job, MAP, part)})
            WHERE kind = 'document' AND list_contains({dropping}::BIGINT[], item)"""
        write_drops(connection, query, job, "contaminated", part)


def reduce_found(job: Job, part: int) -> None:
    """Join the findings of all shards: each gram once, the best document of each example, documents by benchmark."""
    rows = rows_of_part(job, MAP, part)
    query = f"""SELECT DISTINCT * FROM ({rows}) WHERE kind = 'gram'
        UNION ALL SELECT * FROM ({rows}) WHERE kind = 'best'
            QUALIFY row_number() OVER (PARTITION BY item ORDER BY words DESC, id, "row") = 1
        UNION ALL SELECT min(key), kind, item, count(*), -1, '' FROM ({rows})
            WHERE kind = 'document' GROUP BY kind, item"""
    with job.session() as connection:
        write_by_key(connection, query, job, FOUND, part)
