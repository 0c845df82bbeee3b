"""The shuffle between the items of two steps: rows go from the writers to the partitions that read them.

A file is cut into ranges of partitions, and a reader fetches its range of each file. Files times readers would be
quadratic in the corpus. So a file has at most `fan` ranges and a reader at most `fan` files, and where there are more
items or partitions, merging items between them read one range of `fan` files and cut it again, as in a radix sort. 40
items and partitions need no merging, 1,600 are merged once, 64,000 twice.

A file begins with an index: of each chunk the offset of its end and its CRC-32. Chunk 0 is the schema; each other one
is a range, or where a range is one partition a piece of it, as Arrow streams one after another. Once a level is
written, the indexes of the files that are read together are copied into one file: a range costs a store one request,
and an empty one none.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from herd.llama3.data.work_items import Runner, read_each, run_step, work_item
from herd.storage.files import atomic_file, read_file, read_range
from herd.storage.filesystem import StoreError, is_local
from herd.storage.processes import parallel_map

FAN = 40
"""Maximum number of files that an item reads from a step, and of ranges that it writes for the next one. A level of
merging costs a few percent of the processor time; with more files a level, requests of a store cost more than that."""
BUFFER = 32_000_000
"""Bytes of rows that a writer collects before it cuts them into ranges."""
FETCHERS = 4
"""Files of which a reader fetches its range at the same time."""
INDEXES = "indexes"
"""Last name of the steps that copy indexes."""
_PARTITION = "partition"
Ints = NDArray[np.int64]


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
    pieces: int = 1
    """Pieces of a partition; a reader takes one after another. Those of partition p begin at p * `pieces`."""

    @property
    def levels(self) -> int:
        """Files between writer and reader: 1 without merging."""
        levels = 1
        while self.fan**levels < max(self.items, self.partitions):
            levels += 1
        return levels

    @property
    def width(self) -> int:
        """Files that are read together, and ranges that are written: the fewest with which the levels suffice."""
        return next(width for width in range(1, self.fan + 1) if width**self.levels >= max(self.items, self.partitions))

    def step(self, level: int = 0) -> str:
        """Return the step that writes the files of `level`; level 0 is written by the items, the others by `merge`."""
        return f"shuffle/{self.name}/{self.items}-{self.partitions * self.pieces}/{level}"

    def write(self, job: Any, index: int, rows: pa.Table, pieces: Ints) -> None:
        """Add to the file of the item: `rows`, of which row i goes to piece `pieces[i]` of all partitions.

        `index` is the number of the item where it has one piece.
        """
        rows = rows.append_column(_PARTITION, pa.array(pieces, pa.int32()))
        with work_item(index) as item:
            uri = job.file(self.step(), item.number)
            item.output(uri, lambda: self._file(job, 0, item.number)).write(rows)

    def merge(self, runner: Runner, job: Any) -> None:
        """Merge until every partition is in at most `width` files; called once all items have written."""
        for level in range(self.levels):
            if level:
                files = range(self._ranges(level - 1) * self._files(level))
                run_step(runner, job, self.step(level), partial(merge_files, self, level), files)
            batches = range(self._ranges(level - 1) * self._files(level + 1))
            run_step(runner, job, self._indexes(level), partial(copy_indexes, self, level), batches)

    def read(self, job: Any, index: int) -> pa.Table:
        """Return the rows of piece `index` of all partitions. Their order depends on the items: sort what must not."""
        partition, piece = divmod(index, self.pieces)
        with work_item(partition) as item:
            fetched = item.input((self, partition), lambda: self._fetched(job, partition, item.closing))
            chunk = fetched.first + piece
            if self.pieces == 1 and not is_local(job.folder):
                tables = parallel_map(partial(_read_chunk, number=chunk), fetched.files, FETCHERS * FETCHERS)
            else:
                tables = [_read_chunk(file, chunk) for file in fetched.files]
        return pa.concat_tables([fetched.schema.empty_table(), *(table for each in tables for table in each)])

    def merge_item(self, job: Any, level: int, item: int) -> None:
        """Do item `item` of `level`: one range of at most `width` files of the level below, cut into ranges again."""
        number, batch = divmod(item, self._files(level))
        below = self._located(job, level - 1, number, batch)
        merged = self._file(job, level, item)
        try:
            merged.write(_with_partition(below.schema.empty_table(), 0))
            for file in below.files:
                file = file.fetched(below.first, below.first + below.chunks)
                for chunk in range(below.chunks):
                    for table in _read_chunk(file, below.first + chunk):
                        merged.write(_with_partition(table, number * self.pieces + chunk))
            merged.commit()
        except BaseException:
            merged.discard()
            raise

    def copy_indexes(self, job: Any, level: int, item: int) -> None:
        """Write the indexes of the files of `level` that are read together, then their schema."""
        group, batch = divmod(item, self._files(level + 1))
        size = 16 * (1 + self._chunks(level, group))
        names = self._names(job, level, group, batch)
        indexes = read_each(lambda name: read_range(name, 0, size), names)
        end = int(np.frombuffer(indexes[0], np.int64)[0])
        with atomic_file(job.file(self._indexes(level), item)) as temporary, temporary.open("wb") as file:
            file.writelines([*indexes, read_range(names[0], size, end)])

    def files_read(self, level: int) -> int:
        """Return the number of files of `level` that have a range of it."""
        return self._files(level)

    def files_written(self, level: int) -> int:
        """Return the number of files of `level`."""
        return self._ranges(level - 1) * self._files(level)

    def ranges_read(self, level: int) -> int:
        """Return the number of ranges in all files of `level`."""
        return self._ranges(level) * self._files(level)

    def _indexes(self, level: int) -> str:
        return f"{self.step(level)}/{INDEXES}"

    def _ranges(self, level: int) -> int:
        """Return the number of ranges at `level`, over all groups; range i is partitions i P / n to (i + 1) P / n."""
        return min(self.partitions, int(self.width ** (level + 1)))

    def _files(self, level: int) -> int:
        """Return the number of files of each group of `level`; a group is a range of the level below."""
        return -(-self.items // int(self.width**level))

    def _first(self, level: int, group: int) -> int:
        """Return the first range of a group of `level`."""
        return group * self._ranges(level) // self._ranges(level - 1)

    def _split(self, level: int) -> int:
        """Return the number of chunks of a range."""
        return self.pieces if self._ranges(level) == self.partitions else 1

    def _chunks(self, level: int, group: int) -> int:
        """Return the number of chunks of a file without that of the schema."""
        return (self._first(level, group + 1) - self._first(level, group)) * self._split(level)

    def _names(self, job: Any, level: int, group: int, batch: int) -> list[str]:
        """Return the files of a group that are read together."""
        first, stop = batch * self.width, min((batch + 1) * self.width, self._files(level))
        return [job.file(self.step(level), group * self._files(level) + file) for file in range(first, stop)]

    def _file(self, job: Any, level: int, item: int) -> RangeFile:
        """Return the file of item `item` of `level`, to write."""
        group, ranges, split = item // self._files(level), self._ranges(level), self._split(level)
        first = self._first(level, group)

        def chunk_of(pieces: Ints) -> Ints:
            place = ((pieces // self.pieces + 1) * ranges - 1) // self.partitions - first
            return place * split + pieces % split

        exact = ranges == self.partitions
        uri = job.file(self.step(level), item)
        return RangeFile(uri, self._chunks(level, group), chunk_of, self.compression, keep_partition=not exact)

    def _located(self, job: Any, level: int, number: int, batch: int) -> Located:
        """Return where range `number` of `level` is in the files of `batch` of its group."""
        group = ((number + 1) * self._ranges(level - 1) - 1) // self._ranges(level)
        names, chunks = self._names(job, level, group, batch), 1 + self._chunks(level, group)
        data = read_file(job.file(self._indexes(level), group * self._files(level + 1) + batch))
        size = len(names) * chunks * 16
        indexes = np.frombuffer(data[:size], np.int64).reshape(len(names), chunks, 2)
        files = [StoredChunks(name, index) for name, index in zip(names, indexes, strict=True)]
        split = self._split(level)
        first = 1 + (number - self._first(level, group)) * split
        return Located(pa.ipc.open_stream(data[size:]).schema, files, first, split)

    def _fetched(self, job: Any, partition: int, closing: ExitStack) -> Located:
        """Return where the pieces of `partition` are; a store sends those of a file at once, to a file here."""
        located = self._located(job, self.levels - 1, partition, 0)
        if self.pieces == 1 or is_local(job.folder):
            return located
        spool, files = closing.enter_context(tempfile.TemporaryFile()), list[StoredChunks]()  # noqa: SIM115
        for start in range(0, len(located.files), FETCHERS):
            fetch = partial(StoredChunks.fetched, first=located.first, stop=located.first + self.pieces)
            for file in parallel_map(fetch, located.files[start : start + FETCHERS], FETCHERS):
                at = spool.seek(0, os.SEEK_END)
                spool.write(file.data or b"")
                files.append(file._replace(data=None, spool=spool.fileno(), at=at))
        spool.flush()
        return located._replace(files=files)


class StoredChunks(NamedTuple):
    """A file of a shuffle, its index, and chunks of it that were fetched: as bytes, or at `at` of the file `spool`."""

    uri: str
    offsets: Ints
    """Offset of the end, and CRC-32, of each chunk; chunk 0 begins behind the index."""
    offset: int = 0
    """Of the first byte that was fetched."""
    data: bytes | None = None
    spool: int = -1
    at: int = 0

    def span(self, number: int) -> tuple[int, int]:
        """Return the offsets of the first byte of a chunk and of that behind it."""
        return int(self.offsets[number - 1, 0]), int(self.offsets[number, 0])

    def fetched(self, first: int, stop: int) -> StoredChunks:
        """Return the file with the chunks from `first` to `stop`, read by one request, or by none if they are empty."""
        start, end = self.span(first)[0], self.span(stop - 1)[1]
        return self._replace(offset=start, data=read_range(self.uri, start, end) if end > start else b"")

    def bytes_of(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes from `start` to `end`."""
        if self.data is not None:
            return memoryview(self.data)[start - self.offset : end - self.offset]
        if self.spool >= 0:
            return os.pread(self.spool, end - start, self.at + start - self.offset)
        return read_range(self.uri, start, end)


class Located(NamedTuple):
    """Where the chunks `first`, `first` + 1, ... of a range are."""

    schema: pa.Schema
    files: list[StoredChunks]
    first: int
    chunks: int


class RangeFile:
    """A shuffle file that is written a table after another: rows are collected, cut, and put together at the end."""

    def __init__(
        self, uri: str, chunks: int, chunk_of: Callable[[Ints], Ints], compression: str, *, keep_partition: bool
    ) -> None:
        self._atomic = ExitStack()
        self._path = self._atomic.enter_context(atomic_file(uri))
        self._spool = self._atomic.enter_context(tempfile.TemporaryFile(dir=self._path.parent))  # noqa: SIM115
        self._chunks, self._chunk_of, self._keep_partition = chunks, chunk_of, keep_partition
        self._options = pa.ipc.IpcWriteOptions(compression=compression)
        self._tables: list[pa.Table] = []
        self._waiting = 0
        self._encoded: list[list[pa.Buffer | tuple[int, int]]] = [[] for _ in range(chunks + 1)]
        """Streams of each chunk in order: as bytes, or offset and size in the spool."""
        self._in_memory = 0

    def write(self, rows: pa.Table) -> None:
        """Add `rows` with a column of pieces."""
        self._tables.append(rows)
        self._waiting += rows.nbytes
        if self._waiting >= BUFFER:
            self._cut()

    def _cut(self) -> None:
        rows = pa.concat_tables(self._tables)
        self._tables, self._waiting = [], 0
        chunk = self._chunk_of(rows[_PARTITION].to_numpy().astype(np.int64))
        if not self._keep_partition:
            rows = rows.drop_columns([_PARTITION])
        if self._chunks > 1:
            order = np.argsort(chunk, kind="stable")
            chunk, rows = chunk[order], rows.take(pa.array(order)).combine_chunks()
        if not self._encoded[0]:
            self._encoded[0].append(_encoded(rows.slice(0, 0), self._options))
        starts = np.flatnonzero(np.diff(chunk, prepend=-1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(chunk)], strict=len(starts) > 0):
            stream = _encoded(rows.slice(start, end - start), self._options)
            self._encoded[int(chunk[start]) + 1].append(stream)
            self._in_memory += stream.size
        if self._in_memory >= BUFFER:
            for streams in self._encoded:
                for place, stream in enumerate(streams):
                    if isinstance(stream, pa.Buffer):
                        streams[place] = self._spool.tell(), stream.size
                        self._spool.write(stream)
            self._in_memory = 0

    def commit(self) -> None:
        """Write the index and the chunks."""
        if self._tables:
            self._cut()
        index = np.zeros((self._chunks + 1, 2), np.int64)
        self._spool.flush()
        with self._path.open("wb") as file:
            file.write(index.tobytes())
            for number, streams in enumerate(self._encoded):
                checksum = 0
                for stream in streams:
                    data = stream if isinstance(stream, pa.Buffer) else os.pread(self._spool.fileno(), *stream[::-1])
                    checksum = zlib.crc32(data, checksum)
                    file.write(data)
                index[number] = file.tell(), checksum
            file.seek(0)
            file.write(index.tobytes())
        self._atomic.close()

    def discard(self) -> None:
        """Forget what was written."""
        with suppress(InterruptedError), self._atomic:
            raise InterruptedError("its item failed")


def merge_files(shuffle: Shuffle, level: int, job: Any, item: int) -> None:
    """Do `Shuffle.merge_item`."""
    shuffle.merge_item(job, level, item)


def copy_indexes(shuffle: Shuffle, level: int, job: Any, item: int) -> None:
    """Do `Shuffle.copy_indexes`."""
    shuffle.copy_indexes(job, level, item)


def _with_partition(rows: pa.Table, piece: int) -> pa.Table:
    """Return `rows` with the column of pieces, which rows of one piece do not have."""
    if _PARTITION in rows.column_names:
        return rows
    return rows.append_column(_PARTITION, pa.array(np.full(len(rows), piece, np.int32)))


def _encoded(rows: pa.Table, options: pa.ipc.IpcWriteOptions) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def _read_chunk(file: StoredChunks, number: int) -> list[pa.Table]:
    """Return the tables of a chunk, none if it is empty. Raises StoreError."""
    for _ in range(2):
        start, end = file.span(number)
        if start == end:
            return []
        data = file.bytes_of(start, end)
        if zlib.crc32(data) == file.offsets[number, 1]:
            return list(_streams(data))
        # Bits flipped on the way, or a worker that was given up wrote the file again after its index was copied.
        index = np.frombuffer(read_range(file.uri, 0, file.offsets.nbytes), np.int64)
        file = StoredChunks(file.uri, index.reshape(file.offsets.shape))
    raise StoreError(
        f"{file.uri}: the bytes from {start:,} to {end:,} are not those that were written; delete the file"
    )


def rows_in(path: str, chunks: int) -> int:
    """Return the number of rows in the file `path` of a shuffle with `chunks` chunks beside the schema."""
    index = np.frombuffer(read_range(path, 0, 16 * (chunks + 1)), np.int64).reshape(-1, 2)
    file = StoredChunks(path, index)
    return sum(table.num_rows for chunk in range(1, chunks + 1) for table in _read_chunk(file, chunk))


def _streams(data: bytes | memoryview) -> Iterator[pa.Table]:
    source = pa.BufferReader(data)
    while source.tell() < len(data):
        yield pa.ipc.open_stream(source).read_all()


def key_partitions(keys: Any, partitions: int) -> Ints:
    """Return the partition of each key (uint64, equally distributed); it ascends with the key."""
    high = np.asarray(keys, np.uint64) >> np.uint64(32)
    return ((high * np.uint64(partitions)) >> np.uint64(32)).astype(np.int64)
