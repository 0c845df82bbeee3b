"""Where every document went: documents and bytes by domain, source and outcome, summing exactly to what was read."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.collect import Collected

OVER_LIMIT = "over_limit"
SCHEMA = pa.schema(
    {
        "domain": pa.string(),
        "source": pa.string(),
        "outcome": pa.string(),
        "documents": pa.int64(),
        "bytes": pa.int64(),
    }
)
"""Bytes are those of the text after extraction, before it for `over_limit`."""


def write_ledger(connection: duckdb.DuckDBPyConnection, collected: Collected, path: Path) -> pa.Table:
    """Write the ledger of table `judged` and of what was over a limit to `path`, and return it."""
    over = [
        {"domain": domain, "source": source, "outcome": OVER_LIMIT, "documents": count, "bytes": size}
        for (domain, source), count in collected.over_documents.items()
        for size in [collected.over_bytes[domain, source]]
    ]
    connection.register("over_limit", pa.Table.from_pylist(over, SCHEMA))
    ledger = connection.sql(
        """SELECT domain, source, outcome, count(*) AS documents, sum(bytes)::BIGINT AS bytes
        FROM judged GROUP BY ALL
        UNION ALL SELECT * FROM over_limit ORDER BY domain, source, outcome"""
    ).to_arrow_table()
    connection.unregister("over_limit")
    ledger = ledger.cast(SCHEMA).combine_chunks()
    pq.write_table(ledger, path, compression="zstd")
    return ledger
