"""Near-duplicate removal: MinHash bands, verified candidates, connected components, one document kept of each.

Bands alone join many pairs that are not alike (a fifth of the edges, on technical text) and components chain them, so
every edge is verified by true Jaccard (`stars.py`). What this gives up: the shingle sets of all candidates lie on disk
meanwhile, eight bytes a word, and components are found in one place, some 40 bytes per edge (`components.py`).

Steps, all under `near/`: `bands` (by bucket), `candidates` (rows that share a bucket), `sets` (their shingles, from the
text), the rounds of `stars.py`, `components`, `members` (with what the keep rule looks at), `clusters`, `drop`.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.components import components
from llama3.data.copies import KEEP, KEEP_COLUMNS
from llama3.data.job import Job, Runner, Shard, listed, quoted, run, write_table
from llama3.data.kernels.arrow import Hashes, Offsets, list_buffers
from llama3.data.kernels.shingles import shingle_sets, spread
from llama3.data.partition import rows_of_part, write_by_key, write_drops
from llama3.data.stars import BANDS, LISTS, SETS, keys, verdict_files, verify_candidates, write_sets

OUTCOME = "near_duplicate"
_BATCH = 1024
"""Documents whose text is in memory at a time."""
_CLUSTERS = pa.schema(
    {"cluster": pa.string(), "id": pa.string(), "row": pa.int64(), "jaccard": pa.float64(), "size": pa.int64()}
)


def near_duplicates(runner: Runner, job: Job) -> None:
    """Write the drops of the step "near", and the clusters of alike documents as files of the step "near/clusters".

    Clusters: cluster (id of the document that is kept), id, row, jaccard (largest verified one with another of the
    cluster), size (documents of the cluster). Both are empty where the recipe's `dedup.jaccard` is 1.
    """
    shards, parts = range(len(job.shards)), range(job.parts)
    if job.recipe.curate.dedup.jaccard < 1:
        run(runner, job, BANDS, map_bands, shards)
        run(runner, job, "near/candidates", reduce_candidates, parts)
        run(runner, job, SETS, map_sets, shards)
        verify_candidates(runner, job)
        run(runner, job, "near/components", join_components, [0])
        run(runner, job, "near/members", map_members, shards)
    run(runner, job, "near/clusters", reduce_clusters, parts)
    run(runner, job, "near/drop", reduce_drops, parts)


def map_bands(job: Job, item: int) -> None:
    """Write the bands of the documents of shard `item`: key (of the bucket), head (of the id), row."""
    shard = job.shards[item]
    query = job.survivors(shard, before="near", columns='"row", id, language, bands')
    with job.session() as connection:
        found = connection.sql(f'{query} ORDER BY "row"').to_arrow_table()
        bands, offsets = list_buffers(found["bands"])
        each = np.repeat(np.arange(found.num_rows), np.diff(offsets))
        head = _heads(found["id"])
        rows = found["row"].to_numpy()
        exploded = {
            "key": spread(bands[offsets[0] : offsets[-1]] ^ _groups(shard, found["language"])[each]),
            "head": head[each],
            "row": rows[each],
        }
        connection.register("exploded", pa.table(exploded))
        write_by_key(connection, "SELECT * FROM exploded", job, BANDS, item)


def reduce_candidates(job: Job, part: int) -> None:
    """Write the rows of documents that share a bucket of `part` with another."""
    query = f"""SELECT DISTINCT "row" FROM (
        SELECT "row" FROM ({rows_of_part(job, BANDS, part)}) QUALIFY count(*) OVER (PARTITION BY key) > 1)
    ORDER BY "row" """
    with job.session() as connection:
        write_table(connection.sql(query).to_arrow_table(), job.file("near/candidates", part))


def map_sets(job: Job, item: int) -> None:
    """Write the shingle sets of the candidates of shard `item`: key, row, shingles."""
    shard, width = job.shards[item], job.recipe.curate.dedup.shingle
    low, high = shard.rows
    query = f"""SELECT DISTINCT "row" FROM read_parquet({listed(job.files("near/candidates"))})
        WHERE "row" >= {low} AND "row" < {high} ORDER BY "row" """
    with job.session() as connection:
        wanted = connection.sql(query).to_arrow_table()["row"].to_numpy()
    rows, sets = [np.zeros(0, np.int64)], [pa.array([], LISTS)]
    for batch in pq.ParquetFile(shard.text).iter_batches(_BATCH, columns=["row", "text"]):
        here = np.flatnonzero(np.isin(batch["row"].to_numpy(), wanted))
        rows.append(batch["row"].to_numpy()[here])
        sets.append(shingle_sets(batch["text"].take(pa.array(here)), width))
    row = np.concatenate(rows)
    order = np.argsort(keys(row))
    write_sets(keys(row)[order], row[order], pa.concat_arrays(sets).take(pa.array(order)), job.file(SETS, item))


def join_components(job: Job, item: int) -> None:
    """Write, for every document with an edge: key (of its component), label, row, jaccard; ordered by row."""
    left, right, jaccard = _edges(job)
    rows, labels = components(left, right)
    largest = np.zeros(len(rows))
    for end in (left, right):
        np.maximum.at(largest, np.searchsorted(rows, end), jaccard)
    table = {"key": keys(labels), "label": labels, "row": rows, "jaccard": largest}
    write_table(pa.table(table), job.file("near/components", item))


def map_members(job: Job, item: int) -> None:
    """Write the documents of shard `item` that have an edge, with what the keep rule looks at, keyed by component."""
    shard = job.shards[item]
    low, high = shard.rows
    documents = job.survivors(shard, before="near", columns=KEEP_COLUMNS)
    labelled = f"""SELECT * FROM read_parquet({quoted(str(job.file("near/components", 0)))})
        WHERE "row" >= {low} AND "row" < {high}"""
    with job.session() as connection:
        query = f'SELECT * FROM ({documents}) JOIN ({labelled}) USING ("row")'
        write_by_key(connection, query, job, "near/members", item)


def reduce_clusters(job: Job, part: int) -> None:
    """Write the clusters of `part`, each with the document that the keep rule chooses."""
    if job.recipe.curate.dedup.jaccard >= 1:
        write_table(_CLUSTERS.empty_table(), job.file("near/clusters", part))
        return
    query = f"""SELECT first_value(id) OVER (PARTITION BY label ORDER BY {KEEP}) AS cluster, id, "row", jaccard,
            count(*) OVER (PARTITION BY label) AS size
        FROM ({rows_of_part(job, "near/members", part)}) ORDER BY cluster, id"""
    with job.session() as connection:
        table = connection.sql(query).to_arrow_table().cast(_CLUSTERS)
        write_table(table, job.file("near/clusters", part))


def reduce_drops(job: Job, part: int) -> None:
    """Drop all documents of the clusters of `part` but the ones kept, as `near_duplicate`."""
    clusters = quoted(str(job.file("near/clusters", part)))
    query = f"""SELECT "row", '{OUTCOME}' AS outcome, cluster AS kept FROM read_parquet({clusters})
        WHERE id <> cluster"""
    with job.session() as connection:
        write_drops(connection, query, job, "near", part)


def _edges(job: Job) -> tuple[Offsets, Offsets, NDArray[np.float64]]:
    """Return (centre, member, jaccard) of all verified pairs."""
    files = verdict_files(job)
    if not files:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    query = f'SELECT DISTINCT centre, "row", jaccard FROM read_parquet({listed(files)}) WHERE alike ORDER BY ALL'
    with job.session() as connection:
        found = connection.sql(query).to_arrow_table()
    return found["centre"].to_numpy(), found["row"].to_numpy(), found["jaccard"].to_numpy()


def _heads(ids: pa.ChunkedArray) -> Hashes:
    """Return the first 64 bits of each id; two ids that share them would be a collision among alike documents."""
    return np.array([int(one[:16], 16) for one in ids.to_pylist()], np.uint64)


def _groups(shard: Shard, languages: pa.ChunkedArray) -> Hashes:
    """Return a hash of (domain, language) per document: near duplicates are looked for inside one of them."""
    names, each = np.unique(languages.to_numpy().astype(str), return_inverse=True)
    digests = [blake2b(f"{shard.domain}\0{name}".encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[each]
