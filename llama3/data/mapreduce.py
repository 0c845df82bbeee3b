"""Map-reduce for curation: the job, its work items, and the steps that drop documents.

A map item reads one shard and writes one file. A reduce item reads one range of a hash from all those files and writes
one file. A file that exists is done, so a killed job resumes, and a runner (loop, threads, cluster) may do the items of
a step in any order. A reducer opens the file of every mapper, so a job has thousands of shards, not millions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.recipe.base import Domain
from llama3.recipe.schema import Recipe
from storage.duck import session

ROW_BITS = 32
"""Bits of `row` that number the documents inside a shard."""
KEY_SPAN = 2**64
DROPS = ("filter", "url", "exact", "near", "contaminated", "topic")
"""Steps that drop documents, in order; the first one that drops a document decides its outcome."""
DROP_SCHEMA = pa.schema({"row": pa.int64(), "outcome": pa.string(), "kept": pa.string()})
"""What a dropping step writes, ordered by row; `kept`: id of the document that is kept instead, if there is one."""
ROW_GROUP = 8192


@dataclass(frozen=True)
class Shard:
    """Documents of one domain: `text` and `attributes` are Parquet with the same rows in the same order."""

    number: int
    domain: Domain
    text: Path
    attributes: Path
    documents: int
    bytes: int

    @property
    def rows(self) -> tuple[int, int]:
        """Half-open range of the column `row` in this shard."""
        return self.number << ROW_BITS, (self.number + 1) << ROW_BITS


@dataclass(frozen=True)
class CurationJob:
    """Everything that a work item needs; pickled to workers."""

    recipe: Recipe
    shards: tuple[Shard, ...]
    folder: Path
    """Scratch folder of the steps."""
    parts: int = 1
    """Hash ranges that are reduced separately. No result depends on it, but a resumed job must keep it."""
    memory: str = "1GiB"
    """Memory limit of DuckDB in one work item."""
    threads: int = 1

    def file(self, step: str, item: int) -> Path:
        """Return the file that item `item` of `step` writes."""
        return self.folder / step / f"{item:05}.parquet"

    def files(self, step: str) -> list[str]:
        """Return the files that `step` has written, in order."""
        return [str(path) for path in sorted((self.folder / step).glob("[0-9]*.parquet"))]

    @contextmanager
    def session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open a DuckDB session within the job's memory; it spills inside the job's folder."""
        spill = self.folder / "spill" / str(os.getpid())
        with session(spill, self.memory, self.threads) as connection:
            yield connection

    def query(self, sql: str, **tables: pa.Table) -> pa.Table:
        """Return the result of `sql`, which may read `tables` by name, in a new session."""
        with self.session() as connection:
            for name, table in tables.items():
                connection.register(name, table)
            return connection.sql(sql).to_arrow_table()

    def survivors(self, shard: Shard, before: str, columns: str = "*") -> str:
        """Return SQL for `columns` of the attributes of `shard` that no step before `before` has dropped.

        `before` is one of DROPS, or "end" for the documents left after all of them. Unordered.
        """
        earlier = DROPS if before == "end" else DROPS[: DROPS.index(before)]
        files = [file for step in earlier for file in self.files(f"{step}/drop")]
        attributes = f"SELECT {columns} FROM read_parquet({quoted(str(shard.attributes))})"
        if not files:
            return attributes
        low, high = shard.rows
        gone = f'SELECT "row" FROM read_parquet({listed(files)}) WHERE "row" >= {low} AND "row" < {high}'
        return f'{attributes} WHERE "row" NOT IN ({gone})'


Work = Callable[[Any, int], None]
"""Does one item of a step: `work(job, item)`. Defined at module level, so that it pickles."""
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""Runs the items of a step in any order: `runner(job, step, work, items)`. Raises the error of a failed item."""


def run(runner: Runner, job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the `items` of `step` whose file does not exist yet."""
    (job.folder / step).mkdir(parents=True, exist_ok=True)
    runner(job, step, work, [item for item in items if not job.file(step, item).exists()])
    pa.default_memory_pool().release_unused()  # otherwise the process keeps the peak of each step


def in_turn(job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the items one after another in this process."""
    for item in items:
        work(job, item)


def write_table(table: pa.Table, path: Path, row_group: int = ROW_GROUP) -> None:
    """Write `table` atomically; the bytes depend on the table alone."""
    # A dictionary of hashes saves no space and takes a third of the write time.
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    with replacing(path) as temporary:
        table = table.combine_chunks()
        pq.write_table(table, temporary, compression="zstd", row_group_size=row_group, use_dictionary=texts or False)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` when the block succeeds, else delete it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def quoted(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def listed(files: Sequence[str]) -> str:
    """Return `files` as an SQL list of string literals."""
    return "[" + ", ".join(map(quoted, files)) + "]"


# Shuffle: mappers sort by a 64-bit key, reducers read a key range


def key_range(part: int, parts: int) -> tuple[int, int]:
    """Return the first and the last key of range `part` out of `parts`."""
    return part * KEY_SPAN // parts, (part + 1) * KEY_SPAN // parts - 1


def write_by_key(job: CurationJob, query: str, step: str, item: int, **tables: pa.Table) -> None:
    """Write the rows of `query`, which has a column `key` UBIGINT, as the file of `item`, sorted by all columns."""
    # Parquet stores the range of keys of each row group, so a reducer reads only the row groups of its range.
    table = job.query(f"SELECT key, * EXCLUDE (key) FROM ({query}) ORDER BY ALL", **tables)
    write_table(table, job.file(step, item))


def rows_of_part(job: CurationJob, step: str, part: int) -> str:
    """Return SQL for the rows in key range `part` that the mappers of `step` wrote. Unordered."""
    low, high = key_range(part, job.parts)
    return f"SELECT * FROM read_parquet({listed(job.files(step))}) WHERE key BETWEEN {low} AND {high}"


def write_drops(job: CurationJob, query: str, step: str, item: int, **tables: pa.Table) -> None:
    """Write the rows (row, outcome, kept) of `query` as drops of `step`, ordered by row."""
    table = job.query(f'SELECT "row", outcome, kept FROM ({query}) ORDER BY ALL', **tables)
    write_table(table.cast(DROP_SCHEMA), job.file(f"{step}/drop", item))


# Held-out split: a hash of the text decides, so adding or removing documents does not move it.
# It is taken after deduplication, so no near copy of a held-out document remains in the training set of its domain.


def draw_and_id(text: Any, domain: bytes) -> tuple[int, str]:
    """Return the draw of a text in UTF-8 (bytes-like) and its id in `domain`, 32 hex digits of BLAKE2b."""
    # One pass over the text for both: hashing takes about 1 us per kilobyte, a large share of reading.
    digest = blake2b(text, digest_size=32, person=b"herd text").digest()
    return int.from_bytes(digest[:8], "little"), blake2b(digest, digest_size=16, key=domain).hexdigest()


def draw(text: str) -> int:
    """Return a pseudo-random number in [0, 2^64) that depends on `text` only."""
    return draw_and_id(text.encode(), b"")[0]


def document_id(text: str, domain: str) -> str:
    """Return the id of a text; equal texts of a domain have equal ids."""
    return draw_and_id(text.encode(), domain.encode())[1]


def threshold(share: Fraction) -> int:
    """Return the bound below which a draw is held out, at most 2^64 - 1 to fit 64 bits."""
    return min(2**64 * share.numerator // share.denominator, 2**64 - 1)
