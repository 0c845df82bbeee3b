"""Hash ranges: how a step that looks at all documents is cut into pieces that one process can hold.

A mapper writes its rows sorted by a 64-bit key, in small row groups; a reducer of range p reads from each mapper's file
the row groups that overlap it (Parquet keeps the least and greatest key of each). So there is one file per shard and
step, not one per shard and range. The result does not depend on the number of ranges, but a job that is gone on with
must keep it: what a reducer left is taken for the same range.
"""

from __future__ import annotations

import duckdb
import pyarrow as pa

from llama3.data.job import DROP_SCHEMA, Job, listed, write_table

KEY_SPAN = 2**64


def key_range(part: int, parts: int) -> tuple[int, int]:
    """Return the first and the last key of range `part` out of `parts`."""
    return part * KEY_SPAN // parts, (part + 1) * KEY_SPAN // parts - 1


def write_by_key(connection: duckdb.DuckDBPyConnection, query: str, job: Job, step: str, item: int) -> None:
    """Write the rows of `query`, which has a column `key` UBIGINT, as the file of `item`, sorted by all its columns."""
    table = connection.sql(f"SELECT key, * EXCLUDE (key) FROM ({query}) ORDER BY ALL").to_arrow_table()
    write_table(table, job.file(step, item))


def rows_of_part(job: Job, step: str, part: int) -> str:
    """Return SQL for the rows of range `part` that the mappers of `step` wrote. Unordered."""
    low, high = key_range(part, job.parts)
    return f"SELECT * FROM read_parquet({listed(job.files(step))}) WHERE key BETWEEN {low} AND {high}"


def write_drops(connection: duckdb.DuckDBPyConnection, query: str, job: Job, step: str, item: int) -> None:
    """Write the rows (row, outcome, kept) of `query` as drops of `step`, ordered by row."""
    table: pa.Table = connection.sql(f'SELECT "row", outcome, kept FROM ({query}) ORDER BY ALL').to_arrow_table()
    write_table(table.cast(DROP_SCHEMA), job.file(f"{step}/drop", item))
