"""A curation job: its shards, its folder of half-done work, and the order in which steps drop documents.

Every step has one shape. *Map* reads a shard and writes one file; *reduce* reads one range of a hash out of all those
files and writes one file; a file that exists is done, so a killed job goes on where it stopped, and any runner (a loop,
threads, a cluster) may do the items in any order. Files are written under another name and renamed. What this gives up:
a reducer opens every mapper's file, so a job has thousands of shards, not millions.
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
DROPS = ("filter", "url", "exact", "near", "contaminated", "topic")
"""Steps that drop documents, in order; a document's outcome is the first that drops it."""
DROP_SCHEMA = pa.schema({"row": pa.int64(), "outcome": pa.string(), "kept": pa.string()})
"""What a dropping step writes, ordered by row; `kept`: id of the document that stays in its place, if there is one."""
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
    """What a work item needs to know; pickled to workers."""

    recipe: Recipe
    shards: tuple[Shard, ...]
    folder: Path
    """Where steps leave their files."""
    parts: int = 1
    """Ranges of a hash that are reduced separately; no result depends on it."""
    memory: str = "1GiB"
    """DuckDB's memory in one work item."""
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

    def survivors(self, shard: Shard, before: str, columns: str = "*") -> str:
        """Return SQL for `columns` of the attributes of `shard` that no step before `before` has dropped.

        `before` is one of DROPS, or "end" for what is left after all of them. Includes `row`. Unordered.
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
"""Does one item of a step of a job; a function of a module, so that it pickles."""
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""Does `items` of a step, in any order, and returns when all are done; raises what an item raised."""


def run(runner: Runner, job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do those `items` of `step` whose file is not there yet."""
    (job.folder / step).mkdir(parents=True, exist_ok=True)
    runner(job, step, work, [item for item in items if not job.file(step, item).exists()])
    pa.default_memory_pool().release_unused()  # else each step's peak stays with the process


def in_turn(job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """The runner that does one item after another in this process."""
    for item in items:
        work(job, item)


def write_table(table: pa.Table, path: Path, row_group: int = ROW_GROUP) -> None:
    """Write `table` whole or not at all; the bytes depend on the table alone.

    Only text gets a dictionary: for hashes it is a third of the time of writing, and they gain nothing.
    """
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    with replacing(path) as part:
        pq.write_table(
            table.combine_chunks(), part, compression="zstd", row_group_size=row_group, use_dictionary=texts or False
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write to that becomes `path` when the block ends well.

    A killed process leaves a truncated file under the name that it writes to, so that is never the final one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def quoted(text: str) -> str:
    """Return `text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def listed(files: Sequence[str]) -> str:
    """Return `files` as an SQL list of strings."""
    return "[" + ", ".join(map(quoted, files)) + "]"


# Hash ranges: how a step that looks at all documents is cut into pieces that one process can hold.
#
# A mapper writes its rows sorted by a 64-bit key, in small row groups; a reducer of range p reads from each
# mapper's file the row groups that overlap it (Parquet keeps the least and greatest key of each). So there is one
# file per shard and step, not one per shard and range. The result does not depend on the number of ranges, but a
# job that is gone on with must keep it: what a reducer left is taken for the same range.

KEY_SPAN = 2**64


def key_range(part: int, parts: int) -> tuple[int, int]:
    """Return the first and the last key of range `part` out of `parts`."""
    return part * KEY_SPAN // parts, (part + 1) * KEY_SPAN // parts - 1


def write_by_key(connection: duckdb.DuckDBPyConnection, query: str, job: CurationJob, step: str, item: int) -> None:
    """Write the rows of `query`, which has a column `key` UBIGINT, as the file of `item`, sorted by all its columns."""
    table = connection.sql(f"SELECT key, * EXCLUDE (key) FROM ({query}) ORDER BY ALL").to_arrow_table()
    write_table(table, job.file(step, item))


def rows_of_part(job: CurationJob, step: str, part: int) -> str:
    """Return SQL for the rows of range `part` that the mappers of `step` wrote. Unordered."""
    low, high = key_range(part, job.parts)
    return f"SELECT * FROM read_parquet({listed(job.files(step))}) WHERE key BETWEEN {low} AND {high}"


def write_drops(connection: duckdb.DuckDBPyConnection, query: str, job: CurationJob, step: str, item: int) -> None:
    """Write the rows (row, outcome, kept) of `query` as drops of `step`, ordered by row."""
    table: pa.Table = connection.sql(f'SELECT "row", outcome, kept FROM ({query}) ORDER BY ALL').to_arrow_table()
    write_table(table.cast(DROP_SCHEMA), job.file(f"{step}/drop", item))


# Which documents are held out of training: decided by a hash of the text and by nothing else.
#
# So the decision does not move when other documents come or go, and one text has one fate in every domain. It is
# taken after duplicates are gone: no near copy of a held-out document stays behind in the training set of its
# domain. The id comes from the same pass over the text, since hashing is among the dearest parts of reading (about
# 1 us per kilobyte).


def draw_and_id(text: Any, domain: bytes) -> tuple[int, str]:
    """Return the draw of a text in UTF-8 (bytes or a view of them) and its id in `domain`, 32 hex digits of BLAKE2b."""
    digest = blake2b(text, digest_size=32, person=b"herd text").digest()
    return int.from_bytes(digest[:8], "little"), blake2b(digest, digest_size=16, key=domain).hexdigest()


def draw(text: str) -> int:
    """Return a number in [0, 2^64) that only `text` decides."""
    return draw_and_id(text.encode(), b"")[0]


def document_id(text: str, domain: str) -> str:
    """Return the id of a text in a domain: equal texts of a domain have equal ids."""
    return draw_and_id(text.encode(), domain.encode())[1]


def threshold(share: Fraction) -> int:
    """Return the bound below which a draw is held out, at most 2^64 - 1 so that it fits 64 bits."""
    return min(2**64 * share.numerator // share.denominator, 2**64 - 1)
