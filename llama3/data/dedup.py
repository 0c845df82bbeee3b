"""Near-duplicate removal within a domain: MinHash bands, candidate stars, verified edges, connected components.

Bands alone join many pairs that are not alike (a fifth of the edges, on technical text), and components chain them, so
every candidate pair is verified by the true Jaccard of its shingle sets. Candidates of a bucket are its members against
its smallest id, never all pairs: one hot bucket would cost the square of its size. Members that turn out unlike that
centre form a bucket of their own, for a bounded number of rounds. Kept of each component: the longest text, then the
smallest id. What this gives up: components are found in memory, a few hundred bytes per document that has an edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import duckdb
import numpy as np
import pyarrow as pa

from llama3.data.minhash import Hashes, WordHashes, band_hashes, shingles
from llama3.recipe.data import Dedup

ROUNDS = 16
"""A bucket is compared against at most so many centres."""
_BATCH = 512


def near_duplicates(connection: duckdb.DuckDBPyConnection, documents: str, settings: Dedup) -> list[tuple[str, str]]:
    """Return (dropped id, kept id), sorted, for the near duplicates among `documents`.

    `documents` is SQL that yields `id VARCHAR, text VARCHAR` of one domain, ids unique. Tables named `dedup_*` on
    `connection` are made and dropped.
    """
    if settings.jaccard >= 1:
        return []
    _index(connection, documents, settings)
    try:
        edges = list(_verified_edges(connection, settings.jaccard))
        return _dropped(connection, components(edges))
    finally:
        for table in ("dedup_sets", "dedup_buckets", "dedup_pairs", "dedup_checked"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")


def components(edges: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the smallest member of the component of every node of `edges` (union-find, path halving)."""
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for left, right in edges:
        first, second = sorted((root(left), root(right)))
        parent[second] = first
    return {node: root(node) for node in parent}


def _index(connection: duckdb.DuckDBPyConnection, documents: str, settings: Dedup) -> None:
    """Fill `dedup_sets` (id, size, shingles) and `dedup_buckets` (bucket, id; buckets of one are left out)."""
    connection.execute("CREATE OR REPLACE TABLE dedup_sets (id VARCHAR, size UBIGINT, shingles UBIGINT[])")
    connection.execute("CREATE OR REPLACE TABLE dedup_bands (bucket UBIGINT, id VARCHAR)")
    writer, known = connection.cursor(), WordHashes()
    for batch in connection.cursor().sql(documents).to_arrow_reader(_BATCH):
        ids, texts = batch.column("id"), batch.column("text").to_pylist()
        sets = [shingles(text, known) for text in texts]
        _insert(writer, "dedup_sets", {"id": ids, "size": [len(text) for text in texts], "shingles": _lists(sets)})
        bands = band_hashes(sets, settings.bands, settings.rows)
        repeated = pa.array(ids).take(pa.array(np.repeat(np.arange(len(sets)), settings.bands)))
        _insert(writer, "dedup_bands", {"bucket": bands.reshape(-1), "id": repeated})
    connection.execute(
        """CREATE OR REPLACE TABLE dedup_buckets AS
        SELECT DISTINCT bucket, id FROM dedup_bands
        WHERE bucket IN (SELECT bucket FROM dedup_bands GROUP BY bucket HAVING count(*) > 1)"""
    )
    connection.execute("DROP TABLE dedup_bands")


def _insert(writer: duckdb.DuckDBPyConnection, table: str, columns: dict[str, object]) -> None:
    writer.register("dedup_batch", pa.table(columns))
    writer.execute(f"INSERT INTO {table} SELECT * FROM dedup_batch")
    writer.unregister("dedup_batch")


def _lists(sets: list[Hashes]) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum([len(one) for one in sets]))).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(sets))


def _verified_edges(connection: duckdb.DuckDBPyConnection, jaccard: float) -> Iterator[tuple[str, str]]:
    """Yield (centre, member) pairs whose Jaccard is at least `jaccard`; each round takes one centre off each bucket."""
    connection.execute("CREATE OR REPLACE TABLE dedup_checked (centre VARCHAR, id VARCHAR, alike BOOLEAN)")
    for _ in range(ROUNDS):
        connection.execute(
            """CREATE OR REPLACE TABLE dedup_pairs AS SELECT bucket, centre, id
            FROM (SELECT bucket, id, min(id) OVER (PARTITION BY bucket) AS centre FROM dedup_buckets)
            WHERE id <> centre"""
        )
        _check(connection, jaccard)
        connection.execute(
            """CREATE OR REPLACE TABLE dedup_buckets AS SELECT bucket, pairs.id
            FROM dedup_pairs AS pairs JOIN dedup_checked AS checked USING (centre, id) WHERE NOT alike"""
        )
        if not _one(connection, "SELECT count(*) FROM dedup_buckets"):
            break
    yield from connection.execute("SELECT centre, id FROM dedup_checked WHERE alike ORDER BY ALL").fetchall()


def _check(connection: duckdb.DuckDBPyConnection, jaccard: float) -> None:
    """Add a verdict for every pair in `dedup_pairs` that has none; sizes alone rule many pairs out."""
    connection.execute(
        """INSERT INTO dedup_checked
        WITH pairs AS (SELECT DISTINCT centre, id FROM dedup_pairs ANTI JOIN dedup_checked USING (centre, id)),
        counted AS (
            SELECT pairs.centre, pairs.id, len(a.shingles) + len(b.shingles) AS total,
                CASE WHEN least(len(a.shingles), len(b.shingles)) >= $1 * greatest(len(a.shingles), len(b.shingles))
                THEN len(list_intersect(a.shingles, b.shingles)) ELSE 0 END AS shared
            FROM pairs JOIN dedup_sets AS a ON a.id = pairs.centre JOIN dedup_sets AS b ON b.id = pairs.id)
        SELECT centre, id, shared >= $1 * (total - shared) FROM counted""",
        [jaccard],
    )


def _dropped(connection: duckdb.DuckDBPyConnection, member_of: dict[str, str]) -> list[tuple[str, str]]:
    if not member_of:
        return []
    members = pa.table({"id": list(member_of), "component": list(member_of.values())})
    connection.register("dedup_members", members)
    dropped = connection.execute(
        """SELECT id, kept FROM (
            SELECT id, first_value(id) OVER (PARTITION BY component ORDER BY size DESC, id) AS kept
            FROM dedup_members JOIN dedup_sets USING (id))
        WHERE id <> kept ORDER BY id"""
    ).fetchall()
    connection.unregister("dedup_members")
    return [(str(one), str(kept)) for one, kept in dropped]


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])
