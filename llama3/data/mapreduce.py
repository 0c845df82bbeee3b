"""Map-reduce for curation: the job, its work items, and what a stage of curation is.

A map item reads one shard and writes one file. A reduce item reads one range of a hash from all those files and writes
one file. A file that exists is done, so a killed job resumes, and a runner (loop, threads, cluster) may do the items of
a step in any order. A reducer opens the file of every mapper, so a job has thousands of shards, not millions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.recipe.base import Domain
from llama3.recipe.data_schema import Curate
from llama3.recipe.schema import Recipe

# DuckDB's defaults (80 % of the memory, a spill folder in the current directory) disturb a trainer beside it.


class _ThreadDatabase(threading.local):
    """The database that this thread used last, and its settings."""

    settings: tuple[str, str, int] | None = None
    connection: duckdb.DuckDBPyConnection | None = None


_last = _ThreadDatabase()


@contextmanager
def duckdb_session(spill: Path, memory: str = "2GiB", threads: int = 2) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection to an in-memory DuckDB of at most `memory` (DuckDB size text) that spills into `spill`.

    The thread keeps the database for the next call with the same arguments: opening one takes 10 to 15 ms, as much as
    a small step. Tables must be temporary, so that they end with the connection. Row order inside queries is not
    preserved (that costs memory): a result whose order matters needs ORDER BY over columns of the data.
    """
    settings = (str(spill), memory, threads)
    if _last.settings != settings or not spill.is_dir():
        if _last.connection is not None:
            _last.connection.close()
        spill.mkdir(parents=True, exist_ok=True)
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": memory,
            "threads": threads,
            "temp_directory": str(spill),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
        }
        _last.connection, _last.settings = duckdb.connect(":memory:", config=config), settings
        _last.connection.execute("SET enable_progress_bar = false")
        _last.connection.execute("SET parquet_metadata_cache = true")  # a step queries the same files many times
    assert _last.connection is not None
    connection = _last.connection.cursor()
    connection.execute("SET enable_progress_bar = false")
    try:
        yield connection
    finally:
        connection.close()


ROW_BITS = 32
"""Bits of `row` that number the documents inside a shard."""
KEY_SPAN = 2**64
DROP_SCHEMA = pa.schema({"row": pa.int64(), "outcome": pa.string(), "kept": pa.string()})
"""What a stage writes that drops documents, ordered by row; `kept`: id of the document kept instead, if any."""
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
    stages: tuple[CurationStage, ...] = ()
    """Stages of curation in order; the first one that drops a document decides its outcome."""

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
        with duckdb_session(spill, self.memory, self.threads) as connection:
            yield connection

    def query(self, sql: str, **tables: pa.Table) -> pa.Table:
        """Return the result of `sql`, which may read `tables` by name, in a new session."""
        with self.session() as connection:
            for name, table in tables.items():
                connection.register(name, table)
            return connection.sql(sql).to_arrow_table()

    def survivors(self, shard: Shard, before: str, columns: str = "*") -> str:
        """Return SQL for `columns` of the attributes of `shard` that no stage before `before` has dropped.

        `before` is the name of a stage, or "end" for the documents left after all of them. Unordered.
        """
        names = [stage.name for stage in self.stages]
        earlier = names if before == "end" else names[: names.index(before)]
        files = [file for step in earlier for file in self.files(f"{step}/drop")]
        attributes = f"SELECT {columns} FROM read_parquet({sql_literal(str(shard.attributes))})"
        if not files:
            return attributes
        low, high = shard.rows
        gone = f'SELECT "row" FROM read_parquet({sql_list(files)}) WHERE "row" >= {low} AND "row" < {high}'
        return f'{attributes} WHERE "row" NOT IN ({gone})'


Work = Callable[[Any, int], None]
"""Does one item of a step: `work(job, item)`. A function of a module or a method of a stage, so that it pickles."""
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""Runs the items of a step in any order: `runner(job, step, work, items)`. Raises the error of a failed item."""


def run_step(runner: Runner, job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the `items` of `step` whose file does not exist yet."""
    (job.folder / step).mkdir(parents=True, exist_ok=True)
    runner(job, step, work, [item for item in items if not job.file(step, item).exists()])
    pa.default_memory_pool().release_unused()  # otherwise the process keeps the peak of each step


def run_serial(job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the items one after another in this process."""
    for item in items:
        work(job, item)


def write_table(table: pa.Table, path: Path, row_group: int = ROW_GROUP) -> None:
    """Write `table` atomically; the bytes depend on the table alone."""
    # A dictionary of hashes saves no space and takes a third of the write time.
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    with atomic_path(path) as temporary:
        table = table.combine_chunks()
        pq.write_table(table, temporary, compression="zstd", row_group_size=row_group, use_dictionary=texts or False)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` when the block succeeds, else delete it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def schema_of(columns: str) -> pa.Schema:
    """Return the schema of `columns`, written as "name type, name type" with Arrow's names of types."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in pairs])


def sql_literal(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def sql_list(files: Sequence[str]) -> str:
    """Return `files` as an SQL list of string literals."""
    return "[" + ", ".join(map(sql_literal, files)) + "]"


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
    return f"SELECT * FROM read_parquet({sql_list(job.files(step))}) WHERE key BETWEEN {low} AND {high}"


def write_drops(job: CurationJob, query: str, step: str, item: int, **tables: pa.Table) -> None:
    """Write the rows (row, outcome, kept) of `query` as drops of `step`, ordered by row."""
    table = job.query(f'SELECT "row", outcome, kept FROM ({query}) ORDER BY ALL', **tables)
    write_table(table.cast(DROP_SCHEMA), job.file(f"{step}/drop", item))


# Stages of curation: `curate.CURATION` lists them in order. Ledger, report and artifact key follow from the list.


class CurationStage:
    """A stage that looks at many documents at once, in passes over all shards."""

    name: ClassVar[str]
    """Name in the ledger. The documents that it drops are in the files of the step `<name>/drop`."""
    title: ClassVar[str]
    """Name in the report."""
    section: ClassVar[tuple[str, ...]]
    """Fields of `curate` in the recipe that it reads."""
    reasons: ClassVar[Mapping[str, str]]
    """Outcome of the documents that it drops -> explanation in the report."""
    tables: ClassVar[Mapping[str, str]] = {}
    """Step that writes a table of the report as its only file -> name of the table."""

    def enabled(self, curate: Curate) -> bool:
        """Return whether the recipe asks for this stage."""
        return True

    def files(self, curate: Curate) -> list[str]:
        """Return the files (URIs) that the stage reads besides the documents."""
        return []

    def explain(self, outcome: str) -> str | None:
        """Return one sentence that explains `outcome`, or None if it belongs to another stage."""
        return self.reasons.get(outcome)

    def run(self, runner: Runner, job: CurationJob) -> None:
        """Run the stage if the recipe asks for it."""
        if self.enabled(job.recipe.curate):
            self.passes(runner, job)

    def passes(self, runner: Runner, job: CurationJob) -> None:
        """Run the steps of the stage one after another."""
        raise NotImplementedError


class DocumentRule(CurationStage):
    """A stage that decides about each document alone, in one query over the attributes of a shard."""

    def decide(self, curate: Curate, documents: str) -> tuple[str, dict[str, pa.Table]]:
        """Return SQL (row, outcome, kept) for the `documents` (SQL, attributes) to drop, and tables that it joins."""
        raise NotImplementedError

    def passes(self, runner: Runner, job: CurationJob) -> None:
        run_step(runner, job, f"{self.name}/drop", self.drop_documents, range(len(job.shards)))

    def drop_documents(self, job: CurationJob, item: int) -> None:
        """Write the drops of shard `item`."""
        query, tables = self.decide(job.recipe.curate, job.survivors(job.shards[item], self.name))
        write_drops(job, query, self.name, item, **tables)


# Held-out split: a hash of the text decides, so adding or removing documents does not move it.
# It is taken after deduplication, so no near copy of a held-out document remains in the training set of its domain.


def hash_and_id(text: Any, domain: bytes) -> tuple[int, str]:
    """Return the draw of a text in UTF-8 (bytes-like) and its id in `domain`, 32 hex digits of BLAKE2b."""
    # One pass over the text for both: hashing takes about 1 us per kilobyte, a large share of reading.
    digest = blake2b(text, digest_size=32, person=b"herd text").digest()
    return int.from_bytes(digest[:8], "little"), blake2b(digest, digest_size=16, key=domain).hexdigest()


def text_hash(text: str) -> int:
    """Return a pseudo-random number in [0, 2^64) that depends on `text` only."""
    return hash_and_id(text.encode(), b"")[0]


def document_id(text: str, domain: str) -> str:
    """Return the id of a text; equal texts of a domain have equal ids."""
    return hash_and_id(text.encode(), domain.encode())[1]


def hash_threshold(share: Fraction) -> int:
    """Return the bound below which a draw is held out, at most 2^64 - 1 to fit 64 bits."""
    return min(2**64 * share.numerator // share.denominator, 2**64 - 1)
