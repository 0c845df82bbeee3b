"""Map-reduce for curation: the job, its work items, the shuffle between them, and what a stage of curation is.

A work item reads and writes files by path or URI: workers share nothing but the folder of the job, on a disk or in an
object store. A file that exists is done, so a killed job resumes, and a runner (loop, threads, cluster) may do the
items of a step in any order.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import HELD_OUT_DOCUMENTS, HELD_OUT_MOST, Curate
from herd.llama3.recipe.schema import Recipe
from herd.storage.files import atomic_file, file_names, open_file, read_range, remove_tree
from herd.storage.filesystem import StoreError, is_local
from herd.storage.processes import READERS, parallel_map

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
"""Bits of `row` that number the documents inside a shard."""
FAN = 32
"""Maximum number of files that an item reads from a step, and of ranges that it writes for the next one. A level of
merging costs a few percent of the processor time; with more files a level, requests of a store cost more than that."""
DROP_SCHEMA = pa.schema({"row": pa.int64(), "outcome": pa.string(), "kept": pa.string()})
"""What a stage drops; `kept`: id of the document kept instead, if any."""
FATE_SCHEMA = pa.schema({"row": pa.int64(), "step": pa.string(), "outcome": pa.string(), "kept": pa.string()})
"""Documents of a shard that some stage dropped, ordered by row; `step`: name of the stage."""
ROW_GROUP = 8192
BATCH = 2048
"""Documents whose text is in memory at a time, typically 10 MB."""
LISTS = ("lines", "bands")
"""Attributes that take more space than all others together."""
Ints = NDArray[np.int64]
Rows = TypeVar("Rows")


@dataclass(frozen=True)
class Shard:
    """Documents of one domain: `text` and `attributes` (paths or URIs) are Parquet with the same rows in one order."""

    number: int
    domain: Domain
    text: str
    attributes: str
    documents: int
    bytes: int


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
        return Shuffle(name, len(self.shards) if items is None else items, self.partitions, self.fan)

    def by_shard(self, name: str, items: int | None = None) -> Shuffle:
        """Return the shuffle from `items` (default: the partitions) to the shards."""
        return Shuffle(name, self.partitions if items is None else items, len(self.shards), self.fan)

    def shard_of(self, rows: Any) -> Ints:
        """Return the index of the shard of each row."""
        return np.searchsorted(self._numbers, np.asarray(rows, np.int64) >> ROW_BITS)

    @cached_property
    def _numbers(self) -> Ints:
        return np.array([shard.number for shard in self.shards], np.int64)

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
        """Return the documents of a shard that stages before `before` dropped (FATE_SCHEMA).

        `index` is that of the shard in `shards`, `before` the name of a stage, or "end".
        """
        stage = self.last_before(before)
        return read_table(self.file(f"{stage}/fates", index)) if stage else FATE_SCHEMA.empty_table()

    def last_before(self, before: str) -> str:
        """Return the name of the last stage before `before` that writes fates, "" without."""
        names = [stage.name for stage in self.stages]
        earlier = self.stages if before == "end" else self.stages[: names.index(before)]
        used = [stage.name for stage in earlier if stage.drops and stage.enabled(self.recipe.curate)]
        return used[-1] if used else ""

    def survivors(self, index: int, before: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the attributes of the documents that no stage before `before` dropped, in the order of the shard.

        Without `columns` all but LISTS.
        """
        with open_parquet(self.shards[index].attributes) as file:
            names = columns or [name for name in file.schema_arrow.names if name not in LISTS]
            table = file.read(columns=list(dict.fromkeys([*names, "row"])), use_threads=False)
        gone = self.fates(index, before)["row"].to_numpy()
        return table.filter(pa.array(~np.isin(table["row"].to_numpy(), gone))) if len(gone) else table


Work = Callable[[Any, int], None]
"""Does one item of a step: `work(job, item)`. A function of a module or a method of a stage, so that it pickles."""
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""Runs the items of a step in any order: `runner(job, step, work, items)`. Raises the error of a failed item."""


def run_step(runner: Runner, job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the `items` of `step` whose file does not exist yet."""
    if is_local(job.folder):
        Path(job.folder, step).mkdir(parents=True, exist_ok=True)
    done = set(file_names(f"{job.folder}/{step}"))
    left = [item for item in items if job.file(step, item).rpartition("/")[2] not in done]
    if left:
        runner(job, step, work, left)
    pa.default_memory_pool().release_unused()  # otherwise the process keeps the peak of each step


def run_serial(job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the items one after another in this process."""
    for item in items:
        work(job, item)


def write_table(table: pa.Table, uri: str | Path, row_group: int = ROW_GROUP) -> None:
    """Write `table` atomically; the bytes depend on the table alone."""
    # A dictionary of hashes saves no space and takes a third of the write time.
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    with atomic_file(str(uri)) as temporary:
        table = table.combine_chunks()
        pq.write_table(table, temporary, compression="zstd", row_group_size=row_group, use_dictionary=texts or False)


@contextmanager
def open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file by path or URI."""
    with pq.ParquetFile(open_file(uri)) as file:
        yield file


def read_table(uri: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a Parquet file, read by path or URI on this thread."""
    with open_parquet(uri) as file:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)


def read_each(read: Callable[[str], Rows], uris: Sequence[str]) -> list[Rows]:
    """Return the result of `read` for each file; many at a time from a store, where a request waits some 30 ms."""
    return list(map(read, uris)) if all(map(is_local, uris)) else parallel_map(read, uris, READERS)


def documents_of(job: CurationJob, index: int, rows: Any, columns: Sequence[str]) -> pa.Table:
    """Return `columns` and the row of those documents of shard `index` whose row is among `rows`."""
    with open_parquet(job.shards[index].text) as file:
        batches = file.iter_batches(BATCH, columns=["row", *columns], use_threads=False)
        return pa.concat_tables(
            pa.Table.from_batches([batch]).filter(pa.array(np.isin(batch["row"].to_numpy(), rows))) for batch in batches
        )


def schema_of(columns: str) -> pa.Schema:
    """Return the schema of `columns`, written as "name type, name type" with Arrow's names of types."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in pairs])


def sql_literal(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


# The shuffle: rows go from the items of one step to the partitions of the next
#
# A file is cut into ranges of partitions, with an index in front, and a reader fetches its range of each file. Files
# times readers would be quadratic in the corpus. So a file has at most `fan` ranges and a reader at most `fan` files,
# and where there are more items or partitions, merging items between them read one range of `fan` files and cut it
# again, as in a radix sort. 32 items and partitions need no merging, 1,024 are merged once, 32,768 twice, a million
# (60 TB) three times.

_PARTITION = "partition"


@dataclass(frozen=True)
class Shuffle:
    """Rows on their way from `items` (writers) to `partitions` (readers)."""

    name: str
    """The name of the stage, a slash, what the rows are."""
    items: int
    partitions: int
    fan: int = FAN
    compression: str = "lz4"
    """Of Arrow's buffers. Hashes do not compress, so the fastest; texts take zstd."""

    @property
    def levels(self) -> int:
        """Files between writer and reader: 1 without merging."""
        levels = 1
        while self.fan**levels < max(self.items, self.partitions):
            levels += 1
        return levels

    def step(self, level: int = 0) -> str:
        """Return the step that writes the files of `level`; level 0 is written by the items, the others by `merge`."""
        return f"shuffle/{self.name}/{self.items}-{self.partitions}/{level}"

    def write(self, job: Any, item: int, rows: pa.Table, partitions: Ints) -> None:
        """Write the file of `item`: `rows`, of which row i goes to partition `partitions[i]`."""
        self._write(job, 0, item, rows.append_column(_PARTITION, pa.array(partitions, pa.int32())))

    def merge(self, runner: Runner, job: Any) -> None:
        """Merge until every partition is in at most `fan` files; called once all items have written."""
        for level in range(1, self.levels):
            items = range(self._ranges(level - 1) * self._files(level))
            run_step(runner, job, self.step(level), partial(_merge_files, self, level), items)

    def read(self, job: Any, partition: int) -> pa.Table:
        """Return the rows of `partition`. Their order depends on the items: sort what must not."""
        last = self.levels - 1
        return self._read(job, last, partition, range(self._files(last)))

    def merge_item(self, job: Any, level: int, item: int) -> None:
        """Do item `item` of `level`: one range of at most `fan` files of the level below, cut into ranges again."""
        group, batch = divmod(item, self._files(level))
        files = range(batch * self.fan, min((batch + 1) * self.fan, self._files(level - 1)))
        rows = self._read(job, level - 1, group, files)
        if self._ranges(level - 1) == self.partitions:  # the range is one partition
            rows = rows.append_column(_PARTITION, pa.array(np.full(len(rows), group), pa.int32()))
        self._write(job, level, item, rows)

    def _ranges(self, level: int) -> int:
        """Return the number of ranges at `level`, over all groups; range i is partitions i P / n to (i + 1) P / n."""
        return min(self.partitions, int(self.fan ** (level + 1)))

    def _files(self, level: int) -> int:
        """Return the number of files of each group of `level`; a group is a range of the level below."""
        return -(-self.items // int(self.fan**level))

    def _first(self, level: int, group: int) -> int:
        """Return the first range of a group of `level`."""
        return group * self._ranges(level) // self._ranges(level - 1)

    def _write(self, job: Any, level: int, item: int, rows: pa.Table) -> None:
        group = item // self._files(level)
        first, stop = self._first(level, group), self._first(level, group + 1)
        ranges = (
            (rows[_PARTITION].to_numpy().astype(np.int64) + 1) * self._ranges(level) - 1
        ) // self.partitions - first
        if self._ranges(level) == self.partitions:
            rows = rows.drop_columns([_PARTITION])
        if stop - first > 1:
            order = np.argsort(ranges, kind="stable")
            ranges, rows = ranges[order], rows.take(pa.array(order)).combine_chunks()
        ends = np.searchsorted(ranges, np.arange(stop - first), "right").tolist()
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        chunks = [_encoded(rows.slice(0, 0), options)]
        chunks += [
            _encoded(rows.slice(start, end - start), options) if end > start else b""
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        index_bytes = 16 * len(chunks)
        index = np.array(
            [np.cumsum([len(chunk) for chunk in chunks]) + index_bytes, [zlib.crc32(chunk) for chunk in chunks]]
        ).T
        with atomic_file(job.file(self.step(level), item)) as temporary, temporary.open("wb") as file:
            file.write(index.astype(np.int64).tobytes())
            file.writelines(chunks)

    def _read(self, job: Any, level: int, number: int, files: range) -> pa.Table:
        """Return range `number` of `level`, from the files of its group with the numbers `files`."""
        group = ((number + 1) * self._ranges(level - 1) - 1) // self._ranges(level)
        first, stop = self._first(level, group), self._first(level, group + 1)
        names = [job.file(self.step(level), group * self._files(level) + file) for file in files]
        read = partial(_read_range, stop - first, number - first)
        tables = [table for table in read_each(read, names) if table is not None]
        return pa.concat_tables(tables or [_read_chunk(names[0], stop - first, 0)])


def _merge_files(shuffle: Shuffle, level: int, job: Any, item: int) -> None:
    shuffle.merge_item(job, level, item)


def _encoded(rows: pa.Table, options: pa.ipc.IpcWriteOptions) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def _read_range(ranges: int, number: int, uri: str) -> pa.Table | None:
    """Return range `number` of a shuffle file of `ranges` ranges, None if it has no rows."""
    return _read_chunk(uri, ranges, number + 1)


def _read_chunk(uri: str, ranges: int, number: int) -> pa.Table | None:
    """Return a chunk of a shuffle file: the schema is chunk 0, range i is chunk i + 1. Raises StoreError."""
    # The index has a row for each chunk: offset of its end, CRC-32.
    index_bytes = 16 * (ranges + 1)
    index = np.frombuffer(read_range(uri, 0, index_bytes), np.int64).reshape(-1, 2)
    start, (end, checksum) = int(index[number - 1, 0]) if number else index_bytes, index[number].tolist()
    if start == end:
        return None
    for _ in range(2):
        data = read_range(uri, start, end)
        if zlib.crc32(data) == checksum:
            return pa.ipc.open_stream(data).read_all()
    raise StoreError(f"{uri}: the bytes from {start:,} to {end:,} are not those that were written; delete the file")


def key_partitions(keys: Any, partitions: int) -> Ints:
    """Return the partition of each key (uint64, equally distributed); it ascends with the key."""
    high = np.asarray(keys, np.uint64) >> np.uint64(32)
    return ((high * np.uint64(partitions)) >> np.uint64(32)).astype(np.int64)


def write_drops(job: CurationJob, shuffle: Shuffle, item: int, drops: pa.Table) -> None:
    """Send the rows of `drops` (row, outcome, kept) to their shards."""
    rows = drops.select(DROP_SCHEMA.names).cast(DROP_SCHEMA)
    shuffle.write(job, item, rows, job.shard_of(rows["row"]))


def add_fates(stage: str, job: CurationJob, index: int, drops: pa.Table) -> None:
    """Write the fates of shard `index` after `stage`: those before it, and `drops` (DROP_SCHEMA)."""
    step = pa.array([stage] * len(drops), pa.string())
    added = drops.append_column("step", step).select(FATE_SCHEMA.names).cast(FATE_SCHEMA)
    fates = pa.concat_tables([job.fates(index, stage), added]).sort_by("row")
    write_table(fates, job.file(f"{stage}/fates", index))


def aggregate(runner: Runner, job: CurationJob, step: str, items: int, query: str) -> pa.Table:
    """Return the result of `query` over `rows`: the tables that `items` items of `step` wrote, at most `fan` at a time.

    Several results are aggregated again by the same query until one is left.
    """
    source, level = step, 0
    while True:
        target = f"{step}/sums/{level}"
        work = partial(_aggregate_files, source, items, target, query)
        items = -(-items // job.fan)
        run_step(runner, job, target, work, range(items))
        if items == 1:
            return read_table(job.file(target, 0))
        source, level = target, level + 1


def _aggregate_files(source: str, items: int, target: str, query: str, job: CurationJob, item: int) -> None:
    numbers = range(item * job.fan, min((item + 1) * job.fan, items))
    rows = pa.concat_tables(read_each(read_table, [job.file(source, number) for number in numbers]))
    write_table(job.query(query, rows=rows), job.file(target, item))


_SURVIVORS = """SELECT domain, language, {documents}::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
    FROM rows GROUP BY ALL ORDER BY ALL"""


def count_survivors(runner: Runner, job: CurationJob, before: str) -> pa.Table:
    """Return documents and bytes by domain and language of what no stage before `before` has dropped."""
    step = f"survivors/{job.last_before(before) or 'collected'}"
    run_step(runner, job, step, partial(_count_shard, step, before), range(len(job.shards)))
    return aggregate(runner, job, step, len(job.shards), _SURVIVORS.format(documents="sum(documents)"))


def _count_shard(step: str, before: str, job: CurationJob, index: int) -> None:
    rows = job.survivors(index, before, ("domain", "language", "bytes"))
    write_table(job.query(_SURVIVORS.format(documents="count(*)"), rows=rows), job.file(step, index))


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
        run_step(runner, job, f"{self.name}/fates", partial(_apply_drops, self.name, shuffle), range(len(job.shards)))


def _apply_drops(stage: str, shuffle: Shuffle, job: CurationJob, index: int) -> None:
    add_fates(stage, job, index, shuffle.read(job, index))


class DocumentRule(CurationStage):
    """A stage that decides about each document alone, in one query over the attributes of a shard."""

    def decide(self, curate: Curate, documents: str) -> tuple[str, dict[str, pa.Table]]:
        """Return SQL (row, outcome, kept) for the `documents` (SQL, attributes) to drop, and tables that it joins."""
        raise NotImplementedError

    def passes(self, runner: Runner, job: CurationJob) -> None:
        run_step(runner, job, f"{self.name}/fates", self.drop_documents, range(len(job.shards)))

    def drop_documents(self, job: CurationJob, index: int) -> None:
        """Write the fates of shard `index`."""
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
