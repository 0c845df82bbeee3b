"""Map-reduce for curation: the job, its shards and partitions, and what a stage of curation is.

A work item reads and writes files by path or URI: workers share nothing but the folder of the job, on a disk or in an
object store. See `work_items` for items and their pieces, `shuffle` for what passes between them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import numpy as np
import pyarrow as pa

from herd.llama3.data.shuffle import FAN, Ints, Shuffle, key_partitions
from herd.llama3.data.work_items import (
    ROW_GROUP,
    Runner,
    TableFile,
    Work,
    do_pieces,
    open_parquet,
    piece_groups,
    read_each,
    read_piece,
    read_table,
    run_step,
    table_options,
    work_item,
    write_table,
)
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import HELD_OUT_DOCUMENTS, HELD_OUT_MOST, Curate
from herd.llama3.recipe.schema import Recipe
from herd.storage.files import file_names, remove_tree
from herd.storage.filesystem import is_local

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
        without_progress_bar(_last.connection)
    assert _last.connection is not None
    connection = _last.connection.cursor()
    without_progress_bar(connection)
    try:
        yield connection
    finally:
        connection.close()


def without_progress_bar(connection: duckdb.DuckDBPyConnection) -> None:
    """Show no bar during long queries."""
    with suppress(duckdb.InvalidInputException):  # a notebook without ipywidgets: there is no bar, and no such setting
        connection.execute("SET enable_progress_bar = false")


@cache
def _temporary_folder(pid: int) -> Path:
    """Return a folder of this process on the machine's disk, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="herd-curate-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


ROW_BITS = 32
"""Bits of `row` that number the documents inside a piece of a shard."""
DROP_SCHEMA = pa.schema({"row": pa.int64(), "outcome": pa.string(), "kept": pa.string()})
"""What a stage drops; `kept`: id of the document kept instead, if any."""
FATE_SCHEMA = pa.schema({"row": pa.int64(), "step": pa.string(), "outcome": pa.string(), "kept": pa.string()})
"""Documents of a piece that some stage dropped, ordered by row; `step`: name of the stage."""
AGGREGATED = 64_000_000
"""Bytes of rows that a query aggregates at a time."""
BATCH = 2048
"""Documents whose text is in memory at a time, typically 10 MB."""
LISTS = ("lines", "bands")
"""Attributes that take more space than all others together."""


@dataclass(frozen=True)
class Shard:
    """Documents of one domain: `text` and `attributes` (paths or URIs) are Parquet with the same rows in one order."""

    number: int
    """Of the first piece; `row` of the first document of a piece is its number << ROW_BITS."""
    domain: Domain
    text: str
    attributes: str
    documents: int
    bytes: int
    pieces: int = 1
    """Each is sorted by id, and one of them is in memory."""


@dataclass(frozen=True)
class CurationJob:
    """Everything that a work item needs; pickled to workers."""

    recipe: Recipe
    shards: tuple[Shard, ...]
    folder: str
    """Scratch folder of the steps, a path or a URI."""
    partitions: int = 1
    """Hash ranges that are reduced separately. No result depends on it; it may change while no stage is half done, else
    that stage begins again."""
    memory: str = "1GiB"
    """Memory limit of DuckDB in one work item."""
    threads: int = 1
    stages: tuple[CurationStage, ...] = ()
    """Stages of curation in order; the first one that drops a document decides its outcome."""
    fan: int = FAN
    pieces: int = 1
    """Pieces of a partition; one of them is in memory."""

    @cached_property
    def shard_pieces(self) -> int:
        """Pieces of the largest shard. Those of shard i are numbered from i * `shard_pieces` on."""
        return max((shard.pieces for shard in self.shards), default=1)

    def each_shard(self, runner: Runner, step: str, work: Work, shards: Sequence[int] | None = None) -> None:
        """Do `step` for every shard (or `shards`): `work(job, index)` for each piece."""
        shards = range(len(self.shards)) if shards is None else shards
        run_step(runner, self, step, partial(do_shard, step, work), shards)

    def each_partition(self, runner: Runner, step: str, work: Work) -> None:
        """Do `step` for every partition: `work(job, index)` for each piece."""
        run_step(runner, self, step, partial(do_partition, step, work), range(self.partitions))

    def shard(self, index: int) -> Shard:
        """Return the shard of a piece."""
        return self.shards[index // self.shard_pieces]

    def write(self, step: str, index: int, table: pa.Table, row_group: int = ROW_GROUP, **options: Any) -> None:
        """Write `table` to piece `index` of `step`; several tables of a piece follow in order.

        `options` are those of the Parquet file, of which the first table decides.
        """
        with work_item(index) as item:
            uri = self.file(step, item.number)
            output = item.output(uri, lambda: TableFile(uri, **(options or table_options(table.schema))))
            output.write(table, item.piece, row_group)

    def read(self, step: str, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return what an earlier step wrote to piece `index`."""
        with work_item(index) as item:
            return read_piece(self.file(step, item.number), item.piece, columns)

    def file(self, step: str, item: int) -> str:
        """Return the file that item `item` of `step` writes."""
        return f"{self.folder}/{step}/{item:05}.parquet"

    def files(self, step: str) -> list[str]:
        """Return the files that `step` has written, in order of their items."""
        return [f"{self.folder}/{step}/{name}" for name in file_names(f"{self.folder}/{step}")]

    def by_partition(self, step: str) -> str:
        """Return the name of a step whose items are the partitions."""
        return f"{step}/{self.partitions}"

    def by_key(self, name: str, items: int | None = None) -> Shuffle:
        """Return the shuffle from `items` (default: the shards) to the partitions."""
        items = len(self.shards) if items is None else items
        return Shuffle(name, items, self.partitions, self.fan, pieces=self.pieces)

    def partition_of(self, keys: Any) -> Ints:
        """Return the piece of all partitions of each key (uint64, equally distributed)."""
        return key_partitions(keys, self.partitions * self.pieces)

    def by_shard(self, name: str, items: int | None = None) -> Shuffle:
        """Return the shuffle from `items` (default: the partitions) to the shards."""
        items = self.partitions if items is None else items
        return Shuffle(name, items, len(self.shards), self.fan, pieces=self.shard_pieces)

    def piece_of(self, rows: Any) -> Ints:
        """Return the piece of all shards of each row."""
        numbers, pieces = self._numbers
        return pieces[np.searchsorted(numbers, np.asarray(rows, np.int64) >> ROW_BITS)]

    @cached_property
    def _numbers(self) -> tuple[Ints, Ints]:
        """The numbers of all pieces, sorted, and the indices of these pieces."""
        shards = [np.arange(shard.pieces) for shard in self.shards]
        numbers = [shard.number + pieces for shard, pieces in zip(self.shards, shards, strict=True)]
        indices = [place * self.shard_pieces + pieces for place, pieces in enumerate(shards)]
        return tuple(np.concatenate([np.zeros(0, np.int64), *arrays]) for arrays in (numbers, indices))  # type: ignore[return-value]

    @contextmanager
    def session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open a DuckDB session within the job's memory; it spills into the job's folder, or to the machine's disk."""
        local = Path(self.folder) / "spill" / str(os.getpid()) if is_local(self.folder) else None
        with duckdb_session(local or _temporary_folder(os.getpid()), self.memory, self.threads) as connection:
            yield connection

    def query(self, sql: str, **tables: pa.Table) -> pa.Table:
        """Return the result of `sql`, which may read `tables` by name, in a new session."""
        with self.session() as connection:
            for name, table in tables.items():
                connection.register(name, table)
            return connection.sql(sql).to_arrow_table()

    def fates(self, index: int, before: str) -> pa.Table:
        """Return the documents of a piece that stages before `before` (a name, or "end") dropped (FATE_SCHEMA)."""
        stage = self.last_before(before)
        return self.read(f"{stage}/fates", index) if stage else FATE_SCHEMA.empty_table()

    def last_before(self, before: str) -> str:
        """Return the name of the last stage before `before` that writes fates, "" without."""
        names = [stage.name for stage in self.stages]
        earlier = self.stages if before == "end" else self.stages[: names.index(before)]
        used = [stage.name for stage in earlier if stage.drops and stage.enabled(self.recipe.curate)]
        return used[-1] if used else ""

    def survivors(self, index: int, before: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the attributes of the documents of a piece that no stage before `before` dropped, in its order.

        Without `columns` all but LISTS.
        """
        table = self.attributes(index, columns)
        gone = self.fates(index, before)["row"].to_numpy()
        return table.filter(pa.array(~np.isin(table["row"].to_numpy(), gone))) if len(gone) else table

    def attributes(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return `columns` and the row of the attributes of a piece; without `columns` all but LISTS."""
        with open_parquet(self.shard(index).attributes) as file:
            names = columns or [name for name in file.schema_arrow.names if name not in LISTS]
            groups = piece_groups(file, index % self.shard_pieces)
            return file.read_row_groups(groups, columns=list(dict.fromkeys([*names, "row"])), use_threads=False)

    def texts(self, index: int, columns: Sequence[str] | None = None, batch: int = BATCH) -> Iterator[pa.RecordBatch]:
        """Yield the documents of a piece with their text, `batch` at a time."""
        with open_parquet(self.shard(index).text) as file:
            groups = piece_groups(file, index % self.shard_pieces)
            names = None if columns is None else list(columns)
            yield from file.iter_batches(batch, row_groups=groups, columns=names, use_threads=False)


def do_shard(step: str, work: Work, job: CurationJob, shard: int) -> None:
    """Do `work` for each piece of a shard."""
    do_pieces(step, job.shard_pieces, work, job, shard, job.shards[shard].pieces)


def do_partition(step: str, work: Work, job: CurationJob, partition: int) -> None:
    """Do `work` for each piece of a partition."""
    do_pieces(step, job.pieces, work, job, partition, job.pieces)


def documents_of(job: CurationJob, index: int, rows: Any, columns: Sequence[str]) -> pa.Table:
    """Return `columns` and the row of those documents of piece `index` whose row is among `rows`."""
    with open_parquet(job.shard(index).text) as file:
        tables = [file.read_row_groups([], columns=["row", *columns])]
    if len(rows):
        tables += [pa.Table.from_batches([batch]) for batch in job.texts(index, ["row", *columns])]
    return pa.concat_tables(table.filter(pa.array(np.isin(table["row"].to_numpy(), rows))) for table in tables)


def schema_of(columns: str) -> pa.Schema:
    """Return the schema of `columns`, written as "name type, name type" with Arrow's names of types."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in pairs])


def sql_literal(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def write_drops(job: CurationJob, shuffle: Shuffle, item: int, drops: pa.Table) -> None:
    """Send the rows of `drops` (row, outcome, kept) to their shards."""
    rows = drops.select(DROP_SCHEMA.names).cast(DROP_SCHEMA)
    shuffle.write(job, item, rows, job.piece_of(rows["row"]))


def add_fates(stage: str, job: CurationJob, index: int, drops: pa.Table) -> None:
    """Write the fates of piece `index` after `stage`: those before it, and `drops` (DROP_SCHEMA)."""
    step = pa.array([stage] * len(drops), pa.string())
    added = drops.append_column("step", step).select(FATE_SCHEMA.names).cast(FATE_SCHEMA)
    fates = pa.concat_tables([job.fates(index, stage), added]).sort_by("row")
    job.write(f"{stage}/fates", index, fates)


def aggregate(runner: Runner, job: CurationJob, step: str, items: int, query: str) -> pa.Table:
    """Return the result of `query` over `rows`: the tables that `items` items of `step` wrote, at most `fan` at a time.

    Several results are aggregated again by the same query until one is left.
    """
    source, level = step, 0
    while True:
        target = f"{step}/sums/{level}"
        work = partial(aggregate_files, source, items, target, query)
        items = -(-items // job.fan)
        run_step(runner, job, target, work, range(items))
        if items == 1:
            return read_table(job.file(target, 0))
        source, level = target, level + 1


def aggregate_files(source: str, items: int, target: str, query: str, job: CurationJob, item: int) -> None:
    """Write the result of `query` over up to `fan` of the `items` files of the step `source`."""
    files = [job.file(source, number) for number in range(item * job.fan, min((item + 1) * job.fan, items))]
    tables: list[pa.Table] = []
    size = most = AGGREGATED
    for table in _tables(job, files):
        tables.append(table)
        size -= table.nbytes
        if size < 0:
            tables = [job.query(query, rows=pa.concat_tables(tables))]
            most = size = max(most, 2 * tables[0].nbytes)
    write_table(job.query(query, rows=pa.concat_tables(tables)), job.file(target, item))


def _tables(job: CurationJob, files: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of `files`, those with several pieces a row group after another."""
    if job.pieces == job.shard_pieces == 1:
        yield from read_each(read_table, files)
        return
    for uri in files:
        with open_parquet(uri) as file:
            yield from (file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups))


_SURVIVORS = """SELECT domain, language, {documents}::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
    FROM rows GROUP BY ALL ORDER BY ALL"""


def count_survivors(runner: Runner, job: CurationJob, before: str) -> pa.Table:
    """Return documents and bytes by domain and language of what no stage before `before` has dropped."""
    step = f"survivors/{job.last_before(before) or 'collected'}"
    job.each_shard(runner, step, partial(_count_shard, step, before))
    return aggregate(runner, job, step, len(job.shards), _SURVIVORS.format(documents="sum(documents)"))


def _count_shard(step: str, before: str, job: CurationJob, index: int) -> None:
    rows = job.survivors(index, before, ("domain", "language", "bytes"))
    job.write(step, index, job.query(_SURVIVORS.format(documents="count(*)"), rows=rows))


# Stages of curation: `curate.CURATION` lists them in order. Ledger, report and artifact key follow from the list.

DONE = "done"


class CurationStage:
    """A stage that looks at many documents at once, in passes over all shards."""

    name: ClassVar[str]
    """Name in the ledger, and the folder of its steps. After it, `<name>/fates` has the dropped documents by shard."""
    title: ClassVar[str]
    """Name in the report."""
    section: ClassVar[tuple[str, ...]]
    """Fields of `curate` in the recipe that it reads."""
    reasons: ClassVar[Mapping[str, str]]
    """Outcome of the documents that it drops -> explanation in the report."""
    tables: ClassVar[Mapping[str, str]] = {}
    """Step that writes a table of the report as its only file -> name of the table."""
    drops: ClassVar[bool] = True
    """Whether it writes fates; else documents end by its rules when they are written."""

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
        """Run the stage if the recipe asks for it and it has not ended; then remove what it shuffled."""
        if self.enabled(job.recipe.curate) and not job.files(f"{self.name}/{DONE}"):
            self.passes(runner, job)
            write_table(pa.table({}), job.file(f"{self.name}/{DONE}", 0))
            remove_tree(f"{job.folder}/shuffle/{self.name}")

    def passes(self, runner: Runner, job: CurationJob) -> None:
        """Run the steps of the stage one after another."""
        raise NotImplementedError

    def apply_drops(self, runner: Runner, job: CurationJob, shuffle: Shuffle) -> None:
        """Write the fates of all shards from the drops in `shuffle`."""
        shuffle.merge(runner, job)
        job.each_shard(runner, f"{self.name}/fates", partial(_apply_drops, self.name, shuffle))


def _apply_drops(stage: str, shuffle: Shuffle, job: CurationJob, index: int) -> None:
    add_fates(stage, job, index, shuffle.read(job, index))


class DocumentRule(CurationStage):
    """A stage that decides about each document alone, in one query over the attributes of a shard."""

    def decide(self, curate: Curate, documents: str) -> tuple[str, dict[str, pa.Table]]:
        """Return SQL (row, outcome, kept) for the `documents` (SQL, attributes) to drop, and tables that it joins."""
        raise NotImplementedError

    def passes(self, runner: Runner, job: CurationJob) -> None:
        job.each_shard(runner, f"{self.name}/fates", self.drop_documents)

    def drop_documents(self, job: CurationJob, index: int) -> None:
        """Write the fates of piece `index`."""
        query, tables = self.decide(job.recipe.curate, "FROM attributes")
        table = job.query(query, attributes=job.survivors(index, self.name), **tables)
        add_fates(self.name, job, index, table.select(DROP_SCHEMA.names).cast(DROP_SCHEMA))


# Held-out split: a hash of the text, its draw, decides, so adding or removing documents moves no other one. It is taken
# after deduplication, so no near copy of a held-out document remains in the training set of its domain. Of a small
# domain, as one of books is, the share would be too little to judge a model by; then the minimum is taken.


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


def held_out_bound(
    share: Fraction, smallest: Iterable[tuple[int, int, int, int]], documents: int, size: int, least: int
) -> int:
    """Return the draw below which documents are held out: by `share`, and at least the minimum unless `share` is 0.

    The minimum is HELD_OUT_DOCUMENTS with `least` bytes that count. `smallest` are the smallest draws in order, up to
    the minimum or further, each with its documents, bytes and those that count; `documents` and `size` are of all.
    """
    bound = hash_threshold(share)
    taken = taken_bytes = counted = 0
    for draw, count, nbytes, counting in smallest if bound else ():
        taken, taken_bytes, counted = taken + count, taken_bytes + nbytes, counted + counting
        most = HELD_OUT_MOST[taken > HELD_OUT_DOCUMENTS]
        if taken * most > documents or taken_bytes * most > size:
            break
        bound = max(bound, draw + 1)
        if taken >= HELD_OUT_DOCUMENTS and counted >= least:
            break
    return bound


def hash_threshold(share: Fraction) -> int:
    """Return the bound below which a draw is held out, at most 2^64 - 1 to fit 64 bits."""
    return min(2**64 * share.numerator // share.denominator, 2**64 - 1)
