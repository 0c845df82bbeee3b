"""Text shards: Parquet of documents sorted by id, about 64 MB of text each.

zstd at its lowest level takes a third of the disk for about 10 us per 4.5 KB. No statistics and no dictionary for the
text: both cost as much as compressing it and nothing asks for them. Ids have statistics, so that a reader of a range of
ids skips row groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.job import ROW_BITS, replacing
from llama3.recipe.section import Domain

SCHEMA = pa.schema(
    {
        "row": pa.int64(),
        "id": pa.string(),
        "text": pa.large_string(),
        "domain": pa.string(),
        "source": pa.string(),
        "source_index": pa.int32(),
        "language": pa.string(),
        "url": pa.string(),
        "licence": pa.string(),
        "date": pa.string(),
        "bytes": pa.int64(),
        "draw": pa.uint64(),
    }
)
"""`row` numbers the documents as read; it joins tables and never decides anything."""
SHARD_BYTES = 64_000_000
"""Bytes of text after which an item begins another shard."""
ITEM_BITS = 12
"""An item has at most 2^12 shards, 260 GB of text."""
_ROW_GROUP = 1024
_REPEATING = ["domain", "source", "source_index", "language", "licence", "date"]
ORDER = ("id", "url", "date", "source_index", "licence", "language")


class ShardWriter:
    """Writes the rows of one item into shards; `flush` at the end."""

    def __init__(self, folder: Path, domain: Domain, item: int) -> None:
        self.written: list[tuple[str, int, int]] = []
        """Name, documents and bytes of each shard."""
        self._folder, self._domain, self._item = folder, domain, item
        self._tables: list[pa.Table] = []
        self._size = 0

    def add(self, table: pa.Table) -> None:
        """Take rows of SCHEMA but `row`."""
        self._tables.append(table)
        self._size += int(table["bytes"].to_numpy().sum())

    @property
    def full(self) -> bool:
        """Whether the rows since the last shard are enough for one."""
        return self._size >= SHARD_BYTES

    def flush(self) -> None:
        """Write what has come in since the last shard, if anything has."""
        size = self._size
        if not size:
            return
        place = len(self.written)
        assert place < 1 << ITEM_BITS
        name = f"{self._domain}-{self._item:05}-{place:04}.parquet"
        table = pa.concat_tables(self._tables)
        self._tables, self._size = [], 0
        table = table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in ORDER]))
        pa.default_memory_pool().release_unused()  # it keeps what it freed, and a text may be 200 MB
        first = (self._item << ITEM_BITS | place) << ROW_BITS
        table = table.add_column(0, "row", pa.array(np.arange(first, first + table.num_rows, dtype=np.int64)))
        table = table.select(SCHEMA.names).cast(SCHEMA).replace_schema_metadata({"bytes": str(size)})
        with replacing(self._folder / name) as part:
            pq.write_table(
                table,
                part,
                compression="zstd",
                compression_level=1,
                row_group_size=_ROW_GROUP,
                use_dictionary=_REPEATING,
                write_statistics=[column for column in SCHEMA.names if column != "text"],
            )
        self.written.append((name, table.num_rows, size))
